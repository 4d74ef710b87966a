"""Files that are replaced as a whole, and what ``kvledger journals compact`` keeps beside the journals."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..journal.catalogue import may_be_host, say
from ..journal.host_folders import HostJournal
from ..journal.safe_open import create_file, own_folder, sync_folder

DRAFT = ".new"
"""A file that is being written ends with this; its name is random, so nobody can prepare it."""

FOLDER = ".kvledger-facts"
"""The folder beside the journals."""


def left_behind(folder: Path, suffix: str) -> list[Path]:
    """The files of journals that are gone, in a folder of journals and in the folders of hosts below it.

    A folder of kept files that can't be listed is said: what it keeps is unknown.
    """
    paths = _kept_in(folder, suffix)
    hosts: list[str] = []
    with contextlib.suppress(OSError):  # said where its journals are looked for
        hosts = sorted(name for name in os.listdir(folder) if may_be_host(folder / name))
    for name in hosts:
        paths += [HostJournal.of(path, name) for path in _kept_in(folder / name, suffix)]
    return [path for path in paths if not (path.parent.parent / path.name.removesuffix(suffix)).exists()]


def _kept_in(folder: Path, suffix: str) -> list[Path]:
    """The kept files with this suffix of the journals in a folder."""
    kept = folder / FOLDER
    try:
        return sorted(kept / name for name in os.listdir(kept) if name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if os.path.lexists(kept):  # else nobody may even look into the folder, which is said elsewhere
            why = f"{kept} can't be read ({error.strerror})"
            say(f"{why}: figures lack what it keeps of journals that are gone.")
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
