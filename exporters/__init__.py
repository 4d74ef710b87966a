"""Figures for people and machines: they read the audit, never an engine."""
