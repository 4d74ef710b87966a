"""The seals of blocks: the fingerprint of each full block, and the step after which it was taken.

Fingerprints stay in a tensor on the device of the KV caches. A comparison ends in a mask on that device; on a
GPU an asynchronous copy brings the mask to the host, and :meth:`Seals.results` returns what has arrived.
Nothing waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ...events import MISMATCHED, UNFILLED, UNSEEN
from .layout import Layout

Label = TypeVar("Label")


class _Comparison(NamedTuple, Generic[Label]):
    """A comparison whose mask may still be on its way to the host."""

    label: Label
    blocks: list[int]
    mask: Any
    event: Any


class Seals(Generic[Label]):
    """The seals of one worker's blocks. ``seen_from_start``: no block was filled before now."""

    def __init__(self, layout: Layout, key: int, *, seen_from_start: bool) -> None:
        import torch

        from .fingerprint import Fingerprints

        self._torch = torch
        self._prints = {number: Fingerprints(group.layers, key) for number, group in layout.groups.items()}
        """The fingerprint function of each group."""
        device = next(iter(layout.groups.values())).layers[0].device
        self._values = torch.zeros(layout.blocks, dtype=torch.int64, device=device)
        """The fingerprint of each sealed block."""
        self._on_host = device.type == "cpu"
        self.steps = [UNFILLED if seen_from_start else UNSEEN] * layout.blocks
        """The step after which each block was sealed, or UNFILLED or UNSEEN."""
        self.intact = [0] * layout.blocks
        """The last step before which a block was seen to be as it was sealed."""
        self.group_of = [-1] * layout.blocks
        """The group for which a block was sealed last."""
        self._comparisons: deque[_Comparison[Label]] = deque()
        """Comparisons whose results have not been returned, oldest first."""

    @property
    def key_name(self) -> str:
        """The public name of the function and its key."""
        return str(next(iter(self._prints.values())).key_name)

    def of(self, group: int, blocks: Sequence[int]) -> Any:
        """The fingerprints of blocks as they are now, on the device."""
        return self._prints[group].of(blocks)

    def sealed_step(self, block: int) -> int:
        """The step after which a block was sealed, or UNFILLED or UNSEEN."""
        return self.steps[block]

    def void(self, blocks: Iterable[int], code: int = UNFILLED) -> None:
        """Blocks will be written: they lose their seals."""
        steps = self.steps
        for block in blocks:
            steps[block] = code

    def void_all(self) -> None:
        """The contents of all blocks are lost or were not observed."""
        self.steps = [UNSEEN] * len(self.steps)

    def seal(self, group: int, blocks: Sequence[int], step: int) -> None:
        """Take the fingerprints of full blocks after ``step``."""
        if blocks:
            self._values[self._index(blocks)] = self.of(group, blocks)
            for block in blocks:
                self.steps[block] = self.intact[block] = step
                self.group_of[block] = group

    def compare(self, group: int, blocks: list[int], label: Label, *, renew: bool) -> None:
        """Compare sealed blocks with their seals. ``renew``: seal the present bytes where they differ."""
        index, present = self._index(blocks), self.of(group, blocks)
        mask = self._values[index] != present
        if renew:
            self._values[index] = present
        if self._on_host:
            self._comparisons.append(_Comparison(label, blocks, mask, None))
            return
        on_host = self._torch.empty(len(blocks), dtype=self._torch.bool, pin_memory=True)
        on_host.copy_(mask, non_blocking=True)
        event = self._torch.cuda.Event()
        event.record()
        self._comparisons.append(_Comparison(label, blocks, on_host, event))

    def differing(self, group: int, blocks: Sequence[int]) -> Any:
        """Which sealed blocks hold other bytes than were sealed: a mask on the device."""
        return self._values[self._index(blocks)] != self.of(group, blocks)

    def mismatched(self, block: int, sealed_step: int) -> None:
        """A scrub found that a block differs from the seal of ``sealed_step``."""
        if self.steps[block] == sealed_step:
            self.steps[block] = MISMATCHED

    def results(self, *, wait: bool = False) -> list[tuple[Label, list[int]]]:
        """The comparisons whose masks have arrived, in order: the label, and the blocks that differ."""
        arrived = []
        while self._comparisons:
            first = self._comparisons[0]
            if first.event is not None and not first.event.query():
                if not wait:
                    break
                first.event.synchronize()
            self._comparisons.popleft()
            flags = first.mask.tolist()
            arrived.append(
                (first.label, [block for block, flag in zip(first.blocks, flags, strict=True) if flag])
            )
        return arrived

    def _index(self, blocks: Sequence[int]) -> Any:
        """The blocks as an index on the device."""
        index = self._torch.tensor(blocks, dtype=self._torch.int64)
        if self._on_host:
            return index
        return index.pin_memory().to(self._values.device, non_blocking=True)
