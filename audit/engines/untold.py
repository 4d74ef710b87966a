"""What a step took from the pools and hashed, kept until it is told: one event each for many calls.

Who takes blocks is asked of the stack at each call, or where nobody waits to be admitted of the step's
output, which costs least. The output is believed only if it names the very blocks that were handed out,
in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from kvledger.audit import events as ev
from kvledger.audit.engines.callers import NOBODY, Caller

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation running requests take blocks."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""


class Untold:
    """The untold calls of one watch's pools."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.taken: list[tuple[int, list[Any], str | None, int, str]] = []
        """Pool, blocks and caller of a call."""
        self.unasked: list[list[Any]] = []
        """Blocks of a call that was not asked for its caller."""
        self.outputs_tell = False
        """None but running requests take blocks now, and the step's output will name them."""
        self._asks_until = 0
        self.hashed: list[tuple[int, Any, Any, int, int, int, int]] = []
        """Of a block that got another hash: pool, the hash before, request, group, block, the name of the
        hash, end."""

    def clear(self) -> None:
        """Nothing of it will be told."""
        self.taken.clear()
        self.unasked.clear()
        self.hashed.clear()

    def step_begins(self, nobody_waits: bool) -> None:
        """Whether callers have to be asked in this step."""
        watch = self._watch
        if self.unasked:
            self.tell()
        alone = nobody_waits and len(watch.pools) == 1 and not watch.stacks
        self.outputs_tell = alone and watch.step() >= self._asks_until

    def step_ends(self, output: Any) -> None:
        """Tell all of it; ``output`` is the scheduler's."""
        self.outputs_tell = False
        if self.unasked:
            self._tell_by(output)
        self.tell()

    def leaving(self, blocks: Sequence[Any], caller: Caller) -> None:
        """A table is gone whose ``blocks`` may have been taken just before."""
        if self.unasked:
            self._ask_tables(blocks, caller)

    def tell(self) -> None:
        """Tell what was taken, and then what was hashed."""
        if self.unasked:
            self._ask_tables()
        if self.taken:
            self._tell_taken()
        if self.hashed:
            self._tell_hashed()

    def _tell_by(self, output: Any) -> None:
        """Tell what was taken as a step's output says; nothing, if that names other blocks."""
        cached, numbers = output.scheduled_cached_reqs, self._watch.numbers
        new_ids = getattr(cached, "new_block_ids", ())
        rows: list[int] = []
        named: list[int] = []
        for request_id, groups in zip(compress(cached.req_ids, new_ids), filter(None, new_ids), strict=True):
            for group, ids in enumerate(groups):
                if ids:
                    rows += (numbers[request_id], group, len(ids))
                    rows += ids
                    named += ids
        if named != [block.block_id for blocks in self.unasked for block in blocks]:
            return
        self.unasked.clear()
        if rows:
            self._record_taken(rows, 0, TAKES)

    def _ask_tables(self, leaving: Sequence[Any] = (), whose: Caller = NOBODY) -> None:
        """Whose table ends with what was taken; of a table that is gone, ``leaving`` were the blocks.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch = self._watch
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        takers = {id(block): (whose.request_id, whose.group, TAKES) for block in leaving}
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            for request_id, table in manager.req_to_blocks.items():
                if table:
                    takers[id(table[-1])] = request_id, group, TAKES
        self.taken += [(0, blocks, *takers.get(id(blocks[-1]), NOBODY)) for blocks in self.unasked if blocks]
        self.unasked.clear()

    def _tell_taken(self) -> None:
        """Calls in a row by one operation are one event."""
        numbers = self._watch.numbers
        rows: list[int] = []
        last = (-1, "")
        for pool, blocks, request_id, group, by in self.taken:
            if (pool, by) != last:
                if rows:
                    self._record_taken(rows, *last)
                rows, last = [], (pool, by)
            rows += (numbers[request_id], group, len(blocks))
            rows += [block.block_id for block in blocks]
        self.taken.clear()
        self._record_taken(rows, *last)

    def _record_taken(self, rows: list[int], pool: int, by: str) -> None:
        watch = self._watch
        watch.record(ev.BlocksTaken(watch.log.now(), watch.step(), pool, by, rows, watch.stack()))

    def _tell_hashed(self) -> None:
        """Calls in a row for one pool, that replaced hashes or did not, are one event."""
        numbers = self._watch.numbers
        rows: list[int] = []
        last = (-1, False)
        last_request, last_group, count = None, -1, 0
        for pool, old, request, group, block, name, end in self.hashed:
            if (pool, old is not None) != last:
                if rows:
                    self.record_hashed(rows, *last)
                rows, last, last_request = [], (pool, old is not None), None
            if request is last_request and group == last_group:
                rows[count] += 1
                rows += (block, name, end)
            else:
                last_request, last_group, count = request, group, len(rows) + 3
                rows += (numbers[request.request_id], group, request.num_tokens, 1, block, name, end)
        self.hashed.clear()
        self.record_hashed(rows, *last)

    def record_hashed(self, rows: list[int], pool: int, replaced: bool) -> None:
        """Tell of blocks in the cache map: rows as :class:`~kvledger.audit.events.BlocksHashed` has them."""
        watch = self._watch
        watch.record(ev.BlocksHashed(watch.log.now(), watch.step(), pool, rows, replaced, watch.stack()))
