"""``kvledger query``: a question in SQL over the rows of requests, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..csv_cells import csv_of
from .terminal import blocks, decimal, notes, plain_table

MOST_SHOWN = 1_000
"""The most rows that a terminal shows; json and csv have all."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an answer, and the names of their columns. ``notes``: what the tables lack."""

    columns: list[str]
    rows: list[list[Any]]
    notes: list[str] = []


def ask(paths: Sequence[Path], sql: str, *, window: Window = EVERYTHING, run: Run = here) -> Answered:
    """The answer to one SELECT. Raises LedgerError for anything else, and for what DuckDB refuses."""
    from ..facts.dataset import facts
    from ..facts.replayed import Wanted

    with facts(
        paths, window=window, run=run, wanted=Wanted(checks=True, activity=True, blocks=True)
    ) as found:
        found.mount_sums()
        columns, rows = found.answer(sql)
        missing = [*found.notes, *(found.cut if "findings" in sql.lower() else ())]
        return Answered(columns=columns, rows=[list(row) for row in rows], notes=missing)


def render(answer: Answered) -> Any:
    """The answer as a table."""
    table = plain_table(header=True)
    for place, name in enumerate(answer.columns):
        numbers = all(isinstance(row[place], int | float) for row in answer.rows)
        table.add_column(Text(name), justify="right" if numbers and answer.rows else "left")
    for row in answer.rows[:MOST_SHOWN]:
        table.add_row(*(Text(_shown(value)) for value in row))
    if len(answer.rows) > MOST_SHOWN:
        table.caption = f"{MOST_SHOWN:,} of {len(answer.rows):,} rows; --format csv has all."
    return blocks(table, notes(answer.notes))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else decimal(value, 6)


def as_csv(answer: Answered) -> str:
    """The answer with a header; an empty cell for null."""
    return csv_of(answer.columns, answer.rows)
