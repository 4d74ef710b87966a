"""The one metric table: name, unit, kind, help, labels, reader. Everything else is made from it.

A reader takes the books of the engines that are followed and gives samples. What it reads of tokens
and requests are the sums of *ended* requests, for two reasons: what an open account holds may still
move from one heading to another (a draft accepted past the stop becomes overrun), and an account
that turns unknown is taken out of the sums; a counter may do neither.

``python -m kvledger.exporters.metrics`` prints ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import kvledger
from kvledger.audit.replay import Book

Kind = Literal["counter", "gauge", "info"]


class Sample(NamedTuple):
    """One value; ``labels`` in the order of the metric's own."""

    labels: tuple[str, ...]
    value: float


Reader = Callable[[Sequence[Book]], Iterable[Sample]]


class Metric(NamedTuple):
    """One row. A counter is exposed with ``_total`` behind its name, an info with ``_info``."""

    name: str
    unit: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Reader

    @property
    def exposed(self) -> str:
        """The name as a scrape shows it."""
        return self.name + {"counter": "_total", "gauge": "", "info": "_info"}[self.kind]


# --- readers ------------------------------------------------------------------------------------------


def _engines(of: Callable[[Book], Iterable[tuple[tuple[str, ...], float]]]) -> Reader:
    """Reads one engine at a time, and puts its name before the labels."""

    def read(books: Sequence[Book]) -> Iterator[Sample]:
        for book in books:
            for labels, value in of(book):
                yield Sample((book.name, *labels), value)

    return read


def _value(of: Callable[[Book], float]) -> Reader:
    return _engines(lambda book: [((), of(book))])


def _values(of: Callable[[Book], dict[str, int]]) -> Reader:
    return _engines(lambda book: [((key,), value) for key, value in of(book).items()])


def _prompt_tokens(book: Book) -> dict[str, int]:
    closed = book.closed
    return {
        "local": closed.local,
        "external": closed.external,
        "computed": closed.computed,
        "unattained": closed.unattained,
    }


def _work(book: Book) -> dict[str, int]:
    closed = book.closed
    return {
        "first_prompt": closed.first_prompt,
        "first_output": closed.first_output,
        "rework": sum(closed.rework.values()),
        "rejected": closed.rejected,
        "overrun": closed.overrun,
    }


def _requests(book: Book) -> Iterator[tuple[tuple[str, ...], float]]:
    yield from book.requests.items()


def _violations(book: Book) -> Iterator[tuple[tuple[str, ...], float]]:
    seen: dict[tuple[str, str], int] = {}
    for violation in book.auditor.violations:
        key = (violation.id, str(violation.severity))
        seen[key] = seen.get(key, 0) + 1 + violation.repeats
    for key, times in seen.items():
        yield key, times + book.auditor.not_kept.get(key[0], 0)


def _engine(book: Book) -> Iterator[tuple[tuple[str, ...], float]]:
    if book.engine is not None:
        yield (book.engine.engine, book.engine.version, book.engine.adapter), 1


def _last_event(book: Book) -> float:
    started = book.engine
    if started is None:
        return 0.0
    return started.wall_seconds + (book.auditor.ledger.at - started.at) / 1e6


def _build(books: Sequence[Book]) -> Iterator[Sample]:
    yield Sample((kvledger.__version__,), 1)


# --- the table ------------------------------------------------------------------------------------------

ENGINE = ("engine",)

METRICS: tuple[Metric, ...] = (
    Metric(
        "kvledger_prompt_tokens",
        "tokens",
        "counter",
        "Prompt tokens by where their KV first came from, settled once a request.",
        (*ENGINE, "source"),
        _values(_prompt_tokens),
    ),
    Metric(
        "kvledger_planned_prompt_tokens",
        "tokens",
        "counter",
        "Prompt tokens by the promise of the first admission that ran, what vLLM 0.27.1 and later report.",
        (*ENGINE, "source"),
        _values(lambda book: {"local": book.closed.plan_local, "external": book.closed.plan_external}),
    ),
    Metric(
        "kvledger_work_tokens",
        "tokens",
        "counter",
        "Scheduled tokens by what became of them.",
        (*ENGINE, "kind"),
        _values(_work),
    ),
    Metric(
        "kvledger_rework_tokens",
        "tokens",
        "counter",
        "Tokens scheduled again, by the cause for which their KV had ceased to be.",
        (*ENGINE, "cause"),
        _values(lambda book: book.closed.rework),
    ),
    Metric(
        "kvledger_external_promised_tokens",
        "tokens",
        "counter",
        "External tokens that the connector promised, at every admission.",
        ENGINE,
        _value(lambda book: book.closed.promised),
    ),
    Metric(
        "kvledger_external_loaded_tokens",
        "tokens",
        "counter",
        "External tokens that came.",
        ENGINE,
        _value(lambda book: book.closed.loaded),
    ),
    Metric(
        "kvledger_external_voided_tokens",
        "tokens",
        "counter",
        "External tokens that were promised and did not come, by cause.",
        (*ENGINE, "cause"),
        _values(lambda book: book.closed.voided),
    ),
    Metric(
        "kvledger_hit_again_tokens",
        "tokens",
        "counter",
        "Local hits of later lives over tokens that had come to be before.",
        ENGINE,
        _value(lambda book: book.closed.hit_again),
    ),
    Metric(
        "kvledger_loaded_again_tokens",
        "tokens",
        "counter",
        "External loads of later lives over tokens that had come to be before.",
        ENGINE,
        _value(lambda book: book.closed.loaded_again),
    ),
    Metric(
        "kvledger_discarded_tokens",
        "tokens",
        "counter",
        "Tokens whose KV was given up with their life, by cause.",
        (*ENGINE, "cause"),
        _values(lambda book: book.closed.discarded),
    ),
    Metric(
        "kvledger_preemptions",
        "",
        "counter",
        "Preemptions of requests that have ended.",
        ENGINE,
        _value(lambda book: book.closed.preemptions),
    ),
    Metric(
        "kvledger_requests",
        "",
        "counter",
        "Requests that have ended, by verdict (clean, violated, unknown) and outcome.",
        (*ENGINE, "verdict", "outcome"),
        _engines(_requests),
    ),
    Metric(
        "kvledger_open_requests",
        "",
        "gauge",
        "Requests whose accounts are open.",
        ENGINE,
        _value(lambda book: len(book.auditor.ledger.open)),
    ),
    Metric(
        "kvledger_violations",
        "",
        "counter",
        "How often an invariant was seen broken, by its id and severity (violation, drift).",
        (*ENGINE, "id", "severity"),
        _engines(_violations),
    ),
    Metric(
        "kvledger_gaps",
        "",
        "counter",
        "How often events were lost.",
        ENGINE,
        _value(lambda book: book.auditor.ledger.gaps),
    ),
    Metric(
        "kvledger_hook_failures",
        "",
        "counter",
        "How often an observer failed in the engine.",
        ENGINE,
        _value(lambda book: book.auditor.ledger.hook_failures),
    ),
    Metric(
        "kvledger_check_failures",
        "",
        "counter",
        "How often a check itself failed: a defect of kvledger.",
        ENGINE,
        _value(lambda book: sum(book.auditor.check_failures.values())),
    ),
    Metric(
        "kvledger_events",
        "",
        "counter",
        "Events read from the engine's journal.",
        ENGINE,
        _value(lambda book: book.events),
    ),
    Metric(
        "kvledger_last_event_timestamp_seconds",
        "seconds",
        "gauge",
        "When the last event read happened, Unix time.",
        ENGINE,
        _value(_last_event),
    ),
    Metric(
        "kvledger_engine",
        "",
        "info",
        "The engines under observation.",
        (*ENGINE, "host", "version", "adapter"),
        _engines(_engine),
    ),
    Metric(
        "kvledger_build",
        "",
        "info",
        "The kvledger that serves this.",
        ("version",),
        _build,
    ),
)


# --- the page -------------------------------------------------------------------------------------------


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made by `python -m kvledger.exporters.metrics`; do not edit.",
        "",
        "`kvledger serve PATH` serves these at `/metrics`. Figures of tokens and requests are of",
        "requests that have ended; requests that lost events touched are in none but",
        '`kvledger_requests_total{verdict="unknown"}`. `engine` names one observed process.',
        "",
        "| name | kind | labels | what it is |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
