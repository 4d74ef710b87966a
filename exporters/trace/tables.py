"""A trace as tables: a row per request, life, entry, violation, step, stay of content in a block, or second.

:data:`TABLES` has the columns.

Rows are produced as accounts close, so memory is bounded by open requests. ``parquet.py`` writes them to
files, ``frames.py`` makes DataFrames; both take names and types from here. Seconds count from the start of
the engine, as in an account statement. ``python -m kvledger.exporters.trace.tables`` prints
``docs/tables.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

from ...audit import events as ev
from ...audit.checks.registry import Violation
from ...audit.ledger.account import Account
from ...audit.ledger.frozen import Settlement
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_batch
from ...audit.replay.windows import EVERYTHING, Window
from .block_rows import BlockRows

Kind = Literal["text", "count", "seconds"]
Value = str | int | float | None
Rows = list[tuple[Value, ...]]


class Column(NamedTuple):
    """One column. Counts are tokens unless ``description`` names another unit. Any value may be null."""

    name: str
    kind: Kind
    description: str


ENGINE = Column("engine", "text", "the engine's name, as in findings")
REQUEST = Column("request_id", "text", "vLLM's request id")

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": (
        ENGINE,
        REQUEST,
        Column("outcome", "text", "how the request ended; null while it is open"),
        Column("unknown", "text", "why nothing is known of the request; all figures are null then"),
        Column("added_seconds", "seconds", "when the scheduler received the request"),
        Column("closed_seconds", "seconds", "when the request ended"),
        Column(
            "settled_seconds",
            "seconds",
            "when the sources of the prompt tokens were settled for the first time",
        ),
        Column("prompt_tokens", "count", "settled prompt tokens; of a session, all chunks"),
        Column("local", "count", "prompt tokens that hit the local prefix cache first"),
        Column("external", "count", "prompt tokens that the KV connector loaded first"),
        Column("computed", "count", "prompt tokens that were computed first"),
        Column("unattained", "count", "prompt tokens that had no KV when the request ended"),
        Column("plan_local", "count", "local hit planned at the first admission that was scheduled"),
        Column(
            "plan_external", "count", "external tokens promised at the first admission that was scheduled"
        ),
        Column("reported_local", "count", "local tokens, reported by the engine"),
        Column("reported_external", "count", "external tokens, reported by the engine"),
        Column("reported_computed", "count", "computed tokens, reported by the engine"),
        Column("scheduled", "count", "scheduled tokens; the next five columns sum to it"),
        Column("first_prompt", "count", "prompt tokens computed for the first time"),
        Column("first_output", "count", "output tokens computed for the first time"),
        Column("rework", "count", "tokens computed again because their KV was lost"),
        Column("rejected", "count", "rejected draft tokens"),
        Column("overrun", "count", "tokens in flight at the request's stop, or computed past its sequence"),
        Column("hit_again", "count", "repeat hits: local hits on positions whose KV an earlier life had"),
        Column("loaded_again", "count", "repeat loads: loads for positions whose KV an earlier life had"),
        Column("promised", "count", "external tokens promised by the connector, over all lives"),
        Column("loaded", "count", "promised tokens that were loaded"),
        Column("voided", "count", "promised tokens that failed or were cancelled"),
        Column("preemptions", "count", "number of preemptions"),
        Column(
            "lives",
            "count",
            "number of lives; a life lasts from an admission to the next preemption or the end",
        ),
        Column(
            "waited_microseconds",
            "count",
            "microseconds between lives and before the first one, up to the end or the present",
        ),
        Column("model", "text", "the model that the engine serves"),
        Column("began_seconds", "seconds", "Unix time of the engine's second 0"),
    ),
    "lives": (
        ENGINE,
        REQUEST,
        Column("life", "count", "number of the life, from 1"),
        Column("began_seconds", "seconds", "when the request was admitted"),
        Column("began_step", "count", "step of the admission"),
        Column("ended_seconds", "seconds", "when the life ended; null while it lasts"),
        Column("ended_by", "text", "finished, blocks, reset, or another cause"),
        Column("local", "count", "local hit of the admission"),
        Column("external", "count", "external tokens promised at the admission"),
        Column("loaded", "count", "promised tokens that were loaded"),
        Column("voided", "count", "promised tokens that failed or were cancelled"),
        Column("scheduled", "count", "scheduled tokens"),
        Column("rejected", "count", "rejected draft tokens"),
        Column("discarded", "count", "tokens whose KV was discarded at the end of the life"),
    ),
    "entries": (
        ENGINE,
        REQUEST,
        Column("entry", "count", "number of the event in the journal"),
        Column("seconds", "seconds", "when it was posted"),
        Column("step", "count", "step of the engine"),
        Column("life", "count", "number of the life"),
        Column("text", "text", "the posting, as `kvledger show` prints it"),
        Column("debit", "count", "tokens whose KV was lost"),
        Column("credit", "count", "tokens whose KV was gained"),
        Column("balance", "count", "tokens whose KV the life has after the posting"),
    ),
    "violations": (
        ENGINE,
        Column("id", "text", "the invariant"),
        Column("severity", "text", "violation or drift"),
        Column("request_id", "text", "vLLM's request id; null if no single request is concerned"),
        Column("life", "count", "number of the request's life"),
        Column("step", "count", "step in which the finding was first seen"),
        Column("seconds", "seconds", "when the finding was first seen"),
        Column("message", "text", "one sentence with the figures"),
        Column("repeats", "count", "how often the finding was seen again"),
        Column("last_step", "count", "step in which the finding was last seen"),
    ),
    "steps": (
        ENGINE,
        Column("step", "count", "number of the first of these steps"),
        Column("seconds", "seconds", "when the step was scheduled, or when its repeats were emitted"),
        Column("times", "count", "number of equal consecutive steps in this row"),
        Column("requests", "count", "requests that each of these steps scheduled"),
        Column("tokens", "count", "tokens that each of these steps scheduled"),
        Column("drafts", "count", "draft tokens among them"),
    ),
    "stays": (
        ENGINE,
        Column("pool", "count", "number of the block pool"),
        Column("block", "count", "id of the block in which the content stayed"),
        Column("request_id", "text", "the request that cached the content; null if not known"),
        Column("cached_seconds", "seconds", "when the content was cached; null: before the trace begins"),
        Column("left_seconds", "seconds", "when the content left the cache; null while it can be hit"),
        Column("left_by", "text", "evicted, reset, or dropped by the engine"),
        Column("hits", "count", "how often an admission hit the block"),
        Column("released_seconds", "seconds", "when no request held the block any more, the last time"),
        Column("idle_seconds", "seconds", "from the last release to the end of the stay"),
    ),
    "occupancy": (
        ENGINE,
        Column("second", "count", "the second; seconds without block events have no row"),
        Column("running", "count", "blocks that requests or the connector held at its end"),
        Column("cached", "count", "free blocks whose content could be hit"),
        Column("empty", "count", "free blocks without content"),
        Column("unknown", "count", "free blocks of which the trace does not say whether they have content"),
        Column("allocated", "count", "blocks allocated in this second"),
        Column("evicted", "count", "blocks whose content was evicted in this second"),
        Column("hits", "count", "blocks hit by admissions in this second"),
    ),
}


def rows(
    paths: Sequence[Path], wanted: Collection[str] = tuple(TABLES), window: Window = EVERYTHING
) -> Iterator[tuple[str, Rows]]:
    """Yield table names with some rows each, for the ``wanted`` tables of all journals at ``paths``.

    The ``window`` selects requests, with their lives and entries, by their end, and steps by their time.
    Raises LedgerError for a path that holds no journal.
    """
    for path in journals_at(paths):
        yield from _Trace(path, wanted, window).rows()


class _Trace:
    """The rows of one journal."""

    def __init__(self, path: Path, wanted: Collection[str], window: Window) -> None:
        self.path = path
        self._wanted = wanted
        every_request = (lambda _: True) if "entries" in wanted else None
        self._engine_audit = EngineAudit(
            path, keep=True, watch=every_request, window=window, with_metrics=False
        )
        self._scheduled: dict[int, tuple[int, int]] = {}
        self._step = 0
        self._block_rows = BlockRows() if {"stays", "occupancy"} & set(wanted) else None

    def rows(self) -> Iterator[tuple[str, Rows]]:
        engine_audit = self._engine_audit
        for batch in each_batch(engine_audit):
            steps: Rows = []
            if "steps" in self._wanted:
                steps = [row for event in batch.events for row in self._steps(event)]
            if steps:
                yield "steps", steps
            if self._block_rows is not None:
                yield from self._blocks(*self._block_rows.feed(batch.events))
            yield from self._accounts(batch.accounts)
        if self._block_rows is not None:
            yield from self._blocks(*self._block_rows.finish())
        violations = engine_audit.violations
        if violations and "violations" in self._wanted:
            yield "violations", [_violation(engine_audit.name, violation) for violation in violations]

    def _accounts(self, accounts: list[Account]) -> Iterator[tuple[str, Rows]]:
        engine = self._engine_audit.name
        engine_columns = (self._engine_audit.model, self._engine_audit.began_seconds)
        if accounts and "requests" in self._wanted:
            last = self._engine_audit.last_at
            yield "requests", [(*_request(engine, account, last), *engine_columns) for account in accounts]
        if accounts and "lives" in self._wanted:
            yield "lives", [row for account in accounts for row in _lives(engine, account)]
        if accounts and "entries" in self._wanted:
            yield "entries", [row for account in accounts for row in _entries(engine, account)]

    def _blocks(self, stays: Rows, seconds: Rows) -> Iterator[tuple[str, Rows]]:
        """The rows of stays that overlap the window, and of seconds in it."""
        engine, window = self._engine_audit.name, self._engine_audit.window
        began = self._engine_audit.began_seconds or 0.0
        if stays and "stays" in self._wanted:
            yield (
                "stays",
                [
                    (engine, *row)
                    for row in stays
                    if window.touches(began + _number(row[3], 0.0), began + _number(row[4], inf))
                ],
            )
        if seconds and "occupancy" in self._wanted:
            inside = [row for row in seconds if window.holds(began + _number(row[0], 0.0))]
            yield "occupancy", [(engine, *row) for row in inside]

    def _steps(self, event: ev.Event) -> Rows:
        """A row for a scheduled step, or for the repeats of the last one."""
        times = 1
        match event:
            case ev.Snapshot():
                self._scheduled, self._step = {}, event.step
                return []
            case ev.Stepped():
                for request in ev.numbers(event.dropped):
                    self._scheduled.pop(request, None)
                changed = ev.numbers(event.changed)
                for i in range(0, len(changed), 4):
                    self._scheduled[changed[i]] = changed[i + 1], changed[i + 2]
                step = self._step = event.step
            case ev.Repeated():
                step, times = self._step + 1, event.times
                self._step += times
            case _:
                return []
        tokens = sum(tokens for tokens, _ in self._scheduled.values())
        drafts = sum(drafts for _, drafts in self._scheduled.values())
        engine_audit, seconds = self._engine_audit, event.at / 1e6
        if engine_audit.window.bounded and not engine_audit.window.holds(
            (engine_audit.began_seconds or 0.0) + seconds
        ):
            return []
        return [(engine_audit.name, step, seconds, times, len(self._scheduled), tokens, drafts)]


def _request(engine: str, account: Account, last: int) -> tuple[Value, ...]:
    has_figures = account.unknown is None
    settlements = account.settlements
    figures: tuple[Value, ...] = (
        settlements[0].at / 1e6 if settlements else None,
        *_sources(settlements),
        *(account.plan or (None, None)),
        *(account.reported or (None, None, None)),
        account.scheduled,
        account.first_prompt,
        account.first_output,
        sum(account.rework.values()),
        account.rejected,
        account.overrun,
        account.hit_again,
        account.loaded_again,
        account.promised,
        account.loaded,
        sum(account.voided.values()),
    )
    return (
        engine,
        account.request_id,
        account.outcome or None,
        account.unknown,
        account.added_at / 1e6,
        _seconds(account.closed_at),
        *(figures if has_figures else (None,) * len(figures)),
        account.preemptions,
        len(account.lives) if has_figures else None,
        account.waited(last) if has_figures else None,
    )


def _sources(settlements: Sequence[Settlement]) -> tuple[Value, ...]:
    if not settlements:
        return (None,) * 5
    return (
        sum(each.prompt_tokens - each.carried for each in settlements),
        sum(each.local for each in settlements),
        sum(each.external for each in settlements),
        sum(each.computed for each in settlements),
        sum(each.unattained for each in settlements),
    )


def _lives(engine: str, account: Account) -> Iterator[tuple[Value, ...]]:
    if account.unknown is not None:
        return
    for life in account.lives:
        yield (
            engine,
            account.request_id,
            life.number,
            life.began_at / 1e6,
            life.began_step,
            _seconds(life.ended_at),
            life.ended_by or None,
            life.local,
            life.external,
            life.loaded,
            sum(life.voided.values()),
            life.scheduled,
            life.rejected,
            life.discarded,
        )


def _entries(engine: str, account: Account) -> Iterator[tuple[Value, ...]]:
    for line in account.lines or ():
        yield (
            engine,
            account.request_id,
            line.number,
            line.at / 1e6,
            line.step,
            line.life,
            line.text,
            line.debit,
            line.credit,
            line.balance,
        )


def _violation(engine: str, violation: Violation) -> tuple[Value, ...]:
    return (
        engine,
        violation.id,
        violation.severity,
        violation.request,
        violation.life,
        violation.step,
        violation.at / 1e6,
        violation.message,
        violation.repeats,
        violation.last_step,
    )


def hour_name(hour: int) -> str:
    """``2026-01-31T12:00Z`` for the hours since 1970."""
    return datetime.fromtimestamp(hour * 3600, timezone.utc).strftime("%Y-%m-%dT%H:00Z")


def _seconds(at: int) -> float | None:
    return at / 1e6 if at >= 0 else None


def _number(value: Value, otherwise: float) -> float:
    return value if isinstance(value, int | float) else otherwise


# --- the page -------------------------------------------------------------------------------------------


def markdown() -> str:
    """docs/tables.md."""
    lines = [
        "# Tables",
        "",
        "Made by `python -m kvledger.exporters.trace.tables`; do not edit.",
        "",
        "`kvledger export PATH -o DIR` writes these as Parquet, one file per table;",
        "`kvledger.exporters.trace.frames` gives them as pandas DataFrames. *Text* is a string, a *count* a",
        "64-bit integer, of tokens unless the text names another unit, and *seconds* a double, counted from",
        "the start of the engine. A null means that the value is unknown or does not apply.",
    ]
    for name, columns in TABLES.items():
        lines += ["", f"## {name}", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.kind} | {column.description} |" for column in columns]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
