"""Engines' own metrics, scraped and held against the books: what ``--engine-url`` asks for.

Which engine of a URL is which book is told by the engine's index and, where several have one, by the
model; where that leaves a doubt nothing is compared.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ..metrics.values import state
from .reconcile import Comparison, Scrape

logger = logging.getLogger("kvledger")

SCRAPE_SECONDS = 15.0
NOTE_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
MOST_BYTES = 32 << 20

COUNTERS = {
    ("vllm:prompt_tokens_total", ""): "prompt_tokens",
    ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): "local_tokens",
    ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"): "external_tokens",
    ("vllm:prompt_tokens_by_source_total", "local_compute"): "computed_tokens",
    ("vllm:prompt_tokens_cached_total", ""): "cached_tokens",
    ("vllm:prefix_cache_queries_total", ""): "local_queried_tokens",
    ("vllm:prefix_cache_hits_total", ""): "local_hit_tokens",
    ("vllm:external_prefix_cache_queries_total", ""): "external_queried_tokens",
    ("vllm:external_prefix_cache_hits_total", ""): "external_hit_tokens",
    ("vllm:num_preemptions_total", ""): "preemptions",
}
"""Which of vLLM's counters (name, source) is which figure; ``vllm:request_success`` is summed."""

ENDED = "vllm:request_success_total"


class Engine(NamedTuple):
    """One engine as its metrics name it."""

    url: str
    number: str
    model: str


def counters(text: str, url: str = "") -> dict[Engine, dict[str, float]]:
    """The counters of every engine in a scrape, by figure. Raises ValueError for what is no scrape."""
    found: dict[Engine, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            figure = COUNTERS.get((sample.name, labels.get("source", "")))
            if sample.name == ENDED:
                figure = "requests"
            if figure is not None:
                engine = Engine(url, labels.get("engine", "0"), labels.get("model_name", ""))
                of = found.setdefault(engine, {})
                of[figure] = of.get(figure, 0.0) + sample.value
    return found


def fetch(url: str) -> str:
    """What an engine's own ``/metrics`` says. Raises OSError or ValueError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=TIMEOUT_SECONDS) as response:
        text: bytes = response.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return text.decode()


def check_url(url: str) -> None:
    """Raises :class:`LedgerError` for what is no URL of metrics."""
    if not url.startswith(("http://", "https://")):
        raise LedgerError(
            f"{url!r} is no URL of an engine's metrics; one looks like http://localhost:8000/metrics."
        )


def match(engines: Iterable[Engine], books: Sequence[EngineAudit]) -> dict[Engine, EngineAudit]:
    """Each engine's book, where exactly one is live that can be meant, and no other engine means it."""
    live = [book for book in books if book.metrics.begun and state(book) == "live"]
    meant: dict[Engine, EngineAudit] = {}
    for engine in engines:
        found = [book for book in live if _index(book) == engine.number]
        if len(found) > 1:
            found = [book for book in found if _model(book) == engine.model.rstrip("/").rsplit("/", 1)[-1]]
        if len(found) == 1:
            meant[engine] = found[0]
    claims = [id(book) for book in meant.values()]
    return {engine: book for engine, book in meant.items() if claims.count(id(book)) == 1}


def _index(book: EngineAudit) -> str:
    assert book.engine is not None
    settings = book.engine.configuration
    return str(settings.get("engine_index", settings.get("data_parallel_rank", 0)) or 0)


def _model(book: EngineAudit) -> str:
    assert book.engine is not None
    return str(book.engine.configuration.get("model") or "").rsplit("/", 1)[-1]


class Reconciler:
    """Scrapes ``urls`` and keeps each book's ``beside``. Raises :class:`LedgerError` for no URL.

    ``books`` gives those that are followed, and is asked under ``lock``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        books: Callable[[], Sequence[EngineAudit]],
        lock: AbstractContextManager[object],
        *,
        ask: Callable[[str], str] = fetch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for url in urls:
            check_url(url)
        self._urls = urls
        self._books = books
        self._lock = lock
        self._ask = ask
        self._clock = clock
        self._comparisons: dict[int, Comparison] = {}
        self._unmatched: set[Engine] = set()
        self._scraped = 0.0

    def turn(self) -> None:
        """Note the books' figures; scrape if it is time. Never raises on what an engine may answer."""
        with self._lock:
            now = self._clock()
            for comparison in self._comparisons.values():
                comparison.note(now)
        if now - self._scraped >= SCRAPE_SECONDS:
            self._scraped = now
            self._scrape()

    def run(self, stop: threading.Event) -> None:
        """Take turns until told to stop."""
        while not stop.wait(NOTE_SECONDS):
            self.turn()

    def _scrape(self) -> None:
        found: dict[Engine, Scrape] = {}
        for url in self._urls:
            began = self._clock()
            try:
                said = counters(self._ask(url), url)
            except Exception as error:  # whatever it may answer, the others go on
                logger.warning("%s can't be read: %s", url, error)
                continue
            ended = self._clock()
            found |= {engine: Scrape(began, ended, figures) for engine, figures in said.items()}
        with self._lock:
            self._take(found, self._books())

    def _take(self, found: dict[Engine, Scrape], books: Sequence[EngineAudit]) -> None:
        matched = match(found, books)
        answered = {id(book): found[engine] for engine, book in matched.items()}
        for book in books:
            comparison = self._comparisons.get(id(book))
            scrape = answered.get(id(book))
            if scrape is None:
                if comparison is not None:
                    comparison.missed()
                continue
            if comparison is None:
                comparison = self._comparisons[id(book)] = Comparison(book, zero=_zero(book, books))
                comparison.note(self._clock())
            comparison.scraped(scrape)
        kept = {id(book) for book in books}
        self._comparisons = {key: of for key, of in self._comparisons.items() if key in kept}
        unmatched = found.keys() - matched.keys()
        for engine in unmatched - self._unmatched:
            logger.warning(
                "engine %s of %s is no one journal's: it is not compared", engine.number, engine.url
            )
        self._unmatched = unmatched


def _zero(book: EngineAudit, books: Sequence[EngineAudit]) -> bool:
    """Whether the engine's counters began with the book: it saw the start, and no other had its index."""
    alike = [other for other in books if other.engine is not None and _index(other) == _index(book)]
    ledger = book.auditor.ledger
    return book.metrics.from_start and not (ledger.gaps or ledger.hook_failures) and len(alike) == 1


def attach_reconciliation(
    urls: Sequence[str],
    books: Callable[[], Sequence[EngineAudit]],
    lock: AbstractContextManager[object],
    stop: threading.Event,
) -> threading.Thread:
    """Reconcile in a daemon thread until ``stop``. Raises :class:`LedgerError` for what is no URL."""
    thread = threading.Thread(target=Reconciler(urls, books, lock).run, args=(stop,), daemon=True)
    thread.start()
    return thread
