"""The fingerprints of sealed blocks, in a tensor on the device of the KV caches, and comparisons with them.

Caches in host memory are compared at once. On a device, work is queued behind the engine's own, and an
asynchronous copy brings the mask of the blocks that differ to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .device_buffers import Known, Pending, Sent, Slot, Slots
from .fingerprint import Fingerprints


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
