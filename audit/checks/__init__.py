"""The checks: a module for each family of invariants, and one for isolation.

Importing this package, or any module in it, imports every check, which fills the catalogue of
``registry.py``.
"""

from . import blocks, connector, isolation, requests, tokens

__all__ = ["blocks", "connector", "isolation", "requests", "tokens"]
