"""Who reads the journals of a command, and the bar that shows how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvledger.audit.parallel import Processes, Run
from kvledger.exporters.terminal import console

Result = TypeVar("Result")


@contextmanager
def reading(paths: Sequence[Path], jobs: int = 0, scheduler: str = "") -> Iterator[tuple[list[Path], Run]]:
    """The paths to read, and how: ``jobs`` processes here, or the workers of a Dask ``scheduler``.

    On a terminal a bar on standard error counts journals. Raises :class:`LedgerError`.
    """
    run: Run = Processes(jobs)
    places = list(paths)
    out = console(stderr=True)
    if not out.is_terminal:
        yield places, run
        return
    columns = (TextColumn("reading journals"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        yield places, _shown(run, bar)


def _shown(run: Run, bar: Progress) -> Run:
    def shown(work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        # Of one journal nobody knows how far it is: the bar only moves.
        task = bar.add_task("", total=len(journals) if len(journals) > 1 else None)
        for result in run(work, journals):
            bar.advance(task)
            yield result

    return shown
