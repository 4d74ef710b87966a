"""``kvledger query``: a question in SQL over the rows of requests, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..answer import DIM, Answer, Records, Table, Words, notes

MOST_SHOWN = 1_000
"""The most rows that a terminal shows; json and csv have all."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of an answer, and the names of their columns. ``notes``: what the tables lack."""

    columns: list[str]
    rows: list[list[Any]]
    notes: list[str] = []


def ask(paths: Sequence[Path], sql: str, *, window: Window = EVERYTHING, run: Run = here) -> Answered:
    """The answer to one SELECT. Raises LedgerError for anything else, and for what DuckDB refuses."""
    from ..facts import tables
    from ..facts.dataset import facts
    from ..facts.replayed import Wanted

    with facts(
        paths, window=window, run=run, wanted=Wanted(checks=True, activity=True, blocks=True)
    ) as found:
        found.mount_sums()
        columns, rows = found.answer(sql, tables.MOST_VALUES)
        missing = [*found.notes, *(found.cut if "findings" in sql.lower() else ())]
        return Answered(columns=columns, rows=[list(row) for row in rows], notes=missing)


def answer(found: Answered) -> Answer:
    """The rows as a table."""
    rows = [tuple(row) for row in found.rows[:MOST_SHOWN]]
    more = f"{MOST_SHOWN:,} of {len(found.rows):,} rows; --format csv has all."
    cut = [Words(more, DIM)] if len(found.rows) > MOST_SHOWN else []
    return Answer(
        found, cut, [Table(rows, found.columns), notes(found.notes)], Records(found.columns, found.rows)
    )
