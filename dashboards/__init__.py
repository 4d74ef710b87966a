"""Dashboards: builders of dashboards, rules and Kubernetes pieces, and what they built."""
