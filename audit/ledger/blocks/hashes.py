"""What blocks are hashed for: hashes that come and go, and those whose KV is still to come, or never came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ... import events as ev
from ...causes import EVICTED, RESET
from ..frozen import RemovedRange
from .holdings import Holdings
from .records import TABLE, UNKNOWN, Operation, Pool, remember, written
from .subjects import HashedContent


def _hashed(holdings: Holdings, event: ev.BlocksCached) -> None:
    pool = holdings.pools.get(event.pool)
    rows, at = event.rows, 0
    while pool is not None and at < len(rows):
        said, group, tokens, count = rows[at : at + 4]
        at += 4
        if not count:
            _unread(holdings, pool)
        for _ in range(count):
            block, name, end = rows[at : at + 3]
            at += 3
            request, sequence_tokens = said, tokens
            if said < 0:
                request = _sole_writer(holdings, pool, block)
                sequence_tokens = _sequence_tokens(holdings, request, -1 - tokens)
            done = holdings.operation(event, "hashed", "cache_blocks", request, group)
            told = replace(done, what=f"hashed {written(name)} up to {end}")
            _hash(holdings, event, pool, block, name, end, group, request, told)
            if end > sequence_tokens >= 0:
                story = holdings.story(event.pool, block)
                whose = holdings.holder(TABLE, request, group).request_id
                beyond = HashedContent("sequence", whose, event.pool, block, end, sequence_tokens, story)
                holdings.tell(beyond, request)


def _unread(holdings: Holdings, pool: Pool) -> None:
    """Some blocks were hashed and which is not known: of all it is the engine's to say again."""
    for record in pool.records.values():
        holdings.unname(pool, record)
        record.hashed = UNKNOWN
    pool.hashed, pool.named = UNKNOWN, False


def _sole_writer(holdings: Holdings, pool: Pool, block: int) -> int:
    """Whose table a block stands in that has just been filled: the youngest's."""
    holders = holdings.record(pool, block).holders
    return next((holder.request for holder in reversed(holders) if holder.kind == TABLE), UNKNOWN)


def _sequence_tokens(holdings: Holdings, request: int, unheard: int) -> int:
    """How long a request's sequence is, by its account and one token more for each output not yet told."""
    account = holdings.accounts.get(request)
    return UNKNOWN if account is None or account.unknown is not None else account.sequence_tokens + unheard


def _hash(
    holdings: Holdings,
    event: ev.BlocksCached,
    pool: Pool,
    block: int,
    name: int,
    end: int,
    group: int,
    request: int,
    done: Operation,
) -> None:
    record = holdings.record(pool, block)
    if event.replaced:
        holdings.unname(pool, record)
    if name in pool.lost:
        _back(holdings, event.step, pool, name, group, request, end)
    if name not in record.names:
        record.names.append(name)
        pool.hashes[name] = pool.hashes.get(name, 0) + 1
    record.hashed = 1
    record.end = max(end, record.end) if len(record.names) > 1 else end
    record.hasher = request
    remember(record, done)
    holdings.hashed.append((event.pool, block, request, end))


def _back(holdings: Holdings, step: int, pool: Pool, name: int, group: int, request: int, end: int) -> None:
    """What was in the cache before is filled again, and had to be if a hit needs every block."""
    left, came_back, how = pool.lost[name]
    if group in pool.whole:
        size, _ = pool.groups[group]
        start = (end - 1) // size * size  # of a block that is hashed in part, that part
        holdings.lost.append((request, RemovedRange(start, end, left, came_back, how)))
    if came_back < 0:
        pool.lost[name] = (left, step, how)


def _evicted(holdings: Holdings, event: ev.BlocksEvicted) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    for block in event.blocks:
        record = holdings.record(pool, block)
        holdings.unname(pool, record, event.step, EVICTED)
        record.hashed = 0
        remember(record, holdings.done(event, "evicted"))


def _reset(holdings: Holdings, event: ev.PoolReset) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None or not event.succeeded:
        return
    for record in pool.records.values():
        holdings.unname(pool, record, event.step, RESET)
        record.hashed = 0
    pool.hashes.clear()
    pool.hashed, pool.named = 0, True


HASHES: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    ev.BlocksCached: _hashed,
    ev.BlocksEvicted: _evicted,
    ev.PoolReset: _reset,
}

# --- what loads mean for them --------------------------------------------------------------------


def judge_pending(holdings: Holdings) -> None:
    """Blocks hashed before an asynchronous load has filled them."""
    hashed, holdings.hashed = holdings.hashed, []
    for pool, block, request, end in hashed:
        account = holdings.accounts.get(request)
        life = account.life if account is not None else None
        record = holdings.pools[pool].records.get(block) if pool in holdings.pools else None
        if account is None or life is None or record is None or record.hasher != request:
            continue
        if life.asynchronous and life.pending and not life.ran and end > life.local:
            whose, story = account.request_id, holdings.story(pool, block)
            holdings.tell(HashedContent("pending", whose, pool, block, end, life.local, story), request)


def load_failed(holdings: Holdings, event: ev.LoadFailed) -> None:
    """What the request had hashed above the failure is good only when it has been computed."""
    for pool, block in holdings.held.get(event.request, ()):
        record = holdings.pools[pool].records[block]
        if record.hashed == 1 and record.hasher == event.request and record.end > event.computed_tokens:
            whose = holdings.holder(TABLE, event.request, UNKNOWN).request_id
            holdings.failed[pool, block] = event.request, whose, event.computed_tokens


def computed_again(holdings: Holdings) -> None:
    """A step: what it computes is good; a hit on the rest read what is not there."""
    for (pool, block), (request, _, _) in list(holdings.failed.items()):
        account, record = holdings.accounts.get(request), holdings.pools[pool].records[block]
        if record.hasher != request or (account is not None and account.computed >= record.end):
            del holdings.failed[pool, block]
    for key in holdings.hit:
        if key in holdings.failed:
            not_there(holdings, *key)
    holdings.hit = []


def not_there(holdings: Holdings, pool: int, block: int) -> None:
    """A block that is hashed for what never came is hit, or left to be hit."""
    request, request_id, limit = holdings.failed.pop((pool, block))
    end, story = holdings.pools[pool].records[block].end, holdings.story(pool, block)
    holdings.tell(HashedContent("failed", request_id, pool, block, end, limit, story), request)
