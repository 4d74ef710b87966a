"""Memory for fingerprints on a device, set aside once: a step allocates nothing and does not wait.

A slot has room for a number of blocks: their ids and fingerprints, on the host and on the device, and a mask
of the blocks that differ. Host memory is page-locked, so copies are asynchronous. A slot is free again once
the device has done its work and the results were read. While the device lags behind, more slots are created.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

Tensor = Any
"""A ``torch.Tensor``."""

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

ROOM = 4096
"""Blocks that one slot of seals has room for."""

SLOTS = 8
"""Slots that are created at the start."""


class Slot:
    """Buffers for ``count`` blocks. ``event`` follows the last work that the device was given for them."""

    def __init__(self, device: Any, room: int, columns: int, event: Any, dtype: Any) -> None:
        pinned = device.type == "cuda"
        self.event = event
        self.count = 0
        self._ids_on_host = torch.zeros(room, dtype=torch.int64, pin_memory=pinned)
        """The blocks' numbers, in memory from which the device copies."""
        self._ids = self._ids_on_host.numpy()
        self._ids_on_device = torch.zeros(room, dtype=torch.int64, device=device)
        self._sums = torch.zeros((room, columns), dtype=dtype, device=device)
        self._sums_on_host = torch.zeros((room, columns), dtype=dtype, pin_memory=pinned)
        self._differs = torch.zeros(room, dtype=torch.bool, device=device)
        """On the device: whether each block differs from its seal."""
        self._differs_on_host = torch.zeros(room, dtype=torch.bool, pin_memory=pinned)

    def fill(self, blocks: Sequence[int]) -> None:
        """Send the ids of blocks to the device."""
        self.count = len(blocks)
        self._ids[: self.count] = blocks
        self.index.copy_(self._ids_on_host[: self.count], non_blocking=True)

    @property
    def index(self) -> Tensor:
        """The ids of the blocks, on the device."""
        return self._ids_on_device[: self.count]

    @property
    def sums(self) -> Tensor:
        """Room for the fingerprints of the blocks, on the device: one row for each block."""
        return self._sums[: self.count]

    @property
    def differs(self) -> Tensor:
        """Room for the mask of the blocks that differ, on the device."""
        return self._differs[: self.count]

    def send_sums(self) -> None:
        """Copy the fingerprints to the host, once the device comes to it."""
        self.sums_on_host.copy_(self.sums, non_blocking=True)

    def send_differs(self) -> None:
        """Copy the mask to the host, once the device comes to it."""
        self.differs_on_host.copy_(self.differs, non_blocking=True)

    @property
    def sums_on_host(self) -> Tensor:
        """The fingerprints, after ``event``."""
        return self._sums_on_host[: self.count]

    @property
    def differs_on_host(self) -> Tensor:
        """The mask, after ``event``."""
        return self._differs_on_host[: self.count]


class Slots:
    """The slots of one use. ``columns``: fingerprints of each block. ``new_event``: ``torch.cuda.Event``."""

    def __init__(
        self,
        device: Any,
        *,
        room: int = ROOM,
        columns: int = 1,
        count: int = SLOTS,
        new_event: Callable[[], Any] | None = None,
        dtype: Any = torch.int64,
    ) -> None:
        self._device = device
        self.room = room
        """How many blocks a slot has room for."""
        self._columns = columns
        """Fingerprints of each block."""
        self._dtype = dtype
        self._new_event = new_event or torch.cuda.Event
        self._free = [self._new() for _ in range(count)]
        """Slots without work."""
        self._unread: deque[Slot] = deque()
        """Slots whose results nobody reads, oldest first: they are free once the device has done its work."""

    def take(self, blocks: Sequence[int]) -> Iterator[Slot]:
        """Slots with these blocks, whose ids are on their way to the device."""
        for first in range(0, len(blocks), self.room):
            while self._unread and self._unread[0].event.query():
                self._free.append(self._unread.popleft())
            slot = self._free.pop() if self._free else self._new()
            slot.fill(blocks[first : first + self.room])
            yield slot

    def release(self, slot: Slot) -> None:
        """The results of a slot were read."""
        self._free.append(slot)

    def discard(self, slot: Slot) -> None:
        """Nobody reads results of a slot: it is free when the device has done what it was given."""
        slot.event.record()
        self._unread.append(slot)

    def _new(self) -> Slot:
        return Slot(self._device, self.room, self._columns, self._new_event(), self._dtype)


class Pending(Protocol[Result_co]):
    """A result that may be on its way to the host."""

    def arrived(self, *, wait: bool) -> bool:
        """Whether the result is there."""

    def result(self) -> Result_co:
        """The result. Called once, after it has arrived."""


class Known(Generic[Result]):
    """A result that is there."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def arrived(self, *, wait: bool) -> bool:
        """It is."""
        return True

    def result(self) -> Result:
        """The result."""
        return self._result


class Sent(Generic[Result]):
    """The result of ``parts``, which are on their way to the host. ``read`` makes it of the parts."""

    def __init__(self, slots: Slots, parts: list[Slot], read: Callable[[list[Slot]], Result]) -> None:
        self._slots = slots
        """Where the parts go back to."""
        self._parts = parts
        self._read = read

    def arrived(self, *, wait: bool) -> bool:
        """Whether the last copy is complete; those before it then are too."""
        event = self._parts[-1].event if self._parts else None
        if event is not None and wait:
            event.synchronize()
        return event is None or bool(event.query())

    def result(self) -> Result:
        """The result; the slots are free again."""
        result = self._read(self._parts)
        for slot in self._parts:
            self._slots.release(slot)
        return result
