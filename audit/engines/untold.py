"""What pools were called for, kept until it is told as one event, in the calls' order.

A call is written down as the numbers that will be told. Who takes blocks is asked of the stack at each call,
or read off the step's output, which names whom it gives which. The output is believed only if what it names
is, or ends with, the very blocks that were handed out.

Blocks that are handed out while the output tells are put down where the first of them was: what is hashed
between them is other blocks, or hashed after it was taken.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from kvledger.audit import events as ev
from kvledger.audit.engines.callers import NOBODY, Caller
from kvledger.audit.events import FREED, HEAD, TAKEN, TAKEN_EACH

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation the requests of an output take blocks, where no connector promises any."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""

Takers = dict[int, tuple[int, int, Sequence[Any]]]
"""Who may have taken a block: request, group, and a table that ends with it, of blocks or their ids."""


class Untold:
    """The untold calls of one watch's pools, as rows of :class:`~kvledger.audit.events.PoolCalls`."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.rows: list[int] = watch.log.calls
        self.handed: list[Any] = []
        """Blocks that have been handed out, and to whom is not known yet."""
        self._behind = 0
        self._parts: list[tuple[int, int]] = []
        """Where other calls came between: the place in the rows of those before, and how many there are."""
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
        if self._watch.books is not None:
            self._watch.books.step_begins()
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until

    def add(self, what: int, pool: int, caller: Caller, blocks: Sequence[Any]) -> None:
        """A call that took, touched or freed blocks, with what they count just after where that differs."""
        if self.handed:
            self._parts.append((self._behind, len(self.handed)))
        watch, by = self._watch, self._by
        request_id, group, operation = caller
        numbers = [block.block_id for block in blocks]
        if what != TAKEN:
            numbers += [block.ref_cnt for block in blocks]
        number = watch.number(request_id)
        more = by.setdefault(operation, len(by))
        self.rows += (what + 8 * pool, number, group, more, len(numbers), *numbers)
        self._behind = len(self.rows)
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
        if self.handed and not (output is not None and self._named(output)):
            self._ask_tables(leaving, whose)
        if not self.rows:
            return
        stack = watch.callers.stack() if watch.stacks else None
        event = ev.PoolCalls(watch.log.now(), step, _names(*self._by), self.rows.copy(), stack)
        self.clear()
        watch.record(event)

    def clear(self) -> None:
        """Nothing of it will be told."""
        self.rows.clear()
        self.handed.clear()
        self._parts.clear()
        self._by.clear()
        self._behind = 0

    def _named(self, output: Any) -> bool:
        """Write down who took what by what an output names: new blocks, or whole tables. False: not all."""
        number_of, cached = self._watch.number, output.scheduled_cached_reqs
        admitted = [(number_of(new.req_id), new.block_ids) for new in output.scheduled_new_reqs]
        numbers, singles = self._singles(output)
        if self._put(_takers(admitted), numbers, singles):
            return True
        new_ids = getattr(cached, "new_block_ids", ())
        ran = [
            (number_of(name), groups) for name, groups in zip(cached.req_ids, new_ids, strict=False) if groups
        ]
        return self._put(_takers(ran + admitted))

    def _singles(self, output: Any) -> tuple[list[int], list[int]]:
        """Who ran before and got one block of one group, and these blocks' ids; nobody if not all did."""
        cached = output.scheduled_cached_reqs
        new_ids = getattr(cached, "new_block_ids", ())
        req_ids, known, number_of = cached.req_ids, self._watch.numbers, self._watch.number
        numbers, blocks = [], []
        for place in compress(range(len(new_ids)), new_ids):  # to touch each name would cost more
            groups = new_ids[place]
            if len(groups) != 1 or len(groups[0]) != 1:
                return [], []
            blocks.append(groups[0][0])
            number = known.get(req_ids[place])
            numbers.append(number_of(req_ids[place]) if number is None else number)
        return numbers, blocks

    def _put(
        self, takers: Takers, numbers: Sequence[int] = (), singles: Sequence[int] = (), *, asked: bool = False
    ) -> bool:
        """Put what was handed out into the rows. False, and nothing is done: some are nobody's.

        First the requests ``numbers`` took ``singles``, one each of one group. Of these the first and the
        last are compared, of all others each. ``asked``: no output has come that would name them.
        """
        rows, handed, first = self.rows, self.handed, len(singles)
        parts = [*self._parts, (self._behind, len(handed))]
        if first and not (
            first <= parts[0][1]
            and handed[0].block_id == singles[0]
            and handed[first - 1].block_id == singles[-1]
        ):
            return False
        ids = [block.block_id for block in handed[first:]] if first < len(handed) else []
        put: list[tuple[int, list[int]]] = []
        begin = 0
        for place, end in parts:
            cut = self._cut(ids[begin : end - first], takers)
            if cut is None:
                return False
            put.append((place, cut))
            begin = end - first
        if first:
            by = self._operation(TAKES)
            put[0][1][:0] = (TAKEN_EACH, -1, 0, by, 2 * first, *singles, *numbers)
        for place, cut in reversed(put):
            rows[place:place] = cut
        if self._watch.books is not None:
            self._watch.books.handed_out(handed, [*singles, *ids], in_between=asked)
        handed.clear()
        self._parts.clear()
        self._behind = len(rows)
        return True

    def _cut(self, ids: list[int], takers: Takers) -> list[int] | None:
        """The rows of blocks handed out in a row, cut where one taker's end. None: some are nobody's."""
        pieces: list[tuple[int, ...]] = []
        while ids:
            taker = takers.get(ids[-1])
            if taker is None:
                return None
            number, group, table = taker
            count = _common(ids, table)
            by = self._operation(TAKES if number >= 0 else "")
            pieces.append((TAKEN, number, group, by, count, *ids[-count:]))
            del ids[-count:]
            if count < len(table):
                takers.setdefault(_id(table[-count - 1]), (number, group, table[:-count]))
        return list(chain.from_iterable(reversed(pieces)))

    def _operation(self, name: str) -> int:
        return self._by.setdefault(name, len(self._by))

    def _ask_tables(self, leaving: Sequence[int], whose: Caller) -> None:
        """The same by whose table ends with what was taken, or who has given it back since.

        That is a look at every table, so that callers are asked for some steps to come.
        """
        watch, rows = self._watch, self.rows
        self.outputs_tell = False
        self._asks_until = watch.step() + ASKING_STEPS
        takers: Takers = {block.block_id: (-1, -1, (block,)) for block in self.handed}
        if leaving:
            takers[leaving[-1]] = watch.number(whose.request_id), whose.group, leaving
        start = 0
        while start < len(rows):
            what, number, group, _, many = rows[start : start + HEAD]
            start += HEAD + many
            if what == FREED and number >= 0:  # a table is given back with its end first
                given_back = rows[start - many : start - many // 2][::-1]
                takers[given_back[-1]] = number, group, given_back
        for manager in watch.managers:
            group = manager.kv_cache_group_id
            for name, table in manager.req_to_blocks.items():
                if table:
                    takers[table[-1].block_id] = watch.number(name), group, table
        self._put(takers, asked=True)


@functools.lru_cache(64)
def _names(*operations: str) -> tuple[str, ...]:
    """The same tuple for the same operations."""
    return operations


def _takers(gifts: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> Takers:
    """Of requests, and the ids of the blocks that each got, by group."""
    return {
        ids[-1]: (number, group, ids) for number, groups in gifts for group, ids in enumerate(groups) if ids
    }


def _common(ids: list[int], table: Sequence[Any]) -> int:
    """With how many blocks, at least one, both end."""
    count = 1
    most = min(len(ids), len(table))
    while count < most and ids[-count - 1] == _id(table[-count - 1]):
        count += 1
    return count


def _id(block: Any) -> int:
    """Of a block, or of an id itself."""
    return block if type(block) is int else int(block.block_id)
