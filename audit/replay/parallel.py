"""Replay several journals in parallel, one journal per task.

A journal is replayed in order, so it is never divided. Results are merged in the order of the journals,
whichever is done first, so figures do not depend on the number of processes.
"""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ..errors import JournalError, LedgerError
from ..journal.catalogue import left_out

WORTH_BYTES = 8 << 20
"""Below this total size, reading takes less time than starting processes."""

COLLECT_AFTER = 500_000
"""New objects after which a process that only replays looks for reference cycles."""

Item = TypeVar("Item")
Result = TypeVar("Result")


_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/")


def is_remote(path: Path) -> bool:
    """Whether this is an address such as ``s3://bucket/folder`` and not a local path."""
    return _ADDRESS.match(str(path)) is not None and not path.exists()


class Run(Protocol):
    """Does some work for each of several journals and yields the results in the journals' order."""

    def __call__(self, work: Callable[[Path], Result], journals: Sequence[Path], /) -> Iterator[Result]:
        """Except with :func:`here`, ``work`` and its results must be picklable."""


def here(work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
    """Replay one journal after the other, in this process."""
    return map(work, journals)


class Failed(NamedTuple):
    """The journal can't be read."""

    error: JournalError


def _attempted(item: Item, work: Callable[[Item], Result]) -> Result | Failed:
    try:
        return work(item)
    except JournalError as error:
        return Failed(error)


def attempting(work: Callable[[Item], Result]) -> Callable[[Item], Result | Failed]:
    """The same work, whose result for :func:`whole_ones` may be that a journal can't be read."""
    return partial(_attempted, work=work)


def whole_ones(outcomes: Iterable[Result | Failed]) -> Iterator[Result]:
    """The results of the journals that can be read. The others are said, or raised if there is no result."""
    failed, some = [], False
    for outcome in outcomes:
        if isinstance(outcome, Failed):
            failed.append(outcome.error)
        else:
            some = True
            yield outcome
    for error in failed:
        if not some:
            raise error
        left_out(error)


def readable(run: Run, work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
    """What ``run`` yields for the journals that can be read; see :func:`whole_ones`."""
    return whole_ones(run(attempting(work), journals))


def cores() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def size_bytes(journal: Path) -> int:
    """The bytes of a journal, or of a segment, that are on disk now; a hole in a file takes none."""
    try:
        files = journal.glob("*.kvl") if journal.is_dir() else [journal]
        return sum(min(one.st_size, 512 * one.st_blocks) for one in map(os.lstat, files))
    except OSError:
        return 0


class Processes:
    """Up to ``jobs`` processes, 0 for as many as there are cores; the largest journals first."""

    def __init__(self, jobs: int = 0) -> None:
        if jobs < 0:
            raise LedgerError(f"{jobs} processes can't be: 0 means one for each core.")
        self.jobs = jobs

    def __call__(self, work: Callable[[Path], Result], journals: Sequence[Path]) -> Iterator[Result]:
        """See :class:`Run`. Small journals are read in this process."""
        return self.each(work, journals, [size_bytes(journal) for journal in journals])

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], sizes: Sequence[int]
    ) -> Generator[Result, None, None]:
        """The same for any items of these sizes in bytes."""
        jobs = min(self.jobs or cores(), len(items))
        if jobs < 2 or (not self.jobs and sum(sizes) < WORTH_BYTES):
            yield from map(work, items)
            return
        import multiprocessing
        from concurrent.futures import Future, ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool

        # A fork would copy locks that the caller's threads hold.
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=begin_worker) as pool:
            largest = sorted(range(len(items)), key=lambda place: -sizes[place])
            futures: dict[int, Future[Result]] = {}
            try:
                for place in largest:
                    futures[place] = pool.submit(work, items[place])
                for place in range(len(items)):
                    yield futures.pop(place).result()
            except BrokenProcessPool:
                # Python ends the others and waits for them, but not those that it began meanwhile: these
                # may wait for ever to write what nobody reads.
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()
                raise LedgerError("A process that read journals was killed; try fewer --jobs.") from None
            finally:
                for future in futures.values():
                    future.cancel()


def collect_rarely() -> None:
    """Let this process look for reference cycles rarely: a replay makes many objects and next to no cycles.

    Python's default looks through the open accounts thousands of times, a tenth of a replay's time.
    """
    gc.set_threshold(COLLECT_AFTER)


def begin_worker() -> None:
    """Let Ctrl-C end a worker process silently: the command line prints the message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    collect_rarely()
