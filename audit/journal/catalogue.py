"""The catalogue of journals: what each entry of a folder is, told by its name and its segments.

Code that looks for journals uses a :class:`Catalogue`, which lists its folder once. Entries are journals of
engines, of their workers and of KV events, folders of hosts with such journals, and other things.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import JournalError, LedgerError
from ..events import ContentWatched, EngineStarted, EngineStopped, Event, RequestAdded, Snapshot
from .format import frames, is_live, read_header, segments
from .host_folders import HostJournal, engine_name, host_of
from .reader import NewerBatch, UnreadableBatch, decode_batch
from .safe_open import NotAFile, reading
from .writer import Limits

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


# --- Bounds on disk space, from the environment: of one engine's journal, and of all journals in a
# folder.
#
# A container that restarts its engine repeatedly leaves one journal each time, on a volume with a limit.
# Whole journals of ended engines are removed, the oldest first, and never the journal of a live engine. The
# bounds of a segment and of one journal are held by ``writer.py``.

Journal = TypeVar("Journal")

JOURNAL_BYTES = "KVLEDGER_JOURNAL_BYTES"
"""Environment variable: the most bytes of one engine's journal; its oldest segments are removed first."""

TOTAL_BYTES = "KVLEDGER_TOTAL_BYTES"
"""Environment variable: the most bytes of all journals in a folder; whole journals are removed."""

TOTAL_JOURNALS = 16
"""Without the variable: as many bytes as this many journals may have."""

SEGMENTS = 4
"""A bounded journal has at least this many segments, because one segment is removed at a time."""


def limits() -> Limits:
    """The bounds of a new journal. Raises :class:`LedgerError` if the variable is not a number of bytes."""
    journal_bytes = _bytes(JOURNAL_BYTES)
    default = Limits()
    if journal_bytes is None:
        return default
    segment_bytes = min(default.segment_bytes, journal_bytes // SEGMENTS)
    return Limits(segment_bytes=segment_bytes, folder_bytes=journal_bytes)


def make_room(folder: Path, journal_bytes: int) -> list[Path]:
    """Remove journals of ended engines, the oldest first, until a new one of ``journal_bytes`` has room.

    Returns the removed journals. What can't be read stays, and is said. Raises :class:`LedgerError` if
    ``KVLEDGER_TOTAL_BYTES`` is not a number of bytes, and nothing else: the new engine is recorded anyway.
    """
    total_bytes = _bytes(TOTAL_BYTES) or TOTAL_JOURNALS * journal_bytes
    try:
        journals = Catalogue(folder).journals(ENGINE, *BESIDE)
    except FileNotFoundError:
        return []
    except OSError as error:
        left_out(unreadable(folder, error))
        return []
    journals.sort(key=lambda path: path.name.partition("-")[2])  # the time at which it was begun
    sized = [(journal, _size(journal)) for journal in journals]
    removed = oldest(sized, total_bytes - journal_bytes, _may_be_live)
    for journal in removed:
        shutil.rmtree(journal, ignore_errors=True)
    return removed


def oldest(
    journals: Sequence[tuple[Journal, int]],
    most_bytes: int | None,
    is_live: Callable[[Journal], bool],
    is_old: Callable[[Journal], bool] = lambda _: False,
) -> list[Journal]:
    """Which journals of ended engines to remove: those that are old, and more until the rest is small enough.

    ``journals``: with their bytes, the oldest first. ``most_bytes`` is for all that stay, live ones included;
    None: any number.
    """
    rest = sum(size for _, size in journals)
    chosen = []
    for journal, size in journals:
        too_many = most_bytes is not None and rest > most_bytes
        if (too_many or is_old(journal)) and not is_live(journal):
            chosen.append(journal)
            rest -= size
    return chosen


def _may_be_live(journal: Path) -> bool:
    try:
        return is_live(journal)
    except LedgerError:
        return True


def _size(journal: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # another engine that starts may remove the journal meanwhile
        for path in journal.iterdir():
            with contextlib.suppress(OSError):  # a live engine may remove a segment meanwhile
                total += path.lstat().st_size
    return total


def _bytes(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise LedgerError(f"{variable} is {value!r}, which is not a number of bytes.")
    return int(value)


# --- What is known of a journal without replaying it: the engine, the time range, requests, bytes.
#
# Only the first batch and the last ones are decoded. :func:`prunable` chooses journals to remove.

FIRST_FRAMES = 4
"""So many frames at the beginning of a segment are searched for a worker's introduction."""

LAST_FRAMES = 64
"""So many frames at the end of a segment are searched for the last request."""


class JournalFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One journal. ``state``: live, stopped, or ended without EngineStopped (dead). None: not known.

    ``host``: the name that its engine gave, or else the folder of a host in which it lies.
    """

    path: Path
    engine: str = ""
    release: str = ""
    model: str = ""
    rank: int | None = None
    host: str = ""
    level: str = ""
    state: str = ""
    began_seconds: float | None = None
    until_seconds: float | None = None
    requests: int | None = None
    bytes: int = 0
    segments: int = 0


def facts(path: Path) -> JournalFacts:
    """What is known of the journal, or the single segment, at ``path``."""
    files = segments(path) if path.is_dir() else {1: path}
    sizes = _sizes(files.values())
    live = path.is_dir() and is_live(path)
    found = JournalFacts(path=path, bytes=sum(sizes.values()), segments=len(sizes))
    numbers = sorted(files)
    started = _first(files[numbers[0]], EngineStarted) if numbers else None
    last = next((events for number in reversed(numbers) if (events := _last_events(files[number]))), [])
    if not isinstance(started, EngineStarted):
        return msgspec.structs.replace(found, state="live" if live else "dead")
    starts = (_first(files[number], EngineStarted) for number in reversed(numbers))
    newest = next(start for start in starts if isinstance(start, EngineStarted))
    stopped = bool(last) and isinstance(last[-1], EngineStopped)
    settings = started.configuration
    rank = settings.get("data_parallel_rank")
    return JournalFacts(
        path=path,
        engine=engine_name(started, path),
        release=started.version,
        model=str(settings.get("model") or ""),
        rank=rank if isinstance(rank, int) else None,
        host=str(settings.get("instance") or host_of(path)),
        level=started.level,
        state="live" if live else "stopped" if stopped else "dead",
        began_seconds=newest.began_seconds + started.at / 1e6,  # a clock may have been corrected meanwhile
        until_seconds=newest.began_seconds + last[-1].at / 1e6 if last else None,
        requests=_requests(files[numbers[-1]], last),
        bytes=found.bytes,
        segments=found.segments,
    )


def content_watch(journal: Path) -> ContentWatched | None:
    """What a journal's last segments say about the contents of blocks at level ``content``; None: nothing."""
    files = segments(journal)
    for number in sorted(files, reverse=True)[:2]:  # the last one may still be empty
        for events in _batches(files[number], most=FIRST_FRAMES, last=False):
            found = next((event for event in events if isinstance(event, ContentWatched)), None)
            if found is not None:
                return found
    return None


def prunable(
    journals: Sequence[JournalFacts], *, before_seconds: float | None = None, most_bytes: int | None = None
) -> list[JournalFacts]:
    """Journals of ended engines to remove, the oldest first.

    Those that ended before ``before_seconds``, and more until the rest takes ``most_bytes`` at most.
    """
    by_age = sorted(journals, key=lambda one: (one.until_seconds or one.began_seconds or 0.0, one.path))
    return oldest(
        [(one, one.bytes) for one in by_age],
        most_bytes,
        lambda one: one.state == "live",
        lambda one: before_seconds is not None and (one.until_seconds or 0.0) < before_seconds,
    )


def workers_of(journal: Path) -> list[Path]:
    """The journals of the workers of this journal's engine, which are read only together with it."""
    transfer = _transfer(journal)
    if transfer is None:
        return []
    workers = Catalogue.beside(journal).journals(WORKER)
    return [path for path in workers if _transfer(path) == transfer]


def recordings_in(folders: Iterable[Path]) -> list[Path]:
    """The recordings of KV events in these folders, which are read only together with engines' journals."""
    listed = [Catalogue(folder) for folder in dict.fromkeys(folders) if folder.is_dir()]
    return [path for catalogue in listed for path in catalogue.journals(KV_EVENTS)]


def _transfer(journal: Path) -> object:
    files = segments(journal) if journal.is_dir() else {}
    started = _first(files[min(files)], EngineStarted) if files else None
    return started.configuration.get("transfer") if isinstance(started, EngineStarted) else None


def _sizes(files: Iterable[Path]) -> dict[Path, int]:
    sizes = {}
    for file in files:
        try:
            sizes[file] = os.stat(file).st_size
        except OSError:  # a live engine may remove a segment meanwhile
            continue
    return sizes


def _first(segment: Path, kind: type[Event]) -> Event | None:
    """The first event of this kind in the first batch of a segment."""
    for events in _batches(segment, most=1, last=False):
        return next((event for event in events if isinstance(event, kind)), None)
    return None


def _last_events(segment: Path) -> list[Event]:
    """The events of the last batch of a segment."""
    return next(iter(_batches(segment, most=1, last=True)), [])


def _requests(segment: Path, last: list[Event]) -> int | None:
    """How many requests the engine has had: requests are numbered in the order of their arrival."""
    for events in reversed(_batches(segment, most=LAST_FRAMES, last=True)):
        added = [event.request for event in events if isinstance(event, RequestAdded)]
        if added:
            return max(added) + 1
    snapshot = _first(segment, Snapshot)
    rows = snapshot.rows if isinstance(snapshot, Snapshot) else []
    return max((row.request for row in rows), default=-1) + 1 if last else None


def _batches(segment: Path, *, most: int, last: bool) -> list[list[Event]]:
    """The events of the first or last batches of a segment, as far as they can be read."""
    try:
        with reading(segment) as file:
            start, _ = read_header(file.fileno(), segment.name)
            if not start:
                return []
            kept: deque[bytes] = deque(maxlen=most)
            for _, payload in frames(file.fileno(), start):
                kept.append(bytes(payload))
                if not last and len(kept) == most:
                    break
            return [list(decode_batch(memoryview(payload)).events) for payload in kept]
    except (NotAFile, UnreadableBatch, NewerBatch, OSError, LedgerError):
        return []
