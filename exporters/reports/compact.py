"""Compacts journals, and says what was done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Group
from rich.text import Text

from ...audit.journal.catalogue import say
from ...audit.replay.parallel import Run, here
from ..csv_cells import structs_csv
from ..facts.compact import LATER, Compacted, compact
from ..facts.kept import is_session, journals_and_sessions
from ..facts.retention import Retention
from .listing import names_of
from .terminal import blocks, bytes_text, counted, plain_table


def compact_all(paths: Sequence[Path], *, keep: Retention | None = None, run: Run = here) -> list[Compacted]:
    """Keep or continue the facts of every journal at ``paths``; what can't be is said. Raises LedgerError.

    With ``keep`` old rows are removed, also those of journals that are gone.
    """
    found = journals_and_sessions(paths)
    rows = list(run(partial(compact, keep=keep), [path for path in found if keep or not is_session(path)]))
    for row in rows:
        if row.problem and row.problem not in LATER:
            say(f"{row.journal} was not compacted: {row.problem}")
    return rows


def render(rows: Sequence[Compacted]) -> Group:
    """How many requests are kept, then a line for each journal."""
    whole = [row for row in rows if not row.problem]
    requests, size = sum(row.requests for row in whole), bytes_text(sum(row.bytes for row in whole))
    table = plain_table(header=True)
    for name in ("journal", "requests", "files", "bytes"):
        table.add_column(name, justify="left" if name == "journal" else "right")
    table.add_column("verdict")
    name_of = names_of(row.journal for row in rows)
    for row in rows:
        cells = [f"{row.requests:,}", f"{row.files:,}", bytes_text(row.bytes)]
        verdict = row.verdict
        if row.problem:
            cells, verdict = ["-", "-", "-"], f"not compacted: {row.problem}"
        table.add_row(*map(Text, (name_of(row.journal), *cells, verdict)))
    answer = f"{counted(requests, 'ended request')} of {counted(len(whole), 'journal')} in {size} of Parquet"
    removed = sorted({row.rows_from for row in whole} - {""})
    ages = (
        f" Of requests that ended before {' or '.join(removed)} only sums by the hour are kept."
        if removed
        else ""
    )
    return blocks(Group(Text(f"{answer}.{ages}")), table)


def as_csv(rows: Sequence[Compacted]) -> str:
    """One line per journal, with a header."""
    return structs_csv(Compacted, rows)
