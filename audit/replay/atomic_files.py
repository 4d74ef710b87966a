"""Files that are replaced as a whole, and what ``kvledger journals compact`` keeps beside the journals."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..journal.catalogue import may_be_host
from ..journal.host_folders import HostJournal
from ..journal.safe_open import create_file, own_folder, sync_folder

DRAFT = ".new"
"""A file that is being written ends with this; its name is random, so nobody can prepare it."""

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

    Raises as :func:`~kvledger.audit.journal.safe_open.own_folder`.
    """
    own_folder(path.parent, refused)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{DRAFT}")
    try:
        with open(create_file(draft, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    sync_folder(path.parent)
