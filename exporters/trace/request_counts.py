"""Counts the running and waiting requests of an engine from its events."""

from __future__ import annotations

from collections.abc import Iterable

from ...audit import events as ev


class RequestCounts:
    """A request runs from its scheduling to a preemption or its end; otherwise it waits.

    The counts begin with ``in_engine`` requests, of which those with these numbers run.
    """

    def __init__(self, in_engine: int = 0, running: Iterable[int] = ()) -> None:
        self._in_engine = in_engine
        self._running: set[int] = set(running)

    @property
    def state(self) -> tuple[int, list[int]]:
        """What another object begins with to go on from here."""
        return self._in_engine, sorted(self._running)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests in the engine that do not run."""
        return self._in_engine - len(self._running)

    def feed(self, event: ev.Event) -> bool:
        """Apply one event; return whether a count changed."""
        before = self._in_engine, len(self._running)
        match event:
            case ev.Stepped():
                self._running.update(ev.numbers(event.changed)[::4])
            case ev.RequestAdded():
                self._in_engine += 1
            case ev.Finished():
                self._in_engine -= 1
                self._running.discard(event.request)
            case ev.Preempted():
                self._running.discard(event.request)
            case ev.RolledBack() if event.cause == "session":
                self._running.discard(event.request)
            case ev.Snapshot():
                self._in_engine, self._running = len(event.rows), set()
        return before != (self._in_engine, len(self._running))
