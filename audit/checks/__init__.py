"""The checks, one module a family; importing this fills the catalogue."""

from . import blocks, connector, tokens

__all__ = ["blocks", "connector", "tokens"]
