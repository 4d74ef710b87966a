"""Split a :class:`~kvledger.audit.events.PoolCalls` into one event for each call of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ... import events as ev
from ... import pool_calls


def post(reader: Any, event: ev.Event, handlers: Mapping[type[ev.Event], Callable[[Any, Any], None]]) -> bool:
    """Give an event, or each call of a PoolCalls, to the ``reader`` by its handler; False: it has none."""
    if type(event) is ev.PoolCalls:
        for call in calls(event):
            handler = handlers.get(type(call))
            if handler is not None:
                handler(reader, call)
        return True
    handler = handlers.get(type(event))
    if handler is not None:
        handler(reader, event)
    return handler is not None


def calls(event: ev.PoolCalls) -> Iterator[ev.Event]:
    """The calls in order, as events that the ledger of blocks posts."""
    at, step, stack, rows = event.at, event.step, event.stack, ev.numbers(event.rows)
    start = 0
    while start < len(rows):
        code, request, group, more, count = rows[start : start + ev.HEAD]
        start += ev.HEAD + count
        follow = rows[start - count : start]
        pool, code = divmod(code, 8)
        if code == ev.CACHED:
            row = [request, group, more >> 1, count // 3, *follow]
            yield ev.BlocksCached(at, step, pool, row, bool(more & 1), stack)
        elif code == ev.ALLOCATED:
            yield pool_calls.BlocksAllocated(
                at, step, pool, event.by[more], [request, group, count, *follow], stack
            )
        elif code in (ev.TOUCHED, ev.FREED):
            kind = pool_calls.BlocksTouched if code == ev.TOUCHED else pool_calls.BlocksFreed
            half = count // 2
            by, ids, references = event.by[more], follow[:half], follow[half:]
            yield kind(at, step, pool, request, group, by, ids, references, stack)
        elif code == ev.ALLOCATED_EACH:
            half = count // 2
            allocated = [
                number
                for request_no, block in zip(follow[half:], follow[:half], strict=True)
                for number in (request_no, group, 1, block)
            ]
            yield pool_calls.BlocksAllocated(at, step, pool, event.by[more], allocated, stack)
        elif code == ev.IN_STEP:
            step = more
        elif code == ev.TABLES_REPORTED:
            yield pool_calls.TablesReported(at, step, follow)
        else:
            yield pool_calls.TablesRemoved(at, [request])
