"""What the requests of one engine did with the blocks of its prefix cache, in order.

The pool calls of a journal of level ``blocks`` become a :class:`BlockTrace`: requests are admitted, their
block tables grow, blocks are cached and tables are released. A trace names content by hash id and no block of
the recorded pool, so ``simulated_pool.py`` can replay it on a pool of another size.

Only an engine with one pool and one KV cache group of full attention has such a trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from .. import causes, old_events
from .. import events as ev
from ..errors import LedgerError
from ..ledger.blocks.decode import calls
from ..ledger.blocks.pool_contents import PoolContents

ADMIT, GROW, CACHED, RELEASE, DROP, RESET = range(6)
"""Kinds of operations, see :class:`Operation`."""

Operation = tuple[int, int, int, int]
"""One operation: its kind and three numbers.

- ADMIT: life, 0, 0. The life looks its sequence up and holds the blocks that it hits.
- GROW: life, length, 0. The life's table has at least this many blocks from now on.
- CACHED: life, index, hash id. The block at this index of the life's table is full and can be hit.
- RELEASE: life, 0, 0. The life gives up its table, last block first.
- DROP: hash id, 0, 0. The engine took the content out of the cache, for example after a failed load.
- RESET: 0, 0, 0. The engine dropped everything in its prefix cache.
"""

LEVELS = ("blocks", "content")
"""The levels that have what a trace needs."""

UNNAMED = 1 << 63
"""Content whose hash id is not known has a number above this; hash ids are signed numbers of 64 bits."""

FULL_ATTENTION = 2
"""The kind of a group in which a hit needs every block below it."""


class TraceLife(msgspec.Struct):
    """One life of a request: from an admission to the release of its table."""

    request: int
    """Index of the request in :attr:`BlockTrace.requests`."""
    sequence_tokens: int
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
    """Tokens that had KV when the life was preempted."""
    counted: bool = True
    """Whether hits of this life are counted: it began in the time window."""


class TraceRequest(msgspec.Struct):
    """One request. ``hashes`` has the hash id of each full block of its sequence; 0: not known."""

    request_id: str
    prompt_tokens: int
    hashes: list[int] = []
    priority: int = 0
    labels: ev.RequestLabels | None = None
    arrived_seconds: float | None = None
    """Unix time of the arrival; None: not known."""


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
    model: str = ""
    """The model that the engine serves; "": not known."""

    def limit(self, life: TraceLife) -> int:
        """The most blocks that a lookup of this life can hit: the last token is always computed."""
        return max(0, life.sequence_tokens - 1) // self.block_tokens


class NoBlockTrace(LedgerError):
    """A journal from which no block trace can be made."""


class _Table(msgspec.Struct):
    """The block table of one request in its present life."""

    life: int
    blocks: list[int]


class Listener(Protocol):
    """Is told what the recorded engine did with content; ``life`` is an index in ``BlockTrace.lives``."""

    def hit(self, life: int, index: int, hash_id: int) -> None:
        """An admission hit this content, at this index of its table."""

    def cached(self, life: int, index: int, hash_id: int) -> None:
        """A life computed this content and cached it."""

    def evicted(self, hash_id: int, at: int, request: int) -> None:
        """The content was evicted because a block was allocated to a request (an index; -1: not known)."""


class TraceReader:
    """Makes a :class:`BlockTrace` from the events of one engine."""

    def __init__(
        self, path: str = "", name_of: Callable[[ev.EngineStarted], str] = attrgetter("name")
    ) -> None:
        self.path = path
        """The journal, for messages."""
        self._name_of = name_of
        """The engine's name."""
        self.listener: Listener | None = None
        """Receives hits, cached blocks and evictions."""
        self.trace = BlockTrace()
        self.started: ev.EngineStarted | None = None
        """How the engine described itself."""
        self.began_seconds = 0.0
        """Unix time from which the engine's times count."""
        self._pool_seen = False
        self._continued = False
        """Whether there were operations that ``trace`` does not have any more."""
        self._numbers: dict[int, int] = {}
        """The index in ``trace.requests`` of each open request, by the request's number in the journal."""
        self._sequences: dict[int, int] = {}
        """Length of the sequence of each request that was preempted."""
        self._tables: dict[int, _Table] = {}
        """Present tables by request number."""
        self._unadmitted: dict[int, deque[int]] = {}
        """Lives whose admission has not been read yet, by request number."""
        self._admissions: dict[int, deque[ev.Admitted]] = {}
        """Admissions whose life has not begun yet, by request number."""
        self._contents = PoolContents()
        """The hash id of each cached block, and the request to which each block was allocated last."""
        self._unknown_hashes = 0
        """How many cached blocks were hit whose hash id is not known."""
        self._lost = 0
        """How many times events were lost."""
        self._last_life: dict[int, int] = {}
        """The last life of each open request, by request number."""

    def feed(self, event: ev.Event) -> None:
        """Read one event, in the journal's order."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def finish(self) -> BlockTrace:
        """The trace. Raises :class:`NoBlockTrace` if the journal has no blocks to replay."""
        trace = self.trace
        if not self._pool_seen:
            raise NoBlockTrace(
                f"{self.path}: this command needs block events, which KVLEDGER_LEVEL=blocks records."
            )
        if self._unknown_hashes:
            trace.doubts.append(
                f"{self._unknown_hashes:,} hits are on blocks that were cached before the trace begins"
            )
        if self._lost:
            trace.doubts.append(f"events were lost {self._lost:,} times")
        return trace

    # --- the engine ---------------------------------------------------------------------------------

    def _started(self, event: ev.EngineStarted) -> None:
        trace, settings = self.trace, event.configuration
        if event.level not in LEVELS:
            raise NoBlockTrace(
                f"{self.path} was recorded at level {event.level}: this command needs block events, which "
                "KVLEDGER_LEVEL=blocks records."
            )
        if trace.engine:
            return
        self.started = event
        trace.engine, trace.version = self._name_of(event), event.version
        self.began_seconds = event.began_seconds
        trace.model = str(settings.get("model") or "")
        block_bytes, workers = settings.get("block_bytes"), settings.get("workers")
        if isinstance(block_bytes, int) and isinstance(workers, int):
            trace.block_bytes = block_bytes * max(1, workers)
        if settings.get("connector"):
            trace.doubts.append(f"a KV connector ({settings['connector']}) loads blocks beside the cache")
        if settings.get("drafts"):
            trace.doubts.append("speculative decoding may drop the last block of a hit")
        if settings.get("prefix_caching") is False:
            raise NoBlockTrace(
                f"{self.path}: the engine ran without prefix caching, so there is no cache to size."
            )

    def _pool(self, event: ev.PoolSeen) -> None:
        groups = [event.groups[i : i + 3] for i in range(0, len(event.groups), 3)]
        if event.pool or len(groups) != 1 or groups[0][2] != FULL_ATTENTION:
            raise NoBlockTrace(
                f"{self.path}: this command needs an engine with one KV cache group of full attention; this "
                f"engine has {len(groups)} groups in a pool."
            )
        if not self._pool_seen:
            self._pool_seen = True
            self.trace.block_tokens = groups[0][1]
            self.trace.blocks = event.blocks - (event.null_block >= 0)
            self._null = event.null_block

    def _gap(self, event: ev.Gap) -> None:
        if event.reason == ev.REMOVED and not self.trace.operations and not self._continued:
            return
        self._lost += 1
        for table in self._tables.values():
            self._add(RELEASE, table.life)
        self._tables.clear()
        self._unadmitted.clear()
        self._admissions.clear()
        self._contents.forget()

    # --- requests -----------------------------------------------------------------------------------

    def _added(self, event: ev.RequestAdded) -> None:
        self._numbers[event.request] = len(self.trace.requests)
        self.trace.requests.append(
            TraceRequest(
                event.request_id,
                event.prompt_tokens,
                [],
                event.priority,
                event.labels,
                self.began_seconds + event.at / 1e6,
            )
        )

    def _snapshot(self, event: ev.Snapshot) -> None:
        for row in event.rows:
            if row.request not in self._numbers:
                self._numbers[row.request] = len(self.trace.requests)
                self.trace.requests.append(TraceRequest(row.request_id, row.prompt_tokens, []))
                self._sequences[row.request] = max(row.prompt_tokens, row.sequence_tokens)

    def _extended(self, event: ev.Extended) -> None:
        if event.request in self._numbers:
            self._request(event.request).prompt_tokens = event.prompt_tokens

    def _admitted(self, event: ev.Admitted) -> None:
        waiting = self._unadmitted.get(event.request)
        if waiting:
            self._match(self.trace.lives[waiting.popleft()], event)
        else:
            self._admissions.setdefault(event.request, deque()).append(event)

    def _match(self, life: TraceLife, event: ev.Admitted) -> None:
        life.hit_tokens, life.external_tokens, life.at = event.local_tokens, event.external_tokens, event.at
        life.resumed = life.resumed or event.resumed

    def _preempted(self, event: ev.Preempted) -> None:
        number = event.request
        prompt = self._request(number).prompt_tokens if number in self._numbers else 0
        self._sequences[number] = max(prompt, event.before_tokens + 1)
        if number in self._last_life:
            life = self.trace.lives[self._last_life[number]]
            life.preempted, life.computed_tokens = event.cause == causes.BLOCKS, event.before_tokens

    def _finished(self, event: ev.Finished) -> None:
        if event.request not in self._tables:
            self._forget(event.request)

    def _forget(self, number: int) -> None:
        for by_number in (self._numbers, self._sequences, self._last_life):
            by_number.pop(number, None)
        self._unadmitted.pop(number, None)
        self._admissions.pop(number, None)

    def _request(self, number: int) -> TraceRequest:
        return self.trace.requests[self._numbers[number]]

    # --- blocks -------------------------------------------------------------------------------------

    def _calls(self, event: ev.PoolCalls) -> None:
        for call in calls(event):
            handler = _HANDLERS.get(type(call))
            if handler is not None:
                handler(self, call)

    def _table(self, number: int, at: int) -> _Table | None:
        """The present table of a request; a new life begins if it has none. None: no known request."""
        table = self._tables.get(number)
        if table is not None or number not in self._numbers:
            return table
        request = self._request(number)
        life = TraceLife(
            self._numbers[number],
            self._sequences.get(number, request.prompt_tokens),
            number in self._last_life,
            at=at,
        )
        table = self._tables[number] = _Table(len(self.trace.lives), [])
        self._last_life[number] = table.life
        self.trace.lives.append(life)
        admissions = self._admissions.get(number)
        if admissions:
            self._match(life, admissions.popleft())
        else:
            self._unadmitted.setdefault(number, deque()).append(table.life)
        self._add(ADMIT, table.life)
        return table

    def _touched(self, event: old_events.BlocksTouched) -> None:
        table = self._table(event.request, event.at)
        if table is None:
            return
        hashes, cached = self._request(event.request).hashes, self._contents.hashes
        for block in event.blocks:
            if block not in cached:
                self._unknown_hashes += 1
                cached[block] = (self._unnamed(),)
            hash_id = cached[block][-1]
            if self.listener is not None:
                self.listener.hit(table.life, len(table.blocks), hash_id)
            _put(hashes, len(table.blocks), hash_id)
            table.blocks.append(block)
        self.trace.lives[table.life].hit_blocks = len(table.blocks)
        self._add(GROW, table.life, len(table.blocks))

    def _allocated(self, event: old_events.BlocksAllocated) -> None:
        for number, _, blocks in event.calls():
            evicted = self._contents.allocate(number, blocks)
            if self.listener is not None:
                for _, ids in evicted:
                    self.listener.evicted(ids[-1], event.at, self._numbers.get(number, -1))
            table = self._table(number, event.at)
            if table is not None:
                table.blocks += blocks
                self._add(GROW, table.life, len(table.blocks))

    def _cached(self, event: ev.BlocksCached) -> None:
        if not self._pool_seen:
            return
        hashes = self._contents.hashes
        for number, block, hash_id, end in self._contents.cached(event):
            hashes[block] = (hash_id,)
            place, rest = divmod(end, self.trace.block_tokens)
            if number not in self._numbers or rest:
                continue
            _put(self._request(number).hashes, place - 1, hash_id)
            table = self._tables.get(number)
            if table is not None:
                self._add(CACHED, table.life, place - 1, hash_id)
                if self.listener is not None:
                    self.listener.cached(table.life, place - 1, hash_id)

    def _freed(self, event: old_events.BlocksFreed) -> None:
        self._release(event.request, event.blocks)

    def _deferred(self, event: ev.BlocksDeferred) -> None:
        self._release(event.request, event.blocks)

    def _release(self, number: int, blocks: list[int]) -> None:
        table = self._tables.get(number)
        if table is None:
            return
        gone = set(blocks)
        table.blocks = [block for block in table.blocks if block not in gone]
        if not table.blocks:
            self._add(RELEASE, table.life)
            del self._tables[number]

    def _reported(self, event: old_events.TablesReported) -> None:
        """Take the table of a request that was running before the trace began."""
        for number, _, _, blocks in event.tables():
            if number in self._tables or not blocks:
                continue
            table = self._table(number, event.at)
            if table is not None:
                table.blocks = blocks
                self._add(GROW, table.life, len(blocks))

    def _removed(self, event: old_events.TablesRemoved) -> None:
        for number in event.requests:
            table = self._tables.pop(number, None)
            if table is not None:
                self._add(RELEASE, table.life)
            self._forget(number)

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        for block in event.blocks:
            ids = self._contents.hashes.pop(block, None)
            if ids:
                self.trace.operations.append((DROP, ids[-1], 0, 0))

    def _reset(self, event: ev.PoolReset) -> None:
        if event.succeeded:
            self._contents.hashes.clear()
            self.trace.operations.append((RESET, 0, 0, 0))

    def _add(self, kind: int, life: int, first: int = 0, second: int = 0) -> None:
        self.trace.operations.append((kind, life, first, second))

    def _unnamed(self) -> int:
        """A number for content whose hash id is not known."""
        return UNNAMED + self._unknown_hashes


def _put(hashes: list[int], place: int, hash_id: int) -> None:
    """Set an item of a list that may be too short."""
    if place >= len(hashes):
        hashes += [0] * (place + 1 - len(hashes))
    hashes[place] = hash_id


_HANDLERS: dict[type[ev.Event], Callable[[TraceReader, Any], None]] = {
    ev.EngineStarted: TraceReader._started,
    ev.PoolSeen: TraceReader._pool,
    ev.Gap: TraceReader._gap,
    ev.RequestAdded: TraceReader._added,
    ev.Snapshot: TraceReader._snapshot,
    ev.Extended: TraceReader._extended,
    ev.Admitted: TraceReader._admitted,
    ev.Preempted: TraceReader._preempted,
    ev.Finished: TraceReader._finished,
    ev.PoolCalls: TraceReader._calls,
    old_events.BlocksTouched: TraceReader._touched,
    old_events.BlocksAllocated: TraceReader._allocated,
    ev.BlocksCached: TraceReader._cached,
    old_events.BlocksFreed: TraceReader._freed,
    ev.BlocksDeferred: TraceReader._deferred,
    old_events.TablesReported: TraceReader._reported,
    old_events.TablesRemoved: TraceReader._removed,
    ev.BlocksEvicted: TraceReader._evicted,
    ev.PoolReset: TraceReader._reset,
}
