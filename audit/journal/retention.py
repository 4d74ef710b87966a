"""Bounds on disk space, from the environment: of one engine's journal, and of all journals in a folder.

A container that restarts its engine repeatedly leaves one journal each time, on a volume with a limit.
Whole journals of ended engines are removed, the oldest first, and never the journal of a live engine. The
bounds of a segment and of one journal are held by ``writer.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..errors import LedgerError
from .folder import BESIDE, ENGINE
from .format import is_live, segments
from .writer import Limits

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

    Returns the removed journals. Raises :class:`LedgerError` if ``KVLEDGER_TOTAL_BYTES`` is not a number of
    bytes.
    """
    total_bytes = _bytes(TOTAL_BYTES) or TOTAL_JOURNALS * journal_bytes
    if not folder.is_dir():
        return []
    journals = sorted(filter(_is_journal, folder.iterdir()), key=lambda path: path.name.partition("-")[2])
    sizes = {journal: _size(journal) for journal in journals}
    removed = []
    for journal, size in sizes.items():
        if sum(sizes.values()) + journal_bytes <= total_bytes:
            break
        if not is_live(journal):
            shutil.rmtree(journal, ignore_errors=True)
            sizes[journal] -= size
            removed.append(journal)
    return removed


def _is_journal(path: Path) -> bool:
    """Whether kvledger wrote this folder; then its name contains the time at which it was begun."""
    return path.name.startswith((ENGINE, *BESIDE)) and path.is_dir() and bool(segments(path))


def _size(journal: Path) -> int:
    total = 0
    for path in journal.iterdir():
        with contextlib.suppress(OSError):  # a live engine may remove a segment meanwhile
            total += path.stat().st_size
    return total


def _bytes(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise LedgerError(f"{variable} is {value!r}, which is not a number of bytes.")
    return int(value)
