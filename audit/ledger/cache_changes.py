"""What entered and left an engine's prefix cache, by hash id, read from the events of level ``blocks``.

The ledger of blocks keeps the present state; this reader keeps the order of changes, so that another account
of the same cache, such as the engine's KV events, can be compared with it.

An observer may emit a change some steps after the engine made it, so each change has the earliest and the
latest time at which it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from .. import events as ev
from .. import pool_calls
from .blocks.pool_contents import PoolContents
from .blocks.split_calls import post

STORED, REMOVED, CLEARED = ev.STORED, ev.REMOVED_BLOCKS, ev.CLEARED

EMITTED_STEPS = 9
"""A change is emitted at most eight steps after the step that made it."""


class Change(NamedTuple):
    """A hash entered the cache with a block, or left it; or the cache was cleared (hash id 0).

    ``earliest`` and ``at`` bound the time of the change, in microseconds since the engine started.
    """

    kind: int
    hash_id: int
    earliest: int
    at: int
    step: int
    pool: int
    block: int
    request: int


class CacheChanges:
    """The changes of one engine's prefix cache, in order."""

    postings: ClassVar[dict[type[ev.Event], Callable[[Any, Any], None]]]
    """What reads each kind of event."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        """Every change so far."""
        self.cleared: dict[int, list[int]] = {}
        """By index of a CLEARED change: the hash ids that were in the cache."""
        self.whole = True
        """Whether every change since the engine began is here."""
        self.pools: dict[int, PoolContents] = {}
        """What each pool holds."""
        self._pool_seen: set[int] = set()
        """Pools whose first description was read; if a pool had content by then, ``whole`` is false."""
        self._steps: deque[tuple[int, int]] = deque()
        """Step and time of the last events that have both."""

    def feed(self, event: ev.Event) -> None:
        """Read one event, in the journal's order."""
        post(self, event, self.postings)
        if type(event) is ev.PoolCalls:
            self._note(event.step, event.at)

    def taken(self) -> tuple[list[Change], dict[int, list[int]]]:
        """The changes since the last call, which are then no longer kept, and what each reset dropped."""
        changes, cleared = self.changes, self.cleared
        self.changes, self.cleared = [], {}
        return changes, cleared

    # --- the engine ---------------------------------------------------------------------------------

    def _pool(self, event: ev.PoolSeen) -> None:
        if event.pool not in self._pool_seen:
            self._pool_seen.add(event.pool)
            self.whole = self.whole and not event.cached_hashes

    def _lost(self, event: ev.Gap | ev.HookFailed) -> None:
        self.whole = False
        for pool in self.pools.values():
            pool.forget()

    def _contents(self, event: Any) -> PoolContents:
        return self.pools.setdefault(event.pool, PoolContents())

    def _stepped(self, event: Any) -> None:
        self._note(event.step, event.at)

    def _note(self, step: int, at: int) -> None:
        if not self._steps or self._steps[-1][0] < step:
            self._steps.append((step, at))
            while len(self._steps) > 1 and self._steps[1][0] <= step - EMITTED_STEPS:
                self._steps.popleft()

    # --- hashes ---------------------------------------------------------------------------------------

    def _add(self, kind: int, hash_id: int, event: Any, block: int, request: int = -1) -> None:
        earliest = self._steps[0][1] if self._steps else 0
        change = Change(kind, hash_id, earliest, event.at, event.step, event.pool, block, request)
        self.changes.append(change)

    def _drop(self, event: Any, block: int) -> None:
        for hash_id in self._contents(event).hashes.pop(block, ()):
            self._add(REMOVED, hash_id, event, block)

    def _cached(self, event: ev.BlocksCached) -> None:
        contents = self._contents(event)
        for request, _, block, hash_id, _ in contents.cached(event):
            if event.replaced:
                self._drop(event, block)
            held = contents.hashes.get(block, ())
            if hash_id not in held:
                contents.hashes[block] = (*held, hash_id)
                self._add(STORED, hash_id, event, block, request)
        if not all(blocks for _, _, _, blocks, _, _ in event.calls()):  # it is not known which were cached
            self.whole = False

    def _allocated(self, event: pool_calls.BlocksAllocated) -> None:
        for request, _, blocks in event.calls():
            for block, ids in self._contents(event).allocate(request, blocks):
                for hash_id in ids:
                    self._add(REMOVED, hash_id, event, block)

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        for block in event.blocks:
            self._drop(event, block)

    def _copied(self, event: ev.BlockCopied) -> None:
        if event.moved:
            self._contents(event).move(*event.blocks)

    def _reset(self, event: ev.PoolReset) -> None:
        if event.succeeded:
            hashes = self._contents(event).hashes
            self.cleared[len(self.changes)] = [hash_id for ids in hashes.values() for hash_id in ids]
            hashes.clear()
            self._add(CLEARED, 0, event, -1)


CacheChanges.postings = {
    ev.PoolSeen: CacheChanges._pool,
    ev.Gap: CacheChanges._lost,
    ev.HookFailed: CacheChanges._lost,
    ev.Stepped: CacheChanges._stepped,
    ev.BlocksCached: CacheChanges._cached,
    ev.BlocksEvicted: CacheChanges._evicted,
    ev.BlockCopied: CacheChanges._copied,
    ev.PoolReset: CacheChanges._reset,
    pool_calls.BlocksAllocated: CacheChanges._allocated,
}
