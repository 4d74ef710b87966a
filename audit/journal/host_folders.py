"""Folders of several hosts' journals: ``PATH/HOST/JOURNAL``.

Two hosts may have journals of one name, and engines of one process id and rank. So a journal that was found
below a host's folder keeps the folder's name, and the name of its engine ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

from ..events import AnyEvent, EngineStarted
from ..text import printable
from .reader import Damage, Position, Reader


class HostJournal(PosixPath):
    """The path of a journal in a host's folder. It keeps the folder's name in other processes too."""

    host: str = ""
    """The name of the host's folder; "" for paths that are made from this one."""

    @classmethod
    def of(cls, path: Path, host: str) -> HostJournal:
        """The path of a journal in the folder of ``host``."""
        journal = cls(path)
        journal.host = host
        return journal

    def __reduce__(self) -> Any:
        return HostJournal.of, (Path(str(self)), self.host)


def host_of(path: Path) -> str:
    """The host's folder in which a journal was found; "" if it was found by itself or in a flat folder."""
    return printable(path.host) if isinstance(path, HostJournal) else ""


def same_place(path: Path, journal: Path) -> Path:
    """``path`` in the host's folder of ``journal``, as for a copy of it."""
    return HostJournal.of(path, journal.host) if isinstance(journal, HostJournal) else path


def engine_name(started: EngineStarted, path: Path) -> str:
    """The engine's name in findings and tables, with the host's folder unless it has that name already."""
    return f"{started.name}{place_suffix(path, started.configuration.get('instance'))}"


def place_suffix(path: Path, instance: object) -> str:
    """What tells an engine from those in the folders of other hosts: " in HOST".

    "" in a flat folder, and where the name of the ``instance`` that is printed is the folder's.
    """
    host = host_of(path)
    return f" in {host}" if host and host != instance else ""


def journal_name(path: Path) -> str:
    """A journal's name, with the host's folder."""
    host = host_of(path)
    name = printable(path.name)
    return f"{host}/{name}" if host else name


# --- Read a whole journal, or follow one as it grows.
#
# Code that needs positions, batches or damage uses :class:`~kvledger.audit.journal.reader.Reader` itself.


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
