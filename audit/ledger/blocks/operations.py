"""Postings of references: blocks are allocated, touched, freed, copied, or their free is deferred.

Each operation is compared with the block's known holders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import events as ev
from ... import pool_calls
from ...causes import EVICTED
from . import provenance, reads, windows
from .engine_reports import compare_references
from .entries import StrayFree
from .holdings import Holdings
from .isolation import report_other_classes
from .records import (
    COPY,
    DEFERRED,
    PIN,
    TABLE,
    UNKNOWN,
    Block,
    Holder,
    Operation,
    Pool,
    oldest,
    remember,
    table_holders,
    table_key,
    used,
)

AS_PIN = Holder(PIN, UNKNOWN, "", 0, UNKNOWN)
"""Who holds a block that the engine took for no request."""


def _allocated(holdings: Holdings, event: pool_calls.BlocksAllocated) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is not None:
        for request, group, blocks in event.calls():
            _allocate(holdings, event, pool, request, group, blocks)


def _allocate(
    holdings: Holdings,
    event: pool_calls.BlocksAllocated,
    pool: Pool,
    request: int,
    group: int,
    blocks: list[int],
) -> None:
    if request in holdings.demand.waiting:
        holdings.demand.hold(request, used(pool))
    number, records = event.pool, pool.records
    done = holdings.operation(event, "allocated", event.by, request, group)
    said = done.step, done.at, done.what, done.by, done.request_id, done.life, group, done.stack
    holder = Holder(TABLE, request, done.request_id, done.life, group) if request >= 0 else AS_PIN
    if pool.null_block in blocks:
        blocks = [block for block in blocks if block != pool.null_block]
    filled = provenance.allocated(holdings, number, blocks, holder)
    for block in blocks:
        record = records.get(block) or holdings.record(pool, block)
        if evicted := record.hash_ids:
            remember(record, Operation(*said, evicted))
        else:
            remember(record, done)
        if record.has_hash or evicted or record.end:
            holdings.drop_hashes(pool, record, event.step, EVICTED, request)
            record.has_hash = 0
        record.allocations = [*record.allocations[-2:], event.step, request]
        if record.holders:
            holdings.report_collision("taken", number, block, oldest(record), holder)
        else:
            record.holders_known, record.reported = True, False
        record.begin = record.room_end = UNKNOWN
        record.filled = filled
        holdings.add_holder(number, block, record, holder)
    pool.free_blocks -= len(blocks)


def _touched(holdings: Holdings, event: pool_calls.BlocksTouched) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    if event.request in holdings.demand.waiting:
        holdings.demand.hold(event.request, used(pool))
    done = holdings.call_operation(event, "touched")
    holder = AS_PIN
    if event.request >= 0:
        holder = Holder(TABLE, event.request, done.request_id, done.life, event.group)
        if event.request in holdings.isolation:
            report_other_classes(holdings, event.pool, holder, event.blocks)
    held = holdings.held.get(event.request, {})
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = pool.records.get(block) or holdings.record(pool, block)
        remember(record, done)
        if holder is not AS_PIN:
            if (event.pool, block) in held:
                twice = table_holders(pool, record, event.request)
                holdings.report_collision("twice", event.pool, block, twice[0], holder)
            elif record.has_hash == 0:
                holdings.report_collision("unhashed", event.pool, block, oldest(record), holder)
            reads.hit(holdings, event, block, record)
        holdings.add_holder(event.pool, block, record, holder)
        if references == 1:
            pool.free_blocks -= 1
        if references != len(record.holders) or not record.holders_known:
            compare_references(holdings, event.pool, block, record, references)


def _freed(holdings: Holdings, event: pool_calls.BlocksFreed) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    done = holdings.call_operation(event, "freed")
    counts: dict[int, int] = {}
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = pool.records.get(block) or holdings.record(pool, block)
        released = _release(holdings, event, pool, block, record)
        if released is not None:
            remember(record, done)
            if pool.windows:
                windows.freed(holdings, event, pool, block, record, released)
            counts[block] = references
            continue
        earlier = next((o for o in reversed(record.operations) if o.what == "freed"), None)
        remember(record, done)
        if record.holders_known:
            stray = StrayFree(event.pool, block, done, earlier, references, holdings.story(event.pool, block))
            holdings.report(stray, event.request)
            record.holders_known = False  # until the engine reports the block's count
        counts[block] = references
    if event.request >= 0 and len(holdings.pools) == 1:
        holdings.demand.free(event.request, event.step, list(counts), list(counts.values()))
    for block, references in counts.items():
        record = pool.records[block]
        if not references:
            pool.free_blocks += 1
        if references != len(record.holders) or not record.holders_known:
            compare_references(holdings, event.pool, block, record, references)


def _release(
    holdings: Holdings, event: pool_calls.BlocksFreed, pool: Pool, block: int, record: Block
) -> Holder | None:
    """Remove the reference that was freed; None if the block has no such holder."""
    if event.request >= 0:
        key = table_key(event.request, event.group)
        known = record.holders.get(key) if event.group >= 0 else None
        if known is not None:
            holdings.drop_table_holder(event.pool, block, record, key, event.request)
            return known
        for held in table_holders(pool, record, event.request):
            if event.group in (held.group, UNKNOWN):
                holdings.remove_holder(event.pool, block, record, held)
                return held
        return None
    order = {
        "_drain_deferred_frees": (DEFERRED, COPY, PIN),
        "_free_cow_retained_blocks": (COPY, PIN),
    }.get(event.by, (PIN, COPY, DEFERRED))
    released = next((held for kind in order for held in record.holders.values() if held.kind == kind), None)
    if released is not None:
        holdings.remove_holder(event.pool, block, record, released)
    return released


def _copied(holdings: Holdings, event: ev.BlockCopied) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    copy, (source, target) = holdings.actor(COPY, event.request, event.group), event.blocks
    from_, to = holdings.record(pool, source), holdings.record(pool, target)
    remember(from_, holdings.call_operation(event, f"copied to {target}"))
    remember(to, holdings.call_operation(event, f"copied from {source}"))
    replaced, kept = ((target, to), (source, from_)) if event.moved else ((source, from_), (target, to))
    for held in table_holders(pool, replaced[1], event.request)[:1]:
        holdings.remove_holder(event.pool, replaced[0], replaced[1], held)
        holdings.add_holder(event.pool, replaced[0], replaced[1], copy)
    holdings.add_holder(event.pool, kept[0], kept[1], copy)
    if event.moved:
        to.hash_ids, from_.hash_ids = from_.hash_ids, []
        to.has_hash, from_.has_hash = from_.has_hash, 0
        to.end, to.cached_for, to.writer = from_.end, from_.cached_for, from_.writer
        to.isolation, to.least_end, to.wrong = from_.isolation, from_.least_end, from_.wrong
        to.filled, to.begin, to.room_end = from_.filled, from_.begin, from_.room_end


def _deferred(holdings: Holdings, event: ev.BlocksDeferred) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    done = holdings.call_operation(event, "deferred")
    for block in event.blocks:
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        remember(record, done)
        for held in table_holders(pool, record, event.request)[:1]:
            holdings.remove_holder(event.pool, block, record, held)
            deferred = Holder(DEFERRED, held.request, held.request_id, held.life, event.group)
            holdings.add_holder(event.pool, block, record, deferred)


OPERATIONS: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    pool_calls.BlocksAllocated: _allocated,
    pool_calls.BlocksTouched: _touched,
    pool_calls.BlocksFreed: _freed,
    ev.BlockCopied: _copied,
    ev.BlocksDeferred: _deferred,
}
