"""How many more blocks would have let preempted requests run on: the blocks in use, had they kept theirs.

From its preemption to its next admission, a request counts with the blocks that it gave up and that no other
request holds. The pool would have been large enough for a request if it never had fewer blocks than all
requests count with during that time. A preempted request would also have grown and ended meanwhile, which is
not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

MOST_PERCENT = 1_000
"""A pool that is larger than this is not considered."""


class Released(msgspec.Struct):
    """Blocks that a request gave up. ``shared``: those that another request still holds."""

    free: int = 0
    shared: set[int] = set()


class Preempted(msgspec.Struct):
    """A preempted request that waits, and the most blocks that were needed since it began to wait."""

    kept: Released
    most: int = 0


class BlockDemand(msgspec.Struct):
    """Follows one pool. It consists of plain data, so a checkpoint can hold it."""

    step: int = -1
    """The step of ``released``."""
    released: dict[int, Released] = {}
    """What requests gave up in the present step, by request."""
    waiting: dict[int, Preempted] = {}
    """Preempted requests that hold no block, by request."""
    resumed: dict[int, int] = {}
    """The most blocks that were needed, of preempted requests that hold blocks again, by request."""

    def free(self, request: int, step: int, blocks: Sequence[int], references: Sequence[int]) -> None:
        """A request gives blocks up, which have so many references left."""
        if step != self.step:
            self.step, self.released = step, {}
        if self.waiting:
            self._take_over([block for block, left in zip(blocks, references, strict=True) if not left])
        mine = self.released.setdefault(request, Released())
        mine.free += sum(not left for left in references)
        mine.shared |= {block for block, left in zip(blocks, references, strict=True) if left}

    def _take_over(self, blocks: Sequence[int]) -> None:
        """Blocks lose their last holder: they count for the preempted request that shared them."""
        for request in self.waiting.values():
            taken = request.kept.shared.intersection(blocks)
            request.kept.shared -= taken
            request.kept.free += len(taken)

    def preempt(self, request: int) -> None:
        """A request was preempted, after it had given its blocks up."""
        self.waiting[request] = Preempted(self.released.pop(request, Released()))

    def known(self, request: int) -> bool:
        """Whether a request was preempted and not admitted since."""
        return request in self.waiting or request in self.resumed

    def see(self, used: int) -> None:
        """So many blocks are in use now."""
        needed = used + sum(one.kept.free for one in self.waiting.values())
        for one in self.waiting.values():
            one.most = max(one.most, needed)

    def hold(self, request: int, used: int) -> None:
        """A preempted request gets blocks again, while so many are in use."""
        self.see(used)
        self.resumed[request] = self.waiting.pop(request).most

    def end(self, request: int, blocks: int) -> int:
        """A request is admitted again, or ends. Returns the percent by which a pool of ``blocks`` was too
        small for it since it was preempted, rounded up; -1: it was not preempted, or it is not known."""
        one = self.waiting.pop(request, None)
        most = self.resumed.pop(request, -1) if one is None else one.most
        if most < 0 or blocks <= 0:
            return -1
        percent = ceil(100 * max(1, most - blocks) / blocks)
        return percent if percent <= MOST_PERCENT else -1

    def forget(self) -> None:
        """Events were lost."""
        self.released, self.waiting, self.resumed = {}, {}, {}
