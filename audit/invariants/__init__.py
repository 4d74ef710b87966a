"""The checks, one module a family; importing this fills the catalogue."""

from kvledger.audit.invariants import blocks, connector, tokens

__all__ = ["blocks", "connector", "tokens"]
