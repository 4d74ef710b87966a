"""What kept each step of an engine from admitting more, by the minute of the last hour.

A step that leaves requests waiting says what ended its admissions (``LeftWaiting``); it holds for the steps
until the next such event. Where no request was left waiting, a step may still have one whose KV is being
loaded. ``Repeated`` has the time of its emission, so its steps count up to half a minute late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .. import causes
from .. import events as ev
from ..figures.sums import Sums
from ..ledger.clocks import QueueClock

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
