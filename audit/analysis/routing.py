"""What a router's index promises for each request, beside what the engine then had.

The index is kept from recorded KV events in the order in which they were received. When a request arrives,
it names how many of the request's blocks each engine holds; the *predicted* tokens are the most that any
engine has, and the *found* tokens are the local and loaded external tokens of the request's first admission.
Each token of the difference has one cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from ..causes import BOUNDARY, GROUPS, STATE, WINDOW
from ..ledger.kv_events import STORED, Change
from .group_boundaries import Group, common_boundary, lacking
from .index_state import IndexState
from .routed_cache import RecentCounts, RoutedCache

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
