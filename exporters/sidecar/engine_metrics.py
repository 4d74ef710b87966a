"""The counters of an engine's own ``/metrics``, by the figures that the ledger has of them.

Reading is here; comparing with the ledger is below, and judging them by themselves in
``audit/analysis/usage.py``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import NamedTuple

from ...audit.analysis.source_differences import ComparedCounter, Differences, EngineCounters, Figures
from ...audit.causes import TIER_DEVICE, TIER_DISK, TIER_HOST, TIER_P2P, TIER_UNSPECIFIED, UNEXPLAINED
from ...audit.foreign import MOST_COUNT, Unreadable, families
from ...audit.ledger.account import COMPUTED, EXTERNAL, LOCAL
from ...audit.ledger.weights import outputs_of
from ...audit.release_semantics import ServerMetrics, servers, sources_add_up
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.observers import Reconciled
from ...audit.text import printable
from ..http_client import check_url, fetch, shown
from ..metrics.values import state
from .threads import Beat, ignore_beat

MOST_ENGINES = 10_000
"""No server has as many; each costs memory."""


class ScrapedEngine(NamedTuple):
    """One engine as its metrics name it."""

    url: str
    number: str
    model: str


def counters(text: str, url: str, server: ServerMetrics) -> dict[ScrapedEngine, dict[str, float]]:
    """The counters of every engine in a scrape, by figure. Raises Unreadable if ``text`` can't be parsed."""
    by_engine: dict[ScrapedEngine, dict[str, float]] = {}
    for samples in families(text, counter_names(server)).values():
        for name, labels, value in samples:
            figure = server.summed.get(name) or server.counters.get((name, labels.get("source", "")))
            if figure is None:
                continue
            if not abs(value) < MOST_COUNT:  # a negative one is a finding
                raise Unreadable(f"has a counter {name} that is no count")
            engine = ScrapedEngine(url, labels.get(server.rank, "0"), labels.get("model_name", ""))
            figures = by_engine.setdefault(engine, dict.fromkeys(server.zero, 0.0))
            figures[figure] = figures.get(figure, 0.0) + value
            if len(by_engine) > MOST_ENGINES:
                raise Unreadable(f"has more than {MOST_ENGINES:,} engines")
    return by_engine


def counter_names(server: ServerMetrics) -> frozenset[str]:
    """The names of the counters that have a figure."""
    return frozenset({*server.summed, *(name for name, _ in server.counters)})


def compared_counters(text: str, url: str) -> dict[ScrapedEngine, dict[str, float]]:
    """The same of whichever product's server it is, if its counters can be compared with the ledger."""
    return {
        engine: figures
        for server in servers().values()
        if not server.at_end
        for engine, figures in counters(text, url, server).items()
    }


# --- engine metrics ------------------------------------------------------------------------------------
#
# Scrapes the engines' own metrics (``--engine-url``); below they are compared with the ledger.
#
# An engine in a scrape is matched with a journal by the engine's index and, if several journals have that
# index, by the model. Without a unique match nothing is compared.


logger = logging.getLogger("kvledger")

SCRAPE_SECONDS = 15.0
NOTE_SECONDS = 1.0


def match(
    engines: Iterable[ScrapedEngine], audits: Sequence[FollowedAudit]
) -> dict[ScrapedEngine, FollowedAudit]:
    """The audit of each scraped engine, if exactly one live audit fits and it fits no other engine."""
    live = [
        engine_audit
        for engine_audit in audits
        if engine_audit.metrics.begun and state(engine_audit) == "live"
    ]
    matches: dict[ScrapedEngine, FollowedAudit] = {}
    for engine in engines:
        candidates = [engine_audit for engine_audit in live if _index(engine_audit) == engine.number]
        if len(candidates) > 1:
            candidates = [
                engine_audit
                for engine_audit in candidates
                if _model(engine_audit) == engine.model.rstrip("/").rsplit("/", 1)[-1]
            ]
        if len(candidates) == 1:
            matches[engine] = candidates[0]
    claims = [id(engine_audit) for engine_audit in matches.values()]
    return {
        engine: engine_audit
        for engine, engine_audit in matches.items()
        if claims.count(id(engine_audit)) == 1
    }


def _index(engine_audit: FollowedAudit) -> str:
    assert engine_audit.engine is not None
    settings = engine_audit.engine.configuration
    return str(settings.get("engine_index", settings.get("data_parallel_rank", 0)) or 0)


def _model(engine_audit: FollowedAudit) -> str:
    assert engine_audit.engine is not None
    return str(engine_audit.engine.configuration.get("model") or "").rsplit("/", 1)[-1]


class Reconciler:
    """Scrapes ``urls`` and updates each audit's ``engine_counters``.

    ``audits`` returns the followed audits and is called with ``lock`` held. Raises :class:`LedgerError`
    for a malformed URL.
    """

    def __init__(
        self,
        urls: Sequence[str],
        audits: Callable[[], Sequence[FollowedAudit]],
        lock: AbstractContextManager[object],
        *,
        ask: Callable[[str], str] = fetch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for url in urls:
            check_url(url, "an engine's metrics", "http://localhost:8000/metrics")
        self._urls = urls
        self._audits = audits
        self._lock = lock
        self._ask = ask
        self._clock = clock
        """Returns the Unix time, in seconds."""
        self._comparisons: dict[int, CounterComparison] = {}
        """The comparison of each audit, by the identity of the audit."""
        self._unmatched: set[ScrapedEngine] = set()
        """Engines that matched no single journal at the last scrape, which were logged."""
        self._scraped = 0.0
        """Unix time of the last scrape; 0.0: there was none."""

    def turn(self) -> None:
        """Record the ledger's figures; scrape if it is time. A bad answer of an engine is only logged."""
        with self._lock:
            now = self._clock()
            for comparison in self._comparisons.values():
                comparison.note(now)
        if now - self._scraped >= SCRAPE_SECONDS:
            self._scraped = now
            self._scrape()

    def run(self, stop: threading.Event, beat: Beat = ignore_beat) -> None:
        """Take a turn every second until ``stop`` is set."""
        while not stop.wait(NOTE_SECONDS):
            self.turn()
            beat()

    def _scrape(self) -> None:
        scrapes: dict[ScrapedEngine, Scrape] = {}
        for url in self._urls:
            began = self._clock()
            try:
                by_engine = compared_counters(self._ask(url), url)
            except Exception as error:  # the other engines are still scraped
                logger.warning("%s can't be read: %s", shown(url), printable(str(error)))
                continue
            ended = self._clock()
            scrapes |= {engine: Scrape(began, ended, figures) for engine, figures in by_engine.items()}
        with self._lock:
            self._compare(scrapes, self._audits())

    def _compare(self, scrapes: dict[ScrapedEngine, Scrape], audits: Sequence[FollowedAudit]) -> None:
        matched = match(scrapes, audits)
        answered = {id(engine_audit): scrapes[engine] for engine, engine_audit in matched.items()}
        for engine_audit in audits:
            comparison = self._comparisons.get(id(engine_audit))
            scrape = answered.get(id(engine_audit))
            if scrape is None:
                if comparison is not None:
                    comparison.missed()
                continue
            if comparison is None:
                comparison = self._comparisons[id(engine_audit)] = CounterComparison(
                    engine_audit, zero=_began_at_zero(engine_audit, audits)
                )
                comparison.note(self._clock())
            comparison.scraped(scrape)
        kept = {id(engine_audit) for engine_audit in audits}
        self._comparisons = {key: of for key, of in self._comparisons.items() if key in kept}
        unmatched = scrapes.keys() - matched.keys()
        for engine in unmatched - self._unmatched:
            logger.warning(
                "engine %s of %s matches no single journal and is not compared",
                printable(engine.number),
                shown(engine.url),
            )
        self._unmatched = unmatched


def _began_at_zero(engine_audit: FollowedAudit, audits: Sequence[FollowedAudit]) -> bool:
    """Whether both sides began at zero: the journal has the engine's start, and its index is unique."""
    alike = [other for other in audits if other.engine is not None and _index(other) == _index(engine_audit)]
    ledger = engine_audit.auditor.ledger
    return (
        engine_audit.metrics.from_start
        and not (ledger.sums.gaps or ledger.sums.hook_failures)
        and len(alike) == 1
    )


# --- compare counters ----------------------------------------------------------------------------------
#
# Compares an engine's own counters with the ledger, and splits every difference by cause.
#
# Here: the ledger's figures at one moment, their short history, and the comparison with a scrape. Scraping
# itself is above. Times are Unix seconds of this process's clock.
#
# Traffic never stops, so no two figures are of one instant. An engine's counter lags behind its scheduler by
# the delay of its front end; the ledger lags by the delay of the journal. A counter is therefore compared
# with the range of the ledger's figure from ``WINDOW_SECONDS`` before the scrape to ``SETTLE_SECONDS`` after
# it. What lies outside that range in every scrape of a whole window is *unexplained*. Every other difference
# has a named cause:
#
# - between settled and engine-reported figures: the causes of ``audit/analysis/source_differences.py``;
# - between engine-reported figures and those that the front end counted: ``dropped``. The front end discards
#   the output of a request whose client has gone. The number of such requests is bounded: requests that ended
#   here minus requests that the front end saw end. Each explains at most the largest prompt; of output
#   tokens, those of an aborted request, and of each further one the largest output;
# - ``untold``: preemptions that the front end counts with the request's next output, which has not come yet
#   or never comes;
# - ``window``: what the range explains.


WINDOW_SECONDS = 60.0
"""The longest delay between a scheduler's action and the front end's counter."""

SETTLE_SECONDS = 3.0
"""The longest delay between an event and its reading from the journal."""

Counters = Mapping[str, float]
"""The engine's counters in a scrape, by figure."""

Causes = dict[str, float]


class Side(NamedTuple):
    """One figure at one moment: the ledger's, and the range of what the engine's counter may show.

    ``least`` is below ``most`` if the counter depends on outputs that kvledger does not see. ``causes`` lead
    from ``ledger`` to ``most``.
    """

    ledger: float
    least: float
    most: float
    causes: Causes


NOTHING = Side(0, 0, 0, {})


class Point(NamedTuple):
    """All figures of an engine. They include every event before ``seconds`` and none after ``noted``."""

    seconds: float
    noted: float
    sides: dict[str, Side]
    gaps: int


# --- the ledger's figures ---------------------------------------------------------------------------


def point(engine_audit: FollowedAudit, noted: float) -> Point:
    """The present figures that can be compared with this engine's release; none for a v0 scheduler."""
    words = engine_audit.meaning_words
    if engine_audit.engine is None or engine_audit.engine.adapter.startswith("v0"):
        return Point(engine_audit.read_seconds, noted, {}, 0)
    sides: dict[str, Side] = {
        "requests": _plain(engine_audit.closed.requests),
        "preemptions": _preemptions(engine_audit),
        "aborted": _plain(engine_audit.metrics.aborted_requests),
        "output_tokens": _outputs(engine_audit),
    }
    if sources_add_up(words):
        sides |= _prompts(engine_audit)
    for cache in ("local", "external"):
        if words.get(f"{cache} lookups") == "admissions" and engine_audit.metrics.lookups[cache].lookups:
            sides |= _lookups(engine_audit, cache)
    if "local_hit_tokens" in sides and words.get("hits by tier") == "counted":
        sides |= _tiers(engine_audit, sides["local_hit_tokens"])
    ledger = engine_audit.auditor.ledger
    return Point(engine_audit.read_seconds, noted, sides, ledger.sums.gaps + ledger.sums.hook_failures)


def _plain(figure: float) -> Side:
    return Side(figure, figure, figure, {})


def _preemptions(engine_audit: FollowedAudit) -> Side:
    """The front end counts a preemption with the next output, so some are never counted."""
    happened = sum(engine_audit.metrics.preemptions.values())
    return Side(happened, engine_audit.metrics.preemptions_with_output, happened, {})


def _outputs(engine_audit: FollowedAudit) -> Side:
    """The front end counts each output as it comes, so those of open requests, too."""
    metrics = engine_audit.metrics
    running = sum(map(outputs_of, engine_audit.auditor.ledger.open.values()))
    outputs = metrics.ended_outputs + running
    return Side(outputs, outputs - metrics.aborted_outputs, outputs, {})


def _prompts(engine_audit: FollowedAudit) -> Iterator[tuple[str, Side]]:
    metrics, reconciliation = engine_audit.metrics, engine_audit.of(Reconciled).sums
    reported = _figures(metrics.reported)
    unknown = _figures(metrics.reported_unknown)
    still_open = Figures()
    for figures, sign in ((reported, 1), (unknown, -1), (reconciliation.reported, -1)):
        still_open.add(figures, sign)
    for name in ("prompt", LOCAL, EXTERNAL, COMPUTED, "cached"):
        causes: Causes = {}
        for step in (reconciliation.to_plan, reconciliation.to_reported):
            for cause, figures in _by_cause(step):
                _add(causes, cause, _of(figures, name))
        _add(causes, "unknown_here", _of(unknown, name))
        _add(causes, "unsettled", _of(still_open, name))
        counted = _of(reported, name)
        yield f"{name}_tokens", Side(_of(reconciliation.settled, name), counted, counted, causes)


def _figures(table: Mapping[str, int]) -> Figures:
    return Figures(table.get(LOCAL, 0), table.get(EXTERNAL, 0), table.get(COMPUTED, 0))


def _by_cause(differences: Differences) -> Iterator[tuple[str, Figures]]:
    for cause, difference in differences.items():
        yield cause, difference.figures


def _of(figures: Figures, name: str) -> int:
    if name == "prompt":
        return figures.total
    if name == "cached":
        return figures.local + figures.external
    return int(getattr(figures, name))


def _lookups(engine_audit: FollowedAudit, cache: str) -> Iterator[tuple[str, Side]]:
    metrics = engine_audit.metrics
    counted, made, resumed = metrics.lookups[cache], metrics.admitted[cache], metrics.resumed[cache]
    for name, of in (("queried", "queried"), ("hit", "hit")):
        causes: Causes = {}
        _add(causes, "lookup_counted", getattr(counted, of) - getattr(made, of))
        _add(causes, "resumed", -getattr(resumed, of))
        exported = getattr(counted, of) - getattr(resumed, of)
        yield f"{cache}_{name}_tokens", Side(getattr(made, of), exported, exported, causes)


def _tiers(engine_audit: FollowedAudit, local: Side) -> Iterator[tuple[str, Side]]:
    """The counters by tier.

    vLLM counts tokens whose tiers do not sum to them as ``external_unspecified``.
    """
    metrics = engine_audit.metrics
    device = metrics.tiers.get(TIER_DEVICE, 0)
    ledger, least, most = local.ledger + device, local.least + device, local.most + device
    yield "device_hit_tokens", local._replace(ledger=ledger, least=least, most=most)
    for tier in (TIER_HOST, TIER_P2P, TIER_DISK):
        yield f"{tier}_hit_tokens", _plain(metrics.tiers.get(tier, 0))
    unspecified, counted = metrics.tiers.get(TIER_UNSPECIFIED, 0), metrics.untiered
    causes: Causes = {}
    _add(causes, "tiers_do_not_sum", counted)
    exported = unspecified + counted
    yield "unspecified_hit_tokens", Side(unspecified, exported, exported, causes)


def _add(causes: Causes, cause: str, amount: float) -> None:
    if amount:
        causes[cause] = causes.get(cause, 0) + amount


# --- history and comparison -------------------------------------------------------------------------


class Scrape(NamedTuple):
    """An engine's own counters, read at some time between ``began`` and ``ended``."""

    began: float
    ended: float
    counters: Counters


class Base(NamedTuple):
    """The start of a comparison: the counters and the range of the ledger's figures at one scrape."""

    seconds: float
    counters: Counters
    least: dict[str, float]
    most: dict[str, float]
    sides: dict[str, Side]


class CounterComparison:
    """Compares one engine's counters with its audit, from the last baseline on.

    Call ``note`` about once a second, ``scraped`` after each scrape and ``missed`` after a failed one.
    ``zero``: both sides began at zero, so no baseline is needed.
    """

    def __init__(self, engine_audit: FollowedAudit, *, zero: bool) -> None:
        self.engine_audit = engine_audit
        """The audit; its ``engine_counters`` are the result."""
        self._history: deque[Point] = deque()
        """Figures of the ledger, oldest first, as far back as a waiting scrape needs."""
        self._waiting: deque[Scrape] = deque()
        """Scrapes whose settling time has not passed, oldest first."""
        self._base: Base | None = Base(engine_audit.metrics.created_seconds, {}, {}, {}, {}) if zero else None
        """The baseline; None: the next scrape with enough history becomes it."""
        self._outside: dict[str, deque[tuple[float, float]]] = {}
        """By figure: the Unix times of scrapes, and how far the counter was outside the ledger's range."""
        self._last: Counters = {}
        """The counters of the last scrape, to see whether one fell."""

    def note(self, seconds: float) -> None:
        """Record the present figures, and compare the scrapes whose settling time has passed."""
        now = point(self.engine_audit, seconds)
        if self._history and now.gaps != self._history[-1].gaps:
            self.restart()
        if now.seconds and (not self._history or now.seconds > self._history[-1].seconds):
            self._history.append(now)
        while self._waiting and now.seconds >= self._waiting[0].ended + SETTLE_SECONDS:
            self._compare(self._waiting.popleft())
        self._forget()

    def scraped(self, scrape: Scrape) -> None:
        """Add a scrape. A counter that fell was reset, so the comparison restarts."""
        if any(scrape.counters.get(figure, 0) < value for figure, value in self._last.items()):
            self.restart()
        self._last = scrape.counters
        self._waiting.append(scrape)

    def missed(self) -> None:
        """Record that the engine did not answer, or is gone."""
        last = self.engine_audit.engine_counters or EngineCounters()
        self.engine_audit.engine_counters = EngineCounters(
            last.rows, False, last.scraped_seconds, last.baseline_seconds
        )

    def restart(self) -> None:
        """Start again: a later scrape becomes the baseline."""
        self._history.clear()
        self._waiting.clear()
        self._outside.clear()
        self._base = None

    def _forget(self) -> None:
        """Drop history that no waiting scrape needs, but keep one point before it."""
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
        if not reaches_back:  # from a zero baseline the history may begin after the first figures
            least = dict.fromkeys(least, 0.0)
        rows = tuple(
            self._row(figure, base, scrape, least[figure], most[figure])
            for figure in self._history[-1].sides
            if figure in scrape.counters and (not base.counters or figure in base.counters)
        )
        self.engine_audit.engine_counters = EngineCounters(rows, True, scrape.ended, base.seconds)

    def _range(self, scrape: Scrape) -> tuple[dict[str, float], dict[str, float]]:
        """The smallest and largest value of each figure around a scrape."""
        last = self._history[-1].sides
        least = {figure: side.least for figure, side in last.items()}
        most = {figure: side.most for figure, side in last.items()}
        for point in self._history:
            for figure, side in point.sides.items():
                if figure in least:
                    least[figure] = min(least[figure], side.least)
                    most[figure] = max(most[figure], side.most)
        return least, most

    def _row(self, figure: str, base: Base, scrape: Scrape, least: float, most: float) -> ComparedCounter:
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
        idle = all(point.sides.get(figure) == side for point in self._history)
        _add(drift, _cause_of_rest(figure, rest, idle=idle), rest)
        return ComparedCounter(figure, counted, ledger, drift)

    def _slack(self, figure: str, base: Base, scrape: Scrape) -> float:
        """How much of a figure the front end may have dropped because clients had gone."""
        if figure == "requests":
            return inf
        if figure.endswith(("queried_tokens", "hit_tokens")):
            return 0
        ended = self._history[-1].sides["requests"].most - base.least.get("requests", 0)
        seen = scrape.counters.get("requests", 0) - base.counters.get("requests", 0)
        metrics = self.engine_audit.metrics
        if figure == "output_tokens":  # the range has what aborted requests explain
            aborted = self._history[-1].sides["aborted"].most - base.least.get("aborted", 0)
            return max(0.0, ended - seen - aborted) * metrics.largest_output
        each = metrics.most_preemptions if figure == "preemptions" else metrics.largest_prompt
        return max(0.0, ended - seen) * each

    def _lasting(self, figure: str, seconds: float, outside: float) -> float:
        """The smallest distance to the range in a whole window; 0 unless every scrape is on the same side."""
        amounts = self._outside.setdefault(figure, deque())
        if not outside or (amounts and (amounts[-1][1] > 0) != (outside > 0)):
            amounts.clear()
        if outside:
            amounts.append((seconds, outside))
        while len(amounts) > 1 and amounts[1][0] <= seconds - WINDOW_SECONDS:
            amounts.popleft()
        if not amounts or amounts[0][0] > seconds - WINDOW_SECONDS:
            return 0
        return min((amount for _, amount in amounts), key=abs)


def _cause_of_rest(figure: str, rest: float, *, idle: bool) -> str:
    """Name the cause of a difference that the range or the slack explains."""
    if rest > 0:
        return "window"
    if figure == "preemptions":
        return "untold"
    return "dropped" if idle else "window"
