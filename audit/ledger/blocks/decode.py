"""Many calls of pools that were told as one, each for itself again."""

from __future__ import annotations

from collections.abc import Iterator

from ... import events as ev
from ... import old_events


def calls(event: ev.PoolCalls) -> Iterator[ev.Event]:
    """In their order."""
    at, step, stack, rows = event.at, event.step, event.stack, ev.numbers(event.rows)
    start = 0
    while start < len(rows):
        what, request, group, more, count = rows[start : start + ev.HEAD]
        start += ev.HEAD + count
        follow = rows[start - count : start]
        pool, what = divmod(what, 8)
        if what == ev.CACHED:
            row = [request, group, more >> 1, count // 3, *follow]
            yield ev.BlocksCached(at, step, pool, row, bool(more & 1), stack)
        elif what == ev.ALLOCATED:
            yield old_events.BlocksAllocated(
                at, step, pool, event.by[more], [request, group, count, *follow], stack
            )
        elif what in (ev.TOUCHED, ev.FREED):
            kind = old_events.BlocksTouched if what == ev.TOUCHED else old_events.BlocksFreed
            half = count // 2
            by, ids, references = event.by[more], follow[:half], follow[half:]
            yield kind(at, step, pool, request, group, by, ids, references, stack)
        elif what == ev.ALLOCATED_EACH:
            half = count // 2
            taken = [
                number
                for taker, block in zip(follow[half:], follow[:half], strict=True)
                for number in (taker, group, 1, block)
            ]
            yield old_events.BlocksAllocated(at, step, pool, event.by[more], taken, stack)
        elif what == ev.IN_STEP:
            step = more
        elif what == ev.TABLES_REPORTED:
            yield old_events.TablesReported(at, step, follow)
        else:
            yield old_events.TablesRemoved(at, [request])
