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
from kvledger.audit.events import FREED, HEAD, TAKEN

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation the requests of an output take blocks, where no connector promises any."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""


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
        self.tell(step - 1)
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until
        self.clear()

    def add(self, what: int, pool: int, caller: Caller, blocks: Sequence[Any]) -> None:
        """A call that took, touched or freed blocks, with what they count just after where that differs."""
        watch, by = self._watch, self._by
        request_id, group, operation = caller
        numbers = [block.block_id for block in blocks]
        if what != TAKEN:
            numbers += [block.ref_cnt for block in blocks]
        number = watch.number(request_id)
        more = by.setdefault(operation, len(by))
        self.rows += (what + 8 * pool, number, group, more, len(numbers), *numbers)
        if watch.stacks:
            watch.tell()

    def tell(
        self, step: int, output: Any = None, leaving: Sequence[int] = (), whose: Caller = NOBODY
    ) -> None:
        """Tell all of it, of ``step``.

        ``output`` is the scheduler's, if that has just come; ``leaving`` are ids of ``whose`` table, which
        is gone.
        """
        watch = self._watch
        if not self.rows:
            return
        if self.unasked and not (output is not None and self._named(output)):
            self._ask_tables(leaving, whose)
        stack = watch.callers.stack() if watch.stacks else None
        event = ev.PoolCalls(watch.log.now(), step, list(self._by), self.rows.copy(), stack)
        self.clear()
        watch.record(event)

    def clear(self) -> None:
        """Nothing of it will be told. Calls that are not asked are written down as the first operation's."""
        self.rows.clear()
        self.unasked.clear()
        self._by.clear()
        if self.outputs_tell:
            self._by[TAKES] = 0

    def _named(self, output: Any) -> bool:
        """Write down who took what by what an output names: new blocks, or whole tables. False: not all."""
        cached, unasked = output.scheduled_cached_reqs, self.unasked
        new_ids = getattr(cached, "new_block_ids", ())
        names, gifts = list(compress(cached.req_ids, new_ids)), list(filter(None, new_ids))
        told = self._named_singly(names, gifts)
        if not unasked:
            return True
        rows, number_of = self.rows, self._watch.number
        others: dict[int, tuple[str, int, Sequence[int]]] = {}
        rest = list(zip(names[told:], gifts[told:], strict=True))
        place = 0
        for request_id, groups in rest + [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]:
            for group, ids in enumerate(groups):
                if not ids:
                    continue
                first = unasked[place] + HEAD if place < len(unasked) else 0
                if first and rows[first : first + rows[first - 1]] == ids:  # the next that was taken
                    self._write(first, number_of(request_id), group)
                    place += 1
                else:
                    others.setdefault(ids[-1], (request_id, group, ids))
        del unasked[:place]
        while unasked:
            first = unasked[-1] + HEAD
            end = first + rows[first - 1]
            request_id, group, ids = others.get(rows[end - 1], ("", -1, ()))
            if list(ids[first - end :]) != rows[first:end]:
                return False
            self._write(first, number_of(request_id), group)
            unasked.pop()
        return True

    def _named_singly(self, names: list[str], gifts: list[Sequence[list[int]]]) -> int:
        """The same for as long as each was given one block of one group, in the order of the calls.

        That is all of a step that only decodes. Returns to how many of ``names`` it was.
        """
        rows, unasked = self.rows, self.unasked
        told = 0
        for number, groups, start in zip(map(self._watch.numbers.get, names), gifts, unasked, strict=False):
            ids = groups[0]
            if number is None or len(groups) != 1 or len(ids) != 1 or rows[start + HEAD - 1] != 1:
                break
            if rows[start + HEAD] != ids[0]:
                break
            rows[start + 1] = number  # group and operation are as the call was written down
            told += 1
        del unasked[:told]
        return told

    def _write(self, first: int, number: int, group: int, operation: str = TAKES) -> None:
        """The taker, into the call whose blocks begin there."""
        self.rows[first - 4 : first - 1] = number, group, self._by.setdefault(operation, len(self._by))

    def _ask_tables(self, leaving: Sequence[int], whose: Caller) -> None:
        """The same by whose table ends with what was taken, or who has given it back since.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch, rows = self._watch, self.rows
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        takers = dict.fromkeys(leaving, (watch.number(whose.request_id), whose.group))
        start = 0
        while start < len(rows):
            what, number, group, _, many = rows[start : start + HEAD]
            start += HEAD + many
            if what == FREED:
                takers |= dict.fromkeys(rows[start - many : start - many // 2], (number, group))
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            tables = manager.req_to_blocks.items()
            takers |= {table[-1].block_id: (watch.number(name), group) for name, table in tables if table}
        for place in self.unasked:
            first = place + HEAD
            number, group = takers.get(rows[first + rows[first - 1] - 1], (-1, -1))
            self._write(first, number, group, TAKES if number >= 0 else "")
