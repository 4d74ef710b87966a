"""Find journals by path or pattern, and one request by what a user typed.

Nothing here reads an event: :mod:`kvledger.audit.replay.journals` replays what is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path

from ..errors import LedgerError
from ..journal.folder import find_journals
from .parallel import is_remote

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
        return find_journals([path])
    except LedgerError:
        if not os.path.isdir(path / JOURNAL):  # which is false for a folder that may not be read
            raise
        return find_journals([path / JOURNAL])


def pick_request(request_id: str, names: set[str], hints: Sequence[str], where: str) -> str:
    """The one request id in ``names`` that ``request_id`` means.

    That is the same id, else the one id ``request_id-...``, else the one id that begins with
    ``request_id``. Raises :class:`LedgerError` if there is none, with suggestions from ``hints``, or if
    there is more than one.
    """
    names = {name for name in names if name.startswith(request_id)}
    for narrower in ({request_id}, {name for name in names if name.startswith(f"{request_id}-")}):
        names = names & narrower or names
    if not names:
        hint = ", ".join(_suggestions(request_id, hints))
        raise LedgerError(f"No request of {where} is called {request_id!r}; there are {hint or 'none'}.")
    if len(names) > 1:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise LedgerError(f"{len(names)} requests begin with {request_id!r}: {shown}.")
    return names.pop()


def _suggestions(request_id: str, names: Sequence[str]) -> Sequence[str]:
    """A few ids close to ``request_id``, else the first few."""
    return get_close_matches(request_id, names, n=3, cutoff=0.5) or names[:3]
