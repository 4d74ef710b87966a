"""How commands read journals: in processes, on a Dask cluster, from other places, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..audit.replay.parallel import Processes, Run, collect_rarely, is_remote
from .terminal import console

if TYPE_CHECKING:
    from rich.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def reading(
    paths: Sequence[Path], jobs: int = 0, dask: str = "", *, local: bool = False
) -> Iterator[tuple[list[Path], Run]]:
    """The paths to read, and a :class:`Run`: ``jobs`` processes, or the workers of the ``dask`` scheduler.

    An address such as ``s3://...`` becomes the addresses of its journals; with ``local`` it becomes copies of
    them. On a terminal, a bar on standard error counts journals. Raises LedgerError.
    """
    collect_rarely()
    with ExitStack() as stack:
        run: Run = Processes(jobs)
        if dask:
            from .fleet import Fleet

            run = stack.enter_context(closing(Fleet(dask)))
        places = list(paths)
        if any(map(is_remote, places)):
            from . import remote

            run = remote.fetching(run)
            places = journals(paths)
            if local:
                places = [stack.enter_context(remote.copied(place)) for place in places]
        out = console(stderr=True)
        if out.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            columns = (TextColumn("reading journals"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            bar = stack.enter_context(Progress(*columns, console=out, transient=True))
            if local:
                bar.add_task("", total=None)
            run = _ProcessesWithBar(run, bar) if isinstance(run, Processes) else _with_bar(run, bar)
        yield places, run


def journals(paths: Sequence[Path]) -> list[Path]:
    """The paths, each address replaced by those of its journals. Raises LedgerError."""
    if not any(map(is_remote, paths)):
        return list(paths)
    from . import remote

    return [one for path in paths for one in (remote.journals(path) if is_remote(path) else [path])]


class _ProcessesWithBar(Processes):
    """Processes that advance a bar. The progress within one journal is not known, so its bar only pulses."""

    def __init__(self, processes: Processes, bar: Progress) -> None:
        super().__init__(processes.jobs)
        self._bar = bar

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], sizes: Sequence[int]
    ) -> Generator[Result, None, None]:
        task = self._bar.add_task("", total=len(items) if len(items) > 1 else None)
        for result in super().each(work, items, sizes):
            self._bar.advance(task)
            yield result


def _with_bar(run: Run, bar: Progress) -> Run:
    def run_with_bar(work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        task = bar.add_task("", total=len(journals) if len(journals) > 1 else None)
        for result in run(work, journals):
            bar.advance(task)
            yield result

    return run_with_bar
