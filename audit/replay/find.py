"""Short names of journals: the shortest end of a folder's name that no other journal beside it has.

``kvledger journals`` prints them, and each command takes one where it takes a path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import Protocol, TypeVar

from ..client_ids import rank
from ..errors import LedgerError
from ..events import EngineStarted
from ..journal.catalogue import ENGINE, KV_EVENTS, Catalogue, facts, find_journals
from ..journal.format import is_live, segments
from ..journal.host_folders import HostJournal, host_of
from ..release_semantics import meanings
from .parallel import is_remote
from .windows import last_start

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
            names[folder] = [name for name, _ in _named_journals(folder)]
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
        ending = [
            (name, journal) for name, journal in _named_journals(place.absolute()) if name.endswith(end)
        ]
        exact = [journal for name, journal in ending if name == end]
        yield from exact or [journal for _, journal in ending]


def _named_journals(folder: Path) -> Iterator[tuple[str, Path]]:
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


# --- find ----------------------------------------------------------------------------------------------
#
# Find journals by path or pattern, and requests by an id that a client knows.
#
# Nothing here reads an event: :mod:`kvledger.audit.replay.journals` replays what is found.


AnyRequest = TypeVar("AnyRequest", bound="Request")

JOURNAL = "journal"
"""The subfolder in which the demo keeps its journals."""


def journals_at(paths: Iterable[Path]) -> list[Path]:
    """Every journal at or under ``paths``, each once. Raises :class:`LedgerError` if there is none.

    A remote address is taken as the address of a journal. A path that does not exist and contains ``*``,
    ``?`` or ``[`` is a pattern, as in a shell.
    """
    matches = [match for path in paths for match in matching_paths(path)]
    return list(dict.fromkeys(journal for match in matches for journal in _journals(match)))


def matching_paths(path: Path) -> list[Path]:
    """The path itself, or the existing paths that match it as a pattern."""
    if is_remote(path) or not has_magic(str(path)) or path.exists():
        return [path]
    matches = sorted(map(Path, glob(str(path), recursive=True)))
    if not matches:
        raise LedgerError(f"No path matches {path}.")
    return matches


def _journals(path: Path) -> list[Path]:
    """The journals at or under ``path``, or in its subfolder ``journal``, as the demo leaves them."""
    if is_remote(path):
        return [path]
    try:
        found = find_journals([path])
    except LedgerError:
        if not os.path.isdir(path / JOURNAL):  # which is false for a folder that may not be read
            raise
        return find_journals([path / JOURNAL])
    return found if {host_of(journal) for journal in found} != {JOURNAL} else find_journals([path / JOURNAL])


class Request(Protocol):
    """What a request is found by; accounts have it."""

    @property
    def request_id(self) -> str:
        """The engine's id."""

    @property
    def traceparent(self) -> str | None:
        """The caller's trace context."""


def pick_requests(
    asked: str, requests: Iterable[AnyRequest], hints: Sequence[str], where: str, *, suffixed: bool = True
) -> list[AnyRequest]:
    """The requests that ``asked`` names: one, or all of a client's call, in the order of ``requests``.

    ``asked`` is an id by which a client knows them, see :mod:`kvledger.audit.client_ids`; the most exact
    meaning counts. ``suffixed``: the release appends random digits to ids. Raises :class:`LedgerError` if
    there is none, with suggestions from ``hints``.
    """
    ranks: dict[int, list[AnyRequest]] = {}
    for request in requests:
        place = rank(asked, request.request_id, request.traceparent, suffixed=suffixed)
        ranks.setdefault(place, []).append(request)
    ranks.pop(-1, None)
    if not ranks:
        hint = ", ".join(_suggestions(asked, hints))
        raise LedgerError(f"No request of {where} is called {asked!r}; there are {hint or 'none'}.")
    return ranks[min(ranks)]


def pick_request(
    asked: str, requests: Iterable[AnyRequest], hints: Sequence[str], where: str, *, suffixed: bool = True
) -> AnyRequest:
    """The one request that ``asked`` names, see :func:`pick_requests`.

    If several have the same id, the last one. Raises :class:`LedgerError` if ``asked`` is a call of several
    requests.
    """
    picked = pick_requests(asked, requests, hints, where, suffixed=suffixed)
    ids = list(dict.fromkeys(request.request_id for request in picked))
    if len(ids) > 1:
        shown = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
        raise LedgerError(f"{asked!r} names {len(ids)} requests: {shown}. Name one of them.")
    return picked[-1]


def _suggestions(request_id: str, names: Sequence[str]) -> Sequence[str]:
    """A few ids close to ``request_id``, else the first few."""
    return get_close_matches(request_id, names, n=3, cutoff=0.5) or names[:3]


# --- Find the recordings of an engine's KV events.
#
# A recording is a journal of its own beside the engine's, in a folder whose name begins with ``events-``.
# It belongs to the engine if both have the same ``KVLEDGER_EVENTS_KEY`` and port, and the publisher's
# batches fall into the time of the engine's journal.

AFTER_END_SECONDS = 5.0
"""An engine whose journal has no end may have published so long after the last event that was written."""

Identity = tuple[object, object]
"""The print of the key and the port of the publisher; None: not set."""


def recordings_beside(path: Path) -> list[Path]:
    """The journals of KV events in the same folder as an engine's journal."""
    return Catalogue.beside(path).named(KV_EVENTS)


def identity_of(started: EngineStarted) -> Identity:
    """What a recording and its engine have in common."""
    return started.configuration.get("hash_key"), started.configuration.get("kv_events_port")


class Neighbours:
    """The engines whose journals are in one folder with that of one engine.

    A recording names a port and no host: of two engines that published at one port at the same time, as in
    two containers, nobody can tell whose events were recorded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        """The journal of the engine; its folder is searched."""
        self._started: dict[str, EngineStarted | None] = {}
        """By name of a journal: how its engine started; None if it is not known."""

    def rival(self, engine: EngineStarted) -> str:
        """The journal of another engine at the same port while this one ran; "" if there is none."""
        until = _until(self._path)
        began = (last_start(self._path) or engine).began_seconds
        for path in Catalogue.beside(self._path).named(ENGINE):
            name = path.name
            if name == self._path.name:
                continue
            if name not in self._started:
                self._started[name] = last_start(path)
            other = self._started[name]
            if other is None or identity_of(other) != identity_of(engine) or other.began_seconds >= until:
                continue
            if _until(path) > began:
                return name
        return ""


def same_port(rival: str) -> str:
    """Why the events of two engines can't be told apart."""
    return (
        f"the KV events can't be compared: the engine of {rival} published at the same port at the same "
        "time; give each host or container a folder of its own, or each engine a port"
    )


def _until(path: Path) -> float:
    """Unix time up to which an engine ran: infinity if it still does."""
    try:
        return math.inf if is_live(path) else facts(path).until_seconds or 0.0
    except (LedgerError, OSError):
        return 0.0


def incomparable(engine: EngineStarted) -> str:
    """Why an engine's KV events can't be compared with its blocks; "" if they can."""
    if engine.level == "tokens":
        return "the KV events can't be compared: the engine was recorded at level tokens"
    if "kv_events_port" not in engine.configuration:
        return "the KV events can't be compared: the journal names no port of this engine for them"
    if "hash_key" not in engine.configuration:
        return "the KV events can't be compared: the engine ran without KVLEDGER_EVENTS_KEY"
    groups = engine.configuration.get("groups")
    if (
        isinstance(groups, int)
        and groups > 1
        and "kv events" in meanings(engine.version, engine=engine.engine)
    ):
        return "the KV events can't be compared: those of this release do not name the group of a block"
    return ""
