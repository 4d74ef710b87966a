"""What level ``content`` checks and how often, from environment variables."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

SHARE, SCRUB, KEY = "KVLEDGER_CONTENT_SHARE", "KVLEDGER_CONTENT_SCRUB_BYTES", "KVLEDGER_CONTENT_KEY"

SKETCH, WEIGHTS = "KVLEDGER_CONTENT_SKETCH", "KVLEDGER_CONTENT_WEIGHTS_SECONDS"

WEIGHTS_SECONDS = 10.0

SCRUB_BYTES = 64 << 10
"""Bytes of blocks at rest that are compared with their seals in a step, on average."""


class ContentOptions(NamedTuple):
    """``share`` of the hit blocks are verified. ``key``: of the fingerprints; 0: a random one.

    ``sketch``: blocks that are computed again are compared with their first computation. ``weights_seconds``:
    from one look at samples of the weights to the next, at least; 0: never.
    """

    share: float = 1.0
    scrub_bytes: int = SCRUB_BYTES
    key: int = 0
    sketch: bool = False
    weights_seconds: float = WEIGHTS_SECONDS


def options() -> ContentOptions:
    """The options that the environment sets. A value that can't be read is logged, and not used."""
    share = _number(SHARE, 1.0)
    key = int.from_bytes(os.environ.get(KEY, "").encode()[:7], "big")
    scrub = int(max(0.0, _number(SCRUB, SCRUB_BYTES)))
    seconds = max(0.0, _number(WEIGHTS, WEIGHTS_SECONDS))
    return ContentOptions(min(1.0, max(0.0, share)), scrub, key, _number(SKETCH, 0.0) > 0, seconds)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        return default if not text else float(text)
    except ValueError:
        logger.warning("kvledger: %s is %r, not a number; %s is used", name, text, default)
        return default
