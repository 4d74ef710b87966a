"""Fingerprints of the parts of blocks that a connector moves, read where the KV caches are.

On a device the fingerprints are on their way to the host when :meth:`PartPrints.read` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .choose_fingerprint import fingerprints_of
from .device_buffers import Known, Pending, Sent, Slot, Slots
from .keys_and_values import all_parts

ROOM = 256
"""Blocks that one slot has room for; a block has a fingerprint for each part."""


Rows = Any
"""One row for each block: a NumPy array of int64."""


def _rows(parts: list[Slot]) -> Rows:
    return np.concatenate([slot.sums_on_host.numpy() for slot in parts])


class PartPrints:
    """Fingerprints of keys and of values of each layer. ``new_event``: of a device, for tests."""

    def __init__(
        self, layers: Sequence[Any], key: int, *, new_event: Callable[[], Any] | None = None
    ) -> None:
        parts = all_parts(layers)
        factors = [number // 2 for number in range(len(parts))]
        self._prints = fingerprints_of(parts, key, factors=factors)
        device = parts[0].device
        on_host = device.type == "cpu" and new_event is None
        self._slots = None if on_host else Slots(device, room=ROOM, columns=len(parts), new_event=new_event)
        """Buffers on the device; None on the host."""
        if self._slots is not None:
            self.read([0]).arrived(wait=True)  # a kernel is compiled at its first call

    @property
    def key_name(self) -> str:
        """The public name of the function and its key."""
        return str(self._prints.key_name)

    def read(self, blocks: Sequence[int]) -> Pending[Rows]:
        """Take the fingerprints of at least one block."""
        if self._slots is None:
            return Known(self._prints.by_layer(blocks).numpy())
        sent = []
        for slot in self._slots.take(blocks):
            self._prints.write(slot.index, slot.sums)
            slot.send_sums()
            slot.event.record()
            sent.append(slot)
        return Sent(self._slots, sent, _rows)
