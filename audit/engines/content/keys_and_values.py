"""The parts of a block that a transfer is checked by: the keys and the values of each layer.

The KV cache of a layer has keys and values on an axis of their own, or one behind the other in its last axis.
Without either, the two halves of the last axis are the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def parts_of(layer: Any) -> tuple[Any, Any]:
    """Keys and values of a layer: views with the block axis first, then the kernel blocks of a block."""
    if layer.dim() == 6 and layer.shape[2] == 2:
        return layer[:, :, 0], layer[:, :, 1]
    half = (layer.shape[-1] + 1) // 2
    return layer[..., :half], layer[..., half:]


def all_parts(layers: Sequence[Any]) -> list[Any]:
    """The parts of all layers, two for each. A part without content is the layer itself."""
    found = []
    for layer in layers:
        first, second = parts_of(layer)
        found += [first, second if second.shape[-1] else layer]
    return found
