"""How an engine used its blocks: states over time, evictions, lifetimes, idle times, reuse distances.

Kept from the pool calls of level ``blocks``, for any number of pools and groups. A block is *running* while a
request or the connector holds it, *cached* while it is free and its content can be hit, and *empty* while it
is free without content. Where the trace begins in the middle, free blocks are *unknown* until they are used
or reported.

The stay of content in a block is a :class:`Stay`: from the caching to the eviction. Quantiles are of counts
in buckets that are 9 % wide, so memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import Any

import msgspec

from .. import causes
from .. import events as ev
from ..figures.sums import Sums
from ..ledger.blocks import contents
from ..ledger.blocks.contents import CONTENT_EVENTS, Change

STATES = ("running", "cached", "empty", "unknown")

PER_OCTAVE = 8
"""Buckets of a distribution between a number and its double."""

ZERO = -(1 << 30)
"""The bucket of the number zero."""

DROPPED = "dropped"
"""How content left its block: the engine took the hash away, for example after a failed load."""


class Quantiles(Sums):
    """A distribution of positive numbers in buckets of equal ratio; zero has a bucket of its own."""

    counts: dict[int, int] = {}

    def add(self, number: float) -> None:
        """Count one number."""
        bucket = _bucket(number)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    @classmethod
    def of(cls, numbers: dict[float, int]) -> Quantiles:
        """The distribution of numbers that are the middles of buckets, and how often each was counted."""
        found = cls()
        for number, count in numbers.items():
            found.counts[_bucket(number)] = count
        return found

    @staticmethod
    def number(bucket: int) -> float:
        """The middle of a bucket."""
        return float(2 ** (bucket / PER_OCTAVE)) if bucket > ZERO else 0.0

    def at(self, share: float) -> float | None:
        """The number below which this share of all numbers is; None without any."""
        wanted = share * sum(self.counts.values())
        for bucket in sorted(self.counts):
            wanted -= self.counts[bucket]
            if wanted <= 0:
                return self.number(bucket)
        return None


def _bucket(number: float) -> int:
    return round(PER_OCTAVE * log2(number)) if number > 0 else ZERO


class Occupancy(msgspec.Struct, frozen=True):
    """The blocks of all pools by state after an event, and what happened since the event before."""

    at: int
    running: int
    cached: int
    empty: int
    unknown: int
    allocated: int
    evicted: int
    hits: int


class Stay(msgspec.Struct):
    """Content in a block. Times are microseconds since the engine started; -1: not known, or not yet."""

    pool: int
    block: int
    request: int
    """The request that cached the content."""
    cached_at: int
    hits: int = 0
    released_at: int = -1
    """When the block was last released."""
    left_at: int = -1
    left_by: str = ""
    released_after: int = 0
    """How many blocks had been allocated when the block was last released."""


class BlockUse(Sums):
    """What :class:`BlockStates` found, over a whole trace; the use of several engines can be merged."""

    blocks: int = 0
    microseconds: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STATES, 0))
    """Block-microseconds in each state."""
    most_running: int = 0
    allocated: int = 0
    cached: int = 0
    hits: int = 0
    evicted: int = 0
    never_hit: int = 0
    """Evicted content that nobody had hit."""
    lifetimes: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds from the caching to the eviction."""
    idle: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds from the last release to the eviction."""
    reuse_seconds: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds from a release to the next hit."""
    reuse_blocks: Quantiles = msgspec.field(default_factory=Quantiles)
    """Blocks allocated between a release and the next hit."""

    def follow(self, later: BlockUse) -> None:
        """Add what the same engine did later."""
        most = max(self.most_running, later.most_running)
        self.merge(later)
        self.most_running, self.blocks = most, later.blocks


class _Pool(msgspec.Struct):
    """One pool. ``references`` has every block that was seen; the others are as at the beginning."""

    null: int
    blocks: int
    free: int
    cached: int = 0
    unknown: int = 0
    references: dict[int, int] = {}
    stays: dict[int, Stay] = {}


class BlockStates(msgspec.Struct):
    """Follows the pools of one engine. It consists of plain data, so a checkpoint can hold it."""

    use: BlockUse = msgspec.field(default_factory=BlockUse)
    """The sums so far."""
    distributed: bool = True
    """Whether ``use`` has its distributions; the caller can make others of ``ended`` and ``idle_seconds``."""
    seen: bool = False
    """Whether the journal has block events."""
    now: dict[str, int] | None = None
    """Blocks by state after the last event about blocks; None before the first."""
    ended: list[Stay] = []
    """The stays that the last event ended."""
    idle_seconds: list[float] = []
    """For each block that the last event hit and no request held: the seconds since its release."""
    pools: dict[int, _Pool] = {}
    at: int = 0
    before: tuple[int, int, int] = (0, 0, 0)
    allocations: int = 0
    """Blocks that were allocated; unlike ``use.allocated`` it is never taken."""

    def feed(self, event: ev.Event, changes: Sequence[Change]) -> Occupancy | None:
        """Read one event and its ``changes``; returns the new occupancy if the event is about blocks."""
        kind = type(event)
        if kind not in CONTENT_EVENTS:
            return None
        self.ended, self.idle_seconds = [], []
        if type(event) is ev.PoolSeen:
            self._seen(event)
        elif type(event) is ev.BlockStatesReported:
            self._states(event)
        for change in changes:
            handler = _CHANGES.get(change.kind)
            if handler is not None and (change.pool in self.pools or change.kind == contents.LOST):
                handler(self, self.pools.get(change.pool), change)
        return self._occupancy(event.at) if self.pools else None

    def taken(self) -> BlockUse:
        """The sums since the last call, which leave; how many blocks there are and run stays."""
        use, running = self.use, self.now["running"] if self.now is not None else 0
        self.use, self.before = BlockUse(blocks=use.blocks, most_running=running), (0, 0, 0)
        return use

    def open_stays(self) -> list[Stay]:
        """The content that is in the cache at the end of the trace."""
        return [stay for pool in self.pools.values() for stay in pool.stays.values()]

    # --- events ---------------------------------------------------------------------------------------

    def _seen(self, event: ev.PoolSeen) -> None:
        self.seen = True
        pool = self.pools.get(event.pool)
        if pool is None:
            blocks = event.blocks - (event.null_block >= 0)
            pool = self.pools[event.pool] = _Pool(event.null_block, blocks, event.free_blocks)
            pool.unknown = event.free_blocks if event.cached_hashes else 0
            self.use.blocks += blocks
        pool.free = event.free_blocks

    def _states(self, event: ev.BlockStatesReported) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            return
        for block, state in enumerate(event.states, event.first):
            if block != pool.null and block not in pool.references:
                self._know(pool, block)
                pool.references[block] = state >> 3
        if event.free_blocks >= 0:
            pool.free = event.free_blocks

    # --- changes --------------------------------------------------------------------------------------

    def _allocated(self, pool: _Pool, change: Change) -> None:
        for block in change.blocks:
            self._leave(pool, block, change.at, causes.EVICTED, free=True)
            self._know(pool, block)
            pool.references[block] = 1
        count = len(change.blocks)
        pool.free -= count
        self.use.allocated += count
        self.allocations += count

    def _touched(self, pool: _Pool, change: Change) -> None:
        for block, references in zip(change.blocks, change.numbers, strict=True):
            stay = pool.stays.get(block)
            if references == 1:
                pool.free -= 1
                pool.cached -= stay is not None
                self._know(pool, block)
            pool.references[block] = references
            if change.request < 0:
                continue
            self.use.hits += 1
            if stay is None:
                stay = pool.stays[block] = Stay(change.pool, block, -1, -1)
            stay.hits += 1
            if references == 1 and stay.released_at >= 0:
                idle = (change.at - stay.released_at) / 1e6
                self.idle_seconds.append(idle)
                if self.distributed:
                    self.use.reuse_seconds.add(idle)
                    self.use.reuse_blocks.add(self.allocations - stay.released_after)

    def _freed(self, pool: _Pool, change: Change) -> None:
        for block, references in zip(change.blocks, change.numbers, strict=True):
            pool.references[block] = references
            if references:
                continue
            pool.free += 1
            stay = pool.stays.get(block)
            if stay is not None:
                pool.cached += 1
                stay.released_at = change.at
                stay.released_after = self.allocations

    def _cached(self, pool: _Pool, change: Change) -> None:
        for block in change.blocks:
            stay = pool.stays.get(block)
            if stay is None:
                pool.stays[block] = Stay(change.pool, block, change.request, change.at)
                pool.cached += pool.references.get(block, 1) == 0
            elif stay.cached_at >= 0:
                continue
            else:
                stay.request, stay.cached_at = change.request, change.at
            self.use.cached += 1

    def _reported(self, pool: _Pool, change: Change) -> None:
        for block in change.blocks:
            if block not in pool.stays:
                pool.stays[block] = Stay(change.pool, block, -1, -1)
                pool.cached += not pool.references.get(block, 1)

    def _moved(self, pool: _Pool, change: Change) -> None:
        source, target = change.blocks
        stay = pool.stays.pop(source, None)
        if stay is not None:
            pool.cached += (not pool.references.get(target, 1)) - (not pool.references.get(source, 1))
            stay.block = target
            pool.stays[target] = stay

    def _evicted(self, pool: _Pool, change: Change) -> None:
        for block in change.blocks:
            self._leave(pool, block, change.at, DROPPED, free=not pool.references.get(block, 1))

    def _reset(self, pool: _Pool, change: Change) -> None:
        for block in list(pool.stays):
            self._leave(pool, block, change.at, causes.RESET, free=not pool.references.get(block, 1))
        pool.unknown = 0

    def _lost(self, _: _Pool, __: Change) -> None:
        self.pools.clear()
        self.use.blocks = 0

    # --- blocks ---------------------------------------------------------------------------------------

    def _know(self, pool: _Pool, block: int) -> None:
        """The state of a block is known from now on; before, the block was free."""
        if block not in pool.references:
            pool.references[block] = 0
            pool.unknown = max(0, pool.unknown - 1)

    def _leave(self, pool: _Pool, block: int, at: int, how: str, *, free: bool) -> None:
        """The content of a block leaves the cache."""
        stay = pool.stays.pop(block, None)
        if stay is None:
            return
        pool.cached -= free
        stay.left_at, stay.left_by = at, how
        if how == causes.EVICTED:
            self.use.evicted += 1
            self.use.never_hit += not stay.hits
            if self.distributed and stay.cached_at >= 0:
                self.use.lifetimes.add((at - stay.cached_at) / 1e6)
            if self.distributed and stay.released_at >= 0:
                self.use.idle.add((at - stay.released_at) / 1e6)
        self.ended.append(stay)

    def _occupancy(self, at: int) -> Occupancy:
        use, pools = self.use, self.pools.values()
        free, cached = sum(pool.free for pool in pools), sum(pool.cached for pool in pools)
        unknown = sum(pool.unknown for pool in pools)
        now = {
            "running": sum(pool.blocks for pool in pools) - free,
            "cached": cached,
            "empty": free - cached - unknown,
            "unknown": unknown,
        }
        if self.now is not None:
            for name, blocks in self.now.items():
                use.microseconds[name] += blocks * (at - self.at)
        use.most_running = max(use.most_running, now["running"])
        before, self.before = self.before, (use.allocated, use.evicted, use.hits)
        self.now, self.at = now, at
        since = [new - old for new, old in zip(self.before, before, strict=True)]
        return Occupancy(at, now["running"], cached, now["empty"], unknown, since[0], since[1], since[2])


_CHANGES: dict[int, Callable[[BlockStates, Any, Change], None]] = {
    contents.ALLOCATED: BlockStates._allocated,
    contents.HIT: BlockStates._touched,
    contents.CACHED: BlockStates._cached,
    contents.FREED: BlockStates._freed,
    contents.EVICTED: BlockStates._evicted,
    contents.RESET: BlockStates._reset,
    contents.MOVED: BlockStates._moved,
    contents.REPORTED: BlockStates._reported,
    contents.LOST: BlockStates._lost,
}
