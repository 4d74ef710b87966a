"""What pools were called for, kept until it is told as one event, in the calls' order.

A call costs least when it is only put aside: what it means is worked out of all of them together. Who
takes blocks is asked of the stack at each call, or read off the step's output, which names whom it gives
which. The output is believed only if what it names ends with the very blocks that were handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
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

Call = tuple[Any, ...]
"""What it is comes first. TAKEN, TOUCHED and FREED then have pool, request, group, operation, ids, and the
blocks' counts just after (of what was taken none); UNASKED ids; HASHED pool, whether another hash was
replaced, request, group, id, the hash's name and end; STATED rows; GONE the request.

Only numbers are put aside: when these are told, the blocks themselves have long left the processor's caches.
"""


class Untold:
    """The untold calls of one watch's pools."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.calls: list[Call] = watch.log.calls
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
            self.tell(step - 1)
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until

    def tell(
        self, step: int, output: Any = None, leaving: Sequence[int] = (), whose: Caller = NOBODY
    ) -> None:
        """Tell all of it, of ``step``.

        ``output`` is the scheduler's, if that has just come; ``leaving`` are ids of ``whose`` table, which
        is gone.
        """
        watch, calls = self._watch, self.calls.copy()
        self.calls.clear()
        takers: dict[int, Taker] | None = None
        unasked = [call[1] for call in calls if call[0] == UNASKED]
        if unasked and output is not None:
            takers = named_by(output, unasked)
        if unasked and takers is None:
            takers = self._ask_tables(calls, unasked, leaving, whose)
        by: dict[str, int] = {}
        rows = self._rows(calls, takers or {}, by)
        if rows:
            watch.record(ev.PoolCalls(watch.log.now(), step, list(by), rows, watch.stack()))

    def _rows(self, calls: list[Call], takers: dict[int, Taker], by: dict[str, int]) -> list[int]:
        """The calls as :class:`~kvledger.audit.events.PoolCalls` has them; ``by`` gets its operations."""
        numbers = self._watch.numbers
        rows: list[int] = []
        hashing: tuple[Any, ...] = ()
        count = 0
        for call in calls:
            what = call[0]
            if what == HASHED:
                if call[1:5] == hashing:
                    rows[count] += 3
                else:
                    hashing, count = call[1:5], len(rows) + 4
                    _, pool, replaced, request, group, *_ = call
                    more = request.num_tokens * 2 + replaced
                    rows += (HASHED + 8 * pool, numbers[request.request_id], group, more, 3)
                rows += call[5:]
                continue
            hashing = ()
            if what == UNASKED:
                ids = call[1]
                request_id, group, operation = takers.get(ids[-1], NOBODY)
                more = by.setdefault(operation, len(by))
                rows += (TAKEN, numbers[request_id], group, more, len(ids), *ids)
            elif what == STATED:
                rows += (STATED, -1, -1, 0, len(call[1]), *call[1])
            elif what == GONE:
                if call[1] in numbers:
                    rows += (GONE, numbers.pop(call[1]), -1, 0, 0)
            else:
                _, pool, request_id, group, operation, ids, references = call
                more, many = by.setdefault(operation, len(by)), len(ids) + len(references)
                rows += (what + 8 * pool, numbers[request_id], group, more, many, *ids, *references)
        return rows

    def _ask_tables(
        self, calls: list[Call], unasked: list[list[int]], leaving: Sequence[int], whose: Caller
    ) -> dict[int, Taker]:
        """By the last block of each call whose it is: given back since, or at the end of a table.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch = self._watch
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        owners: dict[int, Taker] = {}
        for call in calls:
            if call[0] == FREED:
                owners |= dict.fromkeys(call[5], (call[2], call[3], TAKES))
        owners |= dict.fromkeys(leaving, (whose.request_id, whose.group, TAKES))
        most = sum(map(len, unasked))
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            for request_id, table in manager.req_to_blocks.items():
                ids = [block.block_id for block in table[-most:]]
                owners |= dict.fromkeys(ids, (request_id, group, TAKES))
        return owners


def named_by(output: Any, taken: list[list[int]]) -> dict[int, Taker] | None:
    """By the last block of each call whom an output names for it; None if it names others.

    What it names of a request are its new blocks, or its whole table.
    """
    cached = output.scheduled_cached_reqs
    new_ids = getattr(cached, "new_block_ids", None)
    if new_ids is None:
        return None
    tables = [*zip(compress(cached.req_ids, new_ids), filter(None, new_ids), strict=True)]
    tables += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    named: dict[int, list[int]] = {}
    takers: dict[int, Taker] = {}
    for request_id, groups in tables:
        for group, ids in enumerate(groups):
            if ids and ids[-1] not in named:
                named[ids[-1]] = ids
                takers[ids[-1]] = request_id, group, TAKES
    for ids in taken:
        if named.get(ids[-1], ids[:0])[-len(ids) :] != ids:
            return None
    return takers
