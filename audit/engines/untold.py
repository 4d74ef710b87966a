"""What pools were called for, kept until it is told as one event, in the calls' order.

A call costs least when it is only put aside: what it means is worked out of all of them together. Who
takes blocks is asked of the stack at each call, or read off the step's output, which names whom it gives
which. The output is believed only if what it names ends with the very blocks that were handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from kvledger.audit import events as ev
from kvledger.audit.engines.callers import NOBODY, Caller
from kvledger.audit.events import FREED, GONE, HASHED, STATED, TAKEN

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation the requests of an output take blocks, where no connector promises any."""

UNASKED = -1
"""A call that took blocks and was not asked for its caller."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""

Taker = tuple[str | None, int, str]
"""Request, group and operation."""


class Untold:
    """The untold calls of one watch's pools.

    ``calls`` holds a tuple each, what it is first: TAKEN, TOUCHED and FREED have pool, request, group,
    operation, blocks and, but for TAKEN, their counts just after; UNASKED has the blocks; HASHED has pool,
    the hash before, request, group, block and end; STATED has rows; GONE has the request.
    """

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.calls: list[tuple[Any, ...]] = watch.log.calls
        self.outputs_tell = False
        """Only requests that the step's output will name take blocks now."""
        self._asks_until = 0
        scheduler = watch.scheduler
        self._alone = scheduler is not None and len(watch.pools) == 1 and not watch.stacks
        self._promises = getattr(scheduler, "connector", None) is not None

    def step_begins(self, nobody_waits: bool) -> None:
        """Whether callers have to be asked in this step. What is untold was called for before it."""
        step = self._watch.step()
        if self.calls:
            self._tell(step - 1)
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until

    def step_ends(self, output: Any) -> None:
        """Tell all of it; ``output`` is the scheduler's."""
        self.outputs_tell = False
        if self.calls:
            self._tell(self._watch.step(), output)

    def tell(self, leaving: Sequence[Any] = (), whose: Caller = NOBODY) -> None:
        """Tell all of it, before something else is told; ``whose`` table with ``leaving`` is gone."""
        if self.calls:
            self._tell(self._watch.step(), None, leaving, whose)

    def _tell(
        self, step: int, output: Any = None, leaving: Sequence[Any] = (), whose: Caller = NOBODY
    ) -> None:
        watch, calls = self._watch, self.calls.copy()
        self.calls.clear()
        unasked = [call[1] for call in calls if call[0] == UNASKED]
        takers: dict[int, Taker] = {}
        if unasked:
            named = named_by(output, unasked) if output is not None else None
            takers = self._ask_tables(calls, unasked, leaving, whose) if named is None else named
        numbers, name = watch.numbers, watch.name
        places: dict[str, int] = {}
        rows: list[int] = []
        last: tuple[Any, ...] | None = None
        count = 0
        for call in calls:
            what = call[0]
            if what == HASHED:
                _, pool, old, request, group, block, end = call
                found = block._block_hash
                if found is old:
                    continue
                if last != (pool, old is None, request, group):
                    last, count = (pool, old is None, request, group), len(rows) + 4
                    more = request.num_tokens * 2 + (old is not None)
                    rows += (HASHED + 8 * pool, numbers[request.request_id], group, more, 0)
                rows[count] += 3
                rows += (block.block_id, name(found), end)
                continue
            last = None
            if what == UNASKED:
                ids = [block.block_id for block in call[1]]
                request_id, group, by = takers.get(ids[-1], NOBODY)
                rows += (TAKEN, numbers[request_id], group, places.setdefault(by, len(places)), len(ids))
                rows += ids
            elif what == STATED:
                rows += (STATED, -1, -1, 0, len(call[1]))
                rows += call[1]
            elif what == GONE:
                if call[1] in numbers:
                    rows += (GONE, numbers.pop(call[1]), -1, 0, 0)
            else:
                _, pool, request_id, group, by, blocks, *counts = call
                ids = [block.block_id for block in blocks]
                if counts:
                    ids += counts[0]
                more = places.setdefault(by, len(places))
                rows += (what + 8 * pool, numbers[request_id], group, more, len(ids))
                rows += ids
        if rows:
            watch.record(ev.PoolCalls(watch.log.now(), step, list(places), rows, watch.stack()))

    def _ask_tables(
        self,
        calls: Iterable[tuple[Any, ...]],
        unasked: list[list[Any]],
        leaving: Sequence[Any],
        whose: Caller,
    ) -> dict[int, Taker]:
        """By the last block of each call whose it is: given back since, or at the end of a table.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch = self._watch
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        owners: dict[int, tuple[str | None, int]] = {}
        for call in calls:
            if call[0] == FREED:
                owners |= dict.fromkeys(map(id, call[5]), (call[2], call[3]))
        owners |= dict.fromkeys(map(id, leaving), (whose.request_id, whose.group))
        most = sum(map(len, unasked))
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            for request_id, table in manager.req_to_blocks.items():
                owners |= dict.fromkeys(map(id, table[-most:]), (request_id, group))
        lasts = [blocks[-1] for blocks in unasked]
        return {last.block_id: (*owners[id(last)], TAKES) for last in lasts if id(last) in owners}


def named_by(output: Any, taken: list[list[Any]]) -> dict[int, Taker] | None:
    """By the last block of each call whom an output names for it; None if it names others.

    What it names of a request are its new blocks, or its whole table.
    """
    cached = output.scheduled_cached_reqs
    new_ids = getattr(cached, "new_block_ids", None)
    if new_ids is None:
        return None
    named: dict[int, tuple[str, int, list[int]]] = {}
    tables = [*zip(compress(cached.req_ids, new_ids), filter(None, new_ids), strict=True)]
    tables += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    for request_id, groups in tables:
        for group, ids in enumerate(groups):
            if ids:
                named.setdefault(ids[-1], (request_id, group, ids))
    takers: dict[int, Taker] = {}
    for blocks in taken:
        ids = [block.block_id for block in blocks]
        request_id, group, whole = named.get(ids[-1], ("", -1, ids[:0]))
        if whole[-len(ids) :] != ids:
            return None
        takers[ids[-1]] = request_id, group, TAKES
    return takers
