"""Journals in places that fsspec knows: ``s3://bucket/folder``, ``file:///folder``, ``memory://folder``.

The process that reads a journal copies it to a temporary folder first and removes the copy afterwards. A copy
has no writer, so the journal of a running engine reads like that of a killed engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from ..audit import temporary
from ..audit.errors import LedgerError
from ..audit.journal.format import segment_number
from ..audit.journal.host_folders import HostJournal, same_place
from ..audit.replay.engine_audit import EngineAudit
from ..audit.replay.find import JOURNAL
from ..audit.replay.parallel import Result, Run

__all__ = ["fetching", "journals", "url"]

_Any = TypeVar("_Any")


def url(path: Path) -> str:
    """The address from which a path was made; a path keeps only one of the two slashes."""
    scheme, _, rest = str(path).partition(":")
    return f"{scheme}:{'//' if scheme in ('file', 'local') else '/'}{rest}"


def journals(path: Path) -> list[Path]:
    """The journal folders, or the one segment, at or under an address. Raises :class:`LedgerError`."""
    system, root = _open(path)
    folders: dict[str, None] = {}
    try:
        for name in sorted(_call(path, system.find, root)):
            if segment_number(Path(name)) is not None:
                folders[name if name == root else str(PurePosixPath(name).parent)] = None
    except FileNotFoundError:
        folders = {}
    if not folders:
        raise LedgerError(f"{url(path)} holds no kvledger journal.")
    return [_placed(Path(str(system.unstrip_protocol(name))), _host(name, root)) for name in folders]


def _host(name: str, root: str) -> str:
    """The folder between an address and a journal under it, which tells hosts from each other."""
    parent = PurePosixPath(name).parent
    below = parent.is_relative_to(root) and parent != PurePosixPath(root)
    host = str(parent.relative_to(root)) if below else ""
    return "" if host == JOURNAL else host


def _placed(path: Path, host: str) -> Path:
    return HostJournal.of(path, host) if host else path


def fetching(run: Run) -> Run:
    """``run`` for journals that may be addresses: each process copies the journal that it reads."""

    def fetched(work: Callable[[Path], Result], journals: Any) -> Iterator[Result]:
        return run(partial(_fetch, work), journals)

    return fetched


@contextmanager
def copied(journal: Path) -> Iterator[Path]:
    """A journal on this machine, if need be a temporary copy. Raises :class:`LedgerError`."""
    if journal.exists():
        yield journal
        return
    with temporary.folder("kvledger-") as name:
        local = same_place(Path(name) / journal.name, journal)
        system, root = _open(journal)
        if _call(journal, system.isdir, root):
            local.mkdir()
            for file in _call(journal, system.ls, root, detail=False):
                if segment_number(Path(file)) is not None:
                    _call(journal, system.get_file, file, str(local / Path(file).name))
        else:
            _call(journal, system.get_file, root, str(local))
        yield local


def _fetch(work: Callable[[Path], _Any], journal: Path) -> _Any:
    with copied(journal) as local:
        result = work(local)
    if isinstance(result, EngineAudit):
        result.path = journal
    return result


def _open(path: Path) -> tuple[Any, str]:
    try:
        system, root = fsspec.core.url_to_fs(url(path))
    except (ImportError, ValueError, OSError) as error:
        raise LedgerError(f"{url(path)} can't be read: {error}.") from error
    return system, str(root)


def _call(path: Path, function: Callable[..., _Any], *arguments: Any, **options: Any) -> _Any:
    """Call a file system; each has exceptions of its own, which become :class:`LedgerError`."""
    try:
        return function(*arguments, **options)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise LedgerError(f"{url(path)} can't be read: {error}.") from error
