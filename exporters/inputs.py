"""Who reads the journals of a command, and the bar that shows how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..audit.replay.parallel import Processes, Run, is_remote
from .reports.terminal import console

Result = TypeVar("Result")


@contextmanager
def reading(
    paths: Sequence[Path], jobs: int = 0, scheduler: str = "", *, local: bool = False
) -> Iterator[tuple[list[Path], Run]]:
    """The paths to read, and how: ``jobs`` processes here, or the workers of a Dask ``scheduler``.

    Addresses of other places are journals' by then, or copies of them for who reads by itself
    (``local``). On a terminal a bar on standard error counts journals. Raises :class:`LedgerError`.
    """
    with ExitStack() as stack:
        run: Run = Processes(jobs)
        if scheduler:
            from .fleet import Fleet

            run = stack.enter_context(closing(Fleet(scheduler)))
        places = list(paths)
        if any(map(is_remote, places)):
            from . import remote

            run = remote.fetching(run)
            places = journals(paths)
            if local:
                places = [stack.enter_context(remote.copied(place)) for place in places]
        out = console(stderr=True)
        if out.is_terminal:
            columns = (TextColumn("reading journals"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            bar = stack.enter_context(Progress(*columns, console=out, transient=True))
            if local:
                bar.add_task("", total=None)
            run = _shown(run, bar)
        yield places, run


def journals(paths: Sequence[Path]) -> list[Path]:
    """The paths, with an address for each journal at an address. Raises :class:`LedgerError`."""
    if not any(map(is_remote, paths)):
        return list(paths)
    from . import remote

    return [one for path in paths for one in (remote.journals(path) if is_remote(path) else [path])]


def _shown(run: Run, bar: Progress) -> Run:
    def shown(work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        # Of one journal nobody knows how far it is: the bar only moves.
        task = bar.add_task("", total=len(journals) if len(journals) > 1 else None)
        for result in run(work, journals):
            bar.advance(task)
            yield result

    return shown
