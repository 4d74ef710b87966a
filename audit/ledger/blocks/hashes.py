"""Postings of hashes: blocks that are cached or evicted, and cached blocks whose KV is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ... import events as ev
from ...causes import EVICTED, GROUPS, NOT_HIT, RESET
from ..statements import CachedRange, GroupBlock
from .holdings import Holdings
from .isolation import isolation_below
from .provenance import HASHED_OTHERWISE, PENDING, SEQUENCE, placed
from .records import TABLE, UNKNOWN, Block, CachedHash, Holder, Operation, Pool, Removed, remember


def _cached(holdings: Holdings, event: ev.BlocksCached) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    number, step, at, stack = event.pool, event.step, event.at, event.stack
    for named, group, tokens, blocks, hash_ids, ends in event.calls():
        if not blocks:
            _forget_hashes(holdings, pool)
        request, sequence_tokens, who = named, tokens, holdings.holder(TABLE, named, group)
        for block, hash_id, end in zip(blocks, hash_ids, ends, strict=True):
            if named < 0:
                who = _sole_writer(holdings, pool, block) or NOBODY
                request = who.request
                sequence_tokens = holdings.requests.sequence_tokens(request)
                if sequence_tokens >= 0:  # and one token for each output that was not emitted yet
                    sequence_tokens += -1 - tokens
            holdings.newly_cached.append((number, request, block, end))
            whose = who.request_id
            operation = Operation(
                step, at, "cached", "cache_blocks", whose, who.life, group, stack, [hash_id], end
            )
            _hash(holdings, event, pool, block, hash_id, end, group, request, operation)
            covered = pool.hashes[hash_id].end
            if covered != end:
                holdings.report_cached(HASHED_OTHERWISE, whose, number, block, end, covered, request)
            elif end > sequence_tokens >= 0:
                holdings.report_cached(SEQUENCE, whose, number, block, end, sequence_tokens, request)
                pool.records[block].wrong = [(sequence_tokens, end, SEQUENCE)]


def _forget_hashes(holdings: Holdings, pool: Pool) -> None:
    """Forget all hashes, because it is not known which blocks were cached."""
    for record in pool.records.values():
        holdings.drop_hashes(pool, record)
        record.has_hash = UNKNOWN
    pool.has_hash, pool.hashes_known = UNKNOWN, False


def _sole_writer(holdings: Holdings, pool: Pool, block: int) -> Holder | None:
    """The request that fills a block: the youngest one whose table holds the block."""
    for holder in reversed(holdings.record(pool, block).holders.values()):
        if holder.kind == TABLE:
            return holder
    return None


def _hash(
    holdings: Holdings,
    event: ev.BlocksCached,
    pool: Pool,
    block: int,
    hash_id: int,
    end: int,
    group: int,
    request: int,
    done: Operation,
) -> None:
    record = holdings.record(pool, block)
    if event.replaced:
        holdings.drop_hashes(pool, record)
    removed = pool.removed.get(hash_id)
    cached = pool.hashes.get(hash_id)
    if removed is not None or cached is not None:
        before = list(_had_before(pool, record, hash_id, request, removed))
        note = _note_cached_before if group in pool.prefix_groups else _note_in_group
        note(holdings, pool, group, request, end, before)
    if removed is not None and removed[2] < 0:
        pool.removed[hash_id] = (*removed[:2], event.step, *removed[3:])
    if hash_id not in record.hash_ids:
        record.hash_ids.append(hash_id)
        if cached is None:
            cached = pool.hashes[hash_id] = CachedHash(end, event.step, request)
        cached.blocks += 1
    record.has_hash = 1
    several = len(record.hash_ids) > 1
    record.end = max(end, record.end) if several else end
    record.cached_for, record.writer = request, done.request_id
    record.least_end = min(end, record.least_end) if several else end
    own = holdings.isolation.get(request)
    record.isolation = None if own is None else isolation_below(own, record.least_end)
    remember(record, done)
    placed(pool, record, group, end)
    if holdings.hash_awaited and (event.pool, block) in holdings.hash_awaited:
        allocated = record.allocations[-2] if record.allocations else UNKNOWN
        holdings.hash_awaited.discard((event.pool, block))
        holdings.hash_arrived.append((event.pool, block, hash_id, allocated, record.writer))


NOBODY = Holder(TABLE, UNKNOWN, "", 0, UNKNOWN)
"""Who filled a block that no table holds."""


class _Had(NamedTuple):
    """What the cache had of a hash before a request cached it. ``by``: who made it; else as CachedRange."""

    since: int
    by: int
    left: int
    came_back: int
    how: str
    own: bool


def _had_before(
    pool: Pool, record: Block, hash_id: int, request: int, removed: Removed | None
) -> Iterator[_Had]:
    """What left the cache, and what another block still has."""
    if removed is not None:
        (since, by), left, came_back, how, got = removed
        yield _Had(since, by, left, came_back, how, got == request)
    cached = pool.hashes.get(hash_id)
    if cached is not None and hash_id not in record.hash_ids and cached.request != request:
        yield _Had(cached.step, cached.request, UNKNOWN, UNKNOWN, "", False)


def _note_cached_before(
    holdings: Holdings, pool: Pool, group: int, request: int, end: int, before: list[_Had]
) -> None:
    """Note that a request computed KV which the cache had, or still has in another block."""
    size, _ = pool.groups[group]
    start = (end - 1) // size * size  # of a partly filled block, only that part
    missed = GROUPS if len(pool.groups) > 1 else NOT_HIT
    for had in before:
        of_others = missed if had.by != request else ""
        row = CachedRange(start, end, had.since, had.left, had.came_back, had.how, had.own, of_others)
        holdings.cached_before.append((request, row))


def _note_in_group(
    holdings: Holdings, pool: Pool, group: int, request: int, end: int, before: list[_Had]
) -> None:
    """The same for a group that needs not all blocks below a boundary."""
    for had in before:
        row = GroupBlock(group, end, had.since, had.left, had.came_back, had.how, had.own)
        holdings.cached_in_group.append((request, row))


def _evicted(holdings: Holdings, event: ev.BlocksEvicted) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    for block in event.blocks:
        record = holdings.record(pool, block)
        holdings.drop_hashes(pool, record, event.step, EVICTED)
        record.has_hash = 0
        remember(record, holdings.call_operation(event, "evicted"))


def _reset(holdings: Holdings, event: ev.PoolReset) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None or not event.succeeded:
        return
    for record in pool.records.values():
        holdings.drop_hashes(pool, record, event.step, RESET)
        record.has_hash = 0
    pool.hashes.clear()
    pool.has_hash, pool.hashes_known = 0, True


HASHES: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    ev.BlocksCached: _cached,
    ev.BlocksEvicted: _evicted,
    ev.PoolReset: _reset,
}


def check_pending(holdings: Holdings) -> None:
    """Report blocks that were cached before an asynchronous load has filled them."""
    hashed, holdings.newly_cached = holdings.newly_cached, []
    for number, request, block, end in hashed:
        account = holdings.requests.living.get(request)
        life = account.life if account is not None else None
        if account is None or life is None or not life.asynchronous or not life.pending or life.ran:
            continue
        record = holdings.pools[number].records.get(block) if number in holdings.pools else None
        if record is not None and record.cached_for == request and end > life.local:
            holdings.report_cached(PENDING, account.request_id, number, block, end, life.local, request)
