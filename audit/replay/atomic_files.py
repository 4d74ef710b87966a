"""Files that are replaced as a whole, and those that ``kvledger compact`` keeps beside the journals."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import LedgerError
from ..journal.catalogue import may_be_host
from ..journal.host_folders import HostJournal

DRAFT = ".new"
"""A file that is being written ends with this; its name is random, so nobody can prepare it."""

FOLDER_MODE = 0o700
FOLDER = ".kvledger-facts"
"""The folder beside the journals."""


def left_behind(folder: Path, suffix: str) -> list[Path]:
    """The files of journals that are gone, in a folder of journals and in the folders of hosts below it."""
    with contextlib.suppress(OSError):
        paths = sorted((folder / FOLDER).glob(f"*{suffix}"))
        for path in sorted(folder.glob(f"*/{FOLDER}/*{suffix}")):
            host = path.parent.parent
            if may_be_host(host):
                paths.append(HostJournal.of(path, host.name))
        return [path for path in paths if not (path.parent.parent / path.name.removesuffix(suffix)).exists()]
    return []


@contextlib.contextmanager
def replaced(path: Path, mode: int, refused: str) -> Iterator[BinaryIO]:
    """A file that replaces ``path`` when it is whole and on disk. Makes the folder.

    Raises LedgerError, which ends with ``refused``, if the folder is a link, and OSError.
    """
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    if path.parent.is_symlink():  # the engine's container may write beside the journals
        raise LedgerError(f"{path.parent} is a link, not a folder: {refused} there.")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{DRAFT}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
