"""What pools were called for, kept until it is told as one event, in the calls' order.

A call is written down as the numbers that will be told, while what it concerns is still in the processor's
caches. Who takes blocks is asked of the stack at each call, or read off the step's output, which names whom
it gives which. The output is believed only if what it names ends with the very blocks that were handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from kvledger.audit import events as ev
from kvledger.audit.engines.callers import NOBODY, Caller
from kvledger.audit.events import FREED

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation the requests of an output take blocks, where no connector promises any."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""

HEAD = 5
"""Numbers of a call before its blocks: see :class:`~kvledger.audit.events.PoolCalls`."""

Taker = tuple[str | None, int, Sequence[int] | None]
"""Request, group, and blocks of theirs of which the last ones are new; None: they are not known."""

UNKNOWN: Taker = (None, -1, None)


class Untold:
    """The untold calls of one watch's pools, as rows of :class:`~kvledger.audit.events.PoolCalls`."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.rows: list[int] = watch.log.calls
        self.unasked: list[int] = []
        """Where in them a call begins that took blocks and was not asked for its caller."""
        self.outputs_tell = False
        """Only requests that the step's output will name take blocks now."""
        self._by: dict[str, int] = {}
        self._asks_until = 0
        scheduler = watch.scheduler
        self._alone = scheduler is not None and len(watch.pools) == 1 and not watch.stacks
        self._promises = getattr(scheduler, "connector", None) is not None

    def step_begins(self, nobody_waits: bool) -> None:
        """Whether callers have to be asked in this step. What is untold was called for before it."""
        step = self._watch.step()
        if self.rows:
            self.tell(step - 1)
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until

    def add(
        self, what: int, pool: int, caller: Caller, ids: Sequence[int], references: Sequence[int] = ()
    ) -> None:
        """A call that took, touched or freed blocks."""
        request_id, group, operation = caller
        number = self._watch.numbers[request_id]
        more = self._by.setdefault(operation, len(self._by))
        many = len(ids) + len(references)
        self.rows += (what + 8 * pool, number, group, more, many, *ids, *references)

    def tell(
        self, step: int, output: Any = None, leaving: Sequence[int] = (), whose: Caller = NOBODY
    ) -> None:
        """Tell all of it, of ``step``.

        ``output`` is the scheduler's, if that has just come; ``leaving`` are ids of ``whose`` table, which
        is gone.
        """
        watch = self._watch
        if self.unasked and not (output is not None and self._name(named_by(output))):
            self._name(self._ask_tables(leaving, whose))
        event = ev.PoolCalls(watch.log.now(), step, list(self._by), self.rows.copy(), watch.stack())
        self.clear()
        watch.record(event)

    def clear(self) -> None:
        """Nothing of it will be told."""
        self.rows.clear()
        self.unasked.clear()
        self._by.clear()

    def _name(self, takers: dict[int, list[Taker]]) -> bool:
        """Write down who took what, by its last block; False, if that is not known of all."""
        rows, numbers, by = self.rows, self._watch.numbers, self._by
        everyone = True
        for place in self.unasked:
            first = place + HEAD
            end = first + rows[first - 1]
            known = takers.get(rows[end - 1])
            request_id, group, ids = known[0] if known else UNKNOWN
            if known and len(known) > 1:  # one block was given to two, in this order
                del known[0]
            if ids is not None and end > first + 1 and list(ids[first - end :]) != rows[first:end]:
                request_id = None
            everyone = everyone and request_id is not None
            operation = TAKES if request_id is not None else ""
            rows[place + 1 : first - 1] = numbers[request_id], group, by.setdefault(operation, len(by))
        return everyone

    def _ask_tables(self, leaving: Sequence[int], whose: Caller) -> dict[int, list[Taker]]:
        """Whose table ends with what was taken, or who has given it back since.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch, rows = self._watch, self.rows
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        takers: dict[int, list[Taker]] = {}
        names = {number: request_id for request_id, number in watch.numbers.items()}
        start = 0
        while start < len(rows):
            what, number, group, _, many = rows[start : start + HEAD]
            start += HEAD + many
            if what == FREED:
                ids = rows[start - many : start - many // 2]
                takers |= {block: [(names.get(number), group, None)] for block in ids}
        takers |= {block: [(whose.request_id, whose.group, None)] for block in leaving}
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            tables = manager.req_to_blocks.items()
            takers |= {table[-1].block_id: [(name, group, None)] for name, table in tables if table}
        return takers


def named_by(output: Any) -> dict[int, list[Taker]]:
    """Whom an output names for which blocks, by the last of them.

    What it names of a request are its new blocks, or its whole table.
    """
    takers: dict[int, list[Taker]] = {}
    cached = output.scheduled_cached_reqs
    new_ids = getattr(cached, "new_block_ids", None) or ()
    named = [*zip(compress(cached.req_ids, new_ids), filter(None, new_ids), strict=True)] if new_ids else []
    named += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    for request_id, groups in named:
        for group, ids in enumerate(groups):
            if ids:
                last = ids[-1]
                if last in takers:
                    takers[last].append((request_id, group, ids))
                else:
                    takers[last] = [(request_id, group, ids)]
    return takers
