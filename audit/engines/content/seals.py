"""The seals of blocks: the fingerprint of each full block, and the step after which it was taken.

Fingerprints stay on the device of the KV caches (:mod:`.seal_fingerprints`). :meth:`Seals.results` returns
the comparisons whose results have arrived on the host. Nothing waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ...events import MISMATCHED, UNFILLED, UNSEEN
from .layout import Layout

if TYPE_CHECKING:
    from .device_buffers import Pending
    from .fingerprint import Fingerprints
    from .seal_fingerprints import SealValues

Label = TypeVar("Label")


class _Comparison(NamedTuple, Generic[Label]):
    """A comparison whose result was not returned yet."""

    label: Label
    blocks: list[int]
    pending: Pending[list[bool]]


class Seals(Generic[Label]):
    """The seals of one worker's blocks. ``seen_from_start``: no block was filled before now.

    ``form`` makes the fingerprint functions, and ``new_event`` the events of a device, both for tests.
    """

    def __init__(
        self,
        layout: Layout,
        key: int,
        *,
        seen_from_start: bool,
        form: Callable[..., Fingerprints] | None = None,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        from .choose_fingerprint import fingerprints_of
        from .seal_fingerprints import DeviceValues, HostValues

        form = form or fingerprints_of
        self._prints = {number: form(group.layers, key) for number, group in layout.groups.items()}
        device = next(iter(layout.groups.values())).layers[0].device
        self.values: SealValues
        """The fingerprint of each sealed block."""
        if device.type == "cpu" and new_event is None:
            self.values = HostValues(layout.blocks)
        else:
            self.values = DeviceValues(layout.blocks, device, list(self._prints.values()), new_event)
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
            self.values.seal(self._prints[group], blocks)
            for block in blocks:
                self.steps[block] = self.intact[block] = step
                self.group_of[block] = group

    def compare(self, group: int, blocks: Iterable[int], label: Label, *, renew: bool) -> None:
        """Compare sealed blocks with their seals. ``renew``: seal the present bytes where they differ."""
        once = list(dict.fromkeys(blocks))
        pending = self.values.compare(self._prints[group], once, renew=renew)
        self._comparisons.append(_Comparison(label, once, pending))

    def differing(self, group: int, blocks: Sequence[int]) -> Pending[list[bool]]:
        """Which sealed blocks hold other bytes than were sealed."""
        return self.values.compare(self._prints[group], blocks, renew=False)

    def mismatched(self, block: int, sealed_step: int) -> None:
        """A scrub found that a block differs from the seal of ``sealed_step``."""
        if self.steps[block] == sealed_step:
            self.steps[block] = MISMATCHED

    def results(self, *, wait: bool = False) -> list[tuple[Label, list[int]]]:
        """The comparisons whose masks have arrived, in order: the label, and the blocks that differ."""
        arrived = []
        while self._comparisons:
            first = self._comparisons[0]
            if not first.pending.arrived(wait=wait):
                break
            self._comparisons.popleft()
            flags = first.pending.result()
            arrived.append(
                (first.label, [block for block, flag in zip(first.blocks, flags, strict=True) if flag])
            )
        return arrived
