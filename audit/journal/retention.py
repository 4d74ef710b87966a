"""Room for journals: how much one engine and all of them may hold, from the environment.

A container that restarts its engine again and again leaves a journal each time, on a volume with a
limit. Nothing is removed unless ``KVLEDGER_TOTAL_BYTES`` asks for it, and never a journal whose
engine lives.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..errors import LedgerError
from .format import is_live, segments
from .writer import Limits

JOURNAL_BYTES = "KVLEDGER_JOURNAL_BYTES"
"""The most that one engine's journal holds; its oldest segments go first."""

TOTAL_BYTES = "KVLEDGER_TOTAL_BYTES"
"""The most that all journals of a folder hold; those of ended engines go first, whole."""

SEGMENTS = 4
"""At least so many segments make up a bounded journal: one is removed at a time."""


def limits() -> Limits:
    """The bounds of a new journal. Raises :class:`LedgerError` for a size that is none."""
    most = _bytes(JOURNAL_BYTES)
    default = Limits()
    if most is None:
        return default
    return Limits(segment_bytes=min(default.segment_bytes, most // SEGMENTS), folder_bytes=most)


def make_room(folder: Path, journal_bytes: int) -> list[Path]:
    """Remove journals of ended engines, the oldest first, until a new one of its full size has room.

    Returns what was removed: nothing without ``KVLEDGER_TOTAL_BYTES``. Raises :class:`LedgerError`
    for a size that is none.
    """
    most = _bytes(TOTAL_BYTES)
    if most is None or not folder.is_dir():
        return []
    journals = sorted(filter(_is_journal, folder.iterdir()), key=lambda path: path.name.partition("-")[2])
    sizes = {journal: _size(journal) for journal in journals}
    removed = []
    for journal, size in sizes.items():
        if sum(sizes.values()) + journal_bytes <= most:
            break
        if not is_live(journal):
            shutil.rmtree(journal, ignore_errors=True)
            sizes[journal] -= size
            removed.append(journal)
    return removed


def _is_journal(path: Path) -> bool:
    """Only what an engine or a worker of ours wrote; then its name has the time it began."""
    return path.name.startswith(("engine-", "worker-")) and path.is_dir() and bool(segments(path))


def _size(journal: Path) -> int:
    total = 0
    for path in journal.iterdir():
        with contextlib.suppress(OSError):  # a live engine may remove a segment meanwhile
            total += path.stat().st_size
    return total


def _bytes(variable: str) -> int | None:
    said = os.environ.get(variable, "")
    if not said:
        return None
    if not said.isdecimal() or int(said) < 1:
        raise LedgerError(f"{variable} is {said!r}, which is no number of bytes.")
    return int(said)
