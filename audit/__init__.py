"""The audit: events, ledger, invariants, and what feeds them from a live engine."""
