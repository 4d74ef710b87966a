"""Where the replay of a journal may begin, so that the requests of a time window get their whole accounts.

Each segment begins with a snapshot of the running requests. A replay that begins there knows the whole
account of every request that arrives later. So it may begin at a segment whose running requests all end
before the window begins. They do if none of them runs at the last segment that begins before the window.

Only journals of level ``tokens`` without workers' journals are read in part. At level ``blocks`` the causes
of misses come from blocks that were cached long ago.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import LedgerError
from ..events import EngineStarted, Snapshot
from ..journal.format import segments
from ..journal.reader import Position, Reader
from .engine_audit import EngineAudit


class _Beginning(NamedTuple):
    """The time at which a segment begins, and the requests that run then."""

    at: int
    running: frozenset[int]


def skip_to_window(audit: EngineAudit) -> Position | None:
    """Where the replay for the audit's window may begin; None: at the journal's beginning.

    If it may begin later, the audit learns how the engine described itself at the beginning.
    """
    path, window = audit.path, audit.window
    if window.since is None or audit.auditor.ledger.watch is not None or not path.is_dir():
        return None
    try:
        engine = engine_of(path)
        if engine is None or engine.level != "tokens" or audit.workers.beside():
            return None
        began = engine.began_seconds if audit.clock is None else audit.clock
        number = _first_segment(path, round((window.since - began) * 1e6))
    except (LedgerError, OSError):  # the replay says what is wrong
        return None
    if not number:
        return None
    audit.feed(0, engine)
    return Position(segment=number, event=-1)


def engine_of(path: Path) -> EngineStarted | None:
    """How the engine described itself at the journal's beginning."""
    with Reader(path) as reader:
        for batch in reader.poll():
            return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
    return None


def _first_segment(path: Path, since: int) -> int:
    """The last segment whose running requests have ended when the last segment before ``since`` begins.

    0: there is none behind the journal's first.
    """
    before: list[tuple[int, _Beginning]] = []
    for number in sorted(segments(path))[1:]:
        beginning = _beginning(path, number)
        if beginning is None or beginning.at > since:
            break
        before.append((number, beginning))
    running = before[-1][1].running if before else frozenset[int]()
    return next((number for number, one in reversed(before) if not one.running & running), 0)


def _beginning(path: Path, segment: int) -> _Beginning | None:
    """The beginning of a segment; None if it can't be read."""
    with Reader(path, Position(segment=segment, event=-1)) as reader:
        for batch in reader.poll():
            if batch.start.segment != segment or not batch.begins_segment:
                return None
            snapshots = [event for event in batch.events if isinstance(event, Snapshot)]
            running = frozenset(row.request for snapshot in snapshots for row in snapshot.rows)
            return _Beginning(snapshots[0].at, running) if snapshots else None
    return None
