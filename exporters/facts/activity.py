"""What an engine did over time: requests running and waiting, preemptions, and resets of its prefix cache.

The figures are kept in a :class:`~kvledger.exporters.trace.time_series.Series`, and are rows of ``activity``
when the journal was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...audit import events as ev
from ...audit.replay.engine_audit import EngineAudit
from ..trace.request_counts import RequestCounts
from ..trace.time_series import TICKS, Series
from .schema import Row

LEVELS = ("running", "waiting")

CountsState = tuple[int, list[int]]
"""See :attr:`~kvledger.exporters.trace.request_counts.RequestCounts.state`."""


class Activity:
    """Follows one engine, batch by batch."""

    def __init__(self, audit: EngineAudit) -> None:
        self.series = Series()
        """Requests, preemptions and resets."""
        self._audit = audit
        """The audit that reads the journal; it knows the clock and the window."""
        self._counts = RequestCounts()

    @property
    def at_end(self) -> CountsState:
        """The requests in the engine after the last batch."""
        return self._counts.state

    def go_on(self, series: Series, counts: CountsState) -> None:
        """Go on from an earlier activity of the same engine."""
        self.series, self._counts = series, RequestCounts(*counts)

    def add(self, events: Iterable[ev.Event]) -> None:
        """Add a batch."""
        began = self._audit.began_seconds or 0.0
        holds = self._audit.window.holds
        for event in events:
            changed, reset = self._counts.feed(event), isinstance(event, ev.CacheReset) and event.succeeded
            if (changed or reset) and holds(wall := began + event.at / 1e6):
                levels = (self._counts.running, self._counts.waiting)
                self.series.level(wall, dict(zip(LEVELS, levels, strict=True)))
                if isinstance(event, ev.Preempted):
                    self.series.count(wall, "preemptions")
                if reset:
                    self.series.count(wall, "resets")


def activity_rows(engine: str, journal: str, series: Series) -> Iterator[Row]:
    """The buckets of a series as rows of ``activity``."""
    width = series.width_ticks
    for place in sorted({*series.counts, *series.levels}):
        levels, counts = series.levels.get(place, {}), series.counts.get(place, {})
        yield (
            engine,
            journal,
            round(place * width * 1_000_000 / TICKS),
            round(width * 1_000_000 / TICKS),
            *(levels.get(name) for name in LEVELS),
            counts.get("preemptions", 0),
            counts.get("resets", 0),
        )
