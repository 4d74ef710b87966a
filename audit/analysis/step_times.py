"""How long the steps of an engine took, and what each step worked on, read from the events.

An *observation* is one step, or several steps in a row whose single times were not recorded. Its time runs to
the delivery of its output, from the later of two instants: the delivery before, and its own scheduling where
no request had been running in between. So time without a running request belongs to no step, and steps
that overlap (async scheduling, pipeline stages) are not counted twice.

``Repeated`` has the time of its emission and not of its last delivery. Its steps are therefore observed
together with the next step that has a delivery of its own.

Memory is constant: observations are summed, and a sample of them is kept for :mod:`.step_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from .. import causes
from .. import events as ev
from ..figures.sums import Sums
from ..ledger.clocks import QueueClock

SAMPLE_ROWS = 2048
"""The largest number of rows that a sample keeps."""

_HASH = 2654435761
"""Spreads consecutive numbers over 32 bits (Knuth's multiplicative hash)."""

FAR = 1 << 62
"""A time after every event."""


class Work(NamedTuple):
    """What some steps worked on. ``context_tokens``: the KV that their decoding requests attended to.

    A request decodes if the step schedules one token of it beside drafts; all other tokens are prefill.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    draft_tokens: int = 0
    context_tokens: int = 0

    def __add__(self, more: Work) -> Work:  # type: ignore[override]
        """The sum."""
        return Work(
            self[0] + more[0], self[1] + more[1], self[2] + more[2], self[3] + more[3], self[4] + more[4]
        )


NO_WORK = Work()


class StepSample(Sums):
    """Rows of numbers, thinned to a bounded, evenly spread part of all rows, the same one each time.

    Each kept row stands for ``weight`` rows. The first number of a row decides if it is kept: a time, or the
    number of a request. So two samples merge to the sample of all their rows.
    """

    most: int = SAMPLE_ROWS
    rows: list[tuple[int, ...]] = []
    seen: int = 0
    shift: int = 0

    def add(self, key: int, *row: int) -> None:
        """Take one row."""
        self.seen += 1
        if not ((key * _HASH) & 0xFFFFFFFF) >> (32 - self.shift):  # as _kept
            self.rows.append((key, *row))
            self._thin()

    def merge(self, later: StepSample) -> None:
        """Add the rows of a later sample."""
        self.seen += later.seen
        self.shift = max(self.shift, later.shift)
        self.rows = [row for row in (*self.rows, *later.rows) if self._kept(row[0])]
        self._thin()

    def _thin(self) -> None:
        while len(self.rows) > self.most and self.shift < 32:
            self.shift += 1
            self.rows = [row for row in self.rows if self._kept(row[0])]

    def _kept(self, key: int) -> bool:
        return not ((key * _HASH) & 0xFFFFFFFF) >> (32 - self.shift)

    @property
    def weight(self) -> int:
        """How many rows each kept row stands for, about."""
        return 1 << self.shift


ScheduledRequest = tuple[int, int, int, int]
"""One request's part of the last step: tokens, drafts among them, advance and context.

Its context at step k is context + k * advance. A request decodes if one token is scheduled beside the drafts.
"""


class PendingStep(NamedTuple):
    """A scheduled step whose output has not come."""

    at: int
    work: Work


class StepSums(Sums):
    """How long steps took, and what they worked on."""

    sample: StepSample = msgspec.field(default_factory=StepSample)
    """Observations: steps, the figures of :class:`Work`, microseconds."""
    busy_us: int = 0
    """Time of all observations in the window."""
    work: Work = NO_WORK
    """Work of all observations in the window."""
    busy_by_minute: dict[int, int] = {}
    """``busy_us`` by the minute since 1970 in which an observation ends, if that is wanted."""


class StepTimes(msgspec.Struct):
    """Observes the steps of one engine. Times are microseconds since the engine started.

    ``since_us`` and ``until_us`` bound the window, in Unix time; the sample is of all times.
    """

    since_us: int = 0
    until_us: int = FAR
    by_minute: bool = False
    """Whether the time of the steps is wanted by the minute."""
    sums: StepSums = msgspec.field(default_factory=StepSums)
    """What was observed."""
    requests: dict[int, ScheduledRequest] = {}
    """The last step's requests that still run."""
    now: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0, 0])
    """Over ``requests``: prefill tokens, decoding requests, drafts; context and advance of the decoding."""
    scheduled: int = 0
    """Steps scheduled so far."""
    pending: list[PendingStep] = []
    """Steps whose output has not come, oldest first."""
    repeated: Work = NO_WORK
    """Work of repeated steps that wait for the next delivery."""
    repeated_at: int = -1
    """When these were emitted; -1: there are none."""
    delivered_at: int = -1
    """Time of the last delivery; -1: not known."""
    busy: bool = False
    """Whether requests have been running since the last delivery."""
    lost: bool = False
    """Whether events were lost since the last snapshot."""
    skip: int = 0
    """Deliveries of steps that were not seen."""
    order: list[int] = []
    """Request numbers in the order of the last ``DeliveredWhole``."""
    began_us: int = 0
    """Unix time of the engine's microsecond 0, in microseconds."""

    def state(self) -> tuple[Any, ...]:
        """What decides how the observation goes on."""
        pending = [(step.at, *step.work) for step in self.pending]
        rest = (self.delivered_at, self.repeated_at, self.busy, self.lost, self.skip, self.began_us)
        return (sorted(self.requests.items()), self.now, pending, tuple(self.repeated), self.order, rest)

    # --- events ---------------------------------------------------------------------------------------

    def started(self, event: ev.EngineStarted) -> None:
        """Take the engine's clock."""
        self.began_us = round(event.began_seconds * 1e6)

    def snapshot(self, event: ev.Snapshot) -> None:
        """The next step lists every request. Steps in flight are known unless events were lost."""
        self.requests, self.now = {}, [0, 0, 0, 0, 0]
        if self.lost or len(self.pending) != event.undelivered_steps:
            self.pending, self.skip = [], event.undelivered_steps
            self.repeated, self.repeated_at = NO_WORK, -1
            self.delivered_at, self.busy = -1, False
        self.lost = False

    def lose(self, _: ev.Event) -> None:
        """Events were lost: observe nothing until the next snapshot."""
        self.lost = True

    def raised(self, event: ev.EngineRaised) -> None:
        """An exception of the engine may have left its counts in between."""
        self.lost |= event.lost

    def stepped(self, event: ev.Stepped) -> None:
        """A step was scheduled."""
        if self.lost:
            return
        if event.dropped:
            for request in ev.numbers(event.dropped):
                self._remove(request)
        self.scheduled += 1
        if event.changed:
            self._put(ev.numbers(event.changed))
        self.pending.append(PendingStep(event.at, self._work(1)))

    def delivered(self, event: ev.Delivered) -> None:
        """The output of the oldest step came."""
        if self.now[2]:
            changed = ev.numbers(event.changed)
            for i in range(0, len(changed), 2):
                self._sampled(changed[i], changed[i + 1])
        self._deliver(event.at)

    def delivered_whole(self, event: ev.DeliveredWhole) -> None:
        """The same, for an output with many differences."""
        if event.requests:
            self.order = event.requests
        if self.now[2]:
            for request, sampled in zip(self.order, event.sampled, strict=False):
                self._sampled(request, sampled)
        self._deliver(event.at)

    def repeat(self, event: ev.Repeated) -> None:
        """The last step and its output were repeated."""
        if self.lost or not event.times:
            return
        times, depth = event.times, len(self.pending)
        self.scheduled += times
        if self.skip or self.delivered_at < 0 or not self.requests:
            self._repeat_unobserved(times)
            return
        delivered = [step.work for step in self.pending]
        if times > depth:
            delivered.append(self._work(times - depth, before=depth))
        kept = [self._work(1, before=place) for place in reversed(range(min(times, depth)))]
        self.pending = [
            *self.pending[times:],
            *(PendingStep(event.at, work) for work in kept),
        ]
        for work in delivered[: times if times < depth else len(delivered)]:
            self.repeated = self.repeated + work
        self.repeated_at, self.busy = event.at, True

    def left(self, event: ev.Finished | ev.Preempted) -> None:
        """A request runs no longer."""
        self._remove(event.request)
        if not self.requests and not self.pending:
            if self.repeated_at >= 0 and not self.lost:
                self._observe(self.delivered_at, self.repeated_at, NO_WORK)
                self.delivered_at = self.repeated_at
            self.repeated, self.repeated_at = NO_WORK, -1
            self.busy = False

    # --- a step -----------------------------------------------------------------------------------------

    def _deliver(self, at: int) -> None:
        if self.lost:
            return
        if self.skip:
            self.skip -= 1
        elif self.pending:
            step = self.pending.pop(0)
            begin = self.delivered_at
            if begin < 0 or not self.busy:
                begin = max(begin, step.at)
            self._observe(begin, at, step.work)
        self.delivered_at = at
        self.repeated, self.repeated_at = NO_WORK, -1
        self.busy = bool(self.pending or self.requests)

    def _repeat_unobserved(self, times: int) -> None:
        """Repeat steps while it is not known when the last output came."""
        unseen = min(self.skip, times)
        self.skip -= unseen
        works = [step.work for step in self.pending] + [self._work(1)] * unseen
        self.pending = [PendingStep(FAR, work) for work in works]
        self.delivered_at, self.busy = -1, False

    def _observe(self, begin: int, end: int, work: Work) -> None:
        """Add an observation: the repeated steps, and ``work``."""
        if end <= begin:
            return
        if self.repeated_at >= 0:
            work = self.repeated + work
        sums, ended_us = self.sums, self.began_us + end
        sums.sample.add(end, *work, end - begin)
        if self.since_us <= ended_us < self.until_us:
            sums.busy_us += end - begin
            if self.by_minute:
                minute = ended_us // 60_000_000
                sums.busy_by_minute[minute] = sums.busy_by_minute.get(minute, 0) + end - begin
            sums.work += work

    def _work(self, steps: int, before: int = 0) -> Work:
        """The work of ``steps`` steps with the present requests; the last is ``before`` steps ago."""
        prefill, decodes, drafts, context, advance = self.now
        if steps == 1:
            return Work(1, prefill, decodes, drafts, context + (self.scheduled - before) * advance)
        last = self.scheduled - before
        places = steps * last - steps * (steps - 1) // 2
        tokens = steps * context + places * advance
        return Work(steps, steps * prefill, steps * decodes, steps * drafts, tokens)

    def _put(self, changed: Sequence[int]) -> None:
        """Set the parts of requests of the present step: request, tokens, drafts, context after scheduling.

        Replays spend much of their time here, so this is written out.
        """
        requests, scheduled = self.requests, self.scheduled
        prefill, decodes, draft_tokens, contexts, advances = self.now
        for request, tokens, drafts, computed in zip(*[iter(changed)] * 4, strict=True):
            advance = tokens
            before = requests.get(request)
            if before is None:
                if drafts:
                    advance = 1
            else:
                old_tokens, old_drafts, old_advance, old_context = before
                draft_tokens -= old_drafts
                if old_tokens - old_drafts == 1:
                    decodes -= 1
                    contexts -= old_context
                    advances -= old_advance
                else:
                    prefill -= old_tokens - old_drafts
                if drafts:
                    advance = old_advance if old_drafts else 1
            context = computed - advance * scheduled
            requests[request] = (tokens, drafts, advance, context)
            draft_tokens += drafts
            if tokens - drafts == 1:
                decodes += 1
                contexts += context
                advances += advance
            else:
                prefill += tokens - drafts
        self.now = [prefill, decodes, draft_tokens, contexts, advances]

    def _sampled(self, request: int, sampled: int) -> None:
        """A request with drafts gets ``sampled`` tokens in each step from now on."""
        row = self.requests.get(request)
        if row is None or not sampled:
            return
        tokens, drafts, advance, context = row
        if not drafts or advance == sampled:
            return
        self._remove(request)
        row = (tokens, drafts, sampled, context + (advance - sampled) * self.scheduled)
        self.requests[request] = row
        self._count(row, 1)

    def _remove(self, request: int) -> None:
        row = self.requests.pop(request, None)
        if row is not None:
            self._count(row, -1)

    def _count(self, row: ScheduledRequest, sign: int) -> None:
        sums = self.now
        tokens, drafts, advance, context = row
        if tokens - drafts == 1:
            sums[1] += sign
            sums[3] += sign * context
            sums[4] += sign * advance
        else:
            sums[0] += sign * (tokens - drafts)
        sums[2] += sign * drafts


STEP_HANDLERS: dict[type[ev.Event], Callable[[StepTimes, Any], None]] = {
    ev.EngineStarted: StepTimes.started,
    ev.Snapshot: StepTimes.snapshot,
    ev.Gap: StepTimes.lose,
    ev.HookFailed: StepTimes.lose,
    ev.EngineRaised: StepTimes.raised,
    ev.Stepped: StepTimes.stepped,
    ev.Delivered: StepTimes.delivered,
    ev.DeliveredWhole: StepTimes.delivered_whole,
    ev.Repeated: StepTimes.repeat,
    ev.Finished: StepTimes.left,
    ev.Preempted: StepTimes.left,
}
"""The method for each type of event."""


# --- What kept each step of an engine from admitting more, by the minute of the last hour.
#
# A step that leaves requests waiting says what ended its admissions (``LeftWaiting``); it holds for the
# steps until the next such event. Where no request was left waiting, a step may still have one whose KV is
# being loaded. ``Repeated`` has the time of its emission, so its steps count up to half a minute late.

KEPT_MINUTES = 60

BUDGET, SEATS, BLOCKS, LOADS, NOTHING, OTHER = range(6)
LIMITS = {
    BUDGET: "token budget spent",
    SEATS: "all seats taken",
    BLOCKS: "no free blocks, or a preemption",
    LOADS: "requests waited for loads alone",
    NOTHING: "no request waited",
    OTHER: "paused, or not recorded",
}
"""What kept a step from admitting more."""

_OF_CAUSE = {
    causes.QUEUED_BUDGET: BUDGET,
    causes.QUEUED_RUNNING_LIMIT: SEATS,
    causes.QUEUED_BLOCKS: BLOCKS,
    causes.QUEUED_PREEMPTION: BLOCKS,
}


class StepLimits(Sums):
    """Steps of the last hour, by the minute since 1970 times the number of :data:`LIMITS`, plus the limit."""

    steps: dict[int, int] = {}

    def add(self, minute: int, limit: int, steps: int) -> None:
        """Count steps, and forget those of minutes that have left the hour."""
        key = minute * len(LIMITS) + limit
        if key not in self.steps:
            first = (minute - KEPT_MINUTES) * len(LIMITS)
            self.steps = {each: number for each, number in self.steps.items() if each >= first}
        self.steps[key] = self.steps.get(key, 0) + steps

    def merge(self, more: StepLimits) -> None:
        """Add those of another engine, and keep the last hour."""
        super().merge(more)
        if self.steps:
            first = (max(self.steps) // len(LIMITS) - KEPT_MINUTES) * len(LIMITS)
            self.steps = {key: number for key, number in self.steps.items() if key >= first}

    def by_minute(self, now: int) -> list[tuple[int, list[int]]]:
        """Each minute of the hour that ends with the minute ``now``, and its steps by limit."""
        minutes = range(now - KEPT_MINUTES + 1, now + 1)
        size = len(LIMITS)
        return [(each, [self.steps.get(each * size + limit, 0) for limit in LIMITS]) for each in minutes]


class StepLimitState(msgspec.Struct):
    """The limits so far, and the requests that no step schedules though they were admitted."""

    sums: StepLimits = msgspec.field(default_factory=StepLimits)
    loading: set[int] = msgspec.field(default_factory=set)
    """Requests that wait for KV."""
    preempted: set[int] = msgspec.field(default_factory=set)
    """Requests whose blocks were taken for others; they wait for as many again."""

    def step(self, at: float, queue: QueueClock, steps: int) -> None:
        """Count steps at a Unix time in seconds."""
        left = any(not isinstance(since, int) for since in queue.waiting.values())
        if not queue.recorded:
            limit = OTHER
        elif left:
            limit = _OF_CAUSE.get(queue.cause, OTHER)
        else:
            limit = BLOCKS if self.preempted else LOADS if self.loading else NOTHING
        self.sums.add(int(at // 60), limit, steps)

    def admit(self, event: ev.Admitted) -> None:
        """A request that is admitted with an asynchronous load waits for it."""
        self.preempted.discard(event.request)
        if event.asynchronous:
            self.loading.add(event.request)

    def preempt(self, event: ev.Preempted) -> None:
        """A request waits again."""
        self.loading.discard(event.request)
        if event.cause == "blocks":
            self.preempted.add(event.request)

    def loaded(self, event: Any) -> None:
        """A load has ended, or failed."""
        self.loading.discard(event.request)

    def finish(self, event: ev.Finished) -> None:
        """A request waits for nothing more."""
        self.loading.discard(event.request)
        self.preempted.discard(event.request)

    def compare(self, event: ev.Snapshot) -> None:
        """A request that is gone waits for nothing, though its end may have been lost."""
        open_requests = {row.request for row in event.rows}
        self.loading &= open_requests
        self.preempted &= open_requests


LOAD_HANDLERS: dict[type[ev.Event], Callable[[StepLimitState, Any], None]] = {
    ev.Admitted: StepLimitState.admit,
    ev.LoadFinished: StepLimitState.loaded,
    ev.LoadFailed: StepLimitState.loaded,
    ev.Preempted: StepLimitState.preempt,
    ev.Finished: StepLimitState.finish,
    ev.Snapshot: StepLimitState.compare,
}
