"""Which journals a follower reads: one journal, or all journals in a folder, including later ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ...audit.errors import LedgerError
from ...audit.journal.folder import find_journals, holds_journal, is_beside

Notify = Callable[[str], None]
"""Called with one sentence for each problem."""


class JournalFinder(Protocol):
    """Names the journals to follow; a journal's name is its key in a checkpoint."""

    def names(self, followed: Iterable[str], notify: Notify) -> Iterable[str]:
        """List what may be a journal now; the ``followed`` ones if the listing fails."""

    def path(self, name: str) -> Path:
        """Return where the journal of this name is."""

    def is_journal(self, name: str, notify: Notify) -> bool:
        """Check that there is a journal under this name."""


class FolderFinder:
    """The journals directly in a folder, or one journal by its own path.

    Raises :class:`LedgerError` if there is no ``root``, or if ``root`` is a file that is no journal.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._single = not root.is_dir() or holds_journal(root)
        if self._single:
            find_journals([root])  # raises with the reason

    def names(self, followed: Iterable[str], notify: Notify) -> Iterator[str]:
        """The folder's entries, without hidden ones and workers' journals; ``.`` for a single journal."""
        try:
            if self._single:
                if self._root.exists():
                    yield "."
                return
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if not (entry.name.startswith(".") or is_beside(Path(entry.name))):
                        yield entry.name
        except OSError as error:
            # A folder that can't be listed for a while has not lost its journals.
            yield from followed
            notify(f"{self._root} can't be listed: {error.strerror}.")

    def path(self, name: str) -> Path:
        """The journal's folder."""
        return self._root if self._single else self._root / name

    def is_journal(self, name: str, notify: Notify) -> bool:
        """Whether the entry is a folder with segments."""
        if self._single:
            return True
        path = self.path(name)
        try:
            return path.is_dir() and holds_journal(path)
        except (LedgerError, OSError) as error:
            notify(str(error))
            return False
