"""Postings of the states of pools, blocks and tables that the engine reports.

A report is compared with the ledger, and then the ledger adopts it, so that one fault is reported once.
Reports also reveal the holders of blocks that were held before the trace began.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import events as ev
from ... import pool_calls
from .entries import BlockComparison, Leak, PoolComparison, SharedWrite, Uncovered
from .holdings import Holdings
from .records import TABLE, UNKNOWN, Block, Holder, Pool, Window, oldest, table_holders

SLIDING, CHUNKED, STATE = range(3)
"""Kinds of ``PoolSeen.windows``; a group of another kind has no window that is known."""

LEAK_SECONDS = 900.0
"""How long a connector may keep the blocks of an ended request."""


def pool_of(event: ev.PoolSeen) -> Pool:
    """A pool as the engine describes it, without records of its blocks."""
    rows = [event.groups[i : i + 3] for i in range(0, len(event.groups), 3)]
    groups = {group: (tokens, bool(places)) for group, tokens, places in rows}
    windows = [row for row in zip(*(iter(event.windows),) * 3, strict=True) if row[0] in groups]
    empty = event.cached_hashes == 0
    return Pool(
        blocks=event.blocks,
        null_block=event.null_block,
        idle=event.free_blocks == event.blocks - (event.null_block >= 0),
        has_hash=0 if empty else UNKNOWN,
        free_blocks=event.free_blocks,
        groups=groups,
        hashes={},
        hashes_known=empty,
        prefix_groups=[group for group, _, places in rows if places > 1],
        windows={
            group: Window(tokens, kind == CHUNKED)
            for group, tokens, kind in windows
            if tokens > 0 and kind in (SLIDING, CHUNKED)
        },
        states=[group for group, _, kind in windows if kind == STATE],
    )


def content_group(event: ev.PoolSeen) -> tuple[int, int]:
    """The group whose blocks tell what requests hold, and the tokens of its blocks.

    It is the first of full attention, which caches every block; a window or state keeps some. In a pool
    without one it is the first group.
    """
    pool = pool_of(event)
    group = next(iter([*pool.prefix_groups, *pool.groups]), 0)
    return group, pool.groups.get(group, (0, False))[0]


def _seen(holdings: Holdings, event: ev.PoolSeen) -> None:
    seen = pool_of(event)
    pool = holdings.pools.get(event.pool)
    if pool is None or pool.blocks != event.blocks:
        holdings.pools[event.pool] = seen
        return
    _compare_pool(holdings, event.pool, event.free_blocks, event.cached_hashes)
    pool.groups, pool.prefix_groups, pool.windows, pool.states = (
        seen.groups,
        seen.prefix_groups,
        seen.windows,
        seen.states,
    )


def _compare_pool(holdings: Holdings, number: int, free_blocks: int, hashes: int) -> None:
    pool = holdings.pools[number]
    pool.hashes_known = pool.hashes_known and hashes >= 0
    own = len(pool.hashes) if pool.hashes_known else UNKNOWN
    if free_blocks != pool.free_blocks or (own >= 0 and own != hashes):
        holdings.report(PoolComparison(number, free_blocks, pool.free_blocks, hashes, own), UNKNOWN)
        pool.free_blocks = free_blocks
        pool.hashes_known = False


def _tables(holdings: Holdings, event: pool_calls.TablesReported) -> None:
    places: dict[tuple[int, int, int], int] = {}
    for request, group, computed, table in event.tables():
        number = next((n for n, pool in holdings.pools.items() if group in pool.groups), None)
        if number is not None:
            _table(holdings, number, request, group, table, places)
            size, positional = holdings.pools[number].groups[group]
            if positional and len(table) * size < computed:
                holdings.report(Uncovered(group, len(table), size, computed), request)


def _table(
    holdings: Holdings,
    number: int,
    request: int,
    group: int,
    table: list[int],
    places: dict[tuple[int, int, int], int],
) -> None:
    pool, account = holdings.pools[number], holdings.account(request)
    size, positional = pool.groups[group]
    holder = holdings.holder(TABLE, request, group)
    for block in table:
        if block == pool.null_block:
            continue
        record = holdings.record(pool, block)
        if (number, request, block) in places:
            other = holdings.holder(TABLE, request, places[number, request, block])
            holdings.report_collision("twice", number, block, other, holder)
        places[number, request, block] = group
        if all(held.group != group for held in table_holders(pool, record, request)):
            if record.holders_known:
                holdings.report_collision("unheld", number, block, oldest(record), holder)
            record.reported = True
            holdings.add_holder(number, block, record, holder)
    if not positional or account is None or account.unknown is not None or account.life is None:
        return
    for place in range(max(0, account.life.local) // size, len(table)):
        record = holdings.record(pool, table[place])
        first = oldest(record) or holder
        if table[place] != pool.null_block and not record.reported and first.request != request:
            story = holdings.story(number, table[place])
            holdings.report(SharedWrite(number, table[place], place, first, holder, story), request)


def _block_states(holdings: Holdings, event: ev.BlockStatesReported) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    for block, state in enumerate(event.states, event.first):
        if block == pool.null_block or (state == 1 and block not in pool.records and pool.idle):
            continue
        _compare_block(holdings, event.pool, pool, block, state)
    if event.free_blocks >= 0:
        _compare_pool(holdings, event.pool, event.free_blocks, event.cached_hashes)
    _overdue(holdings, event.at)


def _compare_block(holdings: Holdings, number: int, pool: Pool, block: int, state: int) -> None:
    record = holdings.record(pool, block)
    references, queued, hashed, mapped = state >> 3, state & 1, state >> 1 & 1, state >> 2 & 1
    own = len(record.holders) if record.holders_known else UNKNOWN
    if (
        (references == 0) != bool(queued)
        or references < 0
        or hashed != mapped
        or (own >= 0 and own != references)
        or (record.has_hash >= 0 and record.has_hash != hashed)
    ):
        holders = [str(holder) for holder in record.holders.values()]
        story = holdings.story(number, block, references)
        comparison = BlockComparison(
            number, block, references, own, queued, hashed, record.has_hash, mapped, holders, story
        )
        holdings.report(comparison, next((holder.request for holder in record.holders.values()), UNKNOWN))
    if record.holders_known and own != references:
        record.holders_known = False
    elif not record.holders_known and references == len(record.holders):
        record.holders_known = True
    if record.has_hash != hashed:
        if not hashed:
            holdings.drop_hashes(pool, record)
        record.has_hash = hashed


def compare_references(holdings: Holdings, number: int, block: int, record: Block, references: int) -> None:
    """Compare the reference count that the engine reported with an operation."""
    if not record.holders_known:
        record.holders_known = references == len(record.holders)
        return
    if references != len(record.holders):
        holders = [str(holder) for holder in record.holders.values()]
        story = holdings.story(number, block, references)
        comparison = BlockComparison(
            number, block, references, len(holders), UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, holders, story
        )
        holdings.report(comparison, next((holder.request for holder in record.holders.values()), UNKNOWN))
        record.holders_known = False


def _tables_removed(holdings: Holdings, event: pool_calls.TablesRemoved) -> None:
    for request in event.requests:
        holdings.ending.pop(request, None)
        holdings.isolation.pop(request, None)
        holdings.store_keys.pop(request, None)
        _leak(holdings, request, 0)


def _overdue(holdings: Holdings, at: int) -> None:
    """Report blocks of requests that ended too long ago for a connector to need them."""
    for request, ended in list(holdings.ending.items()):
        if at - ended < LEAK_SECONDS * 1e6:
            return
        del holdings.ending[request]
        _leak(holdings, request, (at - ended) // 1_000_000)


def _leak(holdings: Holdings, request: int, seconds: int) -> None:
    held = holdings.held.pop(request, None)
    if held:
        pool, block = next(iter(held))
        holder = table_holders(holdings.pools[pool], holdings.pools[pool].records[block], request)[0]
        blocks = sorted(block for _, block in held)
        holdings.report(Leak(holder, blocks, seconds, holdings.story(pool, block)), request)


def report_unfreed(holdings: Holdings) -> None:
    """No step is in flight: report the blocks whose free is still deferred."""
    deferred, holdings.deferred = holdings.deferred, {}
    unfreed: dict[Holder, list[tuple[int, int]]] = {}
    for place, holder in deferred.items():
        unfreed.setdefault(holder, []).append(place)
    for holder, places in unfreed.items():
        blocks = sorted(block for _, block in places)
        holdings.report(Leak(holder, blocks, 0, holdings.story(*places[0])), holder.request)


ENGINE_REPORTS: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    ev.PoolSeen: _seen,
    pool_calls.TablesReported: _tables,
    ev.BlockStatesReported: _block_states,
    pool_calls.TablesRemoved: _tables_removed,
}
