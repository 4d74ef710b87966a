"""Calls of the block pools, buffered in order until they are emitted as one ``PoolCalls`` event.

The encoding of that event is written here and nowhere else: :class:`CallBuffer` has one method for each kind
of call. It does not know who calls it, and it does not find owners of blocks: that is ``attribution``.

A call is written as the numbers that will be emitted, while its blocks are in the processor's caches.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ... import events as ev
from ...events import (
    ALLOCATED,
    ALLOCATED_EACH,
    CACHED,
    FREED,
    HEAD,
    IN_STEP,
    TABLES_REMOVED,
    TABLES_REPORTED,
    TOUCHED,
)
from ..step_log import StepLog
from .attribution import NO_REQUEST, BlockRun, Owners

POOL_FACTOR = 8
"""A row's first number is the kind of the call and this many times the pool's number."""

ALLOCATE = "allocate_new_blocks"
"""The operation that allocates the blocks which a scheduler output names."""


class RequestNumbers(dict[str | None, int]):
    """Request numbers by request id. A request stays here until its tables are reported as removed.

    The log may have forgotten the request before that. The number of None, for no request, is -1.
    """

    def __init__(self, intern: Callable[[str], int]) -> None:
        super().__init__({None: NO_REQUEST})
        self._intern = intern
        self.ids: dict[int, str] = {}
        """Request ids by number."""

    def __missing__(self, request_id: str | None) -> int:
        assert request_id is not None
        number = self[request_id] = self._intern(request_id)
        self.ids[number] = request_id
        return number


class CallBuffer:
    """The calls of one engine's pools that have not been emitted."""

    def __init__(self, log: StepLog, step: Callable[[], int]) -> None:
        self.log = log
        """The event log of the engine."""
        self.step = step
        """Returns the number of the present step."""
        self.rows: list[int] = log.pool_calls
        """The encoded calls. The log holds the same list, and has them emitted before any other event."""
        self.request_nos = RequestNumbers(log.intern)
        """The numbers of requests whose tables have not been reported as removed."""
        self.allocated: list[Any] = []
        """Allocated blocks whose owners are not known yet."""
        self.hits: dict[int, list[int]] = {}
        """Ids of the blocks touched in this step, by request number: the prefix-cache hits of admissions, of
        all KV cache groups."""
        self.call_added: Callable[[], None] | None = None
        """Runs after each pool call if stacks are recorded: then every call is emitted by itself."""
        self._allocated_ids: list[int] = []
        """Ids of the first blocks in ``allocated``, as many as have been read."""
        self._place = 0
        """The index in ``rows`` at which the blocks in ``allocated`` belong: after the last touch or free."""
        self._places: list[tuple[int, int]] = []
        """Earlier such indices, each with the number of blocks in ``allocated`` by then."""
        self._operations: dict[str, int] = {}
        """The names of the engine's operations in the rows, and the number of each."""

    # --- one method for each kind of call ---------------------------------------------------------

    def blocks_allocated(self, pool: int, request_no: int, group: int, by: str, ids: list[int]) -> None:
        """``get_new_blocks``, where the owner is known at once."""
        self._add(ALLOCATED + POOL_FACTOR * pool, request_no, group, by, ids)

    def blocks_touched(
        self, pool: int, request_no: int, group: int, by: str, ids: list[int], counts: list[int]
    ) -> None:
        """``touch``; ``counts`` are the blocks' reference counts just after the call."""
        if request_no != NO_REQUEST:
            self.hits.setdefault(request_no, []).extend(ids)
        self._add(TOUCHED + POOL_FACTOR * pool, request_no, group, by, ids, counts)

    def blocks_freed(
        self, pool: int, request_no: int, group: int, by: str, ids: list[int], counts: list[int]
    ) -> None:
        """``free_blocks`` or ``unpin_blocks``; ``counts`` are the blocks' reference counts just after."""
        self._add(FREED + POOL_FACTOR * pool, request_no, group, by, ids, counts)

    def blocks_cached(
        self, pool: int, request_no: int, group: int, length: int, replaced: bool, blocks: Sequence[int]
    ) -> None:
        """``cache_full_blocks``, of a sequence of ``length`` tokens.

        ``blocks`` has three numbers a block: id, hash id and the position up to which the hash reaches.
        """
        kind = CACHED + POOL_FACTOR * pool
        self.rows += (kind, request_no, group, 2 * length + replaced, len(blocks), *blocks)
        if self.call_added is not None:
            self.call_added()

    def table_blocks_cached(self, group: int, blocks: Sequence[int]) -> None:
        """Blocks were found cached, each for the request whose table holds it.

        Empty ``blocks``: some blocks were cached, and it is not known which.
        """
        length = -1 if not blocks else -1 - self.log.unreported_outputs()
        self.rows += (CACHED, NO_REQUEST, group, 2 * length, len(blocks), *blocks)

    def tables_reported(self, rows: Sequence[int]) -> None:
        """The present block tables, as rows of :class:`~kvledger.audit.events.TablesReported`."""
        self.rows += (TABLES_REPORTED, NO_REQUEST, -1, 0, len(rows), *rows)

    def tables_removed(self, request_id: str) -> None:
        """The engine has forgotten a request."""
        number = self.request_nos.pop(request_id, None)
        if number is not None:
            self.request_nos.ids.pop(number, None)
            self.rows += (TABLES_REMOVED, number, -1, 0, 0)

    def step_follows(self, step: int) -> None:
        """The calls that follow were made in this step."""
        self.rows += (IN_STEP, NO_REQUEST, -1, step, 0)
        self._place = len(self.rows)

    def _add(
        self, kind: int, request_no: int, group: int, by: str, ids: list[int], counts: Sequence[int] = ()
    ) -> None:
        rows, operations = self.rows, self._operations
        if self.allocated:
            self._places.append((self._place, len(self.allocated)))
        operation = operations.setdefault(by, len(operations))
        rows += (kind, request_no, group, operation, len(ids) + len(counts))
        rows += ids
        rows += counts
        self._place = len(rows)
        if self.call_added is not None:
            self.call_added()

    # --- allocations whose owners become known later ------------------------------------------------

    def allocated_ids(self) -> list[int]:
        """The ids of the blocks in ``allocated``."""
        ids = self._allocated_ids
        ids += [block.block_id for block in self.allocated[len(ids) :]]
        return ids

    def freed_tables(self) -> list[BlockRun]:
        """The blocks of each buffered ``free_blocks`` call in table order; a table is freed from its end."""
        rows, freed, start = self.rows, [], 0
        while start < len(rows):
            kind, request_no, group, _, count = rows[start : start + HEAD]
            start += HEAD + count
            if kind == FREED and request_no != NO_REQUEST:
                freed.append(BlockRun(request_no, group, rows[start - count : start - count // 2][::-1]))
        return freed

    def set_owners(self, owners: Owners, ids: list[int]) -> None:
        """Insert the allocations of the blocks in ``allocated``, with these ``ids``, where each was made."""
        rows, operations = self.rows, self._operations
        known = operations.setdefault(ALLOCATE, len(operations))
        places = iter((*self._places, (self._place, len(ids))))
        place, until = next(places)
        written, begin, singles = rows[:place], 0, owners.of_single_blocks
        while begin < len(singles):
            while begin == until:
                start, (place, until) = place, next(places)
                written += rows[start:place]
            end = min(len(singles), until)
            written += (ALLOCATED_EACH, NO_REQUEST, 0, known, 2 * (end - begin))
            written += ids[begin:end]
            written += singles[begin:end]
            begin = end
        for request_no, group, blocks in owners.runs:
            by = known if request_no != NO_REQUEST else operations.setdefault("", len(operations))
            last = begin + len(blocks)
            while begin < last:
                while begin == until:
                    start, (place, until) = place, next(places)
                    written += rows[start:place]
                end = min(last, until)
                written += (ALLOCATED, request_no, group, by, end - begin)
                written += ids[begin:end]
                begin = end
        assert begin == len(ids)
        written += rows[place:]
        rows[:] = written
        self.forget_allocated()

    def forget_allocated(self) -> None:
        """The blocks in ``allocated`` have been written, or deferred."""
        self.allocated.clear()
        self._allocated_ids.clear()
        self._places.clear()
        self._place = len(self.rows)

    # --- emitting -----------------------------------------------------------------------------------

    def take(self, step: int, stack: list[str] | None) -> ev.PoolCalls | None:
        """Everything buffered, as one event of ``step``; None if nothing is buffered."""
        if not self.rows:
            return None
        rows = self.log.sink.keep(self.rows)
        event = ev.PoolCalls(self.log.now(), step, _same_tuple(*self._operations), rows, stack)
        self.rows.clear()
        self._operations.clear()
        self._place = 0
        return event

    def clear(self) -> None:
        """Drop everything: an observer has failed."""
        self.rows.clear()
        self._operations.clear()
        self.forget_allocated()


@functools.lru_cache(64)
def _same_tuple(*operations: str) -> tuple[str, ...]:
    """The same tuple object for equal operations, which most steps have."""
    return operations


def block_ids(blocks: Iterable[Any]) -> list[int]:
    """The ids of blocks, in order."""
    return [block.block_id for block in blocks]


def reference_counts(blocks: Iterable[Any]) -> list[int]:
    """The reference counts of blocks, in order."""
    return [block.ref_cnt for block in blocks]


# --- Who calls a block pool: the request, the KV cache group and the engine's operation, read off the
# stack.
#
# A pool's methods receive blocks and no request. Hooking the methods that call them, such as
# ``allocate_slots``, would cost more than all other hooks together: each runs once per request and step,
# and most of these calls do not reach the pool. So the caller is read off the stack when the pool is
# called: the manager of a single group has its group number, and ``request_id`` is a parameter of the
# manager's method.
#
# Only the direct caller is read, and only its parameters: a frame further up may be about another request.

STACK_LINES = 12
"""Lines of a Python stack that are kept, the innermost ones."""

MANAGER, PASSED_ON, OTHER = "manager", "passed on", "other"
"""Kinds of callers: a manager's method with a ``request_id``; a frame that passes the call on; any other."""


class Caller(NamedTuple):
    """Who called a pool. ``request_id`` None: for no request. ``group`` -1: the caller has no group."""

    request_id: str | None
    group: int
    by: str


NOBODY = Caller(None, -1, "")


class Callers:
    """Reads callers off the stack. Frames of modules whose names begin with one of ``ours`` are skipped."""

    def __init__(self, *ours: str) -> None:
        self._ours = ours
        self._kinds: dict[int, str] = {}
        """The kind of each code object, by its id: hashing the object itself would hash all its constants."""
        self._codes: list[CodeType] = []
        """The same code objects, kept alive so that their ids are not reused."""

    def caller(self) -> Caller:
        """The caller of the wrapped pool method, for the function that records the call."""
        frame: FrameType | None = sys._getframe(2)
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code)) or self._kind(frame)
            if kind is MANAGER:
                parameters = frame.f_locals
                group = getattr(parameters.get("self"), "kv_cache_group_id", None)
                if group is None:
                    return Caller(None, -1, code.co_name)
                return Caller(parameters["request_id"], group, code.co_name)
            if kind is OTHER:
                return Caller(None, -1, code.co_name)
            frame = frame.f_back
        return NOBODY

    def _kind(self, frame: FrameType) -> str:
        code = frame.f_code
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if self.is_ours(frame) or code.co_name == "free_blocks":
            kind = PASSED_ON  # kvledger's own, or a pool that passes on another pool's blocks
        elif "self" in parameters and "request_id" in parameters:
            kind = MANAGER
        else:
            kind = OTHER
        self._codes.append(code)
        self._kinds[id(code)] = kind
        return kind

    def is_ours(self, frame: FrameType) -> bool:
        """Whether a frame is one of kvledger."""
        return str(frame.f_globals.get("__name__")).startswith(self._ours)

    def stack(self) -> list[str]:
        """The Python stack without kvledger's modules, innermost last: a line for each frame."""
        frames: list[Any] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and len(frames) < STACK_LINES:
            if not self.is_ours(frame):
                frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        summary = traceback.StackSummary.extract(iter(reversed(frames)), lookup_lines=False)
        return [f"{row.filename}:{row.lineno} {row.name}" for row in summary]
