"""Journals in places that fsspec knows: ``s3://bucket/folder``, ``file:///folder``, ``memory://folder``.

A journal is copied to a temporary folder of whoever reads it, and removed again. A copy has no writer, so
the journal of an engine that runs reads as one that was killed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from ..audit.errors import LedgerError
from ..audit.journal.format import segment_number
from ..audit.replay.engine_audit import EngineAudit
from ..audit.replay.parallel import Result, Run

__all__ = ["fetching", "journals", "url"]

_Any = TypeVar("_Any")


def url(path: Path) -> str:
    """The address again of which a path was made, which leaves one of two slashes."""
    scheme, _, rest = str(path).partition(":")
    return f"{scheme}:{'//' if scheme in ('file', 'local') else '/'}{rest}"


def journals(path: Path) -> list[Path]:
    """The journal folders, or the one segment, at or under an address. Raises :class:`LedgerError`."""
    system, root = _open(path)
    found: dict[str, None] = {}
    try:
        for name in sorted(_told(path, system.find, root)):
            if segment_number(Path(name)) is not None:
                found[name if name == root else str(PurePosixPath(name).parent)] = None
    except FileNotFoundError:
        found = {}
    if not found:
        raise LedgerError(f"{url(path)} holds no kvledger journal.")
    return [Path(str(system.unstrip_protocol(name))) for name in found]


def fetching(run: Run) -> Run:
    """The same, where a journal may be an address: whoever reads it copies it first."""

    def fetched(work: Callable[[Path], Result], journals: Any) -> Iterator[Result]:
        return run(partial(_fetch, work), journals)

    return fetched


@contextmanager
def copied(journal: Path) -> Iterator[Path]:
    """A journal here, if need be a copy that goes when it is done with. Raises :class:`LedgerError`."""
    if journal.exists():
        yield journal
        return
    with tempfile.TemporaryDirectory(prefix="kvledger-") as name:
        local = Path(name) / journal.name
        system, root = _open(journal)
        if _told(journal, system.isdir, root):
            local.mkdir()
            for file in _told(journal, system.ls, root, detail=False):
                if segment_number(Path(file)) is not None:
                    _told(journal, system.get_file, file, str(local / Path(file).name))
        else:
            _told(journal, system.get_file, root, str(local))
        yield local


def _fetch(work: Callable[[Path], _Any], journal: Path) -> _Any:
    with copied(journal) as local:
        found = work(local)
    if isinstance(found, EngineAudit):
        found.path = journal
    return found


def _open(path: Path) -> tuple[Any, str]:
    try:
        system, root = fsspec.core.url_to_fs(url(path))
    except (ImportError, ValueError, OSError) as error:
        raise LedgerError(f"{url(path)} can't be read: {error}.") from error
    return system, str(root)


def _told(path: Path, ask: Callable[..., _Any], *words: Any, **options: Any) -> _Any:
    """What the file system answers. Its errors differ from one to the next."""
    try:
        return ask(*words, **options)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise LedgerError(f"{url(path)} can't be read: {error}.") from error
