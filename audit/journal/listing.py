"""What is known of a journal without replaying it: the engine, the time range, requests, bytes.

Only the first batch and the last ones are decoded. :func:`prunable` chooses journals to remove.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..errors import LedgerError
from ..events import ContentWatched, EngineStarted, EngineStopped, Event, RequestAdded, Snapshot
from .catalogue import KV_EVENTS, WORKER, Catalogue
from .decode import NewerBatch, UnreadableBatch, decode_batch
from .format import frames, is_live, read_header, segments
from .host_folders import engine_name, host_of
from .retention import oldest
from .safe_open import NotAFile, reading

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
