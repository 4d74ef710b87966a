"""What a router's index promises for each request, beside what the engine then had.

The index is kept from recorded KV events in the order in which they were received. When a request arrives,
it names how many of the request's blocks each engine holds; the *predicted* tokens are the most that any
engine has, and the *found* tokens are the local and loaded external tokens of the request's first admission.
Each token of the difference has one cause.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from .. import events as ev
from ..bounded_tables import keep_newest
from ..causes import BOUNDARY, GROUPS, STATE, WINDOW
from ..figures.sums import add_tokens
from ..ledger.blocks import contents
from ..ledger.blocks.contents import Change as PoolChange
from ..ledger.blocks.contents import is_named
from ..ledger.blocks.ledger import pool_of
from ..ledger.kv_events import CLEARED, GPU, STORED, CacheChanges, Change, batch_rows, kv_events
from .cache_misses import Group, Groups, common_boundary, groups_of, lacking

# --- One engine's prefix cache and the requests that used it, as they were a short time ago.
#
# The blocks of a prompt are known only once they are cached. So both the cache and the index that is kept
# from its KV events are kept with what they were: :data:`MOST_RECENT` changes of each. A request that
# arrived before that is counted and not compared.

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


# --- Indexes of routers that are replayed beside our own: what they promise of the caches of several
# engines.


class Index(Protocol):
    """A router's index of the caches of several engines."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        """Take one batch of an engine's KV events."""

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many of these blocks, from the first on, each engine holds."""


class TokensIndex:
    """An index that knows the tokens of blocks and not their salt or adapter.

    ``contents``: by hash id, the keyed hash of all tokens up to the end of the block. A block without it is
    only itself.
    """

    def __init__(self, contents: Mapping[int, int]) -> None:
        self._contents = contents
        self._held: dict[int, Counter[int]] = {}
        """By engine: how many blocks with each content it holds, as its KV events say."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        held = self._held.setdefault(engine, Counter())
        for event, tier in kv_events(batch):
            if event.kind == CLEARED:
                held.clear()
            elif tier in ("", GPU):
                content = self._contents.get(event.hash_id, event.hash_id)
                held[content] += 1 if event.kind == STORED else -1
                if held[content] <= 0:
                    del held[content]

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        return _leading(self._held, [self._contents.get(hash_id, hash_id) for hash_id in hashes])


class UncountedIndex:
    """An index that drops a hash at its first removal, also if the engine has other blocks with it."""

    def __init__(self, contents: Mapping[int, int]) -> None:
        self._held: dict[int, set[int]] = {}
        """By engine: the hash ids that it holds, as the index has it."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        held = self._held.setdefault(engine, set())
        for event, tier in kv_events(batch):
            if event.kind == CLEARED:
                held.clear()
            elif tier in ("", GPU):
                (held.add if event.kind == STORED else held.discard)(event.hash_id)

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        return _leading(self._held, hashes)


def _leading(held: Mapping[int, Container[int]], wanted: Sequence[int]) -> dict[int, int]:
    """How many of what is wanted, from the first on, each engine holds; engines with none are left out."""
    found = {}
    for engine, has in held.items():
        if blocks := next((place for place, one in enumerate(wanted) if one not in has), len(wanted)):
            found[engine] = blocks
    return found


def contents_of(batches: Iterable[ev.KVEventsReceived]) -> dict[int, int]:
    """By hash id, the keyed hash of the tokens up to the end of the block, as far as it was recorded."""
    return {
        hash_id: content
        for batch in batches
        for row in batch_rows(batch)
        for hash_id, content in zip(row.ids, row.contents, strict=False)
        if content
    }


# --- How exact a router's index of one engine is that is kept from KV events: since when, and what it
# lacks.
#
# Exact is an index that has every store and removal since the engine began, or since its cache was last
# reset. What it lacks by its own rules (it can't name a block, or counts it wrongly) is counted beside
# that.

LACKS = {
    "reported-twice": "stores of blocks that were cached already: an index that counts blocks promises them "
    "after their removal",
    "other-size": "blocks of another size than the engine's: they match no prompt",
    "unknown-parent": "blocks whose parent is not in the index: a tree refuses them",
    "keyed": "blocks with a salt, an adapter or an image: an index of tokens gives them to other prompts",
    "next-token": "blocks whose hash covers the next token: an index of tokens gives them to prompts that "
    "differ there",
    "other-groups": "blocks of other KV cache groups: a hit needs them, an index of tokens does not",
    "other-tiers": "blocks in other tiers, or of other engines: they are not in the index",
}
"""What an index can lack, in words. All are blocks."""


class IndexState(msgspec.Struct):
    """Of one engine's KV events. Times are Unix times at which batches were published; 0.0: never."""

    first: float = 0.0
    """The first batch."""
    cleared: float = 0.0
    """The last reset of the cache."""
    lost: float = 0.0
    """The last batch before which some were lost."""
    lacks: dict[str, int] = {}

    @property
    def exact_since(self) -> float | None:
        """Since when the index is exact; None: it is not."""
        if not self.first or self.cleared < self.lost:
            return None
        return self.cleared if self.lost else self.first

    def take(self, batch: ev.KVEventsReceived, held: Container[int], group: int, block_tokens: int) -> None:
        """Take a batch of the engine whose followed ``group`` has blocks of so many tokens.

        ``held``: the hash ids that the index holds before the batch.
        """
        self.first = self.first or batch.published_seconds
        before: set[int] = set()
        for row in batch_rows(batch):
            if row.kind == CLEARED:
                self.cleared = batch.published_seconds
                continue
            blocks = len(row.ids)
            if row.tier not in ("", GPU):
                self._lack("other-tiers", blocks * (row.kind == ev.STORED))
            elif row.kind == ev.STORED:
                other = row.group not in (-1, group)
                self._lack("other-groups", blocks * other)
                self._lack("other-size", blocks * (not other and row.block_tokens != block_tokens))
                known = not row.parent or row.parent in held or row.parent in before
                self._lack("unknown-parent", blocks * (not known))
                self._lack("keyed", blocks * bool(row.flags & ev.KEYED))
                self._lack("next-token", blocks * bool(row.flags & ev.LOOKAHEAD))
                before.update(row.ids)

    def _lack(self, what: str, blocks: int) -> None:
        if blocks:
            add_tokens(self.lacks, what, blocks)


NEVER_STORED = "never-stored"
EVICTED = "evicted-since"
EVENT_LOST = "event-lost"
ELSEWHERE = "routed-elsewhere"
LOAD_FAILED = "load-failed"
OTHER_SALT = "other-salt-or-adapter"
RESTARTED = "engine-restarted"
LAST_TOKEN = "last-token"
NOT_USED = "not-used"
STORED_SINCE = "stored-since"
EXTERNAL = "external"
PART = "part-of-a-block"
COPY_REMOVED = "copy-removed"
INDEX = "index-rule"
UNKNOWN = "unknown"

MISSED = {
    NEVER_STORED: "the engine never had the block",
    OTHER_SALT: "the same tokens are cached under another salt or adapter",
    RESTARTED: "in the cache of the engine before the restart, and not in that of the new one",
    EVICTED: "evicted or reset, and its KV event had not come when the request arrived",
    EVENT_LOST: "evicted or reset, and the KV event that says so was lost",
    ELSEWHERE: "in the cache of another engine than the one that got the request",
    LOAD_FAILED: "promised by the connector, and the load failed",
    LAST_TOKEN: "the block holds the prompt's last token, which is always computed",
    NOT_USED: "in the engine's cache, and the request did not use it",
    INDEX: "promised, and the KV events that had come by then do not say so",
    WINDOW: "a group of sliding windows lacked what it needs before the same boundary",
    STATE: "a group of states lacked the state at the same boundary",
    GROUPS: "another KV cache group of full attention lacked the block",
    BOUNDARY: "the blocks of the KV cache groups do not end together there",
    UNKNOWN: "the journal does not hold the engine's cache at that time",
}
"""Causes of tokens that were predicted and not found."""

SURPLUS = {
    STORED_SINCE: "cached, and its KV event had not come when the request arrived",
    EVENT_LOST: "cached, and the KV event that says so was lost",
    EXTERNAL: "loaded by the connector, of whose store the index knows nothing",
    PART: "a part of a block; the index knows whole blocks",
    COPY_REMOVED: "cached as another block of the same tokens, when a KV event said that one was removed",
    INDEX: "announced, and the index does not hold it by a rule of its own",
    UNKNOWN: "cached before the recording or the journal began",
}
"""Causes of tokens that were found and not predicted."""


class RoutedRequest(NamedTuple):
    """A request as its engine's journal has it. Times are Unix times."""

    request_id: str
    number: int
    engine: int
    prompt_tokens: int
    hashes: list[int]
    arrived: float
    step: int
    changes: int
    """How many changes of the cache came before the first admission was emitted."""
    local: int
    external: int
    failed: int
    """External tokens whose load failed."""


class EngineSide(NamedTuple):
    """An engine that a router can choose: its cache, and what its KV events announced."""

    cache: RoutedCache
    announced: RecentCounts
    """What the KV events announced, by the Unix time at which they were received."""
    by_tokens: RecentCounts
    """The same by the hash of the tokens; empty if that is not known."""
    began: float
    ended: float
    """Unix time after which the engine was gone: a router sends it nothing then. Infinity: it runs."""
    lost: Mapping[int, Change]
    """The last change of each hash id whose last change was in a gap of the KV events."""
    lost_changes: Container[Change]
    """The changes that were in a gap of the KV events."""
    address: object
    """Where the engine publishes: an engine that was restarted has that of the one before."""
    heard: float
    """Unix time at which the first batch was received; infinity: none was."""

    def at(self, request: RoutedRequest, hash_id: int) -> tuple[bool | None, Change | None]:
        """Whether the hash was in the cache at the request's lookup (None: never), and the last change.

        What the request itself cached in the step of its admission came after its lookup.
        """
        changes = self.cache.recent.changes(hash_id, request.changes)
        own = [
            change
            for change in changes
            if change.request == request.number and change.step >= request.step and change.kind == STORED
        ]
        others = [change for change in changes if change not in own]
        last = others[-1] if others else self.lost.get(hash_id)
        blocks = self.cache.recent.count(hash_id, request.changes) - len(own)
        return (None if last is None and blocks <= 0 else blocks > 0), last


Sides = Mapping[int, EngineSide]
"""The engines in one router's index, by number."""

Contents = Mapping[int, int]
"""By hash id, the keyed hash of the tokens up to the end of the block."""


class IndexThen(NamedTuple):
    """Our own index, as it was when a request arrived: the number of blocks with each hash id, by engine."""

    sides: Sides
    arrived: float
    contents: Contents

    def has(self, engine: int, hash_id: int) -> bool:
        """Whether an engine is thought to hold a block with this hash id."""
        return self.sides[engine].announced.count(hash_id, self.arrived) > 0

    def has_tokens(self, engine: int, hash_id: int) -> bool:
        """Whether an engine is thought to hold a block with the tokens of this one."""
        if not self.contents:
            return self.has(engine, hash_id)
        content = self.contents.get(hash_id, hash_id)
        return self.sides[engine].by_tokens.count(content, self.arrived) > 0

    def first(self, engine: int, request: RoutedRequest) -> int:
        """How many of a request's blocks, from the first on, can be hit on one engine, by the index.

        They end at a boundary at which the engine has what every KV cache group needs.
        """
        hashes = request.hashes
        blocks = next((n for n, hash_id in enumerate(hashes) if not self.has(engine, hash_id)), len(hashes))
        return common_boundary(
            self.sides[engine].cache.groups,
            blocks,
            lambda group, end: self.has(engine, self.in_group(group, end, request, engine)),
        )

    def in_group(self, group: Group, end: int, request: RoutedRequest, engine: int) -> int:
        """The hash id of another KV cache group's block that ends at a token of a prompt; 0: not known."""
        named = self.sides[request.engine].cache.in_group(group.number, end, request.hashes)
        return named or self.sides[engine].cache.in_group(group.number, end, request.hashes)

    def held(self, request: RoutedRequest) -> dict[int, int]:
        """How many of a request's blocks, from the first on, each engine that is there holds.

        An engine that was restarted and has announced nothing holds what the one before it announced.
        """
        there = [engine for engine, side in self.sides.items() if side.ended >= self.arrived]
        there.sort(key=lambda engine: self.sides[engine].heard)
        found = {engine: self.first(engine, request) for engine in there}
        before = before_of(self.sides, request.engine)
        if before >= 0 and self.sides[request.engine].heard > self.arrived:
            stale = self.first(before, request)
            found[request.engine] = stale or found.get(request.engine, 0)
        return {engine: blocks for engine, blocks in found.items() if blocks}


def before_of(sides: Sides, engine: int) -> int:
    """The last engine at the same address that was gone before this one began; -1: none."""
    side = sides[engine]
    earlier = [
        (one.ended, number)
        for number, one in sides.items()
        if one.address == side.address and one.ended <= side.began
    ]
    return max(earlier, default=(0.0, -1))[1]


class Row(NamedTuple):
    """One request: predicted, found, and the causes of the difference. Surplus causes count negative."""

    request: RoutedRequest
    best: int
    """The engine for which most was predicted."""
    predicted: int
    predicted_here: int
    """What was predicted for the engine that got the request."""
    found: int
    missed: dict[str, int]
    surplus: dict[str, int]


def row_of(
    sides: Sides,
    request: RoutedRequest,
    held: Mapping[int, int] | None = None,
    contents: Contents | None = None,
) -> Row:
    """The row of one request.

    ``held``: how many of the request's blocks another index promised of each engine that was there; None: our
    own index promises. ``contents``: of every block that was announced, if other indexes are explained.
    """
    index = IndexThen(sides, request.arrived, contents or {})
    return _Explained(index, request, index.held(request) if held is None else held).row()


class _Explained:
    """Gives each token of a difference its cause."""

    def __init__(self, index: IndexThen, request: RoutedRequest, held: Mapping[int, int]) -> None:
        self.index, self.request = index, request
        """Our index when the request arrived, and the request."""
        self.side = index.sides[request.engine]
        """The engine that got the request."""
        self.size = self.side.cache.block_tokens
        """Tokens in a block of that engine."""
        self.here = held.get(request.engine, 0)
        """Blocks that were promised of the engine that got the request."""
        self.best = max(
            held, key=lambda engine: (held[engine], engine == request.engine), default=request.engine
        )
        """The engine of which the most blocks were promised; of equals, the one that got the request."""
        self.blocks = held.get(self.best, 0)
        """Blocks that were promised of the best engine."""
        self.found = request.local + max(0, request.external - request.failed)
        """Tokens that were not computed: local hits, and external tokens whose load did not fail."""

    def row(self) -> Row:
        """The figures, and the causes of their difference."""
        size, predicted = self.size, self.blocks * self.size
        missed = self._missed() if predicted > self.found else {}
        surplus = self._surplus() if predicted < self.found else {}
        row = Row(self.request, self.best, predicted, self.here * size, self.found, missed, surplus)
        assert row.predicted - row.found == sum(missed.values()) - sum(surplus.values())
        return row

    def _missed(self) -> dict[str, int]:
        """Each predicted token that was not found has the cause of its block, or of the first missing one."""
        size, found, request = self.size, self.found, self.request
        causes, inherited = Counter[str](), ""
        in_groups = self._lacking_groups(found // size)
        for place in range(found // size, self.blocks):
            tokens = (place + 1) * size - max(found, place * size)
            if special := self._never_announced(place):
                cause = special
            elif place >= self.here:
                cause = ELSEWHERE
            elif place >= max(0, request.prompt_tokens - 1) // size:
                cause = LAST_TOKEN
            elif place * size < found + request.failed:
                cause = LOAD_FAILED
            else:
                cause = self._why_missing(request.hashes[place]) or inherited
                cause = cause or in_groups.get(place) or NOT_USED
                inherited = inherited or cause
            causes[cause] += tokens
        return dict(causes)

    def _lacking_groups(self, first: int) -> dict[int, str]:
        """For each block from ``first`` on that the followed group had: what another group lacked there."""
        groups, end = self.side.cache.groups, first
        while end < min(self.here, len(self.request.hashes)) and not self._why_missing(
            self.request.hashes[end]
        ):
            end += 1
        found = (
            lacking(groups.others, groups.tokens, first, end, self._why_missing_in) if groups.others else []
        )
        return dict(enumerate(found, first))

    def _why_missing_in(self, group: Group, end: int) -> str:
        """Why the engine lacked a block of another group; "" if it had it.

        What the index promised has the same causes as a block of the followed group.
        """
        engine = self.request.engine
        hash_id = self.index.in_group(group, end, self.request, engine)
        why = self._why_missing(hash_id)
        if why in ("", UNKNOWN) or self.index.has(engine, hash_id):
            return why
        return group.lacks()

    def _never_announced(self, place: int) -> str:
        """The cause of a promised block that the stream of the engine never announced under its hash."""
        if place >= len(self.request.hashes):
            return ""
        index, hash_id = self.index, self.request.hashes[place]
        engine = self.request.engine if place < self.here else self.best
        if index.has(engine, hash_id):
            return ""
        if index.has_tokens(engine, hash_id):
            return OTHER_SALT
        if place >= self.here:
            return ""
        before = before_of(index.sides, engine)
        return RESTARTED if before >= 0 and index.has_tokens(before, hash_id) else INDEX

    def _why_missing(self, hash_id: int) -> str:
        """Why the engine lacked a block at the request's lookup; "" if it had the block."""
        present, last = self.side.at(self.request, hash_id)
        if present:
            return ""
        if last is None:
            return NEVER_STORED if self.side.cache.whole else UNKNOWN
        return EVENT_LOST if last in self.side.lost_changes else EVICTED

    def _surplus(self) -> dict[str, int]:
        """The cause of each found token that was not predicted.

        An index that lacks a block of the engine says nothing of those above it, so they have the same cause:
        that of the first block from ``here`` on that the stream did not announce.
        """
        size, found, request = self.size, self.found, self.request
        causes, inherited = Counter[str](), ""
        for start in range(min(self.here, self.blocks) * size, found, size):
            tokens = min(size, found - start)
            if start >= request.local:
                cause = EXTERNAL
            elif start + size > request.local:
                inside = request.local - start
                causes[PART] += inside
                tokens -= inside
                cause = EXTERNAL
            else:
                cause = inherited or self._why_surplus(start // size)
                inherited = inherited or ("" if cause == INDEX else cause)
            if tokens and start >= self.blocks * size:
                causes[cause] += tokens
        return dict(causes)

    def _why_surplus(self, place: int) -> str:
        """Why the index did not promise a block that was found: it lacks that one or another group's."""
        request, engine = self.request, self.request.engine
        hash_id = request.hashes[place] if place < len(request.hashes) else 0
        needed = [hash_id, *self._needed_in_groups()]
        lacked = next((each for each in needed if not self.index.has(engine, each)), None)
        if lacked is None:
            announced = self.side.announced
            return COPY_REMOVED if announced.fell_last(hash_id, request.arrived) else INDEX
        _, last = self.side.at(request, lacked)
        if last is None:
            return UNKNOWN
        return EVENT_LOST if last in self.side.lost_changes else STORED_SINCE

    def _needed_in_groups(self) -> Iterator[int]:
        """The hash ids of what the other groups had where the local hit ended."""
        boundary = self.request.local // self.size * self.size
        for group in self.side.cache.others:
            for end in group.ends(boundary, 0):
                yield self.index.in_group(group, end, self.request, self.request.engine)


class Routing(NamedTuple):
    """The rows, and their sums."""

    engines: list[str]
    rows: list[Row]
    left_out: int
    """Requests that were not admitted, or whose arrival is not in a journal."""
    gaps: int
    """Gaps in the recorded KV events."""
    indexes: list[IndexState] = []
    """What the index of each engine is worth, in the order of ``engines``."""

    def causes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Requests and tokens by side (``missed``, ``surplus``) and cause."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for row in self.rows:
            for side, causes in (("missed", row.missed), ("surplus", row.surplus)):
                for cause, tokens in causes.items():
                    requests, before = sums.get((side, cause), (0, 0))
                    sums[side, cause] = requests + 1, before + tokens
        return sums
