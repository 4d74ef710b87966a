"""The metric table, the values that are read for it, and their Prometheus and OpenTelemetry forms."""
