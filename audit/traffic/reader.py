"""The one reader that makes requests and a script of a journal, for a simulation or a reproduction.

A :class:`Traffic` is plain values, which a process with another vLLM can read. It has what clients did
(arrivals, lengths, contents, aborts, chunks of sessions) and what the model and the connector answered
(outputs, accepted drafts, lookups, loads). Contents are hash ids: two requests have a block in common if
their hash ids are equal there. So no token is needed and none is known.

The script has every operation on the scheduler in the recorded order, by which the recorded configuration
must lead to the recorded figures. For a reproduction, which leaves requests out, it also has what each step
scheduled; then a journal may begin in mid-life and be of any level.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from .. import events as ev
from ..errors import LedgerError
from ..ledger.blocks.contents import RequestContents
from ..ledger.blocks.ledger import content_group
from .script import Do, Op, Scheduled

TABLES = {1: "sliding", 2: "full"}
"""The kinds of tables in PoolSeen, as EngineSetup names their groups; in other tables an index is no
position."""

KINDS = {0: "sliding", 1: "chunked", 2: "mamba"}
"""The kinds of groups with windows, in PoolSeen."""

HASH = "Q"
"""A hash id has 64 bits."""

_WHOLE = (1 << 64) - 1
"""Hash ids of events have a sign."""

Held = tuple[int, bool, int, int] | None
"""What a connector holds of a request from its first token on, at one lookup (0: nothing beyond the local
hit), whether it loads asynchronously, how many lookups in a row got the answer without an admission (0:
the lookup led to one), and the local hit. None: it asked to be asked again later."""

MOST_DEFERRED = 100
"""Most lookups in a row that are deferred."""


class NoTraffic(LedgerError):
    """The journal does not have what a simulation needs; the text is one sentence."""


class Chunk(msgspec.Struct, array_like=True):
    """A further chunk of a session: the positions [start, end) of the sequence. ``at``: when it came.
    ``turn``: the length of the sequence at which the turn before it had stopped; -1: not known."""

    at: int
    start: int
    end: int
    turn: int = -1


class Verified(msgspec.Struct, array_like=True):
    """One verification of drafts: how many there were, and how many of them were accepted."""

    drafts: int
    accepted: int


class RecordedRequest(msgspec.Struct, array_like=True):
    """One recorded request. Times are microseconds since the engine started; -1: not known.

    ``came_after``: when the last output before the request was taken. Schedulers take requests between two
    steps, so the request came between then and ``at``. ``hashes``: the hash id of each full block of its
    sequence, 0 where it is not known. ``lora``: the number of its adapter, 0 for none. ``outputs``: how many
    output tokens it had at its end; of sessions, in their last turn. ``load_us``: how long each asynchronous
    load took. ``hold_us``: how long the connector kept its blocks after the end; -1: it kept none.
    ``reads_cache``: it may hit the prefix cache. ``parent``: the request whose output its prompt repeats and
    continues. ``salt``: the number of its salt. ``hits``: local and external tokens of each admission.
    """

    number: int
    request_id: str
    at: int
    came_after: int
    prompt: int
    max_tokens: int | None = None
    priority: int = 0
    resumable: bool = False
    pooling: bool = False
    lora: int = 0
    hashes: bytes = b""
    chunks: list[Chunk] = []
    closed: bool = False
    outcome: str = ""
    outputs: int = -1
    ended_at: int = -1
    sequence: int = 0
    answers: list[Held] = []
    load_us: list[int] = []
    hold_us: int = -1
    drafts: list[Verified] = []
    parent: int = -1
    reads_cache: bool = True
    salt: int = 0
    hits: list[tuple[int, int]] = []

    def hash_ids(self) -> array[int]:
        """The hash id of each full block."""
        ids = array(HASH)
        ids.frombytes(self.hashes)
        return ids


class Traffic(msgspec.Struct):
    """Everything that is simulated. ``groups``: the kind of each KV cache group, as EngineSetup
    names it. ``group_tokens``: the tokens of a block of each. ``block_tokens``: of the group whose hash ids
    requests have.

    ``doubts``: what the journal does not have, and what a simulation leaves out, one sentence each.
    """

    version: str
    configuration: dict[str, ev.Setting]
    requests: list[RecordedRequest]
    script: list[Op]
    resets: list[tuple[int, bool]]
    groups: list[str]
    group_tokens: list[int]
    block_tokens: int
    doubts: list[str]
    began_seconds: float = 0.0
    ended_at: int = 0


class _Row:
    """A request while the journal is read."""

    __slots__ = ("found", "hashes", "loading_since", "request")

    def __init__(self, request: RecordedRequest) -> None:
        self.request = request
        """What will be simulated."""
        self.hashes = array(HASH)
        """The hash id of each full block."""
        self.loading_since = -1
        """When its present load began."""
        self.found = 0
        """Where the hits of its last admission end."""


class TrafficReader:
    """Makes traffic of the events of one engine, in their order.

    ``steps``: any journal will do, requests that were there before it count as well, and the script has what
    each step scheduled. ``most``: so many of the latest operations are kept; 0: all.
    """

    def __init__(self, *, steps: bool = False, most: int = 0) -> None:
        self._with_steps, self._most = steps, most
        self.started: ev.EngineStarted | None = None
        """How the engine described itself first."""
        self.requests: list[RecordedRequest] = []
        """Every request, in the order of arrival."""
        self.script: list[Op] = []
        """Every operation, in order."""
        self.resets: list[tuple[int, bool]] = []
        """Resets of the prefix cache: when, and whether running requests were preempted."""
        self.lost = 0
        """How many times events were lost."""
        self.undelivered = 0
        """Steps that were in flight where the journal begins."""
        self.whole = False
        """Whether the journal begins with the engine."""
        self.steps = 0
        """How many steps scheduled tokens."""
        self.chunk_tokens = 0
        """The largest number that divides the end of every save; 0: no save was recorded."""
        self._rows: dict[int, _Row] = {}
        """Open requests, and ended ones whose blocks may still be reported."""
        self._groups: dict[int, str] = {}
        """The kind of each KV cache group."""
        self._sizes: dict[int, int] = {}
        """Tokens of a block, by group."""
        self._size = 16
        """Those of the group whose blocks tell what requests hold."""
        self._contents = RequestContents()
        self._in_output: dict[int, int] = {}
        """The request that first had a block with output tokens, by hash id."""
        self._step = 0
        """The last step whose schedule is in the script."""
        self._last_schedule = Op("schedule")
        self._stepped_at = 0
        """The last step that is known to have returned."""
        self._room: list[int] = []
        """Places in the script since the last schedule at which the engine may have scheduled an empty
        step."""
        self._flying, self._depth = 0, 1
        self._delivered_at = 0
        """When the last output was taken."""
        self._running: dict[int, int] = {}
        """Draft tokens of each request in the last step."""
        self._sampled: dict[int, int] = {}
        """Tokens that each request sampled in its last output, if not one."""
        self._in_flight: deque[dict[int, int]] = deque()
        """Drafts of each step without an output, by request."""
        self._output: Op | None = None
        """The last output, until the next operation: transfers that finish belong to it."""
        self._last_output: Op | None = None
        """The last output, for the drafts that the next step has."""
        self._failing: list[tuple[int, int]] = []
        """Requests whose load failed, and the first position that was not loaded."""
        self._order: list[int] = []
        """The requests of the last DeliveredWhole."""
        self._doubts: dict[str, None] = {}
        self._begun = False
        """Whether the first snapshot was read."""
        self._at = 0
        """The time of the last event."""

    def feed(self, event: ev.Event) -> None:
        """Read one event."""
        self._at = event.at
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)
        for number, hash_id, end, cached in self._contents.read(event):
            if (row := self._rows.get(number)) is not None:
                self._name(row, hash_id & _WHOLE, end)
                if cached and end > row.request.prompt:
                    self._in_output.setdefault(hash_id & _WHOLE, number)

    def traffic(self) -> Traffic:
        """What was read. Raises :class:`NoTraffic`."""
        started = self.started
        if started is None:
            raise NoTraffic("the journal does not say how its engine was configured")
        if not self.requests:
            raise NoTraffic("the journal has no request")
        self.by_number()
        self._find_parents()
        if self.lost:
            self._doubt(f"Events were lost {self.lost:,} times, so requests are missing.")
        return Traffic(
            version=started.version,
            configuration=started.configuration,
            requests=self.requests,
            script=self.script,
            resets=self.resets,
            groups=self.groups() or ["full"],
            group_tokens=[size for _, size in sorted(self._sizes.items())] or [self._size],
            block_tokens=self._size,
            doubts=list(self._doubts),
            began_seconds=started.began_seconds,
            ended_at=self._at,
        )

    def by_number(self) -> dict[int, RecordedRequest]:
        """The last request of each number, with its contents so far."""
        for row in self._rows.values():
            self._close(row)
        return {number: row.request for number, row in self._rows.items()}

    def groups(self) -> list[str]:
        """The kind of each KV cache group, as EngineSetup names it; [] if they are not recorded."""
        return [kind for _, kind in sorted(self._groups.items())]

    @property
    def block_tokens(self) -> int:
        """The tokens of a block of the group whose hash ids requests have."""
        return self._size

    def _doubt(self, sentence: str) -> None:
        self._doubts[sentence] = None

    def _op(self, do: Do, at: int, request: int = -1, count: int = 0) -> Op:
        op = Op(do, "" if request < 0 else str(request), at=at, count=count)
        self.script.append(op)
        answers = do in ("output", "repeat")
        self._output = op if answers else None
        if do in ("schedule", "repeat"):
            self._room = []
        self._flying += (do == "schedule") - (do == "output")
        if answers or (do == "schedule" and self._flying < self._depth):
            self._room.append(len(self.script))
        if self._most and len(self.script) > 2 * self._most:
            gone = len(self.script) - self._most
            del self.script[:gone]
            self._room = [max(0, place - gone) for place in self._room]
        return op

    # --- the engine -----------------------------------------------------------------------------------

    def _engine_started(self, event: ev.EngineStarted) -> None:
        if event.engine != "vllm":
            raise NoTraffic(f"the engine was {event.engine} {event.version}, and only vLLM's can be driven")
        if event.adapter.startswith("v0") and not self._with_steps:
            raise NoTraffic("the engine ran the v0 scheduler, and only that of v1 can be simulated")
        if event.level not in ("blocks", "content") and not self._with_steps:
            raise NoTraffic(
                f"the journal is of level {event.level}: simulate needs block events, which "
                "KVLEDGER_LEVEL=blocks records"
            )
        self.started = self.started or event
        if not self._sizes:
            size = self.started.configuration.get("block_size")
            self._size = size if isinstance(size, int) and size > 0 else 16
        self._depth = 2 if self.started.configuration.get("asynchronous") else 1

    def _snapshot(self, event: ev.Snapshot) -> None:
        if self._begun:
            return
        self._begun = True
        self._step = self._stepped_at = event.step
        self.whole = not event.rows and event.step <= 0
        self.undelivered = event.undelivered_steps
        for row in event.rows if self._with_steps else ():
            tokens = max(row.prompt_tokens, row.sequence_tokens)
            request = RecordedRequest(row.request, row.request_id, -1, -1, tokens, sequence=tokens)
            self._open(request, row.isolation)
        if event.rows:
            self._doubt(
                f"The journal begins in mid-life: {len(event.rows):,} requests and the "
                "cache's contents before it "
                "are not simulated."
            )
            self._in_flight.extend({} for _ in range(event.undelivered_steps))

    def _gap(self, event: ev.Gap) -> None:
        if event.reason != ev.REMOVED or self.requests:
            self.lost += 1

    def _pool(self, event: ev.PoolSeen) -> None:
        windows = {event.windows[i]: event.windows[i + 2] for i in range(0, len(event.windows), 3)}
        for place in range(0, len(event.groups), 3):
            group, size, kind = event.groups[place : place + 3]
            name = KINDS.get(windows.get(group, -1)) or TABLES.get(kind, "cross")
            self._groups[group], self._sizes[group] = name, size
        self._contents.groups[event.pool], self._size = content_group(event)

    def _paused(self, event: ev.LeftWaiting) -> None:
        if "paused" in event.cause:
            self._doubt("The engine was paused, which is not simulated.")

    def _weights(self, event: ev.WeightsChanged) -> None:
        self._doubt("The weights changed, which is not simulated.")

    # --- requests -------------------------------------------------------------------------------------

    def _added(self, event: ev.RequestAdded) -> None:
        request = RecordedRequest(
            event.request,
            event.request_id,
            event.at,
            min(self._delivered_at, event.at),
            event.prompt_tokens,
            event.max_tokens,
            event.priority,
            event.resumable,
            event.pooling,
            sequence=event.prompt_tokens,
            reads_cache=event.reads_cache,
        )
        self._open(request, event.isolation)
        self._op("add", event.at, event.request)

    def _open(self, request: RecordedRequest, isolation: list[int] | None) -> None:
        request.salt, request.lora = (*(isolation or ()), 0, 0)[:2]
        if len(isolation or ()) > 2:
            self._doubt("Requests have multimodal inputs, whose encoder is not simulated.")
        old = self._rows.get(request.number)
        if old is not None:
            self._close(old)
        self._rows[request.number] = _Row(request)
        self.requests.append(request)

    def _extended(self, event: ev.Extended) -> None:
        row = self._rows.get(event.request)
        if row is None:
            return
        if not row.request.resumable:  # a connector cut the prompt
            row.request.prompt = event.prompt_tokens
            return
        row.request.chunks.append(
            Chunk(event.at, event.computed_tokens, event.prompt_tokens, event.turn_tokens)
        )
        self._op("chunk", event.at, event.request, len(row.request.chunks) - 1)

    def _finished(self, event: ev.Finished) -> None:
        row = self._rows.get(event.request)
        if row is None:
            return
        request = row.request
        request.outcome, request.outputs, request.ended_at = event.reason, event.output_tokens, event.at
        request.sequence = max(request.sequence, event.sequence_tokens)
        self._running.pop(event.request, None)
        if event.reason == "aborted":
            self._op("abort", event.at, event.request)
        elif request.resumable:
            request.closed = True  # before the output with which it ended
            place = max(0, self._room[-1] - 1) if self._room else len(self.script)
            self.script.insert(place, Op("close", str(event.request), at=event.at))
            self._room = [each + (each > place) for each in self._room]

    def _close(self, row: _Row) -> None:
        row.request.hashes = row.hashes.tobytes()

    def _find_parents(self) -> None:
        """Find the request whose output each prompt repeats, by the last block that the two share."""
        size = self._size
        for request in self.requests:
            ids = request.hash_ids()
            for place in reversed(range(min(len(ids), request.prompt // size))):
                donor = self._in_output.get(ids[place], request.number)
                if donor != request.number:
                    request.parent = donor
                    break

    # --- steps ----------------------------------------------------------------------------------------

    def _scheduled(self, step: int, at: int) -> None:
        """The schedule of ``step`` is called now, if it is not in the script yet."""
        if step > self._step:
            self._schedule_nothing(step - self._step - 1, at)
            self._step = step
            self._last_schedule = self._op("schedule", at)
            if self._with_steps:
                self._last_schedule.step = Scheduled()

    def _schedule_nothing(self, steps: int, at: int) -> None:
        """Steps without an event were empty. An engine schedules as soon as it has taken an output."""
        places = self._room or [len(self.script)]
        for number, place in reversed(list(enumerate(places))):
            here = min(1, max(0, steps - number)) if place != places[-1] else max(0, steps - number)
            if here:
                self.script.insert(place, Op("empty", at=at, count=here))

    def _stepped(self, event: ev.Stepped) -> None:
        self._scheduled(event.step, event.at)
        running, dropped, rows = self._running, ev.numbers(event.dropped), ev.numbers(event.changed)
        for number in dropped:
            running.pop(number, None)
        for place in range(0, len(rows), 4):
            running[rows[place]] = rows[place + 2]
        self.steps += 1
        step = self._last_schedule.step
        if step is not None:
            step.dropped = list(dropped)
            for place in range(0, len(rows), 4):
                step.changed[rows[place]] = (rows[place + 1], rows[place + 2], rows[place + 3])
        self._stepped_at = event.step
        self._in_flight.append({number: drafts for number, drafts in running.items() if drafts})
        self._propose(self._in_flight[-1])

    def _propose(self, drafts: dict[int, int]) -> None:
        if drafts and self._last_output is not None:
            self._last_output.proposed = {str(number): count for number, count in drafts.items()}

    def _delivered(self, event: ev.Delivered) -> None:
        rows = ev.numbers(event.changed)
        self._answer(dict(zip(rows[::2], rows[1::2], strict=True)), event.at)

    def _delivered_whole(self, event: ev.DeliveredWhole) -> None:
        self._order = event.requests or self._order
        self._answer(dict(zip(self._order, event.sampled, strict=False)), event.at)

    def _answer(self, sampled: dict[int, int], at: int) -> None:
        self._sampled |= sampled
        op = self._op("output", at)
        self._last_output = op
        self._delivered_at = at
        for number, drafts in (self._in_flight.popleft() if self._in_flight else {}).items():
            accepted = min(drafts, max(0, self._sampled.get(number, 1) - 1))
            if accepted:
                op.accepted[str(number)] = accepted
            if (row := self._rows.get(number)) is not None:
                row.request.drafts.append(Verified(drafts, accepted))
        self._fail(op)

    def _fail(self, op: Op) -> None:
        size = self._sizes.get(0, self._size)
        for number, first in self._failing:
            if first < 0:
                op.failed_whole = (*op.failed_whole, str(number))
                continue
            row = self._rows.get(number)
            end = math.ceil((row.found if row else first + size) / size)
            op.failed[str(number)] = (first // size, max(end, first // size + 1))
        self._failing = []

    def _repeated(self, event: ev.Repeated) -> None:
        drafts, times = {number: count for number, count in self._running.items() if count}, event.times
        self.steps += times
        if self._step > self._stepped_at:  # the first of the steps admitted a request, to wait for its load
            times -= 1
            self._in_flight.append(drafts)
            self._propose(drafts)
            self._answer({}, event.at)
        self._step += times
        self._stepped_at = self._step
        if times and not drafts:
            self._op("repeat", event.at, -1, times)
        for _ in range(times if drafts else 0):
            self._op("schedule", event.at)
            self._in_flight.append(drafts)
            self._propose(drafts)
            self._answer({}, event.at)
        self._delivered_at = event.at

    # --- lookups, admissions, loads -------------------------------------------------------------------

    def _matched(self, event: ev.Matched) -> None:
        self._scheduled(event.step, event.at)
        row = self._rows.get(event.request)
        if row is not None and event.external_tokens is not None:
            found = event.external_tokens and event.local_tokens + event.external_tokens
            row.request.answers.append((found, event.asynchronous, 0, event.local_tokens))

    def _not_admitted(self, event: ev.AdmissionFailed) -> None:
        row = self._rows.get(event.request)
        if row is not None and event.reason == "deferred":
            row.request.answers += [None] * min(event.attempts, MOST_DEFERRED)
        elif row is not None and event.external_tokens:
            held = event.local_tokens + event.external_tokens
            row.request.answers.append((held, False, event.attempts, event.local_tokens))

    def _admitted(self, event: ev.Admitted) -> None:
        self._scheduled(event.step, event.at)
        row = self._rows.get(event.request)
        if row is not None:
            row.found = event.local_tokens + event.external_tokens
            row.request.hits.append((event.local_tokens, event.external_tokens))
            if self._last_schedule.step is not None:
                self._last_schedule.step.admitted.append((event.request, row.found))
            if event.asynchronous:
                row.loading_since = event.at

    def _preempted(self, event: ev.Preempted) -> None:
        self._running.pop(event.request, None)
        if event.cause == "blocks":
            if event.step > self._stepped_at:
                self._scheduled(event.step, event.at)
                if self._last_schedule.step is not None:
                    self._last_schedule.step.preempted.append(event.request)
            else:
                self._op("preempt", event.at, event.request).running = not event.delivered
        elif self._with_steps:
            self._op("lost", event.at, event.request)

    def _load_failed(self, event: ev.LoadFailed) -> None:
        whole = event.asynchronous and event.failed_blocks is None
        whole &= event.computed_tokens in (
            0,
            event.before_tokens,
        )  # else blocks failed, which nobody recorded
        whole &= not self._with_steps  # every release takes blocks
        self._failing.append((event.request, -1 if whole else event.computed_tokens))

    def _transferred(self, at: int) -> Op:
        """The output that reports a transfer: the last one, or that of an empty step, of which no event
        tells."""
        op = self._output
        if op is None:
            if self._step == self._stepped_at:
                self._step += 1
                self._last_schedule = self._op("schedule", at)
            self._last_schedule.count = 1
            self._stepped_at = self._step
            op = self._op("output", at)
            op.count = 1
        self._fail(op)
        return op

    def _loaded(self, event: ev.LoadFinished) -> None:
        row = self._rows.get(event.request)
        if row is None:
            return
        op = self._transferred(event.at)
        op.loaded = (*op.loaded, str(event.request))
        if row.loading_since >= 0:
            row.request.load_us.append(event.at - row.loading_since)
            row.loading_since = -1

    def _held(self, event: ev.FreeDelayed) -> None:
        row = self._rows.get(event.request)
        if row is not None:
            row.request.hold_us = 0

    def _sent(self, event: ev.FreeCompleted) -> None:
        row = self._rows.get(event.request)
        if row is not None:
            row.request.hold_us = max(0, event.at - row.request.ended_at)
            op = self._transferred(event.at)
            op.sent = (*op.sent, str(event.request))

    def _reset(self, event: ev.CacheReset) -> None:
        self.resets.append((event.at, event.running))
        self._op("reset", event.at).running = event.running

    def _saved(self, event: ev.SavePlanned) -> None:
        self.chunk_tokens = math.gcd(self.chunk_tokens, max(0, event.end))

    def _tracked(self, event: ev.Tracked) -> None:
        self.chunk_tokens = math.gcd(self.chunk_tokens, max(0, event.due_tokens))

    # --- contents -------------------------------------------------------------------------------------

    def _name(self, row: _Row, hash_id: int, end: int) -> None:
        if end % self._size:
            return  # since 0.32 a block may also be cached by the tokens up to a place in it
        place = end // self._size - 1
        hashes = row.hashes
        if place >= len(hashes):
            hashes.extend([0] * (place + 1 - len(hashes)))
        if place >= 0:
            hashes[place] = hash_id


_HANDLERS: dict[type[ev.Event], Callable[[Any, Any], None]] = {
    ev.EngineStarted: TrafficReader._engine_started,
    ev.Snapshot: TrafficReader._snapshot,
    ev.Gap: TrafficReader._gap,
    ev.PoolSeen: TrafficReader._pool,
    ev.LeftWaiting: TrafficReader._paused,
    ev.WeightsChanged: TrafficReader._weights,
    ev.RequestAdded: TrafficReader._added,
    ev.Extended: TrafficReader._extended,
    ev.Finished: TrafficReader._finished,
    ev.Stepped: TrafficReader._stepped,
    ev.Delivered: TrafficReader._delivered,
    ev.DeliveredWhole: TrafficReader._delivered_whole,
    ev.Repeated: TrafficReader._repeated,
    ev.Matched: TrafficReader._matched,
    ev.AdmissionFailed: TrafficReader._not_admitted,
    ev.Admitted: TrafficReader._admitted,
    ev.Preempted: TrafficReader._preempted,
    ev.LoadFailed: TrafficReader._load_failed,
    ev.LoadFinished: TrafficReader._loaded,
    ev.FreeDelayed: TrafficReader._held,
    ev.FreeCompleted: TrafficReader._sent,
    ev.CacheReset: TrafficReader._reset,
    ev.SavePlanned: TrafficReader._saved,
    ev.Tracked: TrafficReader._tracked,
}
