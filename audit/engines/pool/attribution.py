"""What pools were called for, kept until it is told as one event, in the calls' order.

A call is written down as the numbers that will be told. Who takes blocks is asked of the stack at each call,
or read off the step's output, which names whom it gives which. The output is believed only if what it names
is, or ends with, the very blocks that were handed out.

Blocks that are handed out while the output tells are put down where the first of them was: what is hashed
between them is other blocks, or hashed after it was taken.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ... import events as ev
from ...events import ALLOCATED, ALLOCATED_EACH, FREED, HEAD, IN_STEP, TOUCHED
from ..event_log import NONE
from .caller_stack import NOBODY, Caller

if TYPE_CHECKING:
    from .watch import PoolWatch

TAKES = "allocate_new_blocks"
"""By which operation the requests of an output take blocks, where no connector promises any."""

ASKING_STEPS = 64
"""For so many steps every call is asked for its caller, where an output could not tell."""

LATER_STEPS = 16
"""At most so many steps are put aside, where the engine is not at rest before."""

FIRST = itemgetter(0)

Gift = Sequence[Sequence[int]]
"""Ids of blocks, by group."""

Said = tuple[list[int], list[Gift], Sequence[Any]]
"""Of who ran before and got blocks: their numbers, and what they got; and who was admitted."""

Takers = dict[int, tuple[int, int, Sequence[Any]]]
"""Who may have taken a block: request, group, and a table that ends with it, of blocks or their ids."""


class Untold:
    """The untold calls of one watch's pools, as rows of :class:`~kvledger.audit.events.PoolCalls`."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self.rows: list[int] = watch.log.calls
        self.handed: list[Any] = []
        """Blocks that have been handed out, and to whom is not known yet."""
        self._ids: list[int] = []
        """Theirs, of as many as have been asked for."""
        self.later: list[tuple[int, Said, list[Any]]] = []
        """Steps in which all ran as before: number, what the output names, and what was handed out."""
        self.hits: dict[str, list[int]] = {}
        """What requests were admitted with in this step."""
        self.adds_up = False
        """In this step all tables of who was admitted are those hits, and then what was handed out."""
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
        if self.rows or self.handed or self._watch.ending:
            self.tell(step - 1)
        if self.hits:
            self.hits.clear()
        self.adds_up = False
        self.outputs_tell = self._alone and (nobody_waits or not self._promises) and step >= self._asks_until

    def put_aside(self, output: Any, numbers: list[int] | None) -> bool:
        """Put a step aside in which each request ran as in the last one. False: it is to be told now."""
        books, full = self._watch.books, len(self.later) == LATER_STEPS
        if books is None or full or self.rows or not self.outputs_tell:
            return False
        self.outputs_tell = False
        if self.handed:
            said = self._said(output, numbers)  # to keep the output would keep its memory from the next
            self.later.append((self._watch.step(), said, self.handed.copy()))
            self._put_down()
        return True

    def handed_ids(self) -> list[int]:
        """The ids of ``handed``."""
        ids = self._ids
        ids += [block.block_id for block in self.handed[len(ids) :]]
        return ids

    def catch_up(self) -> None:
        """Write down the steps that were put aside; nothing has been called for since."""
        rows, since = self.rows, self.handed.copy()
        later, self.later = self.later, []
        for place, (step, said, handed) in enumerate(later):
            rows += (IN_STEP, -1, -1, step, 0)
            self._behind = len(rows)
            self.handed[:] = handed
            if not self._named(step, said):
                self.handed += chain.from_iterable(row[-1] for row in later[place + 1 :])
                self.handed += since  # tables end with the last of it all
                since.clear()
                self._ask_tables((), NOBODY)
                break
        self.handed[:] = since
        self.adds_up = False  # of those steps; of this one it is not known yet
        rows += (IN_STEP, -1, -1, self._watch.step(), 0)
        self._behind = len(rows)

    def add(self, what: int, pool: int, caller: Caller, blocks: Sequence[Any]) -> None:
        """A call that took, touched or freed blocks, with what they count just after where that differs."""
        ids = [block.block_id for block in blocks]
        counts = [block.ref_cnt for block in blocks] if what != ALLOCATED else []
        if what == TOUCHED and caller.request_id is not None:
            self.hits[caller.request_id] = ids
        self.call(what + 8 * pool, *caller, ids, counts)
        if self._watch.stacks:
            self._watch.tell()

    def call(
        self, what: int, request_id: str | None, group: int, operation: str, ids: list[int], counts: list[int]
    ) -> None:
        """One call's row."""
        rows, by = self.rows, self._by
        if self.handed:
            self._parts.append((self._behind, len(self.handed)))
        number = self._watch.numbers.get(request_id)
        if number is None:
            number = self._watch.number(request_id)
        rows += (what, number, group, by.setdefault(operation, len(by)), len(ids) + len(counts))
        rows += ids
        rows += counts
        self._behind = len(rows)

    def tell(
        self,
        step: int,
        output: Any = None,
        numbers: list[int] | None = None,
        *,
        leaving: Sequence[int] = (),
        whose: Caller = NOBODY,
    ) -> None:
        """Tell all of it, of ``step``.

        ``output`` is the scheduler's, if that has just come, with the ``numbers`` of who ran before;
        ``leaving`` are ids of ``whose`` table, which is gone.
        """
        watch = self._watch
        if self.later:
            self.catch_up()
        if self.handed and not (output is not None and self._named(step, self._said(output, numbers))):
            self._ask_tables(leaving, whose)
        if watch.ending:
            watch.say_gone()
        if not self.rows:
            return
        stack = watch.callers.stack() if watch.stacks else None
        rows = watch.log.sink.keep(self.rows)
        event = ev.PoolCalls(watch.log.now(), step, _names(*self._by), rows, stack)
        self.rows.clear()
        self._by.clear()
        self._behind = 0
        watch.record(event)

    def clear(self) -> None:
        """Nothing of it will be told."""
        self.rows.clear()
        self.later.clear()
        self._by.clear()
        self._put_down()

    def _said(self, output: Any, numbers: list[int] | None) -> Said:
        """What an output names; ``numbers`` are those of who ran before, if they are at hand."""
        cached = output.scheduled_cached_reqs
        new_ids = getattr(cached, "new_block_ids", ())
        places = list(compress(range(len(new_ids)), new_ids))  # to touch each name would cost more
        if numbers is None:
            takers = list(map(self._watch.number, map(cached.req_ids.__getitem__, places)))
        else:
            takers = list(map(numbers.__getitem__, places))
        return takers, list(map(new_ids.__getitem__, places)), output.scheduled_new_reqs

    def _named(self, step: int, said: Said) -> bool:
        """Write down who took what by what an output names: new blocks, or whole tables. False: not all."""
        self.adds_up = self._in_order(step, said)
        if self.adds_up:
            return True
        numbers, got, admitted = said
        gifts = list(zip(numbers, got, strict=True))
        gifts += [(self._watch.number(new.req_id), new.block_ids) for new in admitted]
        return self._put(
            {
                ids[-1]: (number, group, ids)
                for number, groups in gifts
                for group, ids in enumerate(groups)
                if ids
            }
        )

    def _in_order(self, step: int, said: Said) -> bool:
        """The same, where a block each came first, and then all but their hits for who was admitted.

        False, and nothing is done, if it did not.
        """
        numbers, got, admitted = said
        rows, handed, behind = self.rows, self.handed, self._behind
        ids = self.handed_ids()
        try:
            singles = list(map(FIRST, map(FIRST, got)))
        except IndexError:
            return False
        end = decode = len(singles)
        parts = iter((*self._parts, (behind, len(ids))))
        place, until = next(parts)
        if ids[:end] != singles or end > until:
            return False
        by = self._operation(TAKES)
        told = rows[:place]
        if end:
            told += (ALLOCATED_EACH, -1, 0, by, 2 * end, *singles, *numbers)
        for new in admitted:
            table, hits = new.block_ids[0], self.hits.get(new.req_id, NONE)
            new_ids = ids[end : end + len(table) - len(hits)]
            end += len(new_ids)
            if len(new.block_ids) != 1 or table != hits + new_ids:
                return False
            while end > until:
                start = place
                place, until = next(parts)
                told += rows[start:place]
            if new_ids:
                told += (ALLOCATED, self._watch.number(new.req_id), 0, by, len(new_ids), *new_ids)
        if end != len(ids):
            return False
        rows[:behind] = told + rows[place:behind]
        if self._watch.books is not None:
            self._watch.books.handed_out(step, handed, ids, decode)
        self._put_down()
        return True

    def _put(self, takers: Takers) -> bool:
        """Put what was handed out into the rows. False, and nothing is done: some are nobody's."""
        rows, handed, books = self.rows, self.handed, self._watch.books
        put: list[tuple[int, list[int]]] = []
        begin = 0
        for place, end in (*self._parts, (self._behind, len(handed))):
            cut = self._cut(self.handed_ids()[begin:end], takers)
            if cut is None:
                return False
            put.append((place, cut))
            begin = end
        for place, cut in reversed(put):
            rows[place:place] = cut
        if books is not None:  # some may have been given back since
            kept = [block for block in handed if block.ref_cnt]
            books.handed_out(self._watch.step(), kept, [block.block_id for block in kept], 0)
        self._put_down()
        return True

    def _put_down(self) -> None:
        """All that was handed out is in the rows, or put aside."""
        self.handed.clear()
        self._ids.clear()
        self._parts.clear()
        self._behind = len(self.rows)

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
            pieces.append((ALLOCATED, number, group, by, count, *ids[-count:]))
            del ids[-count:]
            if count < len(table):
                before = _id(table[-count - 1])
                if before not in takers or takers[before][0] < 0:  # else another's table ends with it
                    takers[before] = number, group, table[:-count]
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
        self._put(takers)


@functools.lru_cache(64)
def _names(*operations: str) -> tuple[str, ...]:
    """The same tuple for the same operations."""
    return operations


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
