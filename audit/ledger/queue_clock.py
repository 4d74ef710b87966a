"""Why requests waited for their first admission: one clock for all of them.

The clock adds up the time of each cause for which steps left requests waiting. A request's part is the
difference of two readings, so it costs the same however long the queue is.
"""

from __future__ import annotations

from operator import sub

from .. import causes

_PLACE = {cause: place for place, cause in enumerate(causes.QUEUE)}
_NEXT_STEP, _UNKNOWN = _PLACE[causes.QUEUED_NEXT_STEP], _PLACE[causes.QUEUED_UNKNOWN]


class QueueClock:
    """Microseconds since the journal's beginning by cause, in the order of ``causes.QUEUE``."""

    def __init__(self) -> None:
        self.recorded = False
        """Whether the observer records what ended the admissions of steps."""
        self.cause = causes.QUEUED_UNKNOWN
        """The cause that holds now."""
        self.since = 0
        """Since when it holds."""
        self.spent = [0] * len(_PLACE)
        """The time of each cause until then."""
        self.waiting: dict[int, int | tuple[int, ...]] = {}
        """By request without an admission: the reading from which its time counts. Until a step has left it
        waiting, the time of its arrival; from then on the time between is a part of the next step's."""

    def _read(self, at: int) -> list[int]:
        reading = list(self.spent)
        reading[_PLACE.get(self.cause, _UNKNOWN)] += at - self.since
        return reading

    def begin(self, request: int, at: int, *, seen: bool) -> None:
        """The request waits. ``seen``: its arrival is an event; else a step may have left it waiting."""
        missed = not seen or self.cause == causes.QUEUED_PAUSED
        self.waiting[request] = tuple(self._read(at)) if missed else at

    def set(self, cause: str, at: int) -> None:
        """A step left requests waiting for this cause."""
        self.spent, self.cause, self.since = self._read(at), cause, at
        for request in reversed(self.waiting):
            arrived = self.waiting[request]
            if not isinstance(arrived, int):
                break
            reading = list(self.spent)
            reading[_NEXT_STEP] -= at - arrived
            self.waiting[request] = tuple(reading)

    def read_anew(self) -> None:
        """Let the present reading be 0; only differences are ever used. A cause that holds for nobody is
        forgotten, but not a pause, which also holds for requests that are still to come."""
        left = {request: found for request, found in self.waiting.items() if not isinstance(found, int)}
        if self.cause != causes.QUEUED_PAUSED and not left:
            self.cause, self.since = causes.QUEUED_UNKNOWN, 0
        self.waiting |= {request: tuple(map(sub, reading, self.spent)) for request, reading in left.items()}
        self.spent = [0] * len(_PLACE)

    def end(self, request: int, waited: int, at: int) -> tuple[int, ...]:
        """The parts of the time that the request waited: it is admitted, or it ends."""
        began = self.waiting.pop(request, at - waited)
        if self.recorded and not isinstance(began, int):
            return tuple(map(sub, self._read(at), began))
        parts = [0] * len(_PLACE)
        parts[_NEXT_STEP if self.recorded else _UNKNOWN] = waited
        return tuple(parts)
