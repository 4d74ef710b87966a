"""Leads a real scheduler through recorded traffic, observed by kvledger's own hooks on a simulated clock.

:func:`by_step` carries out the recorded script: every operation in its recorded order. :func:`by_time` lets
requests come when they came, and each step takes what the model of step time says. Either way the hooks'
events go straight to a ledger, so every figure is counted as that of a recorded engine is.

The tokens of a block are made from its hash id. So equal hash ids give equal blocks, outputs that return as
prompts included. A block whose hash id is not known is unique. This module needs vLLM; the rest of the folder
does not.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..traffic.driver import FIRST_TOKEN, Driver, ModelStep, Observation, Runner
from ..traffic.engine_setup import STOP_TOKEN, EngineSetup, build_request, setup_of
from ..traffic.reader import MOST_DEFERRED, RecordedRequest, Traffic
from ..traffic.script import Op
from .rows import Counting, Run

TAKEN_EVERY = 64
"""Steps after which the ledger takes the events."""

IDLE_US = 1_000
"""How long a step without tokens takes, where nothing else says when the next thing happens."""

MOST_IDLE = 2 * MOST_DEFERRED
"""More empty steps in a row, with nothing left to happen, are a standstill."""

_TOKENS = 31_000
_DIGITS = 5
"""So many digits to the base :data:`_TOKENS` hold 64 bits."""


def _block(number: int, size: int) -> list[int]:
    """The tokens of the block that a number of 64 bits stands for."""
    made = []
    for _ in range(min(size, _DIGITS)):
        number, digit = divmod(number, _TOKENS)
        made.append(FIRST_TOKEN + digit)
    return made + [FIRST_TOKEN] * (size - _DIGITS)


def _unique(request: int, place: int) -> int:
    """A number of 64 bits for a block whose hash id is not known (splitmix64)."""
    mixed = (request << 24 | place) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return mixed ^ mixed >> 31


class Standstill(Exception):
    """No request can be scheduled any more."""


class _Content:
    """The tokens of one request's sequence."""

    __slots__ = ("_hashes", "_last", "_number", "_size")

    def __init__(self, request: RecordedRequest, size: int) -> None:
        self._hashes = request.hash_ids()
        """The hash id of each full block."""
        self._number, self._size = request.number, size
        """The request's number, and the recorded tokens of a block."""
        self._last: tuple[int, list[int]] = (-1, [])
        """The block that was made last, and its tokens."""

    def block(self, place: int) -> list[int]:
        """The tokens of a block."""
        if self._last[0] != place:
            known = self._hashes[place] if place < len(self._hashes) else 0
            self._last = place, _block(known or _unique(self._number, place), self._size)
        return self._last[1]

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens of the positions [start, end)."""
        size = self._size
        first = start // size
        blocks = map(self.block, range(first, -(-end // size)))
        return list(itertools.chain.from_iterable(blocks))[start - first * size : end - first * size]

    def token(self, position: int) -> int:
        """The token of one position."""
        place, rest = divmod(position, self._size)
        return self.block(place)[rest]


class _Open:
    """A request of the simulation that has not ended."""

    __slots__ = ("content", "drafted", "loads", "number", "request", "until")

    def __init__(self, request: RecordedRequest, content: _Content) -> None:
        self.request = request
        """What was recorded of it."""
        self.number = request.number
        """Its recorded number."""
        self.content = content
        """Its tokens."""
        self.until = -1
        """The length of the sequence at which its turn stops by a token; -1: it does not."""
        self.drafted = 0
        """How many verifications of its drafts were made."""
        self.loads = 0
        """How many of its loads were begun."""


def _stop(request: RecordedRequest, turn: int) -> int:
    """The length of the sequence at which a turn stops by a token; -1: it does not, or it is not known."""
    begin = request.chunks[turn - 1].end if turn else request.prompt
    if turn < len(request.chunks):
        end = request.chunks[turn].turn
    elif request.outcome == "stopped" or request.resumable:
        end = begin + request.outputs if request.outputs > 0 and request.outcome != "length_capped" else -1
    else:
        end = -1
    return -1 if end <= begin or end - begin == request.max_tokens else end


class SimulatedRunner(Runner):
    """Answers steps as the recorded model did."""

    def __init__(self, setup: EngineSetup, engine: Engine) -> None:
        super().__init__(setup, 0)
        self._engine = engine

    def _proposed(self, name: str) -> int:
        """The recorded number of drafts; by time that of the request's next recorded verification."""
        if self.proposed is not None:
            return self.proposed.get(name, 0)
        one = self._engine.opened.get(name)
        verified = one.request.drafts[one.drafted : one.drafted + 1] if one else []
        return verified[0].drafts if verified else 0


class Engine(Driver):
    """One scheduler with the observer of its release and a clock of our own."""

    def __init__(self, traffic: Traffic, setup: dict[str, Any], counting: Counting) -> None:
        self.traffic = traffic
        """What is simulated."""
        self.now = 0
        """The time, in microseconds since the recorded engine started."""
        self.counting = counting
        """Counts the events."""
        self.opened: dict[str, _Open] = {}
        """Requests that have not ended, by name: their recorded number."""
        self._next = iter(traffic.requests)
        """The requests that the script has not added yet; numbers may be used again."""
        super().__init__(setup_of(setup, "Recorded" if setup.get("connector") else ""), record=False)
        self.runner: SimulatedRunner = SimulatedRunner(self.setup, self)
        """Answers steps."""
        self.runner.content = self._content
        self._size = traffic.block_tokens
        """Tokens of a recorded block."""
        self._observation = Observation(clock=lambda: self.now * 1000)
        """Keeps the events until the ledger takes them."""
        self._observation(self.scheduler)

    def count(self) -> None:
        """Give the ledger the events since the last call."""
        self.counting.feed(self._observation.take())

    def finish(self) -> Run:
        """End the observation and return what was counted."""
        self.counting.feed(self._observation.stop())
        return self.counting.run()

    # --- what clients do ------------------------------------------------------------------------------

    def come(self, name: str) -> None:
        """The next request of the script comes."""
        self.arrive(next(self._next))

    def arrive(self, request: RecordedRequest) -> None:
        """A request comes."""
        name = str(request.number)
        one = self.opened[name] = _Open(request, _Content(request, self._size))
        self.expect(name, request.answers, hold=request.hold_us >= 0)
        one.until = _stop(request, 0)
        self._add(one, one.content.tokens(0, request.prompt))

    def extend(self, name: str, index: int) -> None:
        """The next chunk of a session comes."""
        one = self.opened.get(name)
        if one is not None:
            chunk = one.request.chunks[index]
            one.until = _stop(one.request, index + 1)
            self._add(one, one.content.tokens(chunk.start, chunk.end))

    def _add(self, one: _Open, tokens: list[int]) -> None:
        request, most = one.request, one.request.max_tokens
        self._added += 1
        of_request: dict[str, Any] = {}
        if request.lora and self.setup.loras:
            from vllm.lora.request import LoRARequest

            number = request.lora & 0x7FFFFFFF or 1
            of_request["lora_request"] = LoRARequest(f"adapter {number}", number, "/nowhere")
        made = build_request(
            str(request.number),
            tokens,
            hasher=self._hasher,
            max_tokens=most if most is not None else self.setup.max_model_len,
            pooling=self.setup.pooling,
            resumable=request.resumable,
            priority=request.priority,
            arrival_seconds=float(self._added),
            of_request=of_request,
        )
        if not request.reads_cache:
            made.skip_reading_prefix_cache = True
        self.scheduler.add_request(made)

    def forget_ended(self) -> None:
        """Drop the requests that have ended."""
        living = self.scheduler.requests
        if len(self.opened) > 2 * len(living) + 64:
            self.opened = {name: one for name, one in self.opened.items() if name in living}

    # --- what the model and the connector do ----------------------------------------------------------

    def _content(self, name: str, request: Any, place: int) -> int:
        """The recorded token, where it is known."""
        one = self.opened.get(name)
        if one is None:
            return FIRST_TOKEN
        position = request.num_tokens - request.num_output_tokens + place
        return STOP_TOKEN if position + 1 == one.until else one.content.token(position)

    def accepted(self, step: ModelStep) -> dict[str, int]:
        """How many drafts each request accepts in a step: as in its next recorded verification."""
        found = {}
        for name in step.scheduled.scheduled_spec_decode_tokens:
            one = self.opened.get(name)
            if one is None or name in step.admitted or name in step.unsampled:
                found[name] = 0
                continue
            verified = one.request.drafts[one.drafted : one.drafted + 1]
            one.drafted += 1
            found[name] = verified[0].accepted if verified else 0
        return found


# --- by step --------------------------------------------------------------------------------------------


def by_step(
    traffic: Traffic, setup: dict[str, Any], progress: Callable[[float], object], *, since: int = 0
) -> Run:
    """Carry out the recorded script. Requests that came before ``since`` are not counted."""
    engine = Engine(traffic, setup, Counting(by_name=True, since=since))
    engine.recorded = True
    total, error = len(traffic.script), ""
    try:
        for place, op in enumerate(traffic.script):
            engine.now = max(engine.now, op.at)
            engine.carry_out(op)
            if not place % TAKEN_EVERY:
                engine.count()
                engine.forget_ended()
                progress(place / total)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    run = engine.finish()
    run.error = error
    return run


# --- by time --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Timing:
    """How traffic runs in time. ``rate``: how much faster requests come. ``closed``: a request that continues
    another one's output comes as long after its end as recorded. ``betas``: microseconds of each feature.
    ``since``: requests that came before are not counted."""

    betas: Sequence[float]
    rate: float = 1.0
    closed: bool = False
    since: int = 0


def by_time(
    traffic: Traffic, setup: dict[str, Any], timing: Timing, progress: Callable[[float], object]
) -> Run:
    """Let the requests come at their times, and give each step the time of the step model."""
    first = traffic.requests[0].came_after
    since = first + round((timing.since - first) / timing.rate) if timing.since > first else 0
    engine = Engine(traffic, setup, Counting(by_name=True, since=since))
    return _Clock(engine, timing).run(progress)


class _Clock:
    """One simulation by time."""

    def __init__(self, engine: Engine, timing: Timing) -> None:
        self.engine = engine
        """The scheduler."""
        self.timing = timing
        """How fast requests come, and steps run."""
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        """What happens when: time, order, what."""
        self._order = itertools.count()
        """Things of one time happen in the order in which they were planned."""
        self._begun: deque[tuple[int, tuple[int, ...]]] = deque()
        """When each step in flight was scheduled, and its work."""
        self._delivered_at = 0
        """When the last output came."""
        self._busy = False
        """Whether requests have been running since."""
        self._came = 0
        self._loaded: set[str] = set()
        """Requests whose load has finished and was not reported yet."""
        self._sent: set[str] = set()
        """Ended requests whose blocks were sent and not reported yet."""
        self._children: dict[int, list[tuple[RecordedRequest, int]]] = {}
        """Requests that wait for another one's end, and how long they come after it."""
        self._cut: dict[str, int] = {}
        """The outputs after which a client gives up, by request."""
        self._idle = 0
        self._names: set[str] = set()
        """The requests of the last step."""
        self.waiting: list[int] = []
        """How many requests waited at each twentieth of the arrivals."""

    def run(self, progress: Callable[[float], object]) -> Run:
        engine, error = self.engine, ""
        self._plan()
        total, steps = len(engine.traffic.requests), 0
        try:
            while self._step():
                steps += 1
                if not steps % TAKEN_EVERY:
                    engine.count()
                    engine.forget_ended()
                    progress(self._came / total)
        except Standstill as raised:
            error = str(raised)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        run = engine.finish()
        run.waiting, run.error = self.waiting, error
        return run

    # --- arrivals -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        requests = self.engine.traffic.requests
        zero = requests[0].came_after if requests else 0
        by_number: dict[int, RecordedRequest] = {}
        together: dict[int, list[RecordedRequest]] = {}
        for request in requests:
            together.setdefault(request.at, []).append(request)
        for at, group in together.items():
            begin = max(group[0].came_after, 0)
            for place, request in enumerate(group, 1):
                came = begin + (at - begin) * place // (len(group) + 1) if begin < at else at
                parent = by_number.get(request.parent) if self.timing.closed else None
                if parent is not None and 0 <= parent.ended_at <= request.at:
                    self._children.setdefault(parent.number, []).append(
                        (request, request.at - parent.ended_at)
                    )
                else:
                    self._at(zero + round((came - zero) / self.timing.rate), partial(self._come, request))
                by_number[request.number] = request
        for at, running in self.engine.traffic.resets:
            when = zero + round((at - zero) / self.timing.rate)
            self._do(when, Op("reset", running=running))

    def _at(self, when: int, what: Callable[[], object]) -> None:
        heapq.heappush(self._due, (when, next(self._order), what))

    def _do(self, when: int, op: Op) -> None:
        self._at(when, partial(self.engine.carry_out, op))

    def _come(self, request: RecordedRequest) -> None:
        engine, name = self.engine, str(request.number)
        engine.arrive(request)
        self._came += 1
        if self._came * 20 // len(engine.traffic.requests) > len(self.waiting):
            self.waiting.append(len(engine.scheduler.requests) - len(engine.scheduler.running))
        for index, chunk in enumerate(request.chunks):
            self._do(engine.now + chunk.at - request.at, Op("chunk", name, count=index))
        if request.closed:
            self._do(engine.now + request.ended_at - request.at, Op("close", name))
        elif request.outcome == "aborted":
            if request.outputs > 0:
                self._cut[name] = request.prompt + request.outputs
            else:
                self._do(engine.now + request.ended_at - request.at, Op("abort", name))

    # --- steps ----------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One iteration of the engine; False when all is done."""
        engine = self.engine
        self._happen()
        scheduler, in_flight = engine.scheduler, engine.in_flight
        if scheduler.has_requests():
            scheduled = engine.schedule()
            self._begun.append((engine.now, self._work(scheduled)))
            self._start_loads(scheduled)
            if scheduled.total_num_scheduled_tokens and len(in_flight) < engine.depth:
                return True
        elif not in_flight:
            if not self._due:
                return False
            engine.now = max(engine.now, self._due[0][0])
            return True
        self._deliver()
        return True

    def _happen(self) -> None:
        due, now = self._due, self.engine.now
        while due and due[0][0] <= now:
            heapq.heappop(due)[2]()

    def _deliver(self) -> None:
        engine = self.engine
        step = engine.in_flight[0]
        scheduled_at, work = self._begun.popleft()
        if step.scheduled.total_num_scheduled_tokens:
            begin = self._delivered_at if self._busy else max(self._delivered_at, scheduled_at)
            took = sum(beta * feature for beta, feature in zip(self.timing.betas, work, strict=True))
            engine.now = max(engine.now, begin + max(1, round(took)))
            self._idle = 0
        elif len(engine.in_flight) == 1:
            self._wait()
        arguments: dict[str, Any] = {"accepted": engine.accepted(step)}
        if engine.connector is not None:
            loading = engine.runner.loading
            ready = self._loaded & loading
            self._loaded -= ready
            sent = self._sent & engine.connector.held
            self._sent -= sent
            arguments |= {"finished_recving": ready, "finished_sending": sent}
        before = set(engine.scheduler.requests) if self._children or engine.connector is not None else None
        engine.output(**arguments)
        if step.scheduled.total_num_scheduled_tokens:
            self._delivered_at = engine.now
        self._busy = bool(engine.in_flight or engine.scheduler.running)
        if before is not None:
            self._ended(before - set(engine.scheduler.requests))
        if self._cut:
            self._give_up()

    def _wait(self) -> None:
        """The only step in flight is empty: wait until something happens.

        A connector that asked to be asked later needs further lookups. Raises :class:`Standstill`.
        """
        engine, due = self.engine, self._due
        self._idle += 1
        if self._idle > MOST_IDLE and not due:
            waiting = len(engine.scheduler.requests)
            raise Standstill(
                f"{waiting:,} requests wait for ever: the pool has too few blocks for one of them"
            )
        if engine.connector is None and due:
            engine.now = max(engine.now, due[0][0])
        else:
            engine.now += IDLE_US

    def _ended(self, names: set[str]) -> None:
        engine = self.engine
        for name in names:
            one = engine.opened.get(name)
            for child, later in self._children.pop(int(name), ()):
                self._at(engine.now + round(later / self.timing.rate), partial(self._come, child))
            if engine.connector is not None and one is not None and name in engine.connector.held:
                self._at(engine.now + max(0, one.request.hold_us), partial(self._sent.add, name))

    def _give_up(self) -> None:
        requests = self.engine.scheduler.requests
        for name, length in list(self._cut.items()):
            request = requests.get(name)
            if request is None:
                if name in self.engine.opened:
                    del self._cut[name]
            elif request.num_tokens >= length:
                del self._cut[name]
                self.engine.abort(name)

    def _start_loads(self, scheduled: Any) -> None:
        """Asynchronous loads that the step orders end when they have taken as long as recorded."""
        engine = self.engine
        if engine.connector is None:
            return
        for load in getattr(scheduled.kv_connector_metadata, "loads", ()):
            one = engine.opened.get(load.request_id)
            if load.asynchronous and one is not None:
                took = one.request.load_us[one.loads : one.loads + 1] or one.request.load_us[-1:] or [0]
                one.loads += 1
                self._at(engine.now + took[0], partial(self._loaded.add, load.request_id))

    def _work(self, scheduled: Any) -> tuple[int, ...]:
        """The features of a step, in the order of :data:`~.step_changes.FEATURES`."""
        requests, drafts_of = self.engine.scheduler.requests, scheduled.scheduled_spec_decode_tokens
        prefill = decodes = drafts = context = 0
        names = scheduled.num_scheduled_tokens.keys()
        changes, self._names = len(names ^ self._names), set(names)
        for name, tokens in scheduled.num_scheduled_tokens.items():
            drafted = len(drafts_of[name]) if drafts_of and name in drafts_of else 0
            drafts += drafted
            if tokens - drafted == 1:
                decodes += 1
                context += requests[name].num_computed_tokens
            else:
                prefill += tokens - drafted
        return (1, prefill, decodes, drafts, context, changes)
