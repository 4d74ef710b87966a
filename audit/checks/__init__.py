"""The checks, one module for each family of invariants.

Importing this package, or any module in it, imports every check, which fills the catalogue of
``registry.py``.
"""

from . import blocks, connector, requests, tokens

__all__ = ["blocks", "connector", "requests", "tokens"]
