"""The checks, one module a family; importing this fills the catalogue."""

from kvledger.audit.invariants import connector, tokens

__all__ = ["connector", "tokens"]
