"""Which journals a follower reads: one journal, or all in a folder and in those of hosts, also later ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ...audit.errors import LedgerError
from ...audit.journal.catalogue import Catalogue, find_journals, holds_journal, look_into
from ...audit.journal.host_folders import HostJournal

Notify = Callable[[str], None]
"""Called with one sentence for each problem."""


LOOK_SECONDS = 5.0
"""How often a folder that held no journal is looked at again: it may become that of a host."""


class JournalFinder(Protocol):
    """Names the journals to follow; a journal's name is its key in a checkpoint."""

    def names(self, followed: Iterable[str], notify: Notify) -> Iterable[str]:
        """List what may be a journal now; the ``followed`` ones if the listing fails."""

    def path(self, name: str) -> Path:
        """Return where the journal of this name is."""

    def is_journal(self, name: str, notify: Notify) -> bool:
        """Check that there is a journal under this name."""


class FolderFinder:
    """The journals in a folder and in the folders of hosts below it, or one journal by its own path.

    A journal in a host's folder has the name ``HOST/JOURNAL``. Raises :class:`LedgerError` if there is no
    ``root``, or if ``root`` is a file that is no journal.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._single = not root.is_dir() or holds_journal(root)
        """Whether ``root`` is one journal."""
        self._hosts: set[str] = set()
        self._look_at: dict[str, float] = {}
        """Folders that held no journal, and the monotonic time at which they are looked at again."""
        if self._single:
            find_journals([root])  # raises with the reason

    def names(self, followed: Iterable[str], notify: Notify) -> Iterator[str]:
        """The entries of the folder and of hosts' folders, without hidden ones and workers' journals.

        ``.`` for a single journal.
        """
        followed = list(followed)
        try:
            if self._single:
                if self._root.exists():
                    yield "."
                return
            names = _names(self._root)
        except OSError as error:
            # A folder that can't be listed for a while has not lost its journals.
            yield from followed
            notify(f"{self._root} can't be listed: {error.strerror}.")
            return
        hosts = {name.partition("/")[0] for name in followed if "/" in name}
        known = {name for name in followed if "/" not in name}
        for name in names:
            yield name
            if name in hosts or (name not in known and self._is_host(name, notify)):
                yield from self._names_of_host(name, followed, notify)

    def _is_host(self, name: str, notify: Notify) -> bool:
        """Whether a folder in which no journal is followed yet is that of a host."""
        now = time.monotonic()
        if name in self._hosts:
            return True
        if self._look_at.get(name, 0.0) > now:
            return False
        self._look_at[name] = now + LOOK_SECONDS
        folder = self._root / name
        try:
            if not folder.is_dir() or holds_journal(folder) or not any(look_into(folder)):
                return False
        except (LedgerError, OSError) as error:
            notify(str(error))
            return False
        self._hosts.add(name)
        return True

    def _names_of_host(self, host: str, followed: Iterable[str], notify: Notify) -> Iterator[str]:
        try:
            for name in _names(self._root / host):
                yield f"{host}/{name}"
        except OSError as error:
            yield from (name for name in followed if name.startswith(f"{host}/"))
            notify(f"{self._root / host} can't be listed: {error.strerror}.")

    def path(self, name: str) -> Path:
        """The journal's folder."""
        host = name.rpartition("/")[0]
        path = self._root if self._single else self._root / name
        return HostJournal.of(path, host) if host else path

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


def _names(folder: Path) -> list[str]:
    """What may be a journal, or the folder of a host."""
    return [path.name for path in Catalogue(folder).engines_or_hosts]
