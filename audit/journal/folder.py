"""Find journals, read a whole one, follow one as it grows.

Code that needs positions, batches or damage uses :class:`~kvledger.audit.journal.reader.Reader` itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import LedgerError
from ..old_events import AnyEvent
from .format import NoSegmentFile, open_segment, read_header, segments
from .hosts import HostJournal
from .reader import Damage, Position, Reader

ENGINE = "engine-"
"""The folder name of an engine's journal begins with this."""

WORKER = "worker-"
"""The folder name of a worker's journal begins with this."""

KV_EVENTS = "events-"
"""The folder name of a journal of KV events, which a subscriber recorded, begins with this."""

BESIDE = (WORKER, KV_EVENTS)
"""Journals that are read together with an engine's, and not by themselves."""


def read(
    path: str | Path, start: Position | None = None, damage: list[Damage] | None = None
) -> Iterator[tuple[int, AnyEvent]]:
    """Yield (event number, event) of everything written by now, and append what is damaged to ``damage``.

    A Gap that the reader puts in has the number of the first event that is missing.
    """
    with Reader(path, start) as reader:
        if damage is not None:
            reader.damage = damage
        for batch in reader.poll():
            yield from enumerate(batch.events, batch.first_event)


def tail(
    path: str | Path,
    poll_seconds: float = 0.25,
    stop: threading.Event | None = None,
    start: Position | None = None,
    damage: list[Damage] | None = None,
) -> Iterator[tuple[int, AnyEvent]]:
    """Like :func:`read`, and continue as the journal grows.

    Ends when the writer is gone and everything was read, or after ``stop`` was set.
    """
    stop = stop or threading.Event()
    with Reader(path, start) as reader:
        if damage is not None:
            reader.damage = damage
        while not stop.is_set():
            for batch in reader.poll():
                yield from enumerate(batch.events, batch.first_event)
                if stop.is_set():
                    return
            if reader.ended:
                return
            stop.wait(poll_seconds)


def find_journals(paths: Iterable[str | Path]) -> list[Path]:
    """The journal folders and single segments at ``paths``, in order, each once.

    A path may be a journal folder, a folder of several journals (``KVLEDGER_DIR``), a folder with one for
    each host, or a segment file. Raises :class:`LedgerError` for a path that is missing or no journal.
    """
    return list(dict.fromkeys(itertools.chain.from_iterable(_find(Path(path)) for path in paths)))


def _find(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            if not path.exists():
                raise LedgerError(f"There is no {path}.")
            _check_segment(path)
            return [path]
        if holds_journal(path):
            return [path]
        inside = sorted(path.iterdir())
        folders = [folder for folder in inside if folder.is_dir() and not is_beside(folder)]
        journals = [folder for folder in folders if holds_journal(folder)]
        hosts = [folder for folder in folders if folder not in journals and may_be_host(folder)]
        journals += [journal for host in hosts for journal in host_journals(host)]
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    if journals:
        return journals
    if not inside:
        raise LedgerError(f"{path} is empty: no journal was written there yet.")
    if any(is_beside(folder) for folder in inside):
        raise LedgerError(
            f"{path} holds journals of workers and none of an engine: its scheduler was not observed."
        )
    raise LedgerError(f"{path} holds no kvledger journal.")


def may_be_host(folder: Path) -> bool:
    """Whether a folder may be that of a host: it is neither hidden nor read with a journal."""
    return not folder.name.startswith(".") and not is_beside(folder)


def host_journals(folder: Path) -> list[Path]:
    """The engines' journals in a host's folder; none if it is a folder of other things.

    Raises OSError or :class:`LedgerError` for a journal that can't be read.
    """
    journals, failed = look_into(folder)
    if failed:
        raise failed[0]
    return journals


def look_into(folder: Path) -> tuple[list[Path], list[LedgerError | OSError]]:
    """The engines' journals in what may be a host's folder, and why others can't be read.

    What can't be read in a folder of other things is nobody's journal, unless it has an engine's name.
    """
    journals: list[Path] = []
    failed: list[tuple[Path, LedgerError | OSError]] = []
    inside = sorted(each for each in folder.iterdir() if may_be_host(each))
    for each in inside:
        try:
            if each.is_dir() and holds_journal(each):
                journals.append(HostJournal.of(each, folder.name))
        except (LedgerError, OSError) as error:
            failed.append((each, error))
    return journals, [error for each, error in failed if journals or each.name.startswith(ENGINE)]


def host_folders(folder: Path) -> list[Path]:
    """The folders of hosts in ``folder`` that hold journals of any kind, also only those of KV events."""
    found = []
    for each in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if may_be_host(each) and not segments(each) and any(map(_is_any_journal, each.iterdir())):
                found.append(each)
    return found


def _is_any_journal(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.is_dir() and bool(segments(folder))


def is_beside(folder: Path) -> bool:
    """Whether a journal is of a worker or of KV events: it is read together with an engine's."""
    return folder.name.startswith(BESIDE)


def holds_journal(folder: Path) -> bool:
    """Whether a folder is a journal. Raises :class:`LedgerError` if only its file names look like one."""
    by_number = segments(folder)
    for path in by_number.values():
        try:
            _check_segment(path)
        except (FileNotFoundError, NoSegmentFile, _NotASegment):
            continue
        return True
    if by_number:
        raise LedgerError(f"{folder} is not a kvledger journal: no segment in it has a journal's header.")
    return False


class _NotASegment(LedgerError):
    pass


def _check_segment(path: Path) -> None:
    with open_segment(path) as file:
        start, _ = read_header(file.fileno(), path.name)
        if not start:
            empty = not os.fstat(file.fileno()).st_size
            raise _NotASegment(f"{path} is {'empty' if empty else 'not a kvledger journal'}.")
