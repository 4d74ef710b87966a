"""One journal that is followed: its book, its reader, and what a checkpoint says of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from ...audit.journal.folder import Reader
from ...audit.replay import checkpoint, serialize
from ...audit.replay.checkpoint import JournalState
from ...audit.replay.engine_audit import EngineAudit


class Followed:
    """One journal. ``trouble`` is why it can't be read; ``broken`` that it won't be tried again.

    ``lag_seconds``: how old the oldest event of the last reading was when all of it was posted.
    """

    def __init__(self, name: str, book: EngineAudit, reader: Reader) -> None:
        self.name = name
        self.book = book
        self.reader = reader
        self.shown = False
        self.ended = False
        self.trouble = ""
        self.broken = False
        self.retry_at = 0.0
        self.lag_seconds = 0.0
        self.damage = 0
        self.saved: JournalState | None = None

    def state(self) -> JournalState | None:
        """For the checkpoint: as it is, or as it last was where our own defect spoiled it."""
        if self.broken:
            return self.saved
        position, last = self.reader.resumable, self.saved
        if last is not None and (last.position, last.ended) == (position, self.ended):
            return last
        same = last is not None and last.position.segment == position.segment
        known = last.beginning if last is not None and same else b""
        self.saved = JournalState(
            self.name,
            position,
            known or checkpoint.beginning(self.book.path, position.segment),
            self.ended,
            self.reader.stopped,
            self.damage,
            msgspec.Raw(serialize.capture(self.book)),
        )
        return self.saved

    def read(self, lock: threading.Lock, soon: Callable[[], None], stop: threading.Event | None) -> None:
        """Audit what is there by now, a batch at a time, until told to ``stop``.

        ``soon`` is called between two batches, where a checkpoint is worth more than elsewhere. Raises
        :class:`~kvledger.audit.errors.LedgerError` or OSError if the journal can't be read.
        """
        oldest = -1
        for batch, _ in self.book.batches(self.reader, lock):
            oldest = batch.events[0].at if oldest < 0 else oldest
            if batch.begins_segment:
                soon()
            if stop and stop.is_set():
                return
        self.damage += len(self.reader.damage)
        self.reader.damage.clear()
        started = self.book.engine
        if oldest >= 0 and started is not None:
            happened = started.wall_seconds + (oldest - started.at) / 1e6
            self.lag_seconds = max(0.0, time.time() - happened)
        if self.reader.ended:
            self.end(lock)
            soon()
        self.shown = True

    def end(self, lock: threading.Lock) -> None:
        """There is no more to come."""
        with lock:
            self.book.end(stopped=self.reader.stopped)
        self.ended = True
