"""Dashboards: Grafana boards, Prometheus rules and files to deploy, with their checks."""
