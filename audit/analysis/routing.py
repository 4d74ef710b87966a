"""What a router's index promises for each request, beside what the engine then had.

The index is built from recorded KV events in the order in which they were received. When a request arrives,
it names how many of the request's blocks each engine holds; the *predicted* tokens are the most that any
engine has, and the *found* tokens are the local and loaded external tokens of the request's first admission.
Each token of the difference has one cause.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from .. import events as ev
from ..ledger.cache_changes import CLEARED, STORED, CacheChanges, Change

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
    UNKNOWN: "the journal does not hold the engine's cache at that time",
}
"""Causes of tokens that were predicted and not found."""

SURPLUS = {
    STORED_SINCE: "cached, and its KV event had not come when the request arrived",
    EVENT_LOST: "cached, and the KV event that says so was lost",
    EXTERNAL: "loaded by the connector, of whose store the index knows nothing",
    PART: "a part of a block; the index knows whole blocks",
    INDEX: "announced, and the index does not hold it by a rule of its own",
    UNKNOWN: "cached before the recording or the journal began",
}
"""Causes of tokens that were found and not predicted."""


class Index(Protocol):
    """A router's index of the caches of several engines."""

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        """Take one batch of an engine's KV events."""

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        """How many of these blocks, from the first on, each engine holds."""


class OwnIndex:
    """An index of our own: the number of blocks with each hash id, by engine."""

    def __init__(self) -> None:
        self._held: dict[int, Counter[int]] = {}

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        held, rows, place = self._held.setdefault(engine, Counter()), batch.rows, 0
        while place < len(rows):
            kind, _, tier, _, _, count = rows[place : place + ev.KV_HEAD]
            place += ev.KV_HEAD + count
            if tier >= 0 and batch.tiers[tier] != "GPU":
                continue
            if kind == CLEARED:
                held.clear()
            for hash_id in rows[place - count : place]:
                held[hash_id] += 1 if kind == STORED else -1
                if held[hash_id] <= 0:
                    del held[hash_id]

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        found = {}
        for engine, held in self._held.items():
            blocks = 0
            while blocks < len(hashes) and hashes[blocks] in held:
                blocks += 1
            if blocks:
                found[engine] = blocks
        return found

    def has(self, engine: int, hash_id: int) -> bool:
        """Whether an engine is thought to hold a block with this hash id."""
        return hash_id in self._held.get(engine, ())


class TokensIndex:
    """An index that knows the tokens of blocks and not their salt or adapter.

    ``contents``: by hash id, the keyed hash of all tokens up to the end of the block.
    """

    def __init__(self, contents: Mapping[int, int]) -> None:
        self._contents = contents
        self._own = OwnIndex()

    def apply(self, engine: int, batch: ev.KVEventsReceived) -> None:
        rows, place = list(batch.rows), 0
        while place < len(rows):
            count = rows[place + ev.KV_HEAD - 1]
            place += ev.KV_HEAD + count
            for index in range(place - count, place):  # without contents, a block is only itself
                rows[index] = self._contents.get(rows[index], rows[index])
        self._own.apply(engine, msgspec.structs.replace(batch, rows=rows))

    def held(self, hashes: Sequence[int]) -> dict[int, int]:
        return self._own.held([self._contents.get(hash_id, hash_id) for hash_id in hashes])

    def has(self, engine: int, hash_id: int) -> bool:
        """Whether an engine is thought to hold a block with the tokens of this one."""
        return self._own.has(engine, self._contents.get(hash_id, hash_id))


def contents_of(batches: Iterable[ev.KVEventsReceived]) -> dict[int, int]:
    """By hash id, the keyed hash of the tokens up to the end of the block, as far as it was recorded."""
    found: dict[int, int] = {}
    for batch in batches:
        rows, place, known = batch.rows, 0, iter(batch.contents)
        while place < len(rows):
            kind, count = rows[place], rows[place + ev.KV_HEAD - 1]
            place += ev.KV_HEAD + count
            if kind == STORED:
                found |= {
                    hash_id: content
                    for hash_id, content in zip(rows[place - count : place], known, strict=False)
                    if content
                }
    return found


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
    """One engine: its cache, what was lost of its KV events, and when it received the rest."""

    name: str
    block_tokens: int
    cache: CacheChanges
    lost: set[Change]
    batches: list[tuple[float, ev.KVEventsReceived]]
    """The batches with the Unix times at which they were received."""
    ended: float = math.inf
    """Unix time after which the engine was gone: a router sends it nothing then."""
    before: int = -1
    """The engine that published at the same address and was gone before this one began; -1: none."""

    @property
    def whole(self) -> bool:
        """Whether every change of the cache is known since the engine began."""
        return self.cache.whole

    def was_lost(self, change: Change) -> bool:
        """Whether the KV event of a change was lost."""
        return change in self.lost


Predictions = Mapping[tuple[str, int], Mapping[int, int]]
"""What a router itself predicted: by request id and engine, the blocks of each engine."""


class Side(Protocol):
    """What the causes need of an engine."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def whole(self) -> bool:
        """Whether every change of the cache is known since the engine began."""

    def was_lost(self, change: Change) -> bool:
        """Whether the KV event of a change was lost."""


class Has(Protocol):
    """Our own index, as it was when a request arrived."""

    def has(self, engine: int, hash_id: int) -> bool:
        """Whether an engine is thought to hold a block with this hash id."""


class History(Protocol):
    """One engine's cache, as it was when a request was looked up."""

    def at(self, request: RoutedRequest, hash_id: int) -> tuple[bool | None, Change | None]:
        """Whether the hash was in the cache (None: never), and its last change."""


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


def rows(
    engines: Sequence[EngineSide],
    requests: Sequence[RoutedRequest],
    index: Index,
    contents: Mapping[int, int] | None = None,
    predictions: Predictions | None = None,
) -> Iterator[Row]:
    """The rows in the order of arrival. The causes of each row add up to its difference.

    ``contents``: by hash id, the keyed hash of the tokens, see :func:`contents_of`. ``predictions`` take the
    place of the index; requests without one are left out.
    """
    received = sorted(
        ((at, number, batch) for number, side in enumerate(engines) for at, batch in side.batches),
        key=lambda each: each[0],
    )
    own, place = OwnIndex(), 0
    tokens = TokensIndex(contents or {})
    histories = [_History(side) for side in engines]
    heard: set[int] = set()
    for request in sorted(requests, key=lambda each: each.arrived):
        while place < len(received) and received[place][0] <= request.arrived:
            _, number, batch = received[place]
            heard.add(number)
            index.apply(number, batch)
            own.apply(number, batch)
            tokens.apply(number, batch)
            place += 1
        alive = {number for number, side in enumerate(engines) if side.ended >= request.arrived}
        every = index.held(request.hashes)
        held = {number: blocks for number, blocks in every.items() if number in alive}
        here = request.engine
        before = engines[here].before
        if here not in heard and before in every:
            held[here] = every[before]
        if predictions is not None:
            if (request.request_id, here) not in predictions:
                continue
            held = dict(predictions[request.request_id, here])
        yield row_of(engines[here], request, held, own, histories[here], tokens, before)


class _History:
    """The changes of one engine's cache, by hash id."""

    def __init__(self, side: EngineSide) -> None:
        self.side = side
        self._of: dict[int, list[tuple[int, Change]]] = {}
        self._cleared: list[tuple[int, Change]] = []
        for number, change in enumerate(side.cache.changes):
            if change.kind == CLEARED:
                self._cleared.append((number, change))
            else:
                self._of.setdefault(change.hash_id, []).append((number, change))

    def at(self, request: RoutedRequest, hash_id: int) -> tuple[bool | None, Change | None]:
        """Whether the hash was in the cache at the request's lookup (None: never), and the last change.

        What the request itself cached in the step of its admission came after its lookup.
        """
        blocks, last = 0, None
        changes = sorted([*self._of.get(hash_id, ()), *self._cleared], key=lambda each: each[0])
        for number, change in changes:
            own = change.request == request.number and change.step >= request.step
            if number >= request.changes or (own and change.kind == STORED):
                continue
            if change.kind == CLEARED:
                if not blocks:
                    continue
                blocks = 0
            else:
                blocks = max(0, blocks + (1 if change.kind == STORED else -1))
            last = change
        return (None if last is None else blocks > 0), last


def row_of(
    side: Side,
    request: RoutedRequest,
    held: Mapping[int, int],
    own: Has,
    history: History,
    tokens: Has | None = None,
    before: int = -1,
) -> Row:
    """The row of one request.

    ``held``: how many of the request's blocks the index has of each engine that is there. ``own``: our own
    index. ``tokens``: the same without salts and adapters; None: not known. ``before``: the engine that
    was at the same address before a restart; -1: none.
    """
    size = side.block_tokens
    here = held.get(request.engine, 0)
    best = max(held, key=lambda engine: (held[engine], engine == request.engine), default=request.engine)
    blocks = held.get(best, 0)
    found = request.local + max(0, request.external - request.failed)
    missed, surplus = Counter[str](), Counter[str]()
    if blocks * size > found:
        special = _special(request, best, here, blocks, own, tokens, before)
        _explain_missed(side, request, history, here, blocks, found, missed, special)
    elif found > blocks * size:
        _explain_surplus(side, request, history, own, here, blocks, found, surplus)
    row = Row(request, best, blocks * size, here * size, found, dict(missed), dict(surplus))
    assert row.predicted - row.found == sum(missed.values()) - sum(surplus.values())
    return row


def _explain_missed(
    side: Side,
    request: RoutedRequest,
    history: History,
    here: int,
    blocks: int,
    found: int,
    causes: Counter[str],
    special: Mapping[int, str],
) -> None:
    """Give each predicted token that was not found the cause of its block, or of the first missing one.

    ``special``: the causes of blocks that the engine's own stream never promised under their hash.
    """
    size = side.block_tokens
    inherited = ""
    for place in range(found // size, blocks):
        tokens = (place + 1) * size - max(found, place * size)
        if place in special:
            cause = special[place]
        elif place >= here:
            cause = ELSEWHERE
        elif place >= max(0, request.prompt_tokens - 1) // size:
            cause = LAST_TOKEN
        elif place * size < found + request.failed:
            cause = LOAD_FAILED
        else:
            cause = _why_missing(side, request, history, request.hashes[place]) or inherited or NOT_USED
            inherited = inherited or cause
        causes[cause] += tokens


def _special(
    request: RoutedRequest, best: int, here: int, blocks: int, own: Has, tokens: Has | None, before: int
) -> dict[int, str]:
    """The causes of promised blocks that the stream of the engine never announced under their hash."""
    found = {}
    for place, hash_id in enumerate(request.hashes[:blocks]):
        engine = request.engine if place < here else best
        if own.has(engine, hash_id):
            continue
        if tokens is not None and tokens.has(engine, hash_id):
            found[place] = OTHER_SALT
        elif place < here and before >= 0 and (tokens or own).has(before, hash_id):
            found[place] = RESTARTED
        elif place < here:
            found[place] = INDEX
    return found


def _why_missing(side: Side, request: RoutedRequest, history: History, hash_id: int) -> str:
    """Why the engine lacked a block at the request's lookup; "" if it had the block."""
    present, last = history.at(request, hash_id)
    if present:
        return ""
    if last is None:
        return NEVER_STORED if side.whole else UNKNOWN
    return EVENT_LOST if side.was_lost(last) else EVICTED


def _explain_surplus(
    side: Side,
    request: RoutedRequest,
    history: History,
    own: Has,
    here: int,
    blocks: int,
    found: int,
    causes: Counter[str],
) -> None:
    """Give each found token that was not predicted its cause.

    An index that lacks a block of the engine says nothing of those above it, so they have the same cause:
    that of the first block from ``here`` on that the stream did not announce.
    """
    size = side.block_tokens
    inherited = ""
    for start in range(min(here, blocks) * size, found, size):
        tokens = min(size, found - start)
        if start >= request.local:
            cause = EXTERNAL
        elif start + size > request.local:
            inside = request.local - start
            causes[PART] += inside
            tokens -= inside
            cause = EXTERNAL
        else:
            cause = inherited or _why_surplus(side, request, history, own, start // size)
            inherited = inherited or ("" if cause == INDEX else cause)
        if tokens and start >= blocks * size:
            causes[cause] += tokens


def _why_surplus(side: Side, request: RoutedRequest, history: History, own: Has, place: int) -> str:
    """Why the index did not promise a block that was found."""
    hash_id = request.hashes[place] if place < len(request.hashes) else 0
    if own.has(request.engine, hash_id):
        return INDEX
    _, last = history.at(request, hash_id)
    if last is None:
        return UNKNOWN
    return EVENT_LOST if side.was_lost(last) else STORED_SINCE


class Routing(NamedTuple):
    """The rows, and their sums."""

    engines: list[str]
    rows: list[Row]
    left_out: int
    """Requests that were not admitted, or whose arrival is not in a journal."""
    gaps: int
    """Gaps in the recorded KV events."""

    def causes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Requests and tokens by side (``missed``, ``surplus``) and cause."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for row in self.rows:
            for side, causes in (("missed", row.missed), ("surplus", row.surplus)):
                for cause, tokens in causes.items():
                    requests, before = sums.get((side, cause), (0, 0))
                    sums[side, cause] = requests + 1, before + tokens
        return sums
