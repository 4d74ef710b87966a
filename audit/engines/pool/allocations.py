"""Finds the owners of allocated blocks without reading the stack at each allocation.

Reading the caller off the stack costs more than the allocation. A scheduler output lists the new blocks of
each request, so owners are read from the output once the step is scheduled.
:func:`~kvledger.audit.engines.pool.attribution.attribute` checks that the output accounts for every allocated
block. If it does not, the owners are read from the block tables, and in the next :data:`STACK_STEPS` steps
from the stack.

A step in which every request ran as in the step before is *deferred*: the blocks that its output lists are
kept, and their owners are found when the engine is at rest, or before anything else happens to a block.
Finding the owners of eight steps together costs less than of each step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any, NamedTuple

from .attribution import BlockRun, NamedBlocks, Owners, attribute, owners_from_tables
from .call_buffer import CallBuffer, block_ids

STACK_STEPS = 64
"""Steps in which callers are read off the stack after an output did not account for every block."""

DEFERRED_STEPS = 16
"""The most steps that are deferred. Usually the engine is at rest earlier."""

Expect = Callable[[int, list[Any], list[int], int], None]
"""Called with a step, the blocks allocated in it, their ids, and how many of them, which come first, went to
decoding requests."""


class DeferredStep(NamedTuple):
    """A step whose owners have not been found, and the blocks allocated in it."""

    step: int
    named: NamedBlocks
    allocated: list[Any]


class Allocations:
    """Owners of the blocks that one engine's pools allocate."""

    def __init__(
        self,
        buffer: CallBuffer,
        managers: Iterable[Any],
        *,
        outputs_name_owners: bool,
        connector: bool,
    ) -> None:
        self.named_later = False
        """Whether the output of the present step will list the owners of the blocks allocated now."""
        self.tables_known = False
        """Whether the tables of the requests admitted in this step follow from their hits and allocations."""
        self.deferred: list[DeferredStep] = []
        """Steps whose owners have not been found."""
        self.expect: Expect | None = None
        """Called with the blocks that may be cached next. None if ``cache_full_blocks`` is wrapped."""
        self.owned: Callable[[Owners, list[int]], None] | None = None
        """Called with the owners of all allocated blocks, and the ids. None as for ``expect``."""
        self._buffer = buffer
        """Holds the allocated blocks, and the calls between them."""
        self._managers = managers
        """The managers of single KV cache groups, which hold the block tables."""
        self._outputs_name_owners = outputs_name_owners
        """Whether owners are read from outputs: with a scheduler, one pool, and no recording of stacks."""
        self._connector = connector
        """Whether there is a connector: it may need blocks that the step's output does not list."""
        self._stack_until = 0
        """The first step in which owners are read from the output again."""

    def begin_step(self, nobody_waits: bool) -> None:
        """The scheduler begins a step. ``nobody_waits``: no request waits to be admitted."""
        self._buffer.hits.clear()
        self.tables_known = False
        known = nobody_waits or not self._connector
        self.named_later = self._outputs_name_owners and known and self._buffer.step() >= self._stack_until

    def defer(self, output: Any, request_nos: list[int] | None) -> bool:
        """Defer a step in which each request ran as in the last one. False: it can't be deferred."""
        buffer = self._buffer
        full = len(self.deferred) == DEFERRED_STEPS
        if self.expect is None or full or buffer.rows or not self.named_later:
            return False
        self.named_later = False
        if buffer.allocated:  # keeping the output would keep its memory from the next one
            named = self._named_by(output, request_nos)
            self.deferred.append(DeferredStep(buffer.step(), named, buffer.allocated.copy()))
            buffer.forget_allocated()
        return True

    def scheduled(self, output: Any, request_nos: list[int] | None) -> None:
        """Find owners from the scheduler's output. ``request_nos``: of the requests that ran before."""
        self.named_later = False
        if self.deferred:
            self.write_deferred()
        if self._buffer.allocated:
            named = self._named_by(output, request_nos)
            if not self._from_output(self._buffer.step(), named):
                self._from_tables()

    def find_owners(self, leaving: BlockRun | None = None) -> None:
        """Find the owners of all blocks allocated by now; ``leaving`` is a table that was just given up."""
        if self.deferred:
            self.write_deferred()
        if self._buffer.allocated:
            self._from_tables(leaving)

    def write_deferred(self) -> None:
        """Write the allocations of the deferred steps. No other pool call may have been made since."""
        if not self.deferred:
            return
        buffer = self._buffer
        since = buffer.allocated.copy()
        deferred, self.deferred = self.deferred, []
        buffer.forget_allocated()
        for index, (step, named, allocated) in enumerate(deferred):
            buffer.step_follows(step)
            buffer.allocated += allocated
            if not self._from_output(step, named):
                for later in deferred[index + 1 :]:
                    buffer.allocated += later.allocated
                buffer.allocated += since  # the tables end with the last of all these
                since.clear()
                self._from_tables()
                break
        buffer.step_follows(buffer.step())
        buffer.allocated += since
        self.tables_known = False  # it was set for a deferred step

    def clear(self) -> None:
        """Drop everything: an observer has failed."""
        self.deferred.clear()
        self._buffer.clear()

    def _named_by(self, output: Any, request_nos: list[int] | None) -> NamedBlocks:
        """The blocks that an output lists. ``request_nos``: of the requests that ran before, if known."""
        numbers = self._buffer.request_nos
        cached = output.scheduled_cached_reqs
        new_block_ids = getattr(cached, "new_block_ids", ())
        # Most requests got no block, so their ids are not read.
        places = list(compress(range(len(new_block_ids)), new_block_ids))
        if request_nos is None:
            running = [numbers[cached.req_ids[place]] for place in places]
        else:
            running = list(map(request_nos.__getitem__, places))
        return NamedBlocks(
            running,
            list(map(new_block_ids.__getitem__, places)),
            [(numbers[new.req_id], new.block_ids) for new in output.scheduled_new_reqs],
        )

    def _from_output(self, step: int, named: NamedBlocks) -> bool:
        """Write the allocations with their owners from an output. False: it does not list every block."""
        ids = self._buffer.allocated_ids()
        owners = attribute(ids, named, self._buffer.hits)
        if owners is not None:
            self._write(step, owners, ids)
        return owners is not None

    def _from_tables(self, leaving: BlockRun | None = None) -> None:
        """Write the allocations with their owners from the present block tables and those given up since."""
        step, ids = self._buffer.step(), self._buffer.allocated_ids()
        self.named_later = False
        self._stack_until = step + STACK_STEPS
        tables = [leaving] if leaving is not None and leaving.blocks else []
        tables += self._buffer.freed_tables()
        tables += self._tables_ending_in(ids)
        self._write(step, owners_from_tables(ids, tables, self._buffer.hits), ids)

    def _tables_ending_in(self, allocated: list[int]) -> Iterator[BlockRun]:
        last = set(allocated)
        for manager in self._managers:
            for request_id, table in manager.req_to_blocks.items():
                if table and table[-1].block_id in last:
                    number = self._buffer.request_nos[request_id]
                    yield BlockRun(number, manager.kv_cache_group_id, block_ids(table[-len(allocated) :]))

    def _write(self, step: int, owners: Owners, ids: list[int]) -> None:
        """Write the allocations of the blocks with these ``ids``."""
        self.tables_known = owners.tables_known
        if self.owned is not None:
            self.owned(owners, ids)
        if self.expect is not None:
            blocks, still = self._buffer.allocated, ids
            if not owners.tables_known:  # some may have been freed since
                blocks = [block for block in blocks if block.ref_cnt]
                still = block_ids(blocks)
            self.expect(step, blocks, still, len(owners.of_single_blocks))
        self._buffer.set_owners(owners, ids)
