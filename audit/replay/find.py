"""Find journals by path or pattern, and requests by an id that a client knows.

Nothing here reads an event: :mod:`kvledger.audit.replay.journals` replays what is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import Protocol, TypeVar

from ..client_ids import rank
from ..errors import LedgerError
from ..journal.catalogue import find_journals
from ..journal.host_folders import host_of
from .parallel import is_remote

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
