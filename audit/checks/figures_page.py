"""The tables of docs/reconciliation.md: which counters are compared, and what each figure means.

`make docs` replaces the page from the heading "What is compared" on. ``figures.py`` has the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .figures import FIGURES, Compared, ExportedFigure

HEADING = "## What is compared\n"
"""The first heading of what is written here."""

_NOT_COMPARED = """
A counter is not compared in releases where the journal's events can't reproduce it: before 0.20, prompt
figures are clamped, mixed or missing; before 0.27, local lookups include attempts that led to no admission.
[Releases](reference/releases.md) lists what each figure means in each release.

## What each figure means, and what is counted

Every figure about tokens that vLLM exports or hands its client has a definition here, from first principles:
what it counts once a request, an admission, a position or a step. No definition is taken from the code that
counts. The tables say what releases count instead, and which invariant finds it. Such a *drift* does not
change the verdict. It is found once an engine: by what the engine did or reported, not by its version. Where
no invariant is named, only vLLM's front end knows, which kvledger does not observe.

Examined: the sources of vLLM 0.9.1, 0.9.2, 0.18.1, 0.19.1, 0.20.0, 0.23.0, 0.24.0, 0.27.1, 0.32.0 and 0.33.0,
and those of 0.16 and 0.17 in part. A release between two of these is assumed to be like the older one.
"""


def markdown() -> str:
    """Both tables, from the heading on."""
    figures = ("\n".join(_figure(figure)) for figure in FIGURES)
    return "\n".join((HEADING, "\n".join(_compared()), _NOT_COMPARED, "\n\n".join(figures))) + "\n"


def replaced(page: str) -> str:
    """``page`` with these tables below its prose."""
    return page.partition(HEADING)[0] + markdown()


def _compared() -> Iterator[str]:
    """The table of the counters that the sidecar compares."""
    yield "| `figure` | the engine's counter | the ledger's figure | releases |"
    yield "|---|---|---|---|"
    rows = [row for figure in FIGURES for row in figure.compared]
    for (ledger, since), alike in groupby(rows, lambda row: (row.ledger, row.since)):
        yield _row(list(alike), ledger, since)


def _row(rows: list[Compared], ledger: str, since: str) -> str:
    figures = ", ".join(f"`{row.figure}`" for row in rows)
    counters = ", ".join(dict.fromkeys(f"`{row.counter}`" for row in rows))
    return f"| {figures} | {counters} | {ledger} | since {since} |"


def _figure(figure: ExportedFigure) -> Iterator[str]:
    """One definition and its deviations."""
    yield "### " + ", ".join(f"`{name}`" for name in figure.names)
    yield ""
    yield f"*Each {figure.each}.* {figure.definition}"
    if not figure.deviations:
        return
    yield ""
    yield "| releases | what is counted instead | found by |"
    yield "|---|---|---|"
    for row in figure.deviations:
        found = ", ".join(f"`{id}`" for id in row.finds)
        yield f"| {row.releases} | {row.counts} | {found} |"
