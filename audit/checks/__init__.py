"""The checks: a module for each family of invariants, two for ``metrics``, and one for isolation.

Importing this package, or any module in it, imports every check, which fills the catalogue of
``registry.py``.
"""

from . import (
    blocks,
    connector,
    contents,
    custody,
    encoder,
    isolation,
    kv_events,
    lookup_drifts,
    prompt_drifts,
    requests,
    tokens,
    weights,
)

__all__ = [
    "blocks",
    "connector",
    "contents",
    "custody",
    "encoder",
    "isolation",
    "kv_events",
    "lookup_drifts",
    "prompt_drifts",
    "requests",
    "tokens",
    "weights",
]
