"""Sums by the hour: what stays of requests for a year, when their rows have been removed.

Each table here is the answer to one query over rows, whose keys are the hour and the labels of requests. The
same expressions sum up rows for a command and make these tables, so a question that names no other column has
one answer from both. ``compact`` writes the sums together with the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from ...audit.analysis.costs import DECODE, DRAFT, OVERRUN, PREFILL, REJECTED
from ...audit.checks.registry import Violation, is_once
from ...audit.figures.declared import FIGURES
from ...audit.figures.figure import LABELS
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit, Trouble, of_engine
from ...audit.replay.windows import LossesInWindow, Window
from .schema import CAUSES, DIFFERENCES, ENGINE, JOURNAL, REQUESTS, Column

KEEP_SECONDS = 365 * 86_400.0
"""How long sums by the hour stay where rows are removed by their age."""


class Sum(NamedTuple):
    """A column of sums, and the SQL that finds it over rows."""

    column: Column
    sql: str


class Hourly(NamedTuple):
    """A table of sums of the rows of the table ``of``. Its ``keys`` tell its own rows apart."""

    name: str
    of: str
    keys: tuple[Column, ...]
    sums: tuple[Sum, ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, in their order."""
        return (ENGINE, JOURNAL, *self.keys, *(one.column for one in self.sums))


HOUR_LABELS = (
    *("model", "data_parallel_rank", "outcome", "verdict", "unknown"),
    *(label.column for label in LABELS if label.hourly),
)
"""The columns of requests by which sums are kept apart. Each has few values in an hour."""

HOUR = Column("hour", "time", "the hour in which the requests ended, in UTC; null while they are open")
ADDED_HOUR = Column("added_hour", "time", "the hour in which the scheduler received them, in UTC")
_TIMES = {"hour": "date_trunc('hour', closed_time)", "added_hour": "date_trunc('hour', added_time)"}
"""The keys that are no column of rows, as SQL."""

_COLUMNS = {column.name: column for column in (*DIFFERENCES, *CAUSES, *REQUESTS)}
_OF_REQUESTS = (HOUR, ADDED_HOUR, *(_COLUMNS[name] for name in HOUR_LABELS))


def _total(name: str) -> Sum:
    return Sum(Column(name, "count", f"sum of `{name}`"), f"sum({name})")


_LATE = "output_tokens > 0"
"""Whether tokens past the stop of a request were computed by decoding."""

LOST = {
    (REJECTED, DRAFT): ("rejected", "true"),
    (OVERRUN, DECODE): ("overrun", _LATE),
    (OVERRUN, PREFILL): ("overrun", f"NOT ({_LATE})"),
}
"""By lost work and what it was computed as: the column that has its tokens, and for which requests."""


def lost_columns(lost: tuple[str, str]) -> tuple[str, str]:
    """The columns of its tokens, and of the requests that have some."""
    name = "_".join(lost)
    return f"{name}_tokens", f"{name}_requests"


def _lost(lost: tuple[str, str]) -> tuple[Sum, Sum]:
    (column, which), (tokens, requests) = LOST[lost], lost_columns(lost)
    text = f"`{column}` tokens that were computed as {lost[1]}"
    return (
        Sum(Column(tokens, "count", text), f"sum({column}) FILTER ({which})"),
        Sum(
            Column(requests, "count", f"requests with {text}"), f"count(*) FILTER ({column} > 0 AND {which})"
        ),
    )


_NUMBERS_OF_REQUESTS = {"request", "data_parallel_rank", *(label.column for label in LABELS)}
"""Columns with a number that is not summed."""

_COUNTED = [
    column.name for column in REQUESTS if column.kind == "count" and column.name not in _NUMBERS_OF_REQUESTS
]
_ROWS = Sum(Column("requests", "count", "requests with such a row"), "count(*)")
_EARLY = "requests whose first output it delayed"

HOURS = Hourly(
    "hours",
    "requests",
    _OF_REQUESTS,
    (
        *(Sum(Column(one.name, "count", one.text), one.sql) for one in FIGURES if one.sql),
        *map(_total, _COUNTED),
        *(one for lost in LOST for one in _lost(lost)),
    ),
)
HOUR_CAUSES = Hourly(
    "hour_causes",
    "causes",
    (*_OF_REQUESTS, *(_COLUMNS[name] for name in ("figure", "cause", "more_blocks_percent"))),
    (
        _total("tokens"),
        _ROWS,
        Sum(Column("first_token_requests", "count", _EARLY), "count(first_token_tokens)"),
    ),
)
HOUR_DIFFERENCES = Hourly(
    "hour_differences",
    "differences",
    (HOUR, _COLUMNS["step"], _COLUMNS["cause"]),
    (_ROWS, *map(_total, ("local", "external", "computed", "unattained"))),
)
HOURLY = {table.name: table for table in (HOURS, HOUR_CAUSES, HOUR_DIFFERENCES)}


def rows_of(table: Hourly, expressions: dict[str, str], schema: str = "", where: str = "") -> str:
    """The rows that a table sums up, each with expressions over its request by name, as SQL.

    ``where`` selects requests; ``schema`` is one of :func:`~.tables.mount`.
    """
    named = ", ".join(f"{sql} AS {name}" for name, sql in expressions.items())
    requests = f"FROM {schema}requests" + (f" WHERE ({where})" if where else "")
    if table.of == "requests":
        return f"(SELECT *{', ' if named else ''}{named} {requests})"
    rows = schema + table.of
    if not named and not where:
        return rows
    chosen = f"SELECT journal, request{', ' if named else ''}{named} {requests}"
    return f"{rows} JOIN ({chosen}) USING (journal, request)"


def hours_of(table: Hourly, expressions: dict[str, str], where: str = "") -> str:
    """The kept sums of a table, as :func:`rows_of` has rows, with the same expressions."""
    named = ", ".join(f"{sql} AS {name}" for name, sql in expressions.items())
    times = ", hour AS closed_time" + (", added_hour AS added_time" if ADDED_HOUR in table.keys else "")
    kept = f"(SELECT *{times} FROM kept.{table.name})"
    return f"(SELECT *{', ' if named else ''}{named} FROM {kept}" + (f" WHERE ({where}))" if where else ")")


def query_of(table: Hourly, schema: str = "") -> str:
    """The query over rows whose answer the table is."""
    has_labels = ADDED_HOUR in table.keys
    own = {f"k_{key.name}": _TIMES.get(key.name, key.name) for key in _OF_REQUESTS if has_labels}
    keys = [
        f"k_{key.name} AS {key.name}"
        if f"k_{key.name}" in own
        else f"{_TIMES.get(key.name, key.name)} AS {key.name}"
        for key in table.keys
    ]
    sums = [f"CAST({one.sql} AS BIGINT) AS {one.column.name}" for one in table.sums]
    return (
        f"SELECT engine, journal, {', '.join((*keys, *sums))} FROM {rows_of(table, own, schema)} GROUP BY ALL"
    )


def added_up(table: Hourly, parts: str) -> str:
    """The query that adds up parts of a table."""
    keys = [key.name for key in table.keys]
    sums = [f"CAST(sum({one.column.name}) AS BIGINT) AS {one.column.name}" for one in table.sums]
    return f"SELECT engine, journal, {', '.join((*keys, *sums))} FROM ({parts}) GROUP BY ALL"


# --- When events were lost, hooks failed, the engine raised, or a finding of the engine was made.
#
# A session keeps these times by the minute, so that an audit of a window whose bounds are whole minutes
# knows its doubts without reading the journal. Each list grows with minutes in which something went wrong.


class Losses(msgspec.Struct, array_like=True):
    """Times at which events were lost, or a hook failed, by the minutes between which each loss lies.

    ``rows``: first minute, last minute, losses. ``since``: as in
    :class:`~kvledger.audit.replay.windows.LossesInWindow`.
    """

    rows: list[tuple[int, int, int]] = []
    since: float = -1.0

    def place(self, lost: bool, before: float, at: float) -> None:
        """Take an event at Unix time ``at``, after one at ``before``; ``lost``: it reports a loss."""
        if lost:
            self.since = before if self.since < 0 else self.since
        elif self.since >= 0:
            first, last = int(self.since // 60), int(at // 60)
            if self.rows and self.rows[-1][:2] == (first, last):
                self.rows[-1] = (first, last, self.rows[-1][2] + 1)
            else:
                self.rows.append((first, last, 1))
            self.since = -1.0

    def within(self, window: Window) -> LossesInWindow:
        """The losses that may lie in a window whose bounds are whole minutes."""
        times = sum(row[2] for row in self.rows if window.touches(60.0 * row[0], 60.0 * row[1]))
        return LossesInWindow(times, self.since)


class Doubts(msgspec.Struct):
    """What went wrong in a journal, and when.

    ``errors``: the minutes in which each exception left the engine. ``found``: for findings that are no
    single request's, by invariant, the minutes in which they were made.
    """

    losses: Losses = msgspec.field(default_factory=Losses)
    failures: Losses = msgspec.field(default_factory=Losses)
    unobserved_from: float = math.inf
    """Unix time from which the engine ran without being observed."""
    errors: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}

    def place(self, trouble: Trouble) -> None:
        """Take an event, and what went wrong with it."""
        self.losses.place(trouble.lost, trouble.before, trouble.at)
        self.failures.place(trouble.failed, trouble.before, trouble.at)
        if trouble.unobserved:
            self.unobserved_from = trouble.before
        if trouble.error:
            _note(self.errors, trouble.error, trouble.at)

    def errors_within(self, window: Window) -> set[str]:
        """The exceptions in the window."""
        return {error for error, minutes in self.errors.items() if any(_held(window, minutes))}

    def placed(
        self, findings: Sequence[Violation], window: Window, began_seconds: float
    ) -> Iterator[tuple[Violation, bool]]:
        """The findings, and whether each was made in the window.

        A finding of the engine that was made again in the window is as it was first made.
        """
        several = Counter(row.id for row in findings if of_engine(row))
        for row in findings:
            minutes = self.found.get(row.id, []) if several[row.id] == 1 else []
            first = int((began_seconds + row.at / 1e6) // 60)
            yield row, any(_held(window, [first, *minutes]))


def _held(window: Window, minutes: Sequence[int]) -> Iterator[bool]:
    return (window.holds(60.0 * minute) for minute in minutes)


def keep_doubts(audit: EngineAudit, doubts: Doubts) -> None:
    """Add what goes wrong from now on in the journal of an audit."""

    def found(id: str, at: int, account: Account | None) -> None:
        if account is None or is_once(id):
            _note(doubts.found, id, (audit.began_seconds or 0.0) + at / 1e6)

    audit.on_violation.append(found)
    audit.on_trouble.append(doubts.place)


def _note(table: dict[str, list[int]], name: str, seconds: float) -> None:
    minutes, minute = table.setdefault(name, []), int(seconds // 60)
    if not minutes or minutes[-1] != minute:
        minutes.append(minute)
