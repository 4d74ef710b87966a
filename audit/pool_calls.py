"""One event for one call of a block pool. No engine emits them; readers make them.

Engines emit all pool calls of a step as one :class:`~kvledger.audit.events.PoolCalls`, and
``ledger/blocks/pool.py`` splits it into these events, which the ledger of blocks posts. Journals of
schema 1 hold them as they are, so tags and fields stay. Never emit an event of this file.
"""

from __future__ import annotations

from collections.abc import Iterator

from .events import BlockEvent, EmittedEvent, Event


class BlocksAllocated(Event, frozen=True, array_like=True, tag=26):
    """Free blocks were allocated, with one reference each; their earlier hashes are evicted.

    Calls of one step with no related call in between are one event. ``rows`` is flat. Each call has request,
    group and the number of blocks, then the block ids. -1 and ``by``: as in BlockEvent.
    """

    step: int
    pool: int
    by: str
    rows: list[int]
    stack: list[str] | None = None

    def calls(self) -> Iterator[tuple[int, int, list[int]]]:
        """Request, group and block ids of each call."""
        rows, place = self.rows, 0
        while place < len(rows):
            request, group, count = rows[place : place + 3]
            place += 3 + count
            yield request, group, rows[place - count : place]


class BlocksTouched(BlockEvent, frozen=True, array_like=True, tag=27):
    """Cached blocks got one more reference. ``references`` are the engine's counts just after."""

    references: list[int]
    stack: list[str] | None = None


class BlocksFreed(BlockEvent, frozen=True, array_like=True, tag=28):
    """Blocks lost one reference. ``references`` are the engine's counts just after."""

    references: list[int]
    stack: list[str] | None = None


class TablesReported(Event, frozen=True, array_like=True, tag=34):
    """The block tables of requests, between two steps.

    ``rows`` is flat. Each table has request, group, the engine's count of computed tokens (-1: not known) and
    the number of blocks, then the block ids, which may include the null block.
    """

    step: int
    rows: list[int]

    def tables(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Request, group, computed tokens and block ids of each table."""
        rows, place = self.rows, 0
        while place < len(rows):
            request, group, computed, count = rows[place : place + 4]
            place += 4 + count
            yield request, group, computed, rows[place - count : place]


class TablesRemoved(Event, frozen=True, array_like=True, tag=36):
    """The engine has forgotten these requests: their blocks are freed, or their free is deferred."""

    requests: list[int]


AnyEvent = EmittedEvent | BlocksAllocated | BlocksTouched | BlocksFreed | TablesReported | TablesRemoved
"""Every event that a journal may hold."""
