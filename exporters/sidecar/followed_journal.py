"""One journal that is being followed: its audit, its reader, and its part of a checkpoint.

Which journals there are, and what happens when one fails, is in ``follower.py``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...audit.checks.registry import Violation
from ...audit.journal.format import segments
from ...audit.journal.reader import Batch, Reader
from ...audit.replay import checkpoint, serialize
from ...audit.replay.checkpoint import JournalState
from ...audit.replay.followed_audit import FollowedAudit, settled

OnBatch = Callable[["FollowedJournal", Batch, list[Violation]], None]
"""Called after each batch has been audited, with the findings that are new."""


class FollowedJournal:
    """One journal, read batch by batch into an :class:`FollowedAudit`."""

    def __init__(self, name: str, engine_audit: FollowedAudit, reader: Reader) -> None:
        self.name = name
        """The journal's name under the folder that is followed."""
        self.engine_audit = engine_audit
        """The audit of every event read so far."""
        engine_audit.compare_events()
        self.reader = reader
        """Reads the journal's segments and remembers its position in them."""
        self.lock = threading.Lock()
        """Held while a batch of this journal is posted, and by every thread that looks at the audit."""
        self.shown = False
        """Whether the journal has been read to its end once, so that its figures may be exported."""
        self.lived = False
        """Whether its engine ran when the journal was last read to its end."""
        self.settled_segment = -1
        """The oldest segment when the audit of the ended engine was settled; -1: it can go on as it is."""
        self.before: FollowedAudit | None = None
        """What is exported while a journal whose audit was settled is read again."""
        self.ended = False
        """Whether the engine is gone and everything it wrote has been read."""
        self.problem = ""
        """Why the journal can't be read now; empty if it can."""
        self.broken = False
        """Whether kvledger itself failed on this journal; it is not tried again."""
        self.retry_at = 0.0
        """The monotonic time before which a journal with a problem is not tried again."""
        self.ended_at = 0.0
        """The monotonic time at which the journal had ended."""
        self.end_of_files = (0, 0)
        """The number of the newest segment, and its bytes, when the journal had ended."""
        self.batches = 0
        """How many batches were read."""
        self.unread_since = math.inf
        """The monotonic time since which the journal grows and nothing of it is read; infinity: it is."""
        self._looked: tuple[int, tuple[int, int]] | None = None
        """The batches read and the end of the files at the last :meth:`look`; None before the first."""
        self.damage = 0
        """How often the reader found something missing or damaged."""
        self.behind = False
        """Whether the last reading stopped before the journal's present end."""
        self.saved: JournalState | None = None
        """What the last checkpoint holds of this journal."""
        self._saved_compared = self._compared()

    @property
    def exported(self) -> FollowedAudit:
        """The audit whose figures are exported."""
        return self.before or self.engine_audit

    def _compared(self) -> tuple[int, int]:
        """The versions of what was compared with other journals: KV events, and prompts of two engines."""
        audit = self.engine_audit
        return audit.live_events.comparison.version, audit.metrics.shared.changes

    def state(self) -> JournalState | None:
        """Return what a checkpoint stores; a broken journal keeps the state it had before it broke."""
        if self.broken or self.before is not None:
            return self.saved
        position, last = self.reader.resumable, self.saved
        compared = self._compared()
        now = position, self.ended, self.settled_segment, compared
        if last is not None:
            saved = last.position, last.ended, last.settled_segment, self._saved_compared
            if saved == now:
                return last
        self._saved_compared = compared
        same_segment = last is not None and last.position.segment == position.segment
        beginning = last.beginning if last is not None and same_segment else b""
        self.saved = JournalState(
            self.name,
            position,
            beginning or checkpoint.beginning(self.engine_audit.path, position.segment),
            self.ended,
            self.reader.stopped,
            self.damage,
            msgspec.Raw(serialize.capture(self.engine_audit)),
            self.settled_segment,
        )
        return self.saved

    def read(
        self,
        on_batch: OnBatch,
        save_soon: Callable[[], None],
        stop: threading.Event | None,
        seconds: float = math.inf,
    ) -> None:
        """Audit what has been written by now, a batch at a time, until ``stop`` is set or time is over.

        ``save_soon`` is called between two batches where a checkpoint saves most work after a restart.
        Raises :class:`~kvledger.audit.errors.LedgerError` or OSError if the journal can't be read.
        """
        until = time.monotonic() + seconds
        self.behind = False
        for batch, violations in self.engine_audit.batches(self.reader, self.lock):
            self.batches += 1
            on_batch(self, batch, violations)
            if batch.begins_segment:
                save_soon()
            if stop and stop.is_set():
                return
            if time.monotonic() > until:
                self.behind = True
                break
        self.damage += len(self.reader.damage)
        self.reader.damage.clear()
        if self.behind:
            return
        if self.reader.ended:
            self.end()
            save_soon()
        self.lived = not self.ended
        self.shown, self.before = True, None

    def end(self) -> None:
        """Close the open requests: the journal gets no more events."""
        with self.lock:
            self.engine_audit.end(stopped=self.reader.stopped)
        self.ended, self.ended_at = True, time.monotonic()
        self.end_of_files = end_of(self.engine_audit.path)

    def look(self) -> None:
        """See whether the journal has grown and nothing of it is read. By no clock but this process's."""
        before, now = self._looked, (self.batches, end_of(self.engine_audit.path))
        self._looked = now
        if before is None or now[0] != before[0]:
            self.unread_since = math.inf
        elif now[1] > before[1] and math.isinf(self.unread_since):
            self.unread_since = time.monotonic()

    def settle(self) -> None:
        """Keep only the sums of an engine that has ended. A journal that is revived is read again then.

        The caller holds the lock over all journals.
        """
        self.engine_audit = settled(self.engine_audit)
        self.settled_segment = first_segment(self.engine_audit.path)

    def revive(self) -> None:
        """Go on with a journal that seemed to have ended: its engine lives, or wrote more."""
        self.ended = self.reader.ended = False

    def read_again(self, engine_audit: FollowedAudit) -> None:
        """Read the journal from its beginning into a new audit; what is exported stays until it is read."""
        self.before = self.engine_audit
        engine_audit.series = self.before.series
        self.reader.close()
        self.engine_audit, self.reader = engine_audit, Reader(engine_audit.path)
        engine_audit.compare_events()
        self.ended, self.settled_segment = False, -1


def first_segment(journal: Path) -> int:
    """The number of the oldest segment of a journal; 0 if that can't be found out."""
    try:
        return min(segments(journal), default=0) if journal.is_dir() else 1
    except OSError:
        return 0


def end_of(journal: Path) -> tuple[int, int]:
    """The number of the newest segment of a journal, and its bytes; zeros if that can't be found out."""
    try:
        if not journal.is_dir():
            return 1, journal.stat().st_size
        number, path = max(segments(journal).items(), default=(0, journal))
        return number, path.lstat().st_size if number else 0
    except OSError:
        return 0, 0
