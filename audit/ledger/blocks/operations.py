"""Who comes to hold a block and who gives it back: taken, touched, freed, copied, deferred.

Whoever does something to a block is compared with who holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ... import events as ev
from ... import old_events
from ...causes import EVICTED
from .engine_reports import counted
from .hashes import not_there
from .holdings import Holdings
from .records import COPY, DEFERRED, PIN, TABLE, UNKNOWN, Block, Pool, remember, written
from .subjects import StrayFree


def _taken(holdings: Holdings, event: old_events.BlocksAllocated) -> None:
    pool = holdings.pools.get(event.pool)
    rows, at = event.rows, 0
    while pool is not None and at < len(rows):
        request, group, count = rows[at : at + 3]
        _take(holdings, event, pool, request, group, rows[at + 3 : at + 3 + count])
        at += 3 + count


def _take(
    holdings: Holdings,
    event: old_events.BlocksAllocated,
    pool: Pool,
    request: int,
    group: int,
    blocks: list[int],
) -> None:
    holder = holdings.actor(TABLE, request, group)
    done = holdings.operation(event, "taken", event.by, request, group)
    for block in blocks:
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        evicted = ", ".join(written(name) for name in record.names)
        holdings.unname(pool, record, event.step, EVICTED)
        record.hashed = 0
        remember(record, replace(done, what=f"taken, evicting {evicted}") if evicted else done)
        if record.holders:
            holdings.collide("taken", event.pool, block, record.holders[0], holder)
        else:
            record.known, record.learned = True, False
        holdings.hold(event.pool, block, record, holder)
        pool.free_blocks -= 1


def _touched(holdings: Holdings, event: old_events.BlocksTouched) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    holder, done = holdings.actor(TABLE, event.request, event.group), holdings.done(event, "touched")
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        remember(record, done)
        if holder.kind == TABLE:
            twice = [h for h in record.holders if h.kind == TABLE and h.request == holder.request]
            if twice:
                holdings.collide("twice", event.pool, block, twice[0], holder)
            elif record.hashed == 0:
                first = record.holders[0] if record.holders else None
                holdings.collide("unhashed", event.pool, block, first, holder)
        if (event.pool, block) in holdings.failed:
            holdings.hit.append((event.pool, block))
        holdings.hold(event.pool, block, record, holder)
        pool.free_blocks -= references == 1
        counted(holdings, event.pool, block, record, references)


def _freed(holdings: Holdings, event: old_events.BlocksFreed) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    done = holdings.done(event, "freed")
    counts: dict[int, int] = {}
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        earlier = next((o for o in reversed(record.operations) if o.what == "freed"), None)
        remember(record, done)
        if not _let_go(holdings, event, block, record) and record.known:
            stray = StrayFree(event.pool, block, done, earlier, references, holdings.story(event.pool, block))
            holdings.tell(stray, event.request)
            record.known = False  # what it is now is the engine's to say
        counts[block] = references
        if holdings.failed.get((event.pool, block), (UNKNOWN,))[0] == event.request >= 0:
            if record.hashed == 1 and record.hasher == event.request:
                not_there(holdings, event.pool, block)
            holdings.failed.pop((event.pool, block), None)
    for block, references in counts.items():
        pool.free_blocks += references == 0
        counted(holdings, event.pool, block, pool.records[block], references)


def _let_go(holdings: Holdings, event: old_events.BlocksFreed, block: int, record: Block) -> bool:
    """Take away the reference that was given back; False if there is none of that holder."""
    if event.request >= 0:
        fits = [
            h
            for h in record.holders
            if h.request == event.request and h.kind == TABLE and event.group in (h.group, UNKNOWN)
        ]
    else:
        order = {
            "_drain_deferred_frees": (DEFERRED, COPY, PIN),
            "_free_cow_retained_blocks": (COPY, PIN),
        }.get(event.by, (PIN, COPY, DEFERRED))
        fits = [h for kind in order for h in record.holders if h.kind == kind]
    if not fits:
        return False
    holdings.unhold(event.pool, block, record, fits[0])
    return True


def _copied(holdings: Holdings, event: ev.BlockCopied) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    copy, (source, target) = holdings.actor(COPY, event.request, event.group), event.blocks
    from_, to = holdings.record(pool, source), holdings.record(pool, target)
    remember(from_, holdings.done(event, f"copied to {target}"))
    remember(to, holdings.done(event, f"copied from {source}"))
    given_up, kept = ((target, to), (source, from_)) if event.moved else ((source, from_), (target, to))
    for held in [h for h in given_up[1].holders if h.kind == TABLE and h.request == event.request][:1]:
        holdings.unhold(event.pool, given_up[0], given_up[1], held)
        holdings.hold(event.pool, given_up[0], given_up[1], copy)
    holdings.hold(event.pool, kept[0], kept[1], copy)
    if event.moved:
        to.names, from_.names = from_.names, []
        to.hashed, from_.hashed = from_.hashed, 0
        to.end, to.hasher = from_.end, from_.hasher


def _deferred(holdings: Holdings, event: ev.BlocksDeferred) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    deferred, done = holdings.actor(DEFERRED, event.request, event.group), holdings.done(event, "deferred")
    for block in event.blocks:
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        remember(record, done)
        for held in [h for h in record.holders if h.kind == TABLE and h.request == event.request][:1]:
            holdings.unhold(event.pool, block, record, held)
            holdings.hold(event.pool, block, record, deferred)


OPERATIONS: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    old_events.BlocksAllocated: _taken,
    old_events.BlocksTouched: _touched,
    old_events.BlocksFreed: _freed,
    ev.BlockCopied: _copied,
    ev.BlocksDeferred: _deferred,
}
