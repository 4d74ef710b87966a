"""Prints where a fault begins and ends: the answer first, then a line per release."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...audit.repro import bisect
from ...audit.repro.bisect import Bisection, Run
from . import terminal

STYLES = {"fails": "bold red", "passes": "green", "error": "yellow"}


def run(file: Path, releases: str, interpreters: Sequence[str], jobs: int) -> Bisection:
    """Run the file over the given interpreters, or over the environments of this checkout."""
    environments = bisect.given(interpreters) if interpreters else bisect.built(file, releases)
    if not terminal.console(stderr=True).is_terminal:
        return bisect.bisect(file, environments, jobs=jobs)
    with terminal.progress("running the test", "releases") as move:
        move(0, len(environments))
        return bisect.bisect(file, environments, jobs=jobs, progress=move)


def render(bisection: Bisection) -> Group:
    """The releases, oldest first."""
    return terminal.blocks(Text(answer(bisection), style="bold"), _table(bisection.runs))


def answer(bisection: Bisection) -> str:
    """First bad, last bad and first good release, in one sentence."""
    file, first, last = bisection.file, bisection.first_bad, bisection.last_bad
    if not first:
        ran = sum(run.result == "passes" for run in bisection.runs)
        return (
            f"{file} fails in none of {terminal.counted(len(bisection.runs), 'release')} and passes in {ran}."
        )
    bad = f"First bad {first}, last bad {last}" if first != last else f"Bad in {first} only"
    if bisection.first_good:
        return f"{bad}, first good {bisection.first_good}."
    if last == bisection.runs[-1].release:
        return f"{bad}, which is the newest release tried."
    return f"{bad}, no later release passes."


def _table(runs: tuple[Run, ...]) -> Table:
    table = terminal.plain_table(header=True)
    for name in ("release", "result"):
        table.add_column(name, no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("the engine's figure, or the error", min_width=20)
    for run in runs:
        result = Text(run.result, style=STYLES[run.result])
        table.add_row(run.release, result, f"{run.seconds:.1f}", Text(run.figure))
    return table


def as_data(bisection: Bisection) -> dict[str, object]:
    """For JSON: the same, as plain data."""
    return {
        "file": bisection.file,
        "first_bad": bisection.first_bad or None,
        "last_bad": bisection.last_bad or None,
        "first_good": bisection.first_good or None,
        "releases": [
            {
                "release": run.release,
                "result": run.result,
                "figure": run.figure,
                "seconds": round(run.seconds, 3),
            }
            for run in bisection.runs
        ],
    }
