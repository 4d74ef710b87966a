"""A recorder that keeps its events in memory, for ``attach`` and for tests: no thread, no journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..events import EngineStarted, EngineStopped, Event, Gap, Snapshot
from .recorder import OVERFLOW, microseconds_since
from .writer import JournalWriter, Limits


def write_journal(folder: Path, batches: Iterable[list[Event]]) -> JournalWriter:
    """Write what a :class:`MemoryRecorder` returned as one segment, which is still open. Raises OSError."""
    writer = JournalWriter(folder, Limits(segment_bytes=1 << 40, folder_bytes=1 << 40))
    writer.rotate()
    for events in batches:
        writer.write(events)
    return writer


class MemoryRecorder:
    """A recorder without a journal: :meth:`take` returns the events recorded since the last call."""

    failures = 0
    written_bytes = 0
    write_failures = 0
    writer_seconds = 0.0

    def __init__(self, capacity_events: int = 1 << 20) -> None:
        self.wants_snapshot = True
        """Whether the observer should call :meth:`restart` at the next step boundary; true at first."""
        self.on_exit: Callable[[], object] | None = None
        """Never called: there is no journal to complete at the end of the process."""
        self.lost_events = 0
        """Events refused because too many were kept."""
        self._events: list[Event] = []
        """Events since the last :meth:`take`."""
        self._full_capacity = capacity_events
        """Most events kept while nothing was lost."""
        self._capacity = capacity_events
        """Most events kept now; 0 after a loss."""
        self._taken = 0
        """Events that :meth:`take` has returned so far."""
        self._lost_reported = 0
        self._open = True
        """Whether events are accepted."""
        self._stopped = False
        """Whether the last event that :meth:`take` returned is EngineStopped."""
        self._epoch: float | None = None
        """The monotonic clock when the engine started; None before the first restart."""

    def keep(self, numbers: list[int]) -> list[int]:
        """A copy of ``numbers`` for an event."""
        return numbers.copy()

    @property
    def recorded_events(self) -> int:
        """Events accepted."""
        return self._taken + len(self._events)

    @property
    def written_events(self) -> int:
        """Events accepted: nothing can go wrong after that."""
        return self.recorded_events

    def record(self, event: Event) -> None:
        """Queue one event. Never raises, never waits."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self._capacity = 0
            self.lost_events += 1

    def record_all(self, events: Sequence[Event]) -> None:
        """Queue several events. Never raises, never waits."""
        for event in events:
            self.record(event)

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        """Begin again with these two events; if events were refused, a Gap comes before them."""
        if not self._open:
            return
        self._report_loss(started.at)
        self._epoch = time.monotonic() - started.at / 1e6
        self._events += (started, snapshot)
        self._capacity = self._full_capacity
        self.wants_snapshot = False

    def take(self) -> list[Event]:
        """Everything recorded since the last call."""
        events, self._events = self._events, []
        self._taken += len(events)
        if events:
            self._stopped = type(events[-1]) is EngineStopped
        if self._open and not self._capacity:
            self.wants_snapshot = True
        return events

    def flush(self, timeout: float | None = None) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def close(self, reason: str = "exit", timeout: float = 0.0) -> None:
        """Add EngineStopped unless it was recorded already, and refuse everything after it. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._capacity = 0
        self.wants_snapshot = False
        at = microseconds_since(self._epoch)
        self._report_loss(at)
        stopped = type(self._events[-1]) is EngineStopped if self._events else self._stopped
        if self._epoch is not None and not stopped:
            self._events.append(EngineStopped(at, reason))

    def _report_loss(self, at: int) -> None:
        lost = self.lost_events - self._lost_reported
        self._lost_reported += lost
        if lost:
            self._events.append(Gap(at, lost, OVERFLOW))
