"""The catalogue of journals: what each entry of a folder is, told by its name and its segments.

Code that looks for journals uses a :class:`Catalogue`, which lists its folder once. Entries are journals of
engines, of their workers and of KV events, folders of hosts with such journals, and other things.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import JournalError, LedgerError
from .format import is_live, read_header, segments
from .host_folders import HostJournal
from .safe_open import NotAFile, reading

logger = logging.getLogger("kvledger.journals")
"""Gets a warning for each journal that is left out; the command line prints them and ends with 3."""

ENGINE = "engine-"
"""The folder name of an engine's journal begins with this."""

WORKER = "worker-"
"""The folder name of a worker's journal begins with this."""

KV_EVENTS = "events-"
"""The folder name of a journal of KV events, which a subscriber recorded, begins with this."""

BESIDE = (WORKER, KV_EVENTS)
"""Journals that are read together with an engine's, and not by themselves."""


class Catalogue:
    """The entries of one folder, in the order of their names. Raises OSError if it can't be listed."""

    def __init__(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        self.paths = [folder / name for name in names]
        """Every entry, hidden ones too."""

    @classmethod
    def beside(cls, journal: Path) -> Catalogue:
        """The entries of the folder of a journal; none beside a single segment, or if it can't be listed."""
        catalogue = cls.__new__(cls)
        catalogue.paths = []
        with contextlib.suppress(OSError):
            if journal.is_dir():
                return cls(journal.parent)
        return catalogue

    def named(self, *kinds: str) -> list[Path]:
        """The entries of these kinds by their names: :data:`ENGINE`, :data:`WORKER`, :data:`KV_EVENTS`."""
        return [path for path in self.paths if path.name.startswith(kinds)]

    def newest_first(self, *kinds: str) -> list[Path]:
        """The same by the time at which something in the folder was begun. Raises OSError."""
        return sorted(self.named(*kinds), key=lambda path: path.stat().st_mtime, reverse=True)

    @property
    def engines_or_hosts(self) -> list[Path]:
        """What may be an engine's journal or the folder of a host: not hidden, nor read with a journal."""
        return [path for path in self.paths if may_be_host(path)]

    def journals(self, *kinds: str) -> list[Path]:
        """The journals of these kinds, without those that can't be listed."""
        return [path for path in self.named(*kinds) if _tried(path, _has_segments)]


def say(sentence: str) -> None:
    """Warn that figures lack something, in a sentence."""
    logger.warning("%s", sentence)


def left_out(error: LedgerError) -> None:
    """Say that a journal, or what may be one, can't be read; the others are."""
    say(f"Left out: {error}")


def unreadable(path: Path, error: LedgerError | OSError) -> LedgerError:
    """The sentence that says why this path can't be read."""
    if isinstance(error, LedgerError):
        return error
    return JournalError(f"{path} can't be read: {error.strerror}.")


def _tried(path: Path, is_one: Callable[[Path], bool]) -> bool:
    """Whether this is one. False, and said, for what can't be read."""
    try:
        return is_one(path)
    except FileNotFoundError:  # it was removed meanwhile
        return False
    except (LedgerError, OSError) as error:
        left_out(unreadable(path, error))
        return False


def _has_segments(path: Path) -> bool:
    return path.is_dir() and bool(segments(path))


def find_journals(paths: Iterable[str | Path]) -> list[Path]:
    """The journal folders and single segments at ``paths``, in order, each once.

    A path may be a journal folder, a folder of several journals (``KVLEDGER_DIR``), a folder with one for
    each host, or a segment file. In a folder, a journal that can't be read is left out, and said. Raises
    :class:`LedgerError` for a path that is missing or no journal.
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
        inside = Catalogue(path).paths
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    journals: list[Path] = []
    hosted: list[Path] = []
    failed: list[tuple[Path, LedgerError | OSError]] = []
    for folder in inside:
        try:
            if not may_be_host(folder) or not folder.is_dir():
                continue
            if holds_journal(folder):
                check_readable(folder)
                journals.append(folder)
            else:
                found, errors = look_into(folder, check_readable)
                hosted += found
                failed += [(folder, error) for error in errors]
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except (LedgerError, OSError) as error:
            failed.append((folder, error))
    if journals or hosted:
        for each, why in failed:
            left_out(unreadable(each, why))
        return journals + hosted
    for each, why in failed:
        raise unreadable(each, why)
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


def look_into(
    folder: Path, check: Callable[[Path], None] = lambda _: None
) -> tuple[list[Path], list[LedgerError | OSError]]:
    """The engines' journals in what may be a host's folder, and why others can't be read.

    What can't be read in a folder of other things is nobody's journal, unless it has an engine's name.
    ``check`` raises for a journal that can't be read.
    """
    journals: list[Path] = []
    failed: list[tuple[Path, LedgerError | OSError]] = []
    for each in Catalogue(folder).engines_or_hosts:
        try:
            if each.is_dir() and holds_journal(each):
                check(each)
                journals.append(HostJournal.of(each, folder.name))
        except (LedgerError, OSError) as error:
            failed.append((each, error))
    return journals, [error for each, error in failed if journals or each.name.startswith(ENGINE)]


def host_folders(folder: Path) -> list[Path]:
    """The folders of hosts in ``folder`` that hold journals of any kind, also only those of KV events."""
    found = []
    for each in Catalogue(folder).engines_or_hosts:
        with contextlib.suppress(OSError):
            if not segments(each) and any(map(_is_any_journal, each.iterdir())):
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
        with contextlib.suppress(FileNotFoundError, NotAFile, _NotASegment):
            _check_segment(path)
            return True
    if by_number:
        raise JournalError(f"{folder} is not a kvledger journal: no segment in it has a journal's header.")
    return False


def check_readable(journal: Path) -> None:
    """Raise OSError or :class:`LedgerError` if a segment of a journal can't be read, or its lock."""
    for path in segments(journal).values():
        with contextlib.suppress(FileNotFoundError, NotAFile, _NotASegment):
            _check_segment(path)
    is_live(journal)


class _NotASegment(LedgerError):
    pass


def _check_segment(path: Path) -> None:
    with reading(path) as file:
        start, _ = read_header(file.fileno(), path.name)
        if not start:
            empty = not os.fstat(file.fileno()).st_size
            raise _NotASegment(f"{path} is {'empty' if empty else 'not a kvledger journal'}.")
