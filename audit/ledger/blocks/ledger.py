"""The ledger of blocks, kept from the events of level ``blocks`` alone: blocks are allocated, touched, freed,
copied, cached and evicted.

Each operation is compared with the block's known holders. What the engine reports of pools, blocks and tables
is compared with the ledger, and then the ledger adopts it, so that one fault is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, NamedTuple

from ... import events as ev
from ...bounded_tables import keep_newest
from ...causes import EVICTED, GROUPS, NEVER_SEEN, NOT_HIT, RESET
from ..account import Account, CachedRange, GroupBlock, Life
from ..entries import (
    BlockComparison,
    BlockFinding,
    ForeignHit,
    ForeignLoad,
    Leak,
    Misplaced,
    OtherPrefix,
    PoolComparison,
    SharedWrite,
    Stateless,
    StrayFree,
    Uncovered,
)
from . import reads
from .holdings import Following, Holdings
from .pool import (
    COPY,
    DEFERRED,
    OPERATIONS_KEPT,
    PIN,
    TABLE,
    UNKNOWN,
    Block,
    CachedHash,
    Holder,
    Operation,
    Pool,
    Removed,
    Window,
    calls,
    oldest,
    remember,
    table_holders,
    table_key,
    used,
)
from .reads import HASHED_OTHERWISE, PENDING, SEQUENCE, block_tokens

# --- Isolation classes of cached blocks and of the requests that hit them.
#
# The hash of a cached block covers every position below its end. So a request may hit the block only if it
# has the writer's cache salt and LoRA adapter, and the same multimodal inputs before that end. Later inputs
# may differ.

FIXED = 2
"""The class of the cache salt and the class of the LoRA adapter; a pair for each multimodal input follows."""

SALT, ADAPTER, INPUT = "cache salt", "LoRA adapter", "multimodal input"
"""What the KV of two requests may differ in."""


def isolation_below(isolation: list[int] | None, end: int) -> list[int] | None:
    """The isolation classes that KV below position ``end`` depends on; None: not known."""
    if isolation is None or len(isolation) <= FIXED or isolation[-1] < end:
        return isolation
    below = isolation[:FIXED]
    for place in range(FIXED, len(isolation), 2):
        if isolation[place + 1] < end:
            below += isolation[place : place + 2]
    return below if any(below) else []


def difference(left: list[int], right: list[int]) -> list[str]:
    """What two lists of isolation classes differ in."""
    left, right = left or [0, 0], right or [0, 0]
    pairs = (SALT, left[0], right[0]), (ADAPTER, left[1], right[1]), (INPUT, left[FIXED:], right[FIXED:])
    return [name for name, one, other in pairs if one != other]


def report_other_classes(holdings: Holdings, number: int, holder: Holder, blocks: list[int]) -> None:
    """Report the hits of a request on blocks that were written under other isolation classes."""
    own, pool = holdings.isolation.get(holder.request), holdings.pools[number]
    foreign = []
    for block in blocks:
        record = pool.records.get(block)
        if own is None or record is None or record.isolation is None or record.isolation == own:
            continue
        if record.isolation != isolation_below(own, record.least_end):
            foreign.append(block)
    if own is None or not foreign:
        return
    first = pool.records[foreign[0]]
    assert first.isolation is not None
    differs = difference(first.isolation, isolation_below(own, first.least_end) or [])
    story = holdings.story(number, foreign[0], second=holder)
    tokens = len(foreign) * pool.groups[holder.group][0]
    holdings.report(ForeignHit(number, foreign, tokens, first.writer, holder, differs, story), holder.request)


# --- store ---------------------------------------------------------------------------------------------
#
# The connector's store: who saved KV under which key, and who is promised KV under that key.
#
# A key that requests of several isolation classes have saved proves nothing about the KV that is there now.
# So a promise is foreign only if no request of its own classes is known to have saved the key.


KEYS_KEPT = 1 << 16
"""How many keys of the store are remembered, the last ones."""

CLASSES_KEPT = 4
"""How many requests of different classes are remembered for a key, the last ones."""


def _saved(holdings: Holdings, event: ev.SavePlanned) -> None:
    """Note under which classes the chunks of a request were saved."""
    request = event.request
    own, account = holdings.isolation.get(request), holdings.account(request)
    if own is None or account is None or request not in holdings.store_keys:
        return
    size, keys = holdings.store_keys[request]
    for place, key in enumerate(keys[: max(0, event.end) // size]):
        end = (place + 1) * size
        classes = isolation_below(own, end)
        if end <= event.start or classes is None:
            continue
        saved = holdings.saved_keys.setdefault(key, [])
        if all(classes != known for known, _ in saved):
            saved.append((classes, account.request_id))
            del saved[:-CLASSES_KEPT]
            keep_newest(holdings.saved_keys, KEYS_KEPT)


def _promised(holdings: Holdings, event: ev.Admitted) -> None:
    """Report promised tokens whose chunks were saved under other classes only."""
    request, start = event.request, event.local_tokens
    stop, own = start + event.external_tokens, holdings.isolation.get(request)
    if own is None or request not in holdings.store_keys or start >= stop:
        return
    size, keys = holdings.store_keys[request]
    tokens, first, writer, differs = 0, -1, "", [""]
    for place, key in enumerate(keys[start // size : -(-stop // size)], start // size):
        end = (place + 1) * size
        classes, saved = isolation_below(own, end) or [], holdings.saved_keys.get(key, [])
        if not saved or any(classes == known for known, _ in saved):
            continue
        if first < 0:
            first, (known, writer) = max(start, end - size), saved[-1]
            differs = difference(known, classes)
        tokens += min(end, stop) - max(start, end - size)
    if first >= 0:
        holdings.report(ForeignLoad(tokens, first, writer, differs), request)


FOLLOWING: Following = {ev.SavePlanned: _saved, ev.Admitted: _promised}


# --- engine reports ------------------------------------------------------------------------------------
#
# Postings of the states of pools, blocks and tables that the engine reports.
#
# A report is compared with the ledger, and then the ledger adopts it, so that one fault is reported once.
# Reports also reveal the holders of blocks that were held before the trace began.


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
        since_start=empty and event.step <= 0,
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
        pool.hashes_known = pool.since_start = False


def _tables(holdings: Holdings, event: ev.TablesReported) -> None:
    places: dict[tuple[int, int, int], int] = {}
    for request, group, computed, table in event.tables():
        number = next((n for n, pool in holdings.pools.items() if group in pool.groups), None)
        if number is not None:
            _table(holdings, number, request, group, table, places)
            size, positional = holdings.pools[number].groups[group]
            if positional and len(table) * size < computed:
                holdings.report(Uncovered(group, len(table), size, computed), request)
            if positional:
                _places(holdings, number, request, group, table)
            elif group in holdings.pools[number].states:
                _state_places(holdings, number, request, group, computed, table)


def _places(holdings: Holdings, number: int, request: int, group: int, table: list[int]) -> None:
    """Report the first cached block of a table that does not stand at the place of its positions.

    A block that was allocated twice for the request has a finding of its own.
    """
    pool = holdings.pools[number]
    records, size = pool.records, pool.groups[group][0]
    for place, block in enumerate(table):
        record = records.get(block)
        if (
            record is not None
            and record.has_hash > 0
            and record.begin not in (UNKNOWN, place * size)
            and len(table_holders(pool, record, request)) == 1
        ):
            story = holdings.story(number, block)
            return holdings.report(Misplaced(group, block, place, size, record.begin, story), request)


def _state_places(
    holdings: Holdings, number: int, request: int, group: int, computed: int, table: list[int]
) -> None:
    """Report a table of states without a block for the state that the last step read, or the next one reads.

    It stands at the place of the last position before the step; where a count fell, as by rejected drafts, it
    may stand at another. Which step was the last is known only if the ledger has it in flight.
    """
    account, pool = holdings.account(request), holdings.pools[number]
    life = account.life if account is not None and account.unknown is None else None
    if account is None or life is None or life.rejected or life.rolled_back:
        return
    starts = [each.start for each in account.in_flight[-1:] if each.start + each.tokens == computed]
    for end in (*starts, computed):
        place = (end - 1) // pool.groups[group][0]
        if end > 0 and table[place : place + 1] in ([], [pool.null_block]):
            return holdings.report(Stateless(group, place, end), request)


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
    key, null, records = table_key(request, group), pool.null_block, pool.records
    own = set()
    for block in table:
        record = records.get(block)
        if record is not None and key in record.holders and len(record.holders) == 1:
            own.add(block)  # held by this table alone
    for block in table:
        if block == null:
            continue
        if block in own and (number, request, block) not in places:
            places[number, request, block] = group
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
        if table[place] in own:
            continue
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
        record = pool.records.get(block)
        if block == pool.null_block or (state == 1 and record is None and pool.idle):
            continue
        if record is not None and record.holders_known and record.has_hash >= 0:
            holders = len(record.holders)
            if state == (holders << 3 | record.has_hash * 6 | (not holders)):
                continue  # as the ledger has it
        _compare_block(holdings, event.pool, pool, block, state)
    if event.free_blocks >= 0:
        _compare_pool(holdings, event.pool, event.free_blocks, event.cached_hashes)
    _overdue(holdings, event.at)
    if holdings.pinned:
        _report_pinned(holdings, event.at)


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


def _tables_removed(holdings: Holdings, event: ev.TablesRemoved) -> None:
    for request in event.requests:
        holdings.ending.pop(request, None)
        holdings.isolation.pop(request, None)
        holdings.store_keys.pop(request, None)
        _leak(holdings, request, 0)


def _rests(holdings: Holdings) -> bool:
    """Whether the engine has nothing to do, and so nothing to free later."""
    requests = holdings.requests
    return not (requests.living or requests.is_in_flight or holdings.deferred)


def _overdue(holdings: Holdings, at: int) -> None:
    """Report blocks that ended requests still hold.

    A connector may keep them for a while; an engine without one may not when nothing runs.
    """
    rests = not holdings.pins_last and _rests(holdings)
    for request, ended in list(holdings.ending.items()):
        if at - ended < LEAK_SECONDS * 1e6 and not rests:
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


def _report_pinned(holdings: Holdings, at: int) -> None:
    """Report references that nobody will give back: nothing runs, or they have lasted too long."""
    rests = _rests(holdings)
    by_operation: dict[str, list[tuple[int, int]]] = {}
    for place, done in list(holdings.pinned.items()):
        if rests or at - done.at >= LEAK_SECONDS * 1e6:
            del holdings.pinned[place]
            by_operation.setdefault(done.by, []).append(place)
    for by, places in by_operation.items():
        blocks = sorted(block for _, block in places)
        holdings.report(Leak(AS_PIN, blocks, 0, holdings.story(*places[0]), by), UNKNOWN)


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
    ev.TablesReported: _tables,
    ev.BlockStatesReported: _block_states,
    ev.TablesRemoved: _tables_removed,
}


# --- hashes --------------------------------------------------------------------------------------------
#
# Postings of hashes: blocks that are cached or evicted, and cached blocks whose KV is not there yet.


def _cached(holdings: Holdings, event: ev.BlocksCached) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    number = event.pool
    for named, group, tokens, blocks, hash_ids, ends in event.calls():
        if not blocks:
            _forget_hashes(holdings, pool)
        who, size = holdings.holder(TABLE, named, group), block_tokens(pool, group)
        request, sequence_tokens = named, tokens
        for block, hash_id, end in zip(blocks, hash_ids, ends, strict=True):
            record = pool.records.get(block) or holdings.record(pool, block)
            if named < 0:
                writer = _sole_writer(record) or NOBODY
                if writer is not who:
                    who, request = writer, writer.request
                    sequence_tokens = holdings.requests.sequence_tokens(request)
                    if sequence_tokens >= 0:  # and one token for each output that was not emitted yet
                        sequence_tokens += -1 - tokens
            holdings.newly_cached.append((number, request, block, end))
            covered = _hash(holdings, event, pool, block, record, hash_id, end, group, size, who)
            if covered != end:
                whose = who.request_id
                holdings.report_cached(HASHED_OTHERWISE, whose, number, block, end, covered, request)
            elif end > sequence_tokens >= 0:
                whose = who.request_id
                holdings.report_cached(SEQUENCE, whose, number, block, end, sequence_tokens, request)
                record.wrong = [(sequence_tokens, end, SEQUENCE)]


def _forget_hashes(holdings: Holdings, pool: Pool) -> None:
    """Forget all hashes, because it is not known which blocks were cached."""
    for record in pool.records.values():
        holdings.drop_hashes(pool, record)
        record.has_hash = UNKNOWN
    pool.has_hash, pool.hashes_known, pool.since_start = UNKNOWN, False, False


def _sole_writer(record: Block) -> Holder | None:
    """The request that fills a block: the youngest one whose table holds the block."""
    for holder in reversed(record.holders.values()):
        if holder.kind == TABLE:
            return holder
    return None


def _hash(
    holdings: Holdings,
    event: ev.BlocksCached,
    pool: Pool,
    block: int,
    record: Block,
    hash_id: int,
    end: int,
    group: int,
    size: int,
    who: Holder,
) -> int:
    """A block of ``size`` tokens gets a hash for the positions of a request below ``end``.

    Returns where the hash ends, by whoever had it first.
    """
    request = who.request
    if event.replaced:
        holdings.drop_hashes(pool, record)
    removed = pool.removed.get(hash_id)
    cached = pool.hashes.get(hash_id)
    if removed is not None or cached is not None:
        before = list(_had_before(holdings, pool, record, hash_id, request, removed))
        note = _note_cached_before if group in pool.prefix_groups else _note_in_group
        note(holdings, pool, group, request, end, before)
        if removed is not None and removed[3] < 0:
            pool.removed[hash_id] = (*removed[:3], event.step, *removed[4:])
    elif pool.since_start and not pool.forgotten_hashes and group in pool.prefix_groups:
        _note_never_cached(holdings, request, (end - 1) // size * size, end)
    ids, most, least = record.hash_ids, end, end
    if hash_id not in ids:
        ids.append(hash_id)
        if cached is None:
            cached = pool.hashes[hash_id] = CachedHash(end, event.step, request)
        cached.blocks += 1
    if len(ids) > 1:
        most, least = max(end, record.end), min(end, record.least_end)
    record.has_hash, record.end, record.least_end = 1, most, least
    record.cached_for, record.writer = request, who.request_id
    own = holdings.isolation.get(request)
    record.isolation = isolation_below(own, least) if own else own
    said = event.step, event.at, "cached", "cache_blocks", who.request_id, who.life
    remember(record, Operation(*said, group, event.stack, [hash_id], end))
    record.begin = begin = (end - 1) // size * size if size > 0 else end
    record.room_end, record.of_state = begin + size, group in pool.states
    if holdings.hash_awaited and (event.pool, block) in holdings.hash_awaited:
        allocated = record.allocations[-2] if record.allocations else UNKNOWN
        holdings.hash_awaited.discard((event.pool, block))
        holdings.hash_arrived.append((event.pool, block, hash_id, allocated, record.writer))
    return pool.hashes[hash_id].end if cached is None else cached.end


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
    gone: bool = False


def _had_before(
    holdings: Holdings, pool: Pool, record: Block, hash_id: int, request: int, removed: Removed | None
) -> Iterator[_Had]:
    """What left the cache, and what another block still has."""
    if removed is not None:
        since, by, left, came_back, how, got, call = removed
        lacks = holdings.lives.get(request)
        gone = lacks is not None and left == lacks.step and call < lacks.call
        yield _Had(since, by, left, came_back, how, got == request, gone)
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
        row = CachedRange(
            start, end, had.since, had.left, had.came_back, had.how, had.own, of_others, had.gone
        )
        holdings.cached_before.append((request, row))


def _note_never_cached(holdings: Holdings, request: int, start: int, end: int) -> None:
    """Note that a request computed KV which the cache never had; of neighbours, one range."""
    last = holdings.cached_before[-1:]
    if last and last[0][0] == request and last[0][1].end == start and last[0][1].how == NEVER_SEEN:
        start = holdings.cached_before.pop()[1].start
    row = CachedRange(start, end, UNKNOWN, UNKNOWN, UNKNOWN, NEVER_SEEN, False, "")
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


def _compared(holdings: Holdings, event: ev.HitsCompared) -> None:
    """Report the hit blocks that hold another prefix than the reader's, by group."""
    rows = list(zip(*(iter(event.other),) * 3, strict=True))
    for group in dict.fromkeys(row[0] for row in rows):
        number = next((n for n, pool in holdings.pools.items() if group in pool.groups), None)
        if number is None:
            continue
        pool, blocks = holdings.pools[number], [block for each, block, _ in rows if each == group]
        end = next(end for each, _, end in rows if each == group)
        record, holder = holdings.record(pool, blocks[0]), holdings.holder(TABLE, event.request, group)
        tokens, story = len(blocks) * pool.groups[group][0], holdings.story(number, blocks[0], second=holder)
        subject = OtherPrefix(number, group, blocks, tokens, end, record.writer, holder, story)
        holdings.report(subject, event.request)


HASHES: dict[type[ev.Event], Callable[[Holdings, Any], None]] = {
    ev.BlocksCached: _cached,
    ev.BlocksEvicted: _evicted,
    ev.HitsCompared: _compared,
    ev.PoolReset: _reset,
}


def check_pending(holdings: Holdings) -> None:
    """Report blocks that were cached before an asynchronous load has filled them."""
    hashed, holdings.newly_cached = holdings.newly_cached, []
    filled_by = None
    for number, request, block, end in hashed:
        if request == filled_by:
            continue
        account = holdings.requests.living.get(request)
        life = account.life if account is not None else None
        if account is None or life is None or not life.asynchronous or not life.pending or life.ran:
            filled_by = request  # it waits for no load
            continue
        record = holdings.pools[number].records.get(block) if number in holdings.pools else None
        if record is not None and record.cached_for == request and end > life.local:
            holdings.report_cached(PENDING, account.request_id, number, block, end, life.local, request)


# --- operations ----------------------------------------------------------------------------------------
#
# Postings of references: blocks are allocated, touched, freed, copied, or their free is deferred.
#
# Each operation is compared with the block's known holders.


AS_PIN = Holder(PIN, UNKNOWN, "", 0, UNKNOWN)
"""Who holds a block that the engine took for no request."""


def _allocated(holdings: Holdings, event: ev.BlocksAllocated) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is not None:
        for request, group, blocks in event.calls():
            _allocate(holdings, event, pool, request, group, blocks)


def _allocate(
    holdings: Holdings,
    event: ev.BlocksAllocated,
    pool: Pool,
    request: int,
    group: int,
    blocks: list[int],
) -> None:
    if holdings.demand.waiting and request in holdings.demand.waiting:
        holdings.demand.hold(request, used(pool))
    holdings.calls += 1
    number, step, records = event.pool, event.step, pool.records
    done = holdings.operation(event, "allocated", event.by, request, group)
    said = step, done.at, done.what, done.by, done.request_id, done.life, group, done.stack
    if pool.null_block in blocks:
        blocks = [block for block in blocks if block != pool.null_block]
    holder, filled = AS_PIN, None
    if request >= 0:
        holder, filled = reads.allocated(holdings, number, blocks, done, request)
        key, held = table_key(request, group), holdings.table_of(request)
    for block in blocks:
        record = records.get(block) or holdings.record(pool, block)
        evicted, operations = record.hash_ids, record.operations
        operations.append(Operation(*said, evicted) if evicted else done)
        if len(operations) > OPERATIONS_KEPT:
            del operations[0]
        if record.has_hash or evicted or record.end:
            holdings.drop_hashes(pool, record, step, EVICTED, request)
            record.has_hash = 0
        record.allocations = [*record.allocations[-2:], step, request]
        if record.begin != UNKNOWN:
            record.begin = record.room_end = UNKNOWN
        record.filled = filled
        if not record.holders:
            record.holders_known, record.reported = True, False
            if request >= 0:
                record.holders[key] = holder
                held[number, block] = 1
                continue
        else:
            holdings.report_collision("taken", number, block, oldest(record), holder)
        holdings.add_holder(number, block, record, holder)
    pool.free_blocks -= len(blocks)


def _touched(holdings: Holdings, event: ev.BlocksTouched) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    number, request, records = event.pool, event.request, pool.records
    if request in holdings.demand.waiting:
        holdings.demand.hold(request, used(pool))
    done = holdings.call_operation(event, "touched")
    holder = AS_PIN
    if request >= 0:
        holder = Holder(TABLE, request, done.request_id, done.life, event.group)
        if request in holdings.isolation:
            report_other_classes(holdings, number, holder, event.blocks)
    held = holdings.held.get(request, {})
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = records.get(block) or holdings.record(pool, block)
        remember(record, done)
        if holder is not AS_PIN:
            if (number, block) in held:
                twice = table_holders(pool, record, request)
                holdings.report_collision("twice", number, block, twice[0], holder)
            elif record.has_hash == 0:
                holdings.report_collision("unhashed", number, block, oldest(record), holder)
            reads.hit(holdings, event, block, record)
        holdings.add_holder(number, block, record, holder)
        if holder is AS_PIN and not holdings.pins_last:
            holdings.pinned[number, block] = done
        if references == 1:
            pool.free_blocks -= 1
        if references != len(record.holders) or not record.holders_known:
            compare_references(holdings, number, block, record, references)


def _freed(holdings: Holdings, event: ev.BlocksFreed) -> None:
    pool = holdings.pools.get(event.pool)
    if pool is None:
        return
    number, request, records = event.pool, event.request, pool.records
    done = holdings.call_operation(event, "freed")
    key = table_key(request, event.group) if request >= 0 and event.group >= 0 else 0
    held = holdings.held.get(request, {})
    counts: dict[int, int] = {}
    for block, references in zip(event.blocks, event.references, strict=True):
        if block == pool.null_block:
            continue
        record = records.get(block) or holdings.record(pool, block)
        released = record.holders.pop(key, None) if key else None
        if released is None:
            released = _release(holdings, event, pool, block, record)
        elif (times := held.pop((number, block), 0)) > 1:
            held[number, block] = times - 1
        counts[block] = references
        operations = record.operations
        if released is not None:
            operations.append(done)
            if len(operations) > OPERATIONS_KEPT:
                del operations[0]
            if pool.windows:
                reads.left_window(holdings, event, pool, block, record, released)
            continue
        earlier = next((o for o in reversed(operations) if o.what == "freed"), None)
        remember(record, done)
        if record.holders_known:
            stray = StrayFree(number, block, done, earlier, references, holdings.story(number, block))
            holdings.report(stray, request)
            record.holders_known = False  # until the engine reports the block's count
    if not held:
        holdings.held.pop(request, None)
    if request >= 0 and len(holdings.pools) == 1:
        holdings.demand.free(request, event.step, list(counts), list(counts.values()))
    for block, references in counts.items():
        record = records[block]
        if not references:
            pool.free_blocks += 1
        if references != len(record.holders) or not record.holders_known:
            compare_references(holdings, number, block, record, references)


def _release(
    holdings: Holdings, event: ev.BlocksFreed, pool: Pool, block: int, record: Block
) -> Holder | None:
    """Remove a reference that was freed, of another table than the event says, or of none."""
    if event.request >= 0:
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
    ev.BlocksAllocated: _allocated,
    ev.BlocksTouched: _touched,
    ev.BlocksFreed: _freed,
    ev.BlockCopied: _copied,
    ev.BlocksDeferred: _deferred,
}


# --- ledger --------------------------------------------------------------------------------------------
#
# The ledger of blocks, kept from the events of level ``blocks`` alone.
#
# A block about which nothing is known has no record. If not all holders of a block are known,
# ``holders_known`` is false and its reference count is not checked. The engine reports a block's state
# (:class:`~kvledger.audit.events.BlockStatesReported`) and, with a touch or a free, its count. The ledger
# compares both with its own and then adopts them, so that one fault is reported once.
#
# ``BlockLedger`` judges nothing: it passes subjects to ``audit/checks``.


_APPLYING = OPERATIONS | HASHES | ENGINE_REPORTS

_SCHEDULING = {
    ev.LookedUp,
    ev.Matched,
    ev.AdmissionFailed,
    ev.Admitted,
    ev.LookupsCounted,
    ev.LoadPlanned,
    ev.SavePlanned,
    ev.BlocksSaved,
    ev.BlocksPromised,
    ev.Stepped,
    ev.Repeated,
}
"""Events of a step that come after the step's pool calls. A step may be emitted only together with a later
event; a finished load comes after them."""


def _ends(holdings: Holdings, event: ev.Finished) -> None:
    if event.request in holdings.held:
        holdings.ending[event.request] = event.at


def _census(holdings: Holdings, event: ev.Census) -> None:
    if holdings.deferred and not holdings.requests.is_in_flight:
        report_unfreed(holdings)


_TABLES: tuple[Following, ...] = (
    {ev.Finished: _ends, ev.Census: _census},
    FOLLOWING,
    {ev.BlocksSaved: reads.saved},
    reads.OF_REWRITES,
    reads.OF_READS,
    reads.OF_WINDOWS,
    reads.OF_STATES,
)

_FOLLOWING = {
    kind: tuple(table[kind] for table in _TABLES if kind in table)
    for kind in {kind for table in _TABLES for kind in table}
}
"""What follows from an event of requests, in this order."""


class BlockLedger(Holdings, dict=True, eq=False):
    """Blocks of one engine, kept from its events in order."""

    EVENTS: ClassVar[frozenset[type[ev.Event]]] = frozenset((*_APPLYING, ev.PoolCalls))

    def identify(self, request: int, isolation: ev.Isolation | None) -> None:
        """Note the isolation classes of a request; None: they were not recorded."""
        if isolation is None:
            self.isolation.pop(request, None)
        else:
            self.isolation[request] = isolation

    def apply(self, event: ev.Event) -> list[BlockFinding]:
        """Post one event of blocks; return its subjects for the checks."""
        self.findings = []
        self.cached_before, self.cached_in_group = [], []
        for call in calls(event) if type(event) is ev.PoolCalls else (event,):
            _APPLYING[type(call)](self, call)
        return self.findings

    def follows(self, event: ev.Event) -> bool:
        """Whether anything about blocks may follow from an event of requests."""
        kind = type(event)
        return (
            kind in _FOLLOWING
            or bool(self.newly_cached and kind not in _SCHEDULING)
            or bool(self.preempted_cached)
        )

    def after(self, event: ev.Event) -> list[BlockFinding]:
        """Called after any other event is posted; return the subjects about blocks that follow from it."""
        self.findings, self.invalid_hits = [], []
        kind = type(event)
        if self.newly_cached and kind not in _SCHEDULING:
            check_pending(self)
        if self.preempted_cached:
            reads.check_preempted(self)
        for follow in _FOLLOWING.get(kind, ()):
            follow(self, event)
        return self.findings

    def looked_up(self, event: ev.StoreKeys) -> None:
        """Note the keys of a request in the connector's store."""
        if event.chunk_tokens > 0:
            self.store_keys[event.request] = event.chunk_tokens, event.keys

    def lost(self, request: int, life: int, start: int, end: int, cause: str) -> None:
        """Note that external tokens [start, end) of a life were lost for ``cause``."""
        reads.lost(self, request, life, start, end, cause)

    def load_failed(self, request: int, life: Life, failed: Collection[int]) -> list[BlockFinding]:
        """Blocks failed to load for a life that has ended. Return the subjects about those still cached."""
        self.findings = []
        reads.failed_after_the_end(self, request, life, failed)
        return self.findings

    def life_ends(self, account: Account, life: Life, cause: str) -> list[BlockFinding]:
        """A life ends; its account has the last counts. Return the subjects about its blocks."""
        self.findings = []
        reads.life_ends(self, account, life, cause)
        reads.windows_end(self, account.request)
        reads.states_end(self, account.request)
        reads.rewrites_end(self, account.request)
        return self.findings
