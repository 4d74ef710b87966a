"""Folders of several hosts' journals: ``PATH/HOST/JOURNAL``.

Two hosts may have journals of one name, and engines of one process id and rank. So a journal that was found
below a host's folder keeps the folder's name, and the name of its engine ends with it.
"""

from __future__ import annotations

from pathlib import Path, PosixPath
from typing import Any

from ..events import EngineStarted
from ..text import printable


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
