"""Reads the changes of a block trace from the events of one engine.

The reader consists of plain data, so it can be kept between two parts of a journal. It holds the open
requests only, so its memory is bounded. Of an engine whose KV cache has several groups it follows the first
group of full attention, and names what the other groups cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from .. import causes
from .. import events as ev
from ..errors import JournalError, LedgerError
from ..events import Admitted
from ..ledger.blocks import contents
from ..ledger.blocks.contents import CONTENT_EVENTS, is_named
from ..ledger.blocks.contents import Change as PoolChange
from ..ledger.blocks.ledger import pool_of
from ..release_semantics import contract
from ..text import salt_name, session_of
from .cache_misses import Group, several_groups_of

# --- What the requests of one engine did with the blocks of its prefix cache, in order.
#
# A :class:`BlockTrace` names content by hash id and no block of the recorded pool, so ``whatif.py``
# can replay it on a pool of another size. It is made of *changes*, which :class:`TraceReader` reads from a
# journal of level ``blocks``. Changes are kept as rows of ``block_operations`` and lives as rows of
# ``admissions``: so a trace is the same from a journal and from kept rows.
#
# Only an engine with one pool and one KV cache group of full attention has such a trace.

ADMIT, GROW, CACHED, RELEASE, DROP, RESET, HIT, EVICT = range(8)
"""Kinds of operations and changes."""

IN_GROUP = 8
"""A kind of change: a life cached a block of another group. Number: the block's end in tokens. Hash ids: the
group, and the hash id."""

Operation = tuple[int, int, int, int]
"""What a pool replays: its kind and three numbers.

- ADMIT: life, 0, 0. The life looks its sequence up and holds the blocks that it hits.
- GROW: life, length, 0. The life's table has at least this many blocks from now on.
- CACHED: life, index, hash id. The block at this index of the life's table is full and can be hit.
- RELEASE: life, 0, 0. The life gives up its table, last block first.
- DROP: hash id, 0, 0. The engine took the content out of the cache, for example after a failed load.
- RESET: 0, 0, 0. The engine dropped everything in its prefix cache.
"""

Change = tuple[int, int, int, Sequence[int], int]
"""What the recorded engine did: kind, life (-1: of no life), a number, hash ids, and when.

The number is the length of the table of a GROW, the index of the first block of a CACHED or HIT, and of a
RESET after the weights changed :data:`AFTER_WEIGHTS`. The time is in microseconds since the engine started.

- HIT: an admission hit this content, and its table is longer by it.
- EVICT: content was evicted because a block was allocated, to this life if it is known.
"""

AFTER_WEIGHTS = 1
"""The number of a RESET after the weights changed."""


class NoBlockTrace(JournalError):
    """A journal from which no block trace can be made."""


class TraceLife(msgspec.Struct):
    """One life of a request: from an admission to the release of its table."""

    request: int = -1
    """Index of the request in :attr:`BlockTrace.requests`; -1: the life is in no trace yet."""
    sequence_tokens: int = 0
    """Length of the sequence that the admission looked up."""
    resumed: bool = False
    """Whether the request had an earlier life."""
    hit_blocks: int = 0
    """Blocks that the recorded engine hit."""
    hit_tokens: int = -1
    """Local tokens of the recorded admission; -1: the admission was not recorded."""
    external_tokens: int = 0
    """Tokens that the connector promised at the admission."""
    at: int = 0
    """When the request was admitted, in microseconds since the engine started."""
    preempted: bool = False
    """Whether the life ended by a preemption because no blocks were free."""
    computed_tokens: int = 0
    """Tokens that had KV when the life was preempted, or its request ended."""
    counted: bool = True
    """Whether hits of this life are counted: it began in the time window."""


class TraceRequest(msgspec.Struct):
    """One request. ``hashes`` has the hash id of each full block of its sequence; 0: not known."""

    request_id: str
    prompt_tokens: int
    hashes: list[int] = []


class BlockTrace(msgspec.Struct):
    """The operations of one engine, and what they refer to."""

    engine: str = ""
    version: str = ""
    block_tokens: int = 0
    blocks: int = 0
    """Blocks of the recorded pool that requests can use; 0: the trace is of no pool."""
    block_bytes: int = 0
    """Bytes of KV in one block, over all workers; 0: not known."""
    operations: list[Operation] = []
    lives: list[TraceLife] = []
    requests: list[TraceRequest] = []
    doubts: list[str] = []
    """Reasons why a replay of this trace may differ from the recorded engine."""
    began_seconds: float = 0.0
    """Unix time from which the times of lives count."""

    def limit(self, life: TraceLife) -> int:
        """The most blocks that a lookup of this life can hit: the last token is always computed."""
        return max(0, life.sequence_tokens - 1) // self.block_tokens


class RecordedRequest(msgspec.Struct):
    """One request and its lives, as a journal or kept rows have them.

    ``arrival`` counts the requests of a journal; ``number`` is the journal's own. ``added_at``,
    ``closed_at``: microseconds since the engine started; -1: not known, or open. ``lives`` by their number,
    which counts all lives of the journal.
    """

    number: int
    arrival: int
    request_id: str
    prompt_tokens: int
    priority: int = 0
    lora: str = ""
    salt: str = ""
    group: str = ""
    session: str = ""
    added_at: int = -1
    closed_at: int = -1
    lives: dict[int, TraceLife] = {}
    sequence_tokens: int = -1
    """Length of the sequence when the request was preempted last; -1: it was not."""
    life: int = -1
    """The number of its present life; -1: it has no table."""
    table: list[int] = []
    """The blocks of its present life."""
    unadmitted: list[int] = []
    """Lives whose admission has not been read yet."""
    admissions: list[Admitted] = []
    """Admissions whose life has not begun yet."""
    removed: bool = False
    """Whether the engine has forgotten its tables. Its end comes then, too, if no event is lost."""


class TraceBuilder:
    """Makes a :class:`BlockTrace` of changes and requests."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        """The operations so far, with the numbers of lives in the journal."""
        self._hashes: dict[int, list[int]] = {}
        """By life: the hash ids of its blocks as far as it hit or cached them; 0: not known."""

    def add(self, changes: Iterable[Change]) -> None:
        """Add changes in their order."""
        for change in changes:
            kind, life, index, ids, _ = change
            if kind in (CACHED, HIT):
                put(self._hashes.setdefault(life, []), index, ids)
            self._operations += _operations(change)

    @property
    def first(self) -> int:
        """The first life that is admitted, in the count of the journal."""
        return next((life for kind, life, _, _ in self._operations if kind == ADMIT), 0)

    def trace(self, described: BlockTrace, requests: Iterable[RecordedRequest]) -> BlockTrace:
        """The whole trace of the ``described`` engine, with its requests in the order of arrival.

        Where the oldest lives are not kept any more, the trace counts the others from 0. Raises LedgerError
        if others are missing.
        """
        first = self.first
        known = (one for one in requests if one.lives and max(one.lives) >= first)
        recorded = sorted(known, key=lambda one: one.arrival)
        numbered = {
            number: replace(life, request=place)
            for place, one in enumerate(recorded)
            for number, life in one.lives.items()
            if number >= first
        }
        if numbered and max(numbered) - first + 1 != len(numbered):
            raise LedgerError("Rows of admissions are missing.")
        operations, doubts = self._operations, described.doubts
        if first:
            doubts = [*doubts, f"the {first:,} oldest admissions are not kept any more"]
            operations = [
                (kind, one if kind in (DROP, RESET) else one - first, index, hash_id)
                for kind, one, index, hash_id in operations
                if kind in (DROP, RESET) or one >= first
            ]
        return replace(
            described,
            operations=operations,
            lives=[numbered[number] for number in sorted(numbered)],
            requests=[
                TraceRequest(one.request_id, one.prompt_tokens, self._hashes_of(one)) for one in recorded
            ],
            doubts=doubts,
        )

    def _hashes_of(self, request: RecordedRequest) -> list[int]:
        """The hash ids of the blocks of its lives; those of a later life count."""
        hashes: list[int] = []
        for life in sorted(request.lives):
            _overlay(hashes, self._hashes.pop(life, ()))
        return hashes


def _operations(change: Change) -> Iterator[Operation]:
    """What a pool replays of a change."""
    kind, life, number, ids, _ = change
    if kind == CACHED:
        for index, hash_id in enumerate(ids, number):
            yield kind, life, index, hash_id
    elif kind == HIT:
        yield GROW, life, number + len(ids), 0
    elif kind == DROP:
        for hash_id in ids:
            yield kind, hash_id, 0, 0
    elif kind not in (EVICT, IN_GROUP):
        yield kind, max(0, life), 0 if kind == RESET else number, 0  # a RESET is of no life


def put(hashes: list[int], first: int, ids: Sequence[int]) -> None:
    """Set items of a list that may be too short."""
    if first > len(hashes):
        hashes += [0] * (first - len(hashes))
    hashes[first : first + len(ids)] = ids


def _overlay(hashes: list[int], later: Sequence[int]) -> None:
    """Replace the hash ids by those of a later life, where it has them."""
    if not hashes:
        hashes += later
        return
    for index, hash_id in enumerate(later):
        if hash_id or index >= len(hashes):
            put(hashes, index, (hash_id,))


LEVELS = ("blocks", "content")
"""The levels that have what a trace needs."""

FULL_ATTENTION = 2
"""The kind of a group in which a hit needs every block below it."""

NEEDS_BLOCKS = "this command needs block events, which KVLEDGER_LEVEL=blocks records."


class TraceReader(msgspec.Struct):
    """Makes changes and requests from events.

    An engine with several groups in one pool has a ``problem`` all the same: a pool of another size can't be
    replayed from its changes. They tell of turns and prefixes.
    """

    problem: str = ""
    """Why the engine has no block trace, behind the path of its journal; "": it has one so far."""
    started: ev.EngineStarted | None = None
    """How the engine described itself."""
    block_tokens: int = 0
    """Tokens in a block; 0: the pool has not described itself yet."""
    blocks: int = 0
    """Blocks that requests can use."""
    arrived: int = 0
    """How many requests there were."""
    begun: int = 0
    """How many lives there were."""
    changed: int = 0
    """How many changes there were."""
    unknown_hashes: int = 0
    """How many hits were on blocks that were cached before the trace begins."""
    lost: int = 0
    """How many times events were lost."""
    weights_changed: bool = False
    """Whether the weights of the model changed since the cache was reset last."""
    requests: dict[int, RecordedRequest] = {}
    """The open requests, by their number in the journal."""
    changes: list[Change] = []
    """The changes since :meth:`taken`."""
    ended: list[RecordedRequest] = []
    """The requests that ended since."""
    group: int = 0
    """The group that is followed."""
    others: list[Group] = []
    """The other groups that prefixes are cached in; [] in an engine with one group."""

    @property
    def stopped(self) -> bool:
        """Whether it reads no more events."""
        return bool(self.problem) and not self.others

    def feed(self, event: ev.Event, changes: Sequence[PoolChange]) -> None:
        """Read one event, in the journal's order, and its ``changes`` of the pool."""
        if self.stopped:
            return
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        for change in changes:
            follow = _CHANGES.get(change.kind)
            if follow is not None:
                follow(self, change)

    def taken(self) -> tuple[list[Change], list[RecordedRequest]]:
        """The changes since the last call, and the requests that ended. They leave the reader."""
        changes, ended = self.changes, self.ended
        self.changes, self.ended = [], []
        self.changed += len(changes)
        return changes, ended

    def described(self, path: str, name: str, *, groups: bool = False) -> BlockTrace:
        """The engine, called ``name``, as a trace without operations.

        ``groups``: one of several groups will do, whose pool can't be replayed. Raises
        :class:`NoBlockTrace`, which names the journal's ``path``, if there are no blocks to read.
        """
        if (self.stopped if groups else self.problem) or not self.block_tokens:
            raise NoBlockTrace(f"{path}{self.problem or f': {NEEDS_BLOCKS}'}")
        settings = self.started.configuration if self.started else {}
        block_bytes, workers = settings.get("block_bytes"), settings.get("workers")
        has_bytes = isinstance(block_bytes, int) and isinstance(workers, int)
        return BlockTrace(
            engine=name,
            version=self.started.version if self.started else "",
            block_tokens=self.block_tokens,
            blocks=self.blocks,
            block_bytes=int(block_bytes or 0) * max(1, int(workers or 0)) if has_bytes else 0,
            doubts=self.doubts,
            began_seconds=self.began_seconds,
        )

    @property
    def began_seconds(self) -> float:
        """Unix time from which the engine's times count."""
        return self.started.began_seconds if self.started else 0.0

    @property
    def doubts(self) -> list[str]:
        """Reasons why figures may differ from what the engine did."""
        settings = self.started.configuration if self.started else {}
        found = []
        if settings.get("connector"):
            found.append(f"a KV connector ({settings['connector']}) loads blocks beside the cache")
        if settings.get("drafts"):
            found.append("speculative decoding may drop the last block of a hit")
        if self.unknown_hashes:
            found.append(
                f"{self.unknown_hashes:,} hits are on blocks that were cached before the trace begins"
            )
        if self.lost:
            found.append(f"events were lost {self.lost:,} times")
        return found

    # --- the engine ---------------------------------------------------------------------------------

    def _started(self, event: ev.EngineStarted) -> None:
        name, level = contract(event.engine).name, contract(event.engine).level
        if level not in LEVELS:
            self.problem = f": this command needs block events, and {name} is observed at level {level} only."
        elif event.level not in LEVELS:
            self.problem = f" was recorded at level {event.level}: {NEEDS_BLOCKS}"
        elif self.started is None:
            self.started = event
            if event.configuration.get("prefix_caching") is False:
                self.problem = ": the engine ran without prefix caching, so there is no cache to size."

    def _pool(self, event: ev.PoolSeen) -> None:
        groups = [event.groups[i : i + 3] for i in range(0, len(event.groups), 3)]
        several = None if event.pool else several_groups_of(pool_of(event))
        if event.pool or len(groups) != 1 or groups[0][2] != FULL_ATTENTION:
            self.problem = (
                ": this command needs an engine with one KV cache group of full attention; this engine has "
                f"{len(groups)} groups in a pool. `kvledger simulate --set num_gpu_blocks=N` runs its "
                "requests on its scheduler with other numbers of blocks."
            )
        if several is None:
            self.others = []
        if not self.block_tokens and (several is not None or not self.problem):
            self.group, self.block_tokens, self.others = several or (groups[0][0], groups[0][1], [])
            self.blocks = event.blocks - (event.null_block >= 0)

    def _follows(self, group: int) -> bool:
        return not self.others or group == self.group

    def _lost(self, change: PoolChange) -> None:
        if not self.started and not self.requests:  # rotation has removed the first segments
            return
        self.lost += 1
        for request in sorted(self.requests.values(), key=lambda one: one.life):
            self._release(request, change.at)
            request.unadmitted, request.admissions = [], []
            if request.removed:  # its end was lost
                self._forget(request.number, change.at)

    # --- requests -----------------------------------------------------------------------------------

    def _added(self, event: ev.RequestAdded) -> None:
        labels = event.labels or ev.RequestLabels()
        request = self._open(event.request, event.request_id, event.prompt_tokens, event.at)
        request.priority, request.added_at = event.priority, event.at
        request.lora, request.salt, request.group = labels.lora, salt_name(labels), labels.group
        request.session = labels.session

    def _snapshot(self, event: ev.Snapshot) -> None:
        for row in event.rows:
            if row.request not in self.requests:
                request = self._open(row.request, row.request_id, row.prompt_tokens, event.at)
                request.sequence_tokens = max(row.prompt_tokens, row.sequence_tokens)
                request.session = session_of(row.labels)

    def _open(self, number: int, request_id: str, prompt_tokens: int, at: int) -> RecordedRequest:
        self._forget(number, at)
        request = RecordedRequest(number, self.arrived, request_id, prompt_tokens)
        self.requests[number] = request
        self.arrived += 1
        return request

    def _extended(self, event: ev.Extended) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            request.prompt_tokens = event.prompt_tokens

    def _admitted(self, event: ev.Admitted) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        if request.unadmitted:
            _match(request.lives[request.unadmitted.pop(0)], event)
        else:
            request.admissions.append(event)

    def _preempted(self, event: ev.Preempted) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        request.sequence_tokens = max(request.prompt_tokens, event.before_tokens + 1)
        if request.lives:
            life = request.lives[max(request.lives)]
            life.preempted, life.computed_tokens = event.cause == causes.BLOCKS, event.before_tokens

    def _finished(self, event: ev.Finished) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            request.closed_at = event.at
            if request.lives:
                kept = max(0, min(event.computed_tokens, event.sequence_tokens - 1))
                request.lives[max(request.lives)].computed_tokens = kept
            if request.life < 0 or request.removed:
                self._forget(event.request, event.at)

    def _forget(self, number: int, at: int) -> None:
        request = self.requests.pop(number, None)
        if request is not None:
            self._release(request, at)
            request.closed_at = at if request.closed_at < 0 else request.closed_at
            self.ended.append(request)

    # --- blocks -------------------------------------------------------------------------------------

    def _living(self, number: int, at: int) -> RecordedRequest | None:
        """A request that has a table; a new life begins if it has none. None: no known request."""
        request = self.requests.get(number)
        if request is None or request.life >= 0:
            return request
        sequence = request.sequence_tokens if request.sequence_tokens >= 0 else request.prompt_tokens
        life = TraceLife(sequence_tokens=sequence, resumed=bool(request.lives), at=at)
        request.life = self.begun
        request.lives[self.begun] = life
        self.begun += 1
        if request.admissions:
            _match(life, request.admissions.pop(0))
        else:
            request.unadmitted.append(request.life)
        self._add(at, ADMIT, request.life)
        return request

    def _touched(self, change: PoolChange) -> None:
        request = self._living(change.request, change.at) if self._follows(change.group) else None
        if request is None:
            return
        ids = [each[-1] for each in change.contents]
        self.unknown_hashes += sum(not is_named(hash_id) for hash_id in ids)
        self._add(change.at, HIT, request.life, len(request.table), ids)
        request.table += change.blocks
        request.lives[request.life].hit_blocks = len(request.table)

    def _allocated(self, change: PoolChange) -> None:
        request = self._living(change.request, change.at)
        evicted = [hash_id for ids in change.contents for hash_id in ids]
        if evicted:
            self._add(change.at, EVICT, -1 if request is None else request.life, 0, evicted)
        if request is not None and self._follows(change.group):
            request.table += change.blocks
            self._add(change.at, GROW, request.life, len(request.table))

    def _cached(self, change: PoolChange) -> None:
        request = self.requests.get(change.request)
        if not self.block_tokens or request is None or not request.lives:
            return
        life = request.life if request.life >= 0 else max(request.lives)
        if not self._follows(change.group):
            for end, hash_id in zip(change.numbers, change.ids, strict=True):
                self._add(change.at, IN_GROUP, life, end, (change.group, hash_id))
            return
        run, before = list[int](), -1
        for end, hash_id in zip(change.numbers, change.ids, strict=True):
            place, rest = divmod(end, self.block_tokens)
            if rest:
                continue
            if place - 1 != before:  # the blocks of one call stand in a row
                run = []
                self._add(change.at, CACHED, life, place - 1, run)
            run.append(hash_id)
            before = place

    def _freed(self, change: PoolChange) -> None:
        request = self.requests.get(change.request)
        if request is not None and request.life >= 0:
            gone = set(change.blocks)
            request.table = [block for block in request.table if block not in gone]
            if not request.table:
                self._release(request, change.at)

    def _reported(self, change: PoolChange) -> None:
        """Take the table of a request that was running before the trace began."""
        known = self.requests.get(change.request)
        if change.blocks and self._follows(change.group) and known is not None and known.life < 0:
            request = self._living(change.request, change.at)
            assert request is not None
            request.table = list(change.blocks)
            self._add(change.at, GROW, request.life, len(change.blocks))

    def _removed(self, change: PoolChange) -> None:
        request = self.requests.get(change.request)
        if request is not None:
            self._release(request, change.at)
            request.removed = True
            if request.closed_at >= 0:
                self._forget(change.request, change.at)

    def _evicted(self, change: PoolChange) -> None:
        dropped = [hash_id for ids in change.contents for hash_id in ids]
        if dropped:
            self._add(change.at, DROP, -1, 0, dropped)

    def _weights(self, event: ev.WeightsChanged) -> None:
        if event.changes and event.is_certain and not event.adapter:
            self.weights_changed = True

    def _reset(self, change: PoolChange) -> None:
        self._add(change.at, RESET, -1, AFTER_WEIGHTS if self.weights_changed else 0)
        self.weights_changed = False

    def _release(self, request: RecordedRequest, at: int) -> None:
        """The request gives up its table, if it has one."""
        if request.life >= 0:
            self._add(at, RELEASE, request.life)
            request.life, request.table = -1, []

    def _add(self, at: int, kind: int, life: int, number: int = 0, ids: Sequence[int] = ()) -> None:
        self.changes.append((kind, life, number, ids, at))


def _match(life: TraceLife, event: ev.Admitted) -> None:
    life.hit_tokens, life.external_tokens, life.at = event.local_tokens, event.external_tokens, event.at
    life.resumed = life.resumed or event.resumed


HANDLERS: dict[type[ev.Event], Callable[[TraceReader, Any], None]] = {
    ev.EngineStarted: TraceReader._started,
    ev.PoolSeen: TraceReader._pool,
    ev.RequestAdded: TraceReader._added,
    ev.Snapshot: TraceReader._snapshot,
    ev.Extended: TraceReader._extended,
    ev.Admitted: TraceReader._admitted,
    ev.Preempted: TraceReader._preempted,
    ev.Finished: TraceReader._finished,
    ev.WeightsChanged: TraceReader._weights,
}
"""The method for each type of event."""

_CHANGES: dict[int, Callable[[TraceReader, PoolChange], None]] = {
    contents.HIT: TraceReader._touched,
    contents.ALLOCATED: TraceReader._allocated,
    contents.CACHED: TraceReader._cached,
    contents.FREED: TraceReader._freed,
    contents.DEFERRED: TraceReader._freed,
    contents.TABLE: TraceReader._reported,
    contents.REMOVED: TraceReader._removed,
    contents.EVICTED: TraceReader._evicted,
    contents.RESET: TraceReader._reset,
    contents.LOST: TraceReader._lost,
}
"""The method for each kind of change."""

TRACE_EVENTS: tuple[type[ev.Event], ...] = (*HANDLERS, *(CONTENT_EVENTS - HANDLERS.keys()))
"""The events that a trace is made of."""
