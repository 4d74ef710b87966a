"""The fingerprints of sealed blocks, in a tensor on the device of the KV caches, and comparisons with them.

Caches in host memory are compared at once. On a device, work is queued behind the engine's own, and an
asynchronous copy brings the mask of the blocks that differ to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from .choose_fingerprint import fingerprints_of
from .device_buffers import Known, Pending, Sent, Slot, Slots
from .fingerprint import Fingerprints
from .layout import all_parts


class SealValues(Protocol):
    """The fingerprints of sealed blocks."""

    def seal(self, prints: Fingerprints, blocks: Sequence[int]) -> None:
        """Keep the fingerprints of blocks as they are now."""

    def compare(self, prints: Fingerprints, blocks: Sequence[int], *, renew: bool) -> Pending[list[bool]]:
        """For each block, whether it differs from its seal. A block is named once.

        ``renew``: seal the present bytes.
        """


class HostValues:
    """For KV caches in host memory."""

    def __init__(self, blocks: int) -> None:
        self.values = torch.zeros(blocks, dtype=torch.int64)
        """The fingerprint of each block."""

    def seal(self, prints: Fingerprints, blocks: Sequence[int]) -> None:
        """Keep the fingerprints of blocks as they are now."""
        self.values[torch.tensor(blocks)] = prints.of(blocks)

    def compare(self, prints: Fingerprints, blocks: Sequence[int], *, renew: bool) -> Known[list[bool]]:
        """Compare blocks with their seals. ``renew``: seal the present bytes."""
        index, present = torch.tensor(blocks, dtype=torch.int64), prints.of(blocks)
        mask = self.values[index] != present
        if renew:
            self.values[index] = present
        return Known(mask.tolist())


def _flags(parts: list[Slot]) -> list[bool]:
    return [flag for slot in parts for flag in slot.differs_on_host.tolist()]


class DeviceValues:
    """For KV caches on a device. Memory is set aside and each kernel is compiled here, not in a step."""

    def __init__(
        self,
        blocks: int,
        device: Any,
        forms: Sequence[Fingerprints],
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        self.values = torch.zeros(blocks, dtype=torch.int64, device=device)
        """The fingerprint of each block."""
        self._slots = Slots(device, new_event=new_event)
        for prints in forms:  # a kernel is compiled at its first call
            self.seal(prints, [0])
            for renew in (False, True):
                self.compare(prints, [0], renew=renew).arrived(wait=True)

    def seal(self, prints: Fingerprints, blocks: Sequence[int]) -> None:
        """Keep the fingerprints of blocks as they are now."""
        for slot in self._slots.take(blocks):
            prints.write(slot.index, slot.sums)
            self.values.index_copy_(0, slot.index, slot.sums.view(-1))
            self._slots.discard(slot)

    def compare(self, prints: Fingerprints, blocks: Sequence[int], *, renew: bool) -> Sent[list[bool]]:
        """Compare blocks with their seals. ``renew``: seal the present bytes."""
        parts = []
        for slot in self._slots.take(blocks):
            prints.write(slot.index, slot.sums)
            prints.mark(slot.index, slot.sums, self.values, slot.differs, renew=renew)
            slot.send_differs()
            slot.event.record()
            parts.append(slot)
        return Sent(self._slots, parts, _flags)


# --- Fingerprints of the parts of blocks that a connector moves, read where the KV caches are.
#
# On a device the fingerprints are on their way to the host when :meth:`PartPrints.read` returns.

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
