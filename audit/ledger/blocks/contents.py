"""What the blocks of an engine's pools contain: one lean model, which reads each call of a pool once.

The *content* of a block is the KV of the tokens for which it has hashes. It enters when the block is cached
and leaves when the block is allocated again, loses its hashes, or its pool is reset. The model yields
*changes*. Readers that judge nothing subscribe to them: occupancy, traces, turns, KV events, stores, routing,
simulations. The ledger of blocks keeps holders, operations and doubts as well, and takes six times as long.

What is true of a content, and why (``tests/audit/ledger/test_contents.py`` has a history of each rule):

- A block may have several hashes, since a part of it may be cached as well. All of them leave with it. A hit
  is on the newest, which covers the most tokens.
- A hash that its block has already is no change: nothing was computed or evicted.
- *Replaced* hashes leave before the new one enters. The engine took them away, which is no eviction for an
  allocation.
- Content that was cached before anybody watched is content like any other: it can be hit and evicted. It gets
  a number as its name when the engine reports it or a request hits it, until an event tells its hash. No two
  contents share such a number.
- Hashes that move to another block are still cached.
- The null block holds nothing.
- After lost events, a failed hook or an exception in a hooked method it is not known what blocks contain:
  calls may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from ... import events as ev
from .pool import calls

ALLOCATED, HIT, CACHED, FREED, DEFERRED, EVICTED, RESET, MOVED, TABLE, REMOVED, REPORTED, LOST = range(12)
"""Kinds of changes, see :class:`Change`."""

UNNAMED = -(1 << 63)
"""Content whose hash id is not known has one of the numbers behind this. Hash ids are keyed hashes of 64
bits: that one has such a number is as improbable as that two contents have the same."""

MOST_UNNAMED = 1 << 48

Ids = tuple[int, ...]


def is_named(hash_id: int) -> bool:
    """Whether a content's name is its hash id."""
    return hash_id >= UNNAMED + MOST_UNNAMED


class Change(NamedTuple):
    """What one call did with blocks of a pool, in the order of the calls.

    ``request`` and ``group`` are -1 if the call was for none; ``blocks`` never has the null block.

    - ALLOCATED: to a request; ``contents`` were evicted for it.
    - HIT: cached blocks got one more reference; ``numbers`` are the references just after.
    - CACHED: each block got the hash id in ``ids``, for the tokens up to its end in ``numbers``. No block:
      some were cached, and it is not known which.
    - FREED: blocks lost one reference; ``numbers`` as for HIT. DEFERRED: they will lose it later.
    - EVICTED: the engine took the hashes of blocks away. RESET: all hashes of the pool.
    - MOVED: the content of the first block is now that of the second.
    - TABLE: the engine reported the table of a request. REMOVED: it has forgotten the request.
    - REPORTED: the engine reported that blocks are cached whose hash ids nobody knows.
    - LOST: events were lost, and with them what all pools contain.
    """

    kind: int
    at: int
    step: int
    pool: int = 0
    request: int = -1
    group: int = -1
    blocks: Sequence[int] = ()
    contents: Sequence[Ids] = ()
    """By block: the hash ids that left it, or that it has, oldest first."""
    ids: Sequence[int] = ()
    numbers: Sequence[int] = ()


class PoolContents(msgspec.Struct):
    """One pool."""

    blocks: int = 0
    """Number of blocks, including the null block; 0: not known."""
    null: int = -1
    """The null block; -1: the pool has none."""
    hashes: dict[int, Ids] = {}
    """The hash ids of each cached block, oldest first."""
    owner: dict[int, int] = {}
    """The request to which each block was allocated last."""


class Contents(msgspec.Struct, dict=True):
    """The pools of one engine. It consists of plain data, so a checkpoint can hold it."""

    pools: dict[int, PoolContents] = {}
    unnamed: int = 0
    """How many contents got a number as their name."""

    def __post_init__(self) -> None:
        self._last: tuple[ev.Event | None, list[Change]] = None, []
        """The event that was read last, and its changes: all subscribers of an engine read it in turn."""

    def read(self, event: ev.Event) -> list[Change]:
        """The changes of an event, in order; none if it is not about contents. Nobody changes the list."""
        last, found = self._last
        if last is not event:
            if type(event) is ev.PoolCalls:
                found = [change for call in calls(event) for change in _READS[type(call)](self, call)]
            else:
                read = _READS.get(type(event))
                found = [] if read is None else list(read(self, event))
            self._last = event, found
        return found

    def forget(self) -> None:
        """Drop everything, because the engine has ended."""
        self.pools, self._last = {}, (None, [])

    def pool(self, number: int) -> PoolContents:
        """A pool; its description may have been lost."""
        pool = self.pools.get(number)
        if pool is None:
            pool = self.pools[number] = PoolContents()
        return pool

    def name(self, pool: PoolContents, block: int) -> Ids:
        """Name the content of a block whose hash id is not known."""
        self.unnamed += 1
        ids = pool.hashes[block] = (UNNAMED + self.unnamed,)
        return ids


def _seen(contents: Contents, event: ev.PoolSeen) -> Sequence[Change]:
    pool = contents.pool(event.pool)
    if pool.blocks not in (0, event.blocks):  # another pool has its number now
        pool = contents.pools[event.pool] = PoolContents()
    pool.blocks, pool.null = event.blocks, event.null_block
    return ()


def _allocated(contents: Contents, event: ev.BlocksAllocated) -> Iterator[Change]:
    pool = contents.pool(event.pool)
    leave, owner, null = pool.hashes.pop, pool.owner, pool.null
    for request, group, blocks in event.calls():
        if null in blocks:
            blocks = [block for block in blocks if block != null]
        for block in blocks:
            owner[block] = request
        evicted = [leave(block, ()) for block in blocks]
        yield Change(ALLOCATED, event.at, event.step, event.pool, request, group, blocks, evicted)


def _touched(contents: Contents, event: ev.BlocksTouched) -> Iterator[Change]:
    pool = contents.pool(event.pool)
    blocks, references = _without_null(pool, event.blocks, event.references)
    if event.request < 0:  # a connector holds blocks, whatever they contain
        found = [pool.hashes.get(block, ()) for block in blocks]
    else:
        found = [pool.hashes.get(block) or contents.name(pool, block) for block in blocks]
    head = event.at, event.step, event.pool, event.request, event.group
    yield Change(HIT, *head, blocks, found, numbers=references)


def _cached(contents: Contents, event: ev.BlocksCached) -> Iterator[Change]:
    pool = contents.pool(event.pool)
    hashes, owner = pool.hashes, pool.owner
    at, step, number = event.at, event.step, event.pool
    for named, group, _, blocks, hash_ids, ends in event.calls():
        if not blocks:
            yield Change(CACHED, at, step, number, named, group)
            continue
        rows = zip(blocks, hash_ids, ends, strict=False)
        new = [row for row in rows if row[0] != pool.null and row[1] not in hashes.get(row[0], ())]
        if event.replaced:
            gone = [block for block, _, _ in new if block in hashes]
            yield Change(EVICTED, at, step, number, -1, group, gone, [hashes.pop(block) for block in gone])
        for block, hash_id, _ in new:
            ids = hashes.get(block, ())
            hashes[block] = (*ids, hash_id) if ids and is_named(ids[-1]) else (hash_id,)
        runs = [(named, new)] if named >= 0 else groupby(new, lambda row: owner.get(row[0], -1))
        for request, some in runs:
            if entered := list(some):
                blocks, hash_ids, ends = map(list, zip(*entered, strict=True))
                yield Change(CACHED, at, step, number, request, group, blocks, (), hash_ids, ends)


def _freed(contents: Contents, event: ev.BlocksFreed) -> Iterator[Change]:
    blocks, references = _without_null(contents.pool(event.pool), event.blocks, event.references)
    head = event.at, event.step, event.pool, event.request, event.group
    yield Change(FREED, *head, blocks, numbers=references)


def _deferred(contents: Contents, event: ev.BlocksDeferred) -> Iterator[Change]:
    yield Change(DEFERRED, event.at, event.step, event.pool, event.request, event.group, event.blocks)


def _evicted(contents: Contents, event: ev.BlocksEvicted) -> Iterator[Change]:
    hashes = contents.pool(event.pool).hashes
    gone = [hashes.pop(block, ()) for block in event.blocks]
    yield Change(EVICTED, event.at, event.step, event.pool, -1, event.group, event.blocks, gone)


def _copied(contents: Contents, event: ev.BlockCopied) -> Iterator[Change]:
    pool, (source, target) = contents.pool(event.pool), event.blocks
    ids = pool.hashes.pop(source, ()) if event.moved else ()
    if ids:
        pool.hashes[target] = ids
        yield Change(MOVED, event.at, event.step, event.pool, -1, event.group, event.blocks, (ids, ids))


def _reset(contents: Contents, event: ev.PoolReset) -> Iterator[Change]:
    if event.succeeded:
        pool = contents.pool(event.pool)
        hashes, pool.hashes = pool.hashes, {}
        yield Change(RESET, event.at, event.step, event.pool, -1, -1, list(hashes), list(hashes.values()))


def _reported(contents: Contents, event: ev.BlockStatesReported) -> Iterator[Change]:
    """Of a block that was allocated since, the events say what it contains; the ledger of blocks compares."""
    pool = contents.pool(event.pool)
    found = [
        block
        for block, state in enumerate(event.states, event.first)
        if state & 2 and block not in pool.hashes and block not in pool.owner and block != pool.null
    ]
    named = [contents.name(pool, block) for block in found]
    yield Change(REPORTED, event.at, event.step, event.pool, -1, -1, found, named)


def _tables(contents: Contents, event: ev.TablesReported) -> Iterator[Change]:
    for request, group, _, blocks in event.tables():
        yield Change(TABLE, event.at, event.step, 0, request, group, blocks)


def _removed(contents: Contents, event: ev.TablesRemoved) -> Iterator[Change]:
    for request in event.requests:
        yield Change(REMOVED, event.at, 0, 0, request)


def _lost(contents: Contents, event: Any) -> Iterator[Change]:
    for pool in contents.pools.values():
        pool.hashes, pool.owner = {}, {}
    yield Change(LOST, event.at, 0)


def _raised(contents: Contents, event: ev.EngineRaised) -> Iterator[Change]:
    if event.lost:
        yield from _lost(contents, event)


def _without_null(
    pool: PoolContents, blocks: list[int], references: list[int]
) -> tuple[list[int], list[int]]:
    if pool.null not in blocks:
        return blocks, references
    rows = [row for row in zip(blocks, references, strict=True) if row[0] != pool.null]
    return [block for block, _ in rows], [count for _, count in rows]


_READS: dict[type[ev.Event], Callable[[Contents, Any], Any]] = {
    ev.PoolSeen: _seen,
    ev.BlocksAllocated: _allocated,
    ev.BlocksTouched: _touched,
    ev.BlocksCached: _cached,
    ev.BlocksFreed: _freed,
    ev.BlocksDeferred: _deferred,
    ev.BlocksEvicted: _evicted,
    ev.BlockCopied: _copied,
    ev.PoolReset: _reset,
    ev.BlockStatesReported: _reported,
    ev.TablesReported: _tables,
    ev.TablesRemoved: _removed,
    ev.Gap: _lost,
    ev.HookFailed: _lost,
    ev.EngineRaised: _raised,
}

CONTENT_EVENTS: frozenset[type[ev.Event]] = frozenset({ev.PoolCalls, *_READS})
"""The types of events that :meth:`Contents.read` makes changes of."""


class RequestContents:
    """Which contents requests have, as one KV cache group of each pool tells."""

    def __init__(self) -> None:
        self.contents = Contents()
        """What all blocks contain."""
        self._cached: dict[tuple[int, int], tuple[int, int]] = {}
        """The newest hash id of each block and its end, by pool and block."""
        self.groups: dict[int, int] = {}
        """The group that tells, by pool; of a pool that is not here, group 0."""

    def read(self, event: ev.Event) -> Iterator[tuple[int, int, int, bool]]:
        """Request, hash id and end of each block that a request caches or hits; whether it caches it."""
        cached = self._cached
        for change in self.contents.read(event):
            if change.kind == CACHED and self._tells(change):
                for block, hash_id, end in zip(change.blocks, change.ids, change.numbers, strict=True):
                    cached[change.pool, block] = hash_id, end
                    yield change.request, hash_id, end, True
            elif change.kind == HIT and self._tells(change):
                for block, ids in zip(change.blocks, change.contents, strict=True):
                    known = cached.get((change.pool, block))
                    if known is not None and known[0] in ids:
                        yield change.request, *known, False
            elif change.kind == MOVED:
                source, target = change.blocks
                if known := cached.pop((change.pool, source), None):
                    cached[change.pool, target] = known

    def _tells(self, change: Change) -> bool:
        return change.group < 0 or change.group == self.groups.get(change.pool, 0)
