"""How many requests of an engine run and wait, from its events."""

from __future__ import annotations

from ...audit import events as ev


class RequestCounts:
    """Whoever was scheduled since it waited runs; whoever is there and does not run waits."""

    def __init__(self) -> None:
        self._there = 0
        self._running: set[int] = set()

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are there and do not run."""
        return self._there - len(self._running)

    def feed(self, event: ev.Event) -> bool:
        """Take in one event; whether a count changed."""
        before = self._there, len(self._running)
        match event:
            case ev.Stepped():
                self._running.update(event.changed[::4])
            case ev.RequestAdded():
                self._there += 1
            case ev.Finished():
                self._there -= 1
                self._running.discard(event.request)
            case ev.Preempted():
                self._running.discard(event.request)
            case ev.RolledBack() if event.cause == "session":
                self._running.discard(event.request)
            case ev.Snapshot():
                self._there, self._running = len(event.rows), set()
        return before != (self._there, len(self._running))
