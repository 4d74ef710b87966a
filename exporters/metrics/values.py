"""How the metrics are read from the books: the readers of the table in ``metrics.py``, and their samples.

What is read of tokens and requests are the sums of *ended* requests, for two reasons: what an open
account holds may still move from one heading to another (a draft accepted past the stop becomes
overrun), and an account that turns unknown is taken out of the sums; a counter may do neither.

Words that become label values are of closed sets, each shown from the start, at zero. A word that no
set has is counted as ``other``: labels stay bounded whatever a host may say.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ... import __version__
from ...audit import causes
from ...audit.checks.registry import catalogue
from ...audit.errors import LedgerError
from ...audit.journal.format import is_live
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.metrics_state import VERDICTS, Distribution, Exemplar, LookupCounts, ViolationCount

OTHER = "other"
SOURCES = ("local", "external", "computed", "unattained")
PLANNED = ("local", "external", "computed")
WORK = ("first_prompt", "first_output", "rework", "rejected", "overrun")
LOSSES = (*causes.REWORK, OTHER)
DISCARDS = (*causes.DISCARDS, OTHER)
VOIDS = (
    causes.FAILED,
    causes.NOT_PLANNED,
    causes.NEVER_LOADED,
    causes.PREEMPTED,
    causes.FINISHED,
    OTHER,
)
PREEMPTIONS = (*causes.PREEMPTIONS, OTHER)
OUTCOMES = (*causes.OUTCOMES, OTHER)
CACHES = ("local", "external")
STATES = ("live", "detached", "failed", "stopped", "dead")
ORDERLY = {"shutdown": "stopped", "exit": "stopped", "detached": "detached"}
GAP_SIZES = ("known", "unknown")


class Sample(NamedTuple):
    """One value; ``labels`` in the order of the metric's own.

    ``created``: Unix time since which a counter counts (0.0: not said).
    """

    labels: tuple[str, ...]
    value: float | Distribution
    created: float = 0.0
    exemplar: Exemplar | None = None


Reader = Callable[[Sequence[EngineAudit]], Iterable[Sample]]
Values = Iterable[tuple[tuple[str, ...], "float | Distribution"]]


# --- shapes -------------------------------------------------------------------------------------------


def engines(of: Callable[[EngineAudit], Values]) -> Reader:
    """Reads one engine at a time, and puts its name before the labels.

    A journal in which no engine has said its name has no series: its name would change.
    """

    def read(books: Sequence[EngineAudit]) -> Iterator[Sample]:
        for book in books:
            if book.engine is not None:
                for labels, value in of(book):
                    yield Sample((book.name, *labels), value, book.metrics.created_seconds)

    return read


def value(of: Callable[[EngineAudit], float | Distribution]) -> Reader:
    """One value an engine."""
    return engines(lambda book: [((), of(book))])


def values(words: tuple[str, ...], of: Callable[[EngineAudit], Mapping[str, int]]) -> Reader:
    """A value a word, each of ``words`` from the start."""
    return engines(lambda book: [((word,), n) for word, n in bounded(words, of(book)).items()])


def bounded(words: tuple[str, ...], found: Mapping[str, int]) -> dict[str, int]:
    """``found`` by these words alone; what has another is summed as ``other``."""
    table = dict.fromkeys(words, 0)
    for word, number in found.items():
        known = word if word in table else OTHER
        table[known] = table.get(known, 0) + number
    return table


# --- tokens -------------------------------------------------------------------------------------------


def prompt_tokens(book: EngineAudit) -> dict[str, int]:
    """By where their KV first came from."""
    return {source: getattr(book.closed, source) for source in SOURCES}


def work(book: EngineAudit) -> dict[str, int]:
    """By what became of them."""
    closed = book.closed
    return {kind: getattr(closed, kind) for kind in WORK if kind != "rework"} | {
        "rework": sum(closed.rework.values())
    }


def lookups(of: Callable[[LookupCounts], int]) -> Reader:
    """What the engine counted of its look-ups, by cache."""
    return values(CACHES, lambda book: {cache: of(book.metrics.lookups[cache]) for cache in CACHES})


# --- requests -----------------------------------------------------------------------------------------


def requests(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """By verdict and outcome."""
    for verdict in VERDICTS:
        of_verdict: dict[str, int] = {}
        for (said, outcome), number in book.requests.items():
            if said == verdict:
                word = outcome.removesuffix("_capped")  # v1 has a longer word for it than v0
                of_verdict[word] = of_verdict.get(word, 0) + number
        for outcome, number in bounded(OUTCOMES, of_verdict).items():
            yield (verdict, outcome), number


def violations(books: Sequence[EngineAudit]) -> Iterator[Sample]:
    """Every invariant of the catalogue, with the request in which it was last seen broken."""
    for book in books:
        if book.engine is None:
            continue
        for id, row in catalogue().items():
            sights = book.metrics.violations.get(id, ViolationCount())
            shown = None
            if sights.request_id:
                shown = Exemplar(sights.request_id, sights.trace_id, 1.0, sights.last_seconds)
            labels = (book.name, id, row.severity)
            yield Sample(labels, sights.times, book.metrics.created_seconds, shown)


def last_violations(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """When each was last seen; nothing of those that never were."""
    for id, row in catalogue().items():
        sights = book.metrics.violations.get(id)
        if sights is not None:
            yield (id, row.severity), sights.last_seconds


# --- coverage -----------------------------------------------------------------------------------------


def state(book: EngineAudit) -> str:
    """What became of the observation of an engine; one of :data:`STATES`."""
    reason = book.auditor.ledger.stopped
    if reason is not None:
        return ORDERLY.get(reason, "failed")
    try:
        return "live" if is_live(book.path) else "dead"
    except LedgerError:
        return "dead"


def states(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """1 for the state that it is in, 0 for the others."""
    now = state(book)
    for word in STATES:
        yield (word,), float(word == now)


def lag(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Everything written until so many seconds ago has been read; of a live engine."""
    if book.read_seconds:
        yield (), max(0.0, time.time() - book.read_seconds) if state(book) == "live" else 0.0


def gaps(book: EngineAudit) -> dict[str, int]:
    """By whether the number of lost events is known."""
    return {"known": book.metrics.gaps_of_known_size, "unknown": book.metrics.gaps_of_unknown_size}


def last_event(book: EngineAudit) -> float:
    """Unix time."""
    return book.metrics.seconds(book.auditor.ledger.at)


def checkpoint(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Unix time of the last checkpoint, where there are any."""
    if book.checkpoint_seconds:
        yield (), book.checkpoint_seconds


class EngineAudits(list[EngineAudit]):
    """The books of a follower, and how it does itself."""

    def __init__(self, books: Iterable[EngineAudit], health: Health) -> None:
        super().__init__(books)
        self.health = health


AMISS = (
    "checkpoint damaged",
    "checkpoint of another version",
    "engine forgotten",
    "journal replaced",
    "segment removed",
)


class Health(msgspec.Struct):
    """How a follower does.

    ``lost``: how often what was known before was not there, by reason (:data:`AMISS`); it survives
    restarts. ``saved_at``: Unix time of the last checkpoint, 0 before it. ``save_bytes``,
    ``save_seconds``: its size and what it took. ``unreadable``: journals that can't be read now.
    ``problems``: how often one could not, each cause once. ``caught_up_seconds``: what the first
    reading took.
    """

    lost: dict[str, int] = {}
    saved_at: float = 0.0
    save_bytes: int = 0
    save_seconds: float = 0.0
    save_failures: int = 0
    problems: int = 0
    unreadable: int = 0
    caught_up_seconds: float = 0.0


def health(of: str) -> Reader:
    """A figure of the follower's own; none of books that nobody follows."""
    return lambda books: [Sample((), getattr(books.health, of))] if isinstance(books, EngineAudits) else []


def amiss(books: Sequence[EngineAudit]) -> Iterator[Sample]:
    """What the follower lost, by reason."""
    if isinstance(books, EngineAudits):
        for reason in AMISS:
            yield Sample((reason,), books.health.lost.get(reason, 0))


def unnamed(books: Sequence[EngineAudit]) -> Iterator[Sample]:
    """Journals without an engine's name."""
    yield Sample((), sum(book.engine is None for book in books))


ENGINE_LABELS = (
    "host",
    "product",
    "version",
    "adapter",
    "level",
    "process_id",
    "model_name",
    "engine_index",
    "connector",
)


def engine(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """Who it is, in the order of :data:`ENGINE_LABELS`."""
    said = book.engine
    if said is None:
        return
    settings = said.configuration
    index = settings.get("engine_index", settings.get("data_parallel_rank", 0))
    yield (
        (
            socket.gethostname(),
            said.engine,
            said.version,
            said.adapter,
            said.level,
            str(said.process_id),
            str(settings.get("model") or ""),
            str(index or 0),
            str(settings.get("connector") or ""),
        ),
        1,
    )


def build(books: Sequence[EngineAudit]) -> Iterator[Sample]:
    """Our own version."""
    yield Sample((__version__,), 1)


# --- reconciliation -----------------------------------------------------------------------------------


def engine_counters(of: str) -> Reader:
    """The engine's own counters (``counted``) or the ledger's figures (``ledger``), by figure."""
    return engines(
        lambda book: (
            [((row.figure,), getattr(row, of)) for row in book.engine_counters.rows]
            if book.engine_counters
            else []
        )
    )


def drift(book: EngineAudit) -> Iterator[tuple[tuple[str, ...], float]]:
    """By figure and cause."""
    for row in book.engine_counters.rows if book.engine_counters else ():
        for cause, amount in row.drift.items():
            yield (row.figure, cause), amount


def reconciled(of: str) -> Reader:
    """A figure of the reconciliation itself, where there is one."""
    return engines(
        lambda book: [((), float(getattr(book.engine_counters, of)))] if book.engine_counters else []
    )
