"""Readers of connectors' plans: one small file a connector (``docs/connectors.md``)."""
