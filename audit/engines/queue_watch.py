"""What ended the admissions of a step that left requests waiting.

The scheduler admits waiting requests until a condition of its loop ends it. The conditions only come true
while the loop runs, so what holds after ``schedule`` is what ended it. A refused allocation leaves no trace,
so the manager's ``allocate_slots`` is wrapped from the step's first lookup to the step's end: all running
requests have their blocks by then, and only calls for waiting requests are seen. An object whose method was
once covered by an attribute is slower for good, so this begins only after a lookup that led to no admission.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .. import causes
from .. import events as ev
from ..hooks import EngineMismatch, Wrapping
from .engine_counts import EngineCounts
from .observer import Observer


class QueueWatch:
    """Emits ``LeftWaiting``."""

    def __init__(self, observer: Observer, counts: EngineCounts) -> None:
        scheduler = observer.scheduler
        self._observer = observer
        self._scheduler = scheduler
        self._counts = counts
        """Says whether the engine is paused."""
        self._budget: int = scheduler.max_num_scheduled_tokens
        """Tokens that a step may schedule."""
        self._limit: int = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        """As many requests may run."""
        self.waiting = False
        """Whether requests waited when the step began."""
        self.arrived = False
        """Whether a request has come since the last step."""
        self.preempted_in = -1
        """The last step that preempted a request."""
        self.watches = False
        """Whether allocations are watched: a lookup has led to no admission."""
        self._refused = False
        """Whether the step's last allocation for a waiting request was refused."""
        self._wrapping: Wrapping | None = None
        """``allocate_slots`` while it is wrapped."""
        self._emitted = ""
        """The cause of the last event; empty if readers may not know it."""

    def step_begins(self, nobody_waits: bool) -> None:
        """``schedule`` is called."""
        self.waiting = not nobody_waits
        if self._wrapping is not None:  # an exception left the last step
            self.unwrap()
            self._refused = False

    def looked_up(self) -> None:
        """The engine looks a waiting request up: watch the allocation that follows."""
        if self.watches and self._wrapping is None:
            self._refused = False
            with contextlib.suppress(EngineMismatch):  # then no refusal is seen
                self._wrapping = Wrapping(
                    self._scheduler.kv_cache_manager, "allocate_slots", self._watch_refusal
                )

    def _watch_refusal(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            self._refused = blocks is None
            return blocks

        return watched

    def unwrap(self) -> None:
        """Restore ``allocate_slots``."""
        wrapping, self._wrapping = self._wrapping, None
        if wrapping is not None:
            wrapping.undo()

    def step_ended(self, tokens: int) -> None:
        """``schedule`` returned; requests waited when it was called. ``tokens``: all that it scheduled."""
        if self._wrapping is not None:
            self.unwrap()
        if len(self._scheduler.requests) != len(self._scheduler.running):
            cause = self._cause(tokens)
            if self.arrived or cause != self._emitted:
                self._emit(cause)
        self.arrived = self._refused = False

    def _cause(self, tokens: int) -> str:
        if self._counts.paused(self._scheduler):
            return causes.QUEUED_PAUSED
        if self.preempted_in == self._observer.step:
            return causes.QUEUED_PREEMPTION
        if tokens >= self._budget:
            return causes.QUEUED_BUDGET
        if len(self._scheduler.running) >= self._limit:
            return causes.QUEUED_RUNNING_LIMIT
        return causes.QUEUED_BLOCKS if self._refused else causes.QUEUED_UNKNOWN

    def pause_changed(self) -> None:
        """The engine was paused, or goes on."""
        paused = self._counts.paused(self._scheduler)
        self._emit(causes.QUEUED_PAUSED if paused else causes.QUEUED_NEXT_STEP)

    def begin_segment(self) -> None:
        """A new reader knows no cause yet."""
        self._emitted = ""
        if self._counts.paused(self._scheduler):
            self.pause_changed()

    def _emit(self, cause: str) -> None:
        self._emitted = cause
        log = self._observer.log
        log.emit(ev.LeftWaiting(log.now(), cause))
