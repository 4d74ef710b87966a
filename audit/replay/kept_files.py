"""Files that ``kvledger compact`` keeps beside the journals, and that stay when the journals are removed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import LedgerError
from ..journal.folder import may_be_host
from ..journal.hosts import HostJournal
from . import checkpoint

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
    path.parent.mkdir(mode=checkpoint.FOLDER_MODE, parents=True, exist_ok=True)
    if path.parent.is_symlink():  # the engine's container may write beside the journals
        raise LedgerError(f"{path.parent} is a link, not a folder: {refused} there.")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{checkpoint.DRAFT}")
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
