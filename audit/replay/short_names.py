"""Short names of journals: the shortest end of a folder's name that no other journal beside it has.

``kvledger ls`` prints them, and each command takes one where it takes a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import has_magic
from pathlib import Path

from ..errors import LedgerError
from ..journal.format import segments
from ..journal.host_folders import HostJournal, host_of
from .parallel import is_remote

SHORTEST = 4
"""Characters of the shortest name, so that a name lasts while journals are added."""

LISTED = 5
"""Journals that the sentence about an ambiguous name lists."""


def short_names(journals: Iterable[Path]) -> dict[Path, str]:
    """The short name of each journal; the whole name of a single segment and of a journal elsewhere."""
    names: dict[Path, list[str]] = {}
    found = {}
    for journal in journals:
        if is_remote(journal) or not journal.is_dir():
            found[journal] = journal.name
            continue
        place = journal.absolute()
        folder = place.parent.parent if host_of(journal) else place.parent
        if folder not in names:
            names[folder] = [name for name, _ in _journals(folder)]
        found[journal] = _shortest(str(place.relative_to(folder)), names[folder])
    return found


def _shortest(name: str, names: list[str]) -> str:
    """The shortest end of ``name`` that no other of the ``names`` has."""
    for length in range(SHORTEST, len(name)):
        end = name[-length:]
        if end[0].isalnum() and not any(other.endswith(end) for other in names if other != name):
            return end
    return name


def named(path: Path) -> Path:
    """The journal that ``path`` names, if it is no path: one that ends like it.

    ``FOLDER/NAME`` is looked for in that folder, ``NAME`` in the current folder and in ``KVLEDGER_DIR``.
    A path that names no journal is returned. Raises :class:`LedgerError` if it names several.
    """
    if is_remote(path) or os.path.lexists(path) or has_magic(str(path)):
        return path
    found = list(dict.fromkeys(_ending(path)))
    if len(found) > 1:
        some = ", ".join(map(str, found[:LISTED])) + (", ..." if len(found) > LISTED else "")
        raise LedgerError(f"{path} names {len(found)} journals: {some}. Write more of the name.")
    return found[0] if found else path


def _ending(path: Path) -> Iterator[Path]:
    """The journals whose names end like ``path``; one that has this name is the only one of its folder."""
    folder = next(parent for parent in path.parents if parent.is_dir() or parent == parent.parent)
    places = [(folder, str(path.relative_to(folder)))]
    if not path.is_absolute() and (own := os.environ.get("KVLEDGER_DIR")):
        places.append((Path(own), str(path)))
    for place, end in places:
        ending = [(name, journal) for name, journal in _journals(place.absolute()) if name.endswith(end)]
        exact = [journal for name, journal in ending if name == end]
        yield from exact or [journal for _, journal in ending]


def _journals(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each journal in ``folder`` and in those of hosts, also of workers and KV events, by its name there."""
    for path in _folders(folder):
        if _is_journal(path):
            yield path.name, path
        else:
            for inner in _folders(path):
                if _is_journal(inner):
                    yield f"{path.name}/{inner.name}", HostJournal.of(inner, path.name)


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(folder / each.name for each in entries if each.name[0] != "." and each.is_dir())
    return []


def _is_journal(folder: Path) -> bool:
    with suppress(OSError):
        return bool(segments(folder))
    return False
