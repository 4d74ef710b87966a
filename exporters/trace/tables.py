"""A trace as tables: one row a request, life, entry, violation or step. Their columns are :data:`TABLES`.

Streams: rows come as accounts close, so memory is bounded by what is open. ``parquet.py`` writes
them to files, ``frames.py`` makes DataFrames of them; both take names and types from here.
Seconds count from the start of the engine, as in a statement; ``None`` is not known or not so.
``python -m kvledger.exporters.trace.tables`` prints ``docs/tables.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timezone
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

Kind = Literal["text", "count", "seconds"]
Value = str | int | float | None
Rows = list[tuple[Value, ...]]


class Column(NamedTuple):
    """``says``: what it is; counts are tokens unless that says something else. All may be null."""

    name: str
    kind: Kind
    says: str


ENGINE = Column("engine", "text", "the engine, as in findings")
REQUEST = Column("request_id", "text", "the request, by vLLM's id")

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": (
        ENGINE,
        REQUEST,
        Column("outcome", "text", "how it ended; null while it is open"),
        Column("unknown", "text", "why nothing is claimed of it; then all figures are null"),
        Column("added_seconds", "seconds", "when it came"),
        Column("closed_seconds", "seconds", "when it ended"),
        Column("settled_seconds", "seconds", "when it was first said where its prompt came from"),
        Column("prompt_tokens", "count", "settled prompt, of sessions all chunks"),
        Column("local", "count", "of these from the engine's prefix cache"),
        Column("external", "count", "of these loaded by the connector"),
        Column("computed", "count", "of these computed"),
        Column("unattained", "count", "of these never come to be"),
        Column("plan_local", "count", "local hit of the first admission that ran"),
        Column("plan_external", "count", "external promise of the first admission that ran"),
        Column("reported_local", "count", "local, as the engine reported it"),
        Column("reported_external", "count", "external, as the engine reported it"),
        Column("reported_computed", "count", "computed, as the engine reported it"),
        Column("scheduled", "count", "scheduled; the next five sum to it"),
        Column("first_prompt", "count", "prompt computed for the first time"),
        Column("first_output", "count", "output computed for the first time"),
        Column("rework", "count", "computed again after it was lost"),
        Column("rejected", "count", "drafts that were rejected"),
        Column("overrun", "count", "in flight past the stop"),
        Column("hit_again", "count", "local hits over what had come to be before"),
        Column("loaded_again", "count", "loads over what had come to be before"),
        Column("promised", "count", "promised by the connector"),
        Column("loaded", "count", "of these loaded"),
        Column("voided", "count", "of these void"),
        Column("preemptions", "count", "times preempted"),
        Column("lives", "count", "number of lives"),
        Column("waited_microseconds", "count", "microseconds in no life, up to the end or up to now"),
        Column("model", "text", "the model that its engine serves"),
        Column("began_seconds", "seconds", "Unix time of the engine's second 0"),
    ),
    "lives": (
        ENGINE,
        REQUEST,
        Column("life", "count", "its number, from 1"),
        Column("began_seconds", "seconds", "when it was admitted"),
        Column("began_step", "count", "the step of that"),
        Column("ended_seconds", "seconds", "when it ended; null while it lasts"),
        Column("ended_by", "text", "finished, blocks, reset, or another cause of a loss"),
        Column("local", "count", "local hit"),
        Column("external", "count", "external promise"),
        Column("loaded", "count", "of the promise loaded"),
        Column("voided", "count", "of the promise void"),
        Column("scheduled", "count", "scheduled"),
        Column("rejected", "count", "drafts that were rejected"),
        Column("discarded", "count", "KV given up at its end"),
    ),
    "entries": (
        ENGINE,
        REQUEST,
        Column("entry", "count", "number of the event in the journal"),
        Column("seconds", "seconds", "when"),
        Column("step", "count", "step of the engine"),
        Column("life", "count", "number of the life"),
        Column("text", "text", "the posting, as a statement has it"),
        Column("debit", "count", "KV lost"),
        Column("credit", "count", "KV won"),
        Column("balance", "count", "KV that the life has after it"),
    ),
    "violations": (
        ENGINE,
        Column("id", "text", "the invariant"),
        Column("severity", "text", "violation or drift"),
        Column("request_id", "text", "the request; null where no single one is concerned"),
        Column("life", "count", "number of its life"),
        Column("step", "count", "step of its first sight"),
        Column("seconds", "seconds", "when it was first seen"),
        Column("message", "text", "one sentence with the figures"),
        Column("repeats", "count", "later sights of it"),
        Column("last_step", "count", "step of the last sight"),
    ),
    "steps": (
        ENGINE,
        Column("step", "count", "number of the first of these steps"),
        Column("seconds", "seconds", "when it was scheduled, or its repeats were told"),
        Column("times", "count", "equal steps in a row that this row stands for"),
        Column("requests", "count", "requests that each of them scheduled"),
        Column("tokens", "count", "tokens that each of them scheduled"),
        Column("drafts", "count", "drafts among these tokens"),
    ),
}


def rows(
    paths: Sequence[Path], wanted: Collection[str] = tuple(TABLES), window: Window = EVERYTHING
) -> Iterator[tuple[str, Rows]]:
    """Rows of the ``wanted`` tables of all journals at ``paths``, some at a time, with their table.

    Those of the ``window``: requests with their lives and entries by when they ended, steps by when
    they were. Raises :class:`LedgerError` for a path that holds no journal.
    """
    for path in journals_at(paths):
        yield from _Trace(path, wanted, window).rows()


class _Trace:
    def __init__(self, path: Path, wanted: Collection[str], window: Window) -> None:
        self.path = path
        self._wanted = wanted
        everybody = (lambda _: True) if "entries" in wanted else None
        self._engine_audit = EngineAudit(path, keep=True, watch=everybody, window=window, with_metrics=False)
        self._scheduled: dict[int, tuple[int, int]] = {}
        self._step = 0

    def rows(self) -> Iterator[tuple[str, Rows]]:
        engine_audit = self._engine_audit
        for batch in each_batch(engine_audit):
            steps: Rows = []
            if "steps" in self._wanted:
                steps = [row for event in batch.events for row in self._steps(event)]
            if steps:
                yield "steps", steps
            yield from self._accounts(batch.accounts)
        found = engine_audit.violations
        if found and "violations" in self._wanted:
            yield "violations", [_violation(engine_audit.name, violation) for violation in found]

    def _accounts(self, accounts: list[Account]) -> Iterator[tuple[str, Rows]]:
        engine, of_engine = (
            self._engine_audit.name,
            (self._engine_audit.model, self._engine_audit.began_seconds),
        )
        if accounts and "requests" in self._wanted:
            last = self._engine_audit.last_at
            yield "requests", [(*_request(engine, account, last), *of_engine) for account in accounts]
        if accounts and "lives" in self._wanted:
            yield "lives", [row for account in accounts for row in _lives(engine, account)]
        if accounts and "entries" in self._wanted:
            yield "entries", [row for account in accounts for row in _entries(engine, account)]

    def _steps(self, event: ev.Event) -> Rows:
        """A step that was scheduled, or the repeats of the last one."""
        times = 1
        match event:
            case ev.Snapshot():
                self._scheduled, self._step = {}, event.step
                return []
            case ev.Stepped():
                for request in event.dropped:
                    self._scheduled.pop(request, None)
                changed = event.changed
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
    known = account.unknown is None
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
        *(figures if known else (None,) * len(figures)),
        account.preemptions,
        len(account.lives) if known else None,
        account.waited(last) if known else None,
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


def _violation(engine: str, found: Violation) -> tuple[Value, ...]:
    return (
        engine,
        found.id,
        found.severity,
        found.request,
        found.life,
        found.step,
        found.at / 1e6,
        found.message,
        found.repeats,
        found.last_step,
    )


def hour_name(hour: int) -> str:
    """``2026-01-31T12:00Z`` for the hours since 1970."""
    return datetime.fromtimestamp(hour * 3600, timezone.utc).strftime("%Y-%m-%dT%H:00Z")


def _seconds(at: int) -> float | None:
    return at / 1e6 if at >= 0 else None


# --- the page -------------------------------------------------------------------------------------------


def markdown() -> str:
    """docs/tables.md."""
    lines = [
        "# Tables",
        "",
        "Made by `python -m kvledger.exporters.trace.tables`; do not edit.",
        "",
        "`kvledger export PATH -o DIR` writes these as Parquet, one file a table;",
        "`kvledger.exporters.trace.frames` gives them as pandas DataFrames. *Text* is a string, a *count* a",
        "64-bit integer, of tokens unless it says something else, and *seconds* a double, from the start",
        "of the engine. Any may be null: not known, or not so.",
    ]
    for name, columns in TABLES.items():
        lines += ["", f"## {name}", "", "| column | type | what it is |", "|---|---|---|"]
        lines += [f"| `{column.name}` | {column.kind} | {column.says} |" for column in columns]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
