"""Reads the changes of a block trace from the events of one engine.

The reader consists of plain data, so it can be kept between two parts of a journal. It holds the open
requests only, so its memory is bounded. Of an engine whose KV cache has several groups it follows the first
group of full attention, and names what the other groups cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .. import causes
from .. import events as ev
from ..ledger.blocks import contents
from ..ledger.blocks.contents import CONTENT_EVENTS, is_named
from ..ledger.blocks.contents import Change as PoolChange
from ..ledger.blocks.ledger import pool_of
from ..text import salt_name, session_of
from .block_trace import (
    ADMIT,
    AFTER_WEIGHTS,
    CACHED,
    DROP,
    EVICT,
    GROW,
    HIT,
    IN_GROUP,
    RELEASE,
    RESET,
    BlockTrace,
    Change,
    NoBlockTrace,
    RecordedRequest,
    TraceLife,
)
from .group_boundaries import Group, several_groups_of

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
        if event.engine == "sglang":
            self.problem = ": this command needs block events, and SGLang is observed at level tokens only."
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
