"""An engine's own counters beside the ledger: what each rose by, and why the two differ.

Here: the figures of a book at one moment, their short history, and the comparison with what a scrape
found. Not here: scraping (``engine_metrics.py``). Times are Unix seconds of this process's clock.

Traffic never stops, so no two figures are of one instant. A counter of the engine trails what its
scheduler did, by the time that its front end takes; the ledger trails it too, by the time that the
journal takes. So a counter is held against all that the ledger's figure was from ``WINDOW_SECONDS``
before the scrape to ``SETTLE_SECONDS`` after it, and what lies outside that range, in every scrape of
a whole window, is *unexplained*. Everything else has a cause with a name:

- from what the ledger settled to what the engine reported, the causes of ``analysis/reconciliation.py``;
- from what it reported to what its front end counted, that a client had gone (``dropped``): it throws
  away what comes for such a request. How many there were at most is known: requests that ended here
  less those that the front end saw end. Each explains the largest prompt at most;
- preemptions that are told with an output which has not come, or never does, are ``untold``;
- what the range explains is ``window``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from ...audit.analysis.reconciliation import Compared, EngineCounters, Figures, Step
from ...audit.causes import UNEXPLAINED
from ...audit.ledger.positions import COMPUTED, EXTERNAL, LOCAL
from ...audit.replay.engine_audit import EngineAudit

WINDOW_SECONDS = 60.0
"""Longest that a front end may take to count what its scheduler did."""

SETTLE_SECONDS = 3.0
"""Longest that an event may take into the journal, and be read from it."""

Counters = Mapping[str, float]
"""What a scrape found, by figure."""

Causes = dict[str, float]


class Side(NamedTuple):
    """One figure at one moment: the ledger's own, and what a prompt counter would have counted.

    ``least`` is less than ``most`` where it depends on outputs that are not seen. ``causes`` lead from
    ``ledger`` to ``most``.
    """

    ledger: float
    least: float
    most: float
    causes: Causes


NOTHING = Side(0, 0, 0, {})


class Point(NamedTuple):
    """All figures of a book: of everything before ``seconds``, and of nothing after ``noted``."""

    seconds: float
    noted: float
    sides: dict[str, Side]
    gaps: int


# --- the ledger's figures ---------------------------------------------------------------------------


def point(book: EngineAudit, noted: float) -> Point:
    """The figures that this engine's release lets compare, as they stand; none of a v0 scheduler's."""
    words = book.meaning_words
    if book.engine is None or book.engine.adapter.startswith("v0"):
        return Point(book.read_seconds, noted, {}, 0)
    sides: dict[str, Side] = {"requests": _plain(book.closed.requests), "preemptions": _preemptions(book)}
    if words.get("prompt figures") in ("first", "last") and "a negative figure" not in words:
        sides |= _prompts(book)
    for cache in ("local", "external"):
        if words.get(f"{cache} look-ups") == "admissions" and book.metrics.lookups[cache].lookups:
            sides |= _lookups(book, cache)
    ledger = book.auditor.ledger
    return Point(book.read_seconds, noted, sides, ledger.gaps + ledger.hook_failures)


def _plain(figure: float) -> Side:
    return Side(figure, figure, figure, {})


def _preemptions(book: EngineAudit) -> Side:
    """The front end hears of one with the next output; what ends without any is never counted."""
    happened = sum(book.metrics.preemptions.values())
    return Side(happened, book.metrics.preemptions_with_output, happened, {})


def _prompts(book: EngineAudit) -> Iterator[tuple[str, Side]]:
    tallies, between = book.metrics, book.reconciliation
    reported = _figures(tallies.reported)
    unknown = _figures(tallies.reported_unknown)
    still_open = Figures()
    for figures, sign in ((reported, 1), (unknown, -1), (between.reported, -1)):
        still_open.add(figures, sign)
    for name in ("prompt", LOCAL, EXTERNAL, COMPUTED, "cached"):
        causes: Causes = {}
        for step in (between.to_plan, between.to_reported):
            for cause, figures in _by_cause(step):
                _add(causes, cause, _of(figures, name))
        _add(causes, "unknown_here", _of(unknown, name))
        _add(causes, "unsettled", _of(still_open, name))
        counted = _of(reported, name)
        yield f"{name}_tokens", Side(_of(between.settled, name), counted, counted, causes)


def _figures(table: Mapping[str, int]) -> Figures:
    return Figures(table.get(LOCAL, 0), table.get(EXTERNAL, 0), table.get(COMPUTED, 0))


def _by_cause(step: Step) -> Iterator[tuple[str, Figures]]:
    for cause, difference in step.differences.items():
        yield cause, difference.figures


def _of(figures: Figures, name: str) -> int:
    if name == "prompt":
        return figures.total
    if name == "cached":
        return figures.local + figures.external
    return int(getattr(figures, name))


def _lookups(book: EngineAudit, cache: str) -> Iterator[tuple[str, Side]]:
    tallies = book.metrics
    counted, made, resumed = tallies.lookups[cache], tallies.admitted[cache], tallies.resumed[cache]
    for name, of in (("queried", "queried"), ("hit", "hit")):
        causes: Causes = {}
        _add(causes, "lookup_counted", getattr(counted, of) - getattr(made, of))
        _add(causes, "resumed", -getattr(resumed, of))
        exported = getattr(counted, of) - getattr(resumed, of)
        yield f"{cache}_{name}_tokens", Side(getattr(made, of), exported, exported, causes)


def _add(causes: Causes, cause: str, amount: float) -> None:
    if amount:
        causes[cause] = causes.get(cause, 0) + amount


# --- history and comparison -------------------------------------------------------------------------


class Scrape(NamedTuple):
    """What an engine's own counters said, somewhere between ``began`` and ``ended``."""

    began: float
    ended: float
    counters: Counters


class Base(NamedTuple):
    """Where a comparison begins: the counters, and the range of the ledger's figures, at one scrape."""

    seconds: float
    counters: Counters
    least: dict[str, float]
    most: dict[str, float]
    sides: dict[str, Side]


class Comparison:
    """One engine's counters and its book, from the last baseline on.

    ``note`` is to be called every second or so, ``scraped`` with every scrape, ``missed`` when one
    failed. ``zero``: both sides began at nothing, so that no baseline has to be found.
    """

    def __init__(self, book: EngineAudit, *, zero: bool) -> None:
        self.book = book
        self._history: deque[Point] = deque()
        self._waiting: deque[Scrape] = deque()
        self._base: Base | None = Base(book.metrics.created_seconds, {}, {}, {}, {}) if zero else None
        self._outside: dict[str, deque[tuple[float, float]]] = {}
        self._last: Counters = {}

    def note(self, seconds: float) -> None:
        """Take the book's figures of now, and compare the scrapes that can be by now."""
        now = point(self.book, seconds)
        if self._history and now.gaps != self._history[-1].gaps:
            self.restart()
        if now.seconds and (not self._history or now.seconds > self._history[-1].seconds):
            self._history.append(now)
        while self._waiting and now.seconds >= self._waiting[0].ended + SETTLE_SECONDS:
            self._compare(self._waiting.popleft())
        self._forget()

    def scraped(self, scrape: Scrape) -> None:
        """The engine's counters were read. One that fell began anew, and so does the comparison."""
        if any(scrape.counters.get(figure, 0) < value for figure, value in self._last.items()):
            self.restart()
        self._last = scrape.counters
        self._waiting.append(scrape)

    def missed(self) -> None:
        """The engine did not answer, or there is none any more."""
        last = self.book.engine_counters or EngineCounters()
        self.book.engine_counters = EngineCounters(
            last.rows, False, last.scraped_seconds, last.baseline_seconds
        )

    def restart(self) -> None:
        """Begin anew: a later scrape will be the baseline."""
        self._history.clear()
        self._waiting.clear()
        self._outside.clear()
        self._base = None

    def _forget(self) -> None:
        """Keep what the oldest scrape that waits may be held against, and one point before that."""
        latest = self._history[-1].noted if self._history else 0.0
        needed = min([latest, *(scrape.began for scrape in self._waiting)]) - WINDOW_SECONDS
        while len(self._history) > 1 and self._history[1].noted <= needed:
            self._history.popleft()

    def _compare(self, scrape: Scrape) -> None:
        reaches_back = bool(self._history) and self._history[0].noted <= scrape.began - WINDOW_SECONDS
        base = self._base
        if base is None:
            if not reaches_back:
                return
            least, most = self._range(scrape)
            base = self._base = Base(scrape.ended, scrape.counters, least, most, self._history[-1].sides)
        least, most = self._range(scrape)
        if not reaches_back:  # of a zero baseline: how it came to its first figures was not seen
            least = dict.fromkeys(least, 0.0)
        rows = tuple(
            self._row(figure, base, scrape, least[figure], most[figure])
            for figure in self._history[-1].sides
            if figure in scrape.counters and (not base.counters or figure in base.counters)
        )
        self.book.engine_counters = EngineCounters(rows, True, scrape.ended, base.seconds)

    def _range(self, scrape: Scrape) -> tuple[dict[str, float], dict[str, float]]:
        """The least and the most that each figure was around a scrape."""
        last = self._history[-1].sides
        least = {figure: side.least for figure, side in last.items()}
        most = {figure: side.most for figure, side in last.items()}
        for point in self._history:
            for figure, side in point.sides.items():
                if figure in least:
                    least[figure] = min(least[figure], side.least)
                    most[figure] = max(most[figure], side.most)
        return least, most

    def _row(self, figure: str, base: Base, scrape: Scrape, least: float, most: float) -> Compared:
        side = self._history[-1].sides[figure]
        before = base.sides.get(figure, NOTHING)
        counted = scrape.counters[figure] - base.counters.get(figure, 0)
        above = counted - (most - base.least.get(figure, 0))
        below = counted - (least - base.most.get(figure, 0)) + self._slack(figure, base, scrape)
        outside = above if above > 0 else min(below, 0)
        drift = {
            cause: amount
            for cause in {**before.causes, **side.causes}
            if (amount := side.causes.get(cause, 0) - before.causes.get(cause, 0))
        }
        drift[UNEXPLAINED] = drift.get(UNEXPLAINED, 0) + self._lasting(figure, scrape.ended, outside)
        ledger = side.ledger - before.ledger
        rest = counted - ledger - sum(drift.values())
        _add(drift, _why(figure, rest, idle=least == most), rest)
        return Compared(figure, counted, ledger, drift)

    def _slack(self, figure: str, base: Base, scrape: Scrape) -> float:
        """How much of a figure requests may have taken along whose clients had gone."""
        if figure == "requests":
            return inf
        if figure.endswith(("queried_tokens", "hit_tokens")):
            return 0
        ended = self._history[-1].sides["requests"].most - base.least.get("requests", 0)
        heard = scrape.counters.get("requests", 0) - base.counters.get("requests", 0)
        tallies = self.book.metrics
        each = tallies.most_preemptions if figure == "preemptions" else tallies.largest_prompt
        return max(0.0, ended - heard) * each

    def _lasting(self, figure: str, seconds: float, outside: float) -> float:
        """What lay outside at least, in every scrape of the last window, all to the same side."""
        seen = self._outside.setdefault(figure, deque())
        if not outside or (seen and (seen[-1][1] > 0) != (outside > 0)):
            seen.clear()
        if outside:
            seen.append((seconds, outside))
        while len(seen) > 1 and seen[1][0] <= seconds - WINDOW_SECONDS:
            seen.popleft()
        if not seen or seen[0][0] > seconds - WINDOW_SECONDS:
            return 0
        return min((amount for _, amount in seen), key=abs)


def _why(figure: str, rest: float, *, idle: bool) -> str:
    """What a difference is called that the range or the slack allows."""
    if rest > 0:
        return "window"
    if figure == "preemptions":
        return "untold"
    return "dropped" if idle else "window"
