"""The checks: a module for each family of invariants; ``drifts`` has those of ``metrics``.

Importing this package, or any module in it, imports every check, which fills the catalogue of
``registry.py``.
"""

from . import blocks, connector, contents, drifts, encoder, kv_events, pool, requests, tokens, weights

__all__ = [
    "blocks",
    "connector",
    "contents",
    "drifts",
    "encoder",
    "kv_events",
    "pool",
    "requests",
    "tokens",
    "weights",
]
