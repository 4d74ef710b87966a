"""Scrapes the engines' own metrics (``--engine-url``); ``compare_counters.py`` compares them with the ledger.

An engine in a scrape is matched with a journal by the engine's index and, if several journals have that
index, by the model. Without a unique match nothing is compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from ...audit.errors import LedgerError
from ...audit.replay.followed_audit import FollowedAudit
from ..metrics.values import state
from .compare_counters import CounterComparison, Scrape
from .scrape import ScrapedEngine, counters, fetch

logger = logging.getLogger("kvledger")

SCRAPE_SECONDS = 15.0
NOTE_SECONDS = 1.0


def check_url(url: str) -> None:
    """Raise :class:`LedgerError` unless ``url`` is an HTTP URL."""
    if not url.startswith(("http://", "https://")):
        raise LedgerError(
            f"{url!r} is no URL of an engine's metrics; an example is http://localhost:8000/metrics."
        )


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
            check_url(url)
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

    def run(self, stop: threading.Event) -> None:
        """Take a turn every second until ``stop`` is set."""
        while not stop.wait(NOTE_SECONDS):
            self.turn()

    def _scrape(self) -> None:
        scrapes: dict[ScrapedEngine, Scrape] = {}
        for url in self._urls:
            began = self._clock()
            try:
                by_engine = counters(self._ask(url), url)
            except Exception as error:  # the other engines are still scraped
                logger.warning("%s can't be read: %s", url, error)
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
                "engine %s of %s matches no single journal and is not compared", engine.number, engine.url
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


def attach_reconciliation(
    urls: Sequence[str],
    audits: Callable[[], Sequence[FollowedAudit]],
    lock: AbstractContextManager[object],
    stop: threading.Event,
) -> threading.Thread:
    """Reconcile in a daemon thread until ``stop`` is set. Raises :class:`LedgerError` for a bad URL."""
    thread = threading.Thread(target=Reconciler(urls, audits, lock).run, args=(stop,), daemon=True)
    thread.start()
    return thread
