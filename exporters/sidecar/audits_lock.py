"""The lock under which threads look at the audits, without waiting for the posting of any one journal.

The follower's thread posts a batch under the lock of that journal alone. A thread that looks, such as one
that answers ``/metrics``, takes the lock over all journals: the journals then stay the same, and each of them
stands still as soon as its batch is posted. A journal that is not ready in time is left out of that look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from .followed_journal import FollowedJournal

PATIENCE_SECONDS = 2.0
"""How long a look waits for all batches that are being posted. A batch takes milliseconds."""


class AuditsLock:
    """A context manager; one thread holds it at a time. Not reentrant."""

    def __init__(self, journals: Callable[[], Iterable[FollowedJournal]]) -> None:
        self.busy: set[str] = set()
        """The journals that were not ready in time, while the lock is held; empty otherwise."""
        self._journals = journals
        """Returns the journals that are followed; called with the guard held."""
        self._guard = threading.Lock()
        """Held by the thread that holds this lock."""
        self._held: list[FollowedJournal] = []
        """The journals whose own locks are held."""

    def __enter__(self) -> None:
        self._guard.acquire()
        until = time.monotonic() + PATIENCE_SECONDS
        for journal in self._journals():
            if journal.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                self._held.append(journal)
            else:
                self.busy.add(journal.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        held, self._held, self.busy = self._held, [], set()
        for journal in held:
            journal.lock.release()
        self._guard.release()
