"""Bounds on disk space, from the environment: of one engine's journal, and of all journals in a folder.

A container that restarts its engine repeatedly leaves one journal each time, on a volume with a limit.
Whole journals of ended engines are removed, the oldest first, and never the journal of a live engine. The
bounds of a segment and of one journal are held by ``writer.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..errors import LedgerError
from .catalogue import BESIDE, ENGINE, Catalogue, left_out, unreadable
from .format import is_live
from .writer import Limits

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
