"""Figures over time in a bounded number of buckets, for traces of any length.

Time is counted in ticks since 1970. Each width of buckets divides the next one: ticks times a power of two up
to 4 seconds, 12 seconds, a minute, and minutes times a power of two. When there are too many buckets,
neighbours are merged. So the series of several engines, and of sums by the minute, have common bucket bounds
and can be added.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...audit import events as ev

TICKS = 64
"""Ticks per second."""

MINUTE_TICKS = 60 * TICKS

MOST = 256
"""The largest number of buckets; a long trace has between a fifth of it and all of it."""


def wider(width_ticks: int) -> int:
    """The next width of buckets."""
    return width_ticks * {256: 3, 768: 5}.get(width_ticks, 2)


class Series(msgspec.Struct):
    """``counts`` hold sums of each bucket, ``levels`` the last value in each bucket."""

    width_ticks: int = 1
    most: int = MOST
    """The largest number of buckets; beyond it they are merged."""
    counts: dict[int, dict[str, int]] = {}
    levels: dict[int, dict[str, int]] = {}

    def count(self, wall_seconds: float, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a count."""
        row = self.counts.setdefault(int(wall_seconds * TICKS) // self.width_ticks, {})
        row[name] = row.get(name, 0) + amount
        if len(self.counts) > self.most:
            self.coarsen(wider(self.width_ticks))

    def level(self, wall_seconds: float, levels: dict[str, int]) -> None:
        """Set levels from this time on. Times never decrease."""
        self.levels[int(wall_seconds * TICKS) // self.width_ticks] = levels
        if len(self.levels) > self.most:
            self.coarsen(wider(self.width_ticks))

    def coarsen(self, width_ticks: int) -> None:
        """Merge buckets to ``width_ticks``, a multiple of the present width."""
        factor = width_ticks // self.width_ticks
        counts: dict[int, dict[str, int]] = {}
        for place, row in self.counts.items():
            into = counts.setdefault(place // factor, {})
            for name, amount in row.items():
                into[name] = into.get(name, 0) + amount
        self.counts = counts
        self.levels = {place // factor: self.levels[place] for place in sorted(self.levels)}
        self.width_ticks = width_ticks

    def split(self, place: int) -> tuple[Series, Series]:
        """The buckets before ``place``, and the others."""
        parts = []
        for before in (True, False):
            counts = {at: row for at, row in self.counts.items() if (at < place) is before}
            levels = {at: row for at, row in self.levels.items() if (at < place) is before}
            parts.append(Series(self.width_ticks, self.most, counts, levels))
        return parts[0], parts[1]

    def fill(self) -> None:
        """Copy each level to the empty buckets before the next one."""
        for first, last in zip(sorted(self.levels), sorted(self.levels)[1:], strict=False):
            for place in range(first + 1, last):
                self.levels[place] = self.levels[first]


def together(several: list[Series]) -> Series:
    """Sum the counts and levels of all engines' series."""
    summed = Series(width_ticks=max((one.width_ticks for one in several), default=1))
    while True:
        for one in several:
            one.coarsen(summed.width_ticks)
        places = [place for one in several for place in (*one.counts, *one.levels)]
        if not places or max(places) - min(places) < 2 * MOST:
            break
        summed.width_ticks = wider(summed.width_ticks)
    for one in several:
        one.fill()
        for into, rows in ((summed.counts, one.counts), (summed.levels, one.levels)):
            for place, row in rows.items():
                sums = into.setdefault(place, {})
                for name, amount in row.items():
                    sums[name] = sums.get(name, 0) + amount
    return summed


# --- Counts the running and waiting requests of an engine from its events.

COUNTED_REQUESTS = (ev.Stepped, ev.RequestAdded, ev.Finished, ev.Preempted, ev.RolledBack, ev.Snapshot)
"""The events that change how many run or wait."""


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
                if event.changed:
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
