"""Postings of hashes: blocks that are cached or evicted, and cached blocks whose KV is not there yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ... import events as ev
from ...causes import EVICTED, RESET
from ..statements import RemovedRange
from .entries import CachedContent
from .holdings import Holdings
from .invalid import mark_invalid, mark_never_loaded
from .isolation import isolation_below
from .records import TABLE, UNKNOWN, FailedLoad, Operation, Pool, hash_text, remember


def _cached(holdings: Holdings, event: ev.BlocksCached) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    for named, group, tokens, blocks, hash_ids, ends in event.calls():
        if not blocks:
            _forget_hashes(holdings, pool)
        for block, hash_id, end in zip(blocks, hash_ids, ends, strict=True):
            request, sequence_tokens = named, tokens
            if named < 0:
                request = _sole_writer(holdings, pool, block)
                sequence_tokens = _sequence_tokens(holdings, request, -1 - tokens)
            done = holdings.operation(event, "cached", "cache_blocks", request, group)
            operation = replace(done, what=f"cached {hash_text(hash_id)} up to {end}")
            _hash(holdings, event, pool, block, hash_id, end, group, request, operation)
            if end > sequence_tokens >= 0:
                story = holdings.story(event.pool, block)
                whose = holdings.holder(TABLE, request, group).request_id
                beyond = CachedContent("sequence", whose, event.pool, block, end, sequence_tokens, story)
                holdings.report(beyond, request)
                mark_invalid(holdings, event.pool, block, beyond.why, sequence_tokens)


def _forget_hashes(holdings: Holdings, pool: Pool) -> None:
    """Forget all hashes, because it is not known which blocks were cached."""
    for record in pool.records.values():
        holdings.drop_hashes(pool, record)
        record.has_hash = UNKNOWN
    pool.has_hash, pool.hashes_known = UNKNOWN, False


def _sole_writer(holdings: Holdings, pool: Pool, block: int) -> int:
    """The request that fills a block: the youngest one whose table holds the block."""
    holders = holdings.record(pool, block).holders
    return next((holder.request for holder in reversed(holders) if holder.kind == TABLE), UNKNOWN)


def _sequence_tokens(holdings: Holdings, request: int, unemitted: int) -> int:
    """Length of a request's sequence: the account's, and one token for each output not yet emitted."""
    account = holdings.accounts.get(request)
    return UNKNOWN if account is None or account.unknown is not None else account.sequence_tokens + unemitted


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
    elif not record.hash_ids:
        holdings.failed.pop((event.pool, block), None)  # the load that failed belongs to earlier content
    if hash_id in pool.removed:
        _note_return(holdings, event.step, pool, hash_id, group, request, end)
    if hash_id not in record.hash_ids:
        record.hash_ids.append(hash_id)
        pool.hashes[hash_id] = pool.hashes.get(hash_id, 0) + 1
    record.has_hash = 1
    record.end = max(end, record.end) if len(record.hash_ids) > 1 else end
    record.cached_for, record.writer = request, done.request_id
    record.least_end = min(end, record.least_end) if len(record.hash_ids) > 1 else end
    record.isolation = isolation_below(holdings.isolation.get(request), record.least_end)
    remember(record, done)
    mark_never_loaded(holdings, event.pool, block, group, request)
    if (event.pool, block) in holdings.hash_awaited:
        allocated = record.allocations[-2] if record.allocations else UNKNOWN
        holdings.hash_awaited.discard((event.pool, block))
        holdings.hash_arrived.append((event.pool, block, hash_id, allocated, record.writer))
    holdings.newly_cached.append((event.pool, block, request, end))


def _note_return(
    holdings: Holdings, step: int, pool: Pool, hash_id: int, group: int, request: int, end: int
) -> None:
    """Note that a hash returned to the cache: the request computed KV that had been cached before."""
    left, came_back, how = pool.removed[hash_id]
    if group in pool.prefix_groups:
        size, _ = pool.groups[group]
        start = (end - 1) // size * size  # of a partly filled block, only that part
        holdings.refilled.append((request, RemovedRange(start, end, left, came_back, how)))
    if came_back < 0:
        pool.removed[hash_id] = (left, step, how)


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

# --- loads into cached blocks --------------------------------------------------------------------


def check_pending(holdings: Holdings) -> None:
    """Report blocks that were cached before an asynchronous load has filled them."""
    hashed, holdings.newly_cached = holdings.newly_cached, []
    for pool, block, request, end in hashed:
        account = holdings.accounts.get(request)
        life = account.life if account is not None else None
        record = holdings.pools[pool].records.get(block) if pool in holdings.pools else None
        if account is None or life is None or record is None or record.cached_for != request:
            continue
        if life.asynchronous and life.pending and not life.ran and end > life.local:
            whose, story = account.request_id, holdings.story(pool, block)
            holdings.report(CachedContent("pending", whose, pool, block, end, life.local, story), request)
            mark_invalid(holdings, pool, block, "pending", life.local)


def load_failed(holdings: Holdings, event: ev.LoadFailed) -> None:
    """Remember the request's cached blocks without KV above the failure, until their tokens are computed.

    If the failed blocks are known, the others of the load have KV. Blocks above the load were computed over
    the missing KV. Local hits are not part of a load that failed as a whole.
    """
    account = holdings.accounts.get(event.request)
    if account is None or account.unknown is not None or account.life is None:
        return
    owner, life, failed = holdings.holder(TABLE, event.request, UNKNOWN), account.life, event.failed_blocks
    start = event.computed_tokens
    if failed is None and event.asynchronous:
        start = max(start, life.local)
    loaded_end = life.local + max(0, life.external)
    for pool, block in holdings.held.get(event.request, ()):
        record = holdings.pools[pool].records[block]
        if failed is not None and block not in failed and record.end <= loaded_end:
            continue
        if record.has_hash == 1 and record.cached_for == event.request and record.end > start:
            holdings.failed[pool, block] = FailedLoad(
                event.request, owner.request_id, owner.life, event.computed_tokens
            )


def follow_failed_loads(holdings: Holdings) -> None:
    """Forget failed blocks whose tokens have been computed; report those whose life has ended before.

    Called after each event that posts a step or ends a life. A pool's calls are emitted before the steps that
    were held back, so a call itself does not show how far its request has computed.
    """
    for (pool, block), failed in reversed(list(holdings.failed.items())):
        record, account = holdings.pools[pool].records[block], holdings.accounts.get(failed.request)
        life = account.life if account is not None else None
        unknown = account is not None and account.unknown is not None
        if unknown or record.has_hash != 1 or record.cached_for != failed.request:
            del holdings.failed[pool, block]
        elif account is None or life is None or life.number != failed.life:
            _report_not_loaded(holdings, pool, block)
        else:
            failed.valid_to = max(failed.valid_to, account.computed)
            if failed.valid_to >= record.end:
                del holdings.failed[pool, block]


def check_failed_hits(holdings: Holdings, step: int) -> None:
    """``step`` has been posted: report the hits that it and earlier steps made on blocks without KV."""
    hits, holdings.failed_hits = holdings.failed_hits, []
    for hit in hits:
        made_in, pool, block = hit
        if (pool, block) not in holdings.failed:
            continue
        if made_in <= step:
            _report_not_loaded(holdings, pool, block)
        else:
            holdings.failed_hits.append(hit)


def _report_not_loaded(holdings: Holdings, pool: int, block: int) -> None:
    """Report a cached block whose load failed and which was hit, or can be hit from now on."""
    failed = holdings.failed.pop((pool, block))
    end, story = holdings.pools[pool].records[block].end, holdings.story(pool, block)
    content = CachedContent("failed", failed.request_id, pool, block, end, failed.valid_to, story)
    holdings.report(content, failed.request)
    mark_invalid(holdings, pool, block, content.why, failed.valid_to)
