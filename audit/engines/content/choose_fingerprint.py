"""Chooses the form of the fingerprint function: Triton on a GPU, else the form of :mod:`.fingerprint`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from .fingerprint import Fingerprints

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""


def fingerprints_of(layers: Sequence[Any], key: int, *, factors: Sequence[int] | None = None) -> Fingerprints:
    """The fingerprints of these layers. Without Triton, torch computes them, and one log line says why."""
    if layers[0].device.type != "cuda":
        return Fingerprints(layers, key, factors=factors)
    try:
        from .fingerprint_triton import TritonFingerprints

        return TritonFingerprints(layers, key, factors=factors)
    except Exception as error:  # Triton is missing, or does not read a layer in its memory order
        logger.warning("kvledger computes fingerprints with torch, not with Triton: %r", error)
        return Fingerprints(layers, key, factors=factors)
