"""One engine's prefix cache and the requests that used it, as they were a short time ago.

The blocks of a prompt are known only once they are cached. So both the cache and the index that is kept from
its KV events are kept with what they were: :data:`MOST_RECENT` changes of each. A request that arrived before
that is counted and not compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .. import events as ev
from ..bounded_tables import keep_newest
from ..ledger.blocks import contents
from ..ledger.blocks.contents import Change as PoolChange
from ..ledger.blocks.contents import is_named
from ..ledger.blocks.ledger import pool_of
from ..ledger.kv_events import CLEARED, STORED, CacheChanges, Change
from .group_boundaries import Group, Groups, groups_of

MOST_RECENT = 1 << 16
"""Changes of one cache, and of its index, that are kept."""

MOST_REQUESTS = 1 << 12
"""Requests of one engine that wait for their comparison."""


class RecentCounts(msgspec.Struct, dict=True, eq=False):
    """How many blocks had each hash id, now and a short time ago."""

    now: dict[int, int] = {}
    """Blocks by hash id."""
    last: float = 0.0
    """The time of the last change."""

    def __post_init__(self) -> None:
        self._changes: dict[int, deque[tuple[float, int, Change | None]]] = {}
        """By hash id: time, blocks before, and what changed."""
        self._order: deque[int] = deque()
        """The hash ids of these changes, in order."""
        self._dropped = 0.0
        """The time of the last change that is no longer kept."""

    @property
    def since(self) -> float:
        """The time from which changes are known."""
        return self._dropped if self._order else self.last

    def add(self, at: float, hash_id: int, kind: int, change: Change | None = None) -> None:
        """A block with this hash id was stored, removed, or dropped by a clearing."""
        before = self.now.get(hash_id, 0)
        after = 0 if kind == CLEARED else max(0, before + (1 if kind == STORED else -1))
        if after:
            self.now[hash_id] = after
        else:
            self.now.pop(hash_id, None)
        if not self._order:
            self._dropped = self.last
        self.last = at
        self._changes.setdefault(hash_id, deque()).append((at, before, change))
        self._order.append(hash_id)
        if len(self._order) > MOST_RECENT:
            self._drop()

    def clear(self, at: float, change: Change | None = None) -> None:
        """Every block was dropped."""
        for hash_id in list(self.now):
            self.add(at, hash_id, CLEARED, change)

    def count(self, hash_id: int, at: float) -> int:
        """How many blocks had this hash id after all changes up to ``at``."""
        for when, before, _ in self._changes.get(hash_id, ()):
            if when > at:
                return before
        return self.now.get(hash_id, 0)

    def fell_last(self, hash_id: int, at: float) -> bool:
        """Whether the last change of this hash id up to ``at`` was a removal, as far as it is kept."""
        before = [count for when, count, _ in self._changes.get(hash_id, ()) if when <= at]
        return bool(before) and self.count(hash_id, at) < before[-1]

    def changes(self, hash_id: int, at: float) -> list[Change]:
        """What changed this hash id up to ``at``, as far as it is kept."""
        recent = self._changes.get(hash_id, ())
        return [change for when, _, change in recent if when <= at and change is not None]

    def forget(self) -> None:
        """Keep only what is cached now."""
        self._changes.clear()
        self._order.clear()

    def _drop(self) -> None:
        hash_id = self._order.popleft()
        changes = self._changes[hash_id]
        self._dropped = changes.popleft()[0]
        if not changes:
            del self._changes[hash_id]


class OpenRequest(msgspec.Struct):
    """A request whose comparison waits. ``at``: microseconds since the engine started."""

    request_id: str
    number: int
    prompt_tokens: int
    arrived_at: int
    admitted_at: int = -1
    step: int = 0
    changes: int = 0
    """How many changes of the cache came before the first admission was emitted."""
    local: int = 0
    external: int = 0
    valid: int = -1
    """The first position that a failed load left invalid; -1: none did."""
    hashes: list[int] = []
    """Of the blocks of the group that is followed."""
    waiting: list[tuple[int, int, int]] = []
    """Group, end and hash id of other groups' blocks, until the followed group has cached the same tokens."""


class RoutedCache(CacheChanges, eq=False):
    """Reads the changes of a cache, and the requests that used it."""

    block_tokens: int = 0
    """Tokens of a block; 0: the engine has no KV cache group of full attention in its only pool."""
    followed: int = 0
    """The KV cache group whose blocks name a prompt: the first of full attention."""
    others: list[Group] = []
    """The other groups, of each of which a hit needs something."""
    in_groups: dict[tuple[int, int, int], int] = {}
    """The hash id of a block of another group, by the group, its end, and the followed group's hash id of
    the block with its last token, which stands for all tokens before."""
    number: int = 0
    """How many changes there were."""
    recent: RecentCounts = msgspec.field(default_factory=RecentCounts)
    """The cache, by the number of changes."""
    requests: dict[int, OpenRequest] = {}
    """Requests that have not ended, by number."""
    complete: list[OpenRequest] = []
    """Requests that have ended and are not compared yet, in this order."""
    left_out: int = 0
    """Requests that were dropped since the last comparison, because too many waited."""
    arrived: int = 0
    """Requests that were there when the journal began, or arrived since."""
    present: set[int] = set()
    """The numbers of the requests that have not ended."""

    def feed(self, event: ev.Event, changes: Sequence[PoolChange]) -> None:
        """Read one event and its changes, see the base."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        super().feed(event, changes)

    def change(self, change: PoolChange) -> None:
        """Follow one change of a pool."""
        super().change(change)
        if change.kind == contents.HIT:
            self._touched(change)
        elif change.kind == contents.CACHED and self.block_tokens:
            self._cached(change)

    def _pool(self, event: ev.PoolSeen) -> None:
        groups = None if event.pool else groups_of(pool_of(event))
        self.followed, self.block_tokens, self.others = groups or (0, 0, [])

    @property
    def groups(self) -> Groups:
        """What a hit needs of each KV cache group."""
        return Groups(self.followed, self.block_tokens, self.others)

    def in_group(self, group: int, end: int, hashes: Sequence[int]) -> int:
        """The hash id of the block of another group that ends at a token of a prompt; 0: not known.

        ``hashes`` are those of the followed group.
        """
        place = (end - 1) // self.block_tokens
        return self.in_groups.get((group, end, hashes[place]), 0) if place < len(hashes) else 0

    def _add(self, kind: int, hash_id: int, of: PoolChange, block: int, request: int = -1) -> None:
        super()._add(kind, hash_id, of, block, request)
        self.number += 1
        if not self.block_tokens:
            return
        if kind == CLEARED:
            self.recent.clear(self.number, self.changes[-1])
        else:
            self.recent.add(self.number, hash_id, kind, self.changes[-1])

    def _snapshot(self, event: ev.Snapshot) -> None:
        for row in event.rows:
            self._arrive(row.request)

    def _arrive(self, request: int) -> None:
        self.arrived += request not in self.present
        self.present.add(request)

    def _added(self, event: ev.RequestAdded) -> None:
        self._arrive(event.request)
        if not self.block_tokens:
            return
        self.requests[event.request] = OpenRequest(
            event.request_id, event.request, event.prompt_tokens, event.at
        )
        self.left_out += len(keep_newest(self.requests, MOST_REQUESTS))

    def _admitted(self, event: ev.Admitted) -> None:
        request = self.requests.get(event.request)
        if request is None or event.resumed or request.admitted_at >= 0:
            return
        request.admitted_at, request.step, request.changes = event.at, event.step, self.number
        request.local, request.external = event.local_tokens, event.external_tokens

    def _load_failed(self, event: ev.LoadFailed) -> None:
        request = self.requests.get(event.request)
        if request is not None and request.valid < 0:
            request.valid = event.computed_tokens

    def _touched(self, change: PoolChange) -> None:
        request = self.requests.get(change.request)
        if request is not None and change.group == self.followed:
            for place, ids in enumerate(change.contents):
                self._put(request, place, ids[-1] if ids and is_named(ids[-1]) else 0)

    def _cached(self, change: PoolChange) -> None:
        request = self.requests.get(change.request)
        if request is None:
            return
        for hash_id, end in zip(change.ids, change.numbers, strict=True):
            if change.group != self.followed:
                request.waiting.append((change.group, end, hash_id))
                self._join(request, (end - 1) // self.block_tokens)
            elif not end % self.block_tokens:
                self._put(request, end // self.block_tokens - 1, hash_id)

    def _put(self, request: OpenRequest, place: int, hash_id: int) -> None:
        """Note the hash id of one block of a prompt. A load that fails later is known by the end only."""
        if place >= request.prompt_tokens // self.block_tokens and not self.others:
            return
        hashes = request.hashes
        hashes += [0] * (place + 1 - len(hashes))
        hashes[place] = hash_id
        self._join(request, place)

    def _join(self, request: OpenRequest, place: int) -> None:
        """Name the blocks of other groups whose last token is in this block of the followed group."""
        followed = request.hashes[place] if place < len(request.hashes) else 0
        if not followed or not request.waiting:
            return
        waiting, request.waiting = request.waiting, []
        for group, end, hash_id in waiting:
            if (end - 1) // self.block_tokens == place:
                self.in_groups[group, end, followed] = hash_id
            else:
                request.waiting.append((group, end, hash_id))
        keep_newest(self.in_groups, MOST_RECENT)

    def _finished(self, event: ev.Finished) -> None:
        self.present.discard(event.request)
        request = self.requests.pop(event.request, None)
        if request is not None and request.admitted_at >= 0:
            self.complete.append(request)
            if len(self.complete) > MOST_REQUESTS:
                del self.complete[0]
                self.left_out += 1

    def take(self, before: int, *, ended: bool) -> tuple[list[OpenRequest], int]:
        """The ended requests that were admitted up to a time, and how many were dropped meanwhile.

        ``ended``: nothing follows, so those that are open are taken as they are.
        """
        if ended:
            self.complete += [one for one in self.requests.values() if one.admitted_at >= 0]
            self.requests = {}
        ready = [one for one in self.complete if ended or one.admitted_at <= before]
        self.complete = [one for one in self.complete if not ended and one.admitted_at > before]
        dropped, self.left_out = self.left_out, 0
        return ready, dropped


_HANDLERS: dict[type[ev.Event], Callable[[RoutedCache, Any], None]] = {
    ev.Snapshot: RoutedCache._snapshot,
    ev.RequestAdded: RoutedCache._added,
    ev.Admitted: RoutedCache._admitted,
    ev.LoadFailed: RoutedCache._load_failed,
    ev.Finished: RoutedCache._finished,
    ev.PoolSeen: RoutedCache._pool,
}
