"""One engine's journal, audited from a reader, to its present end.

An :class:`EngineAudit` serves a whole journal and a live one alike: its figures of ended requests only ever
rise. Whole journals are read in ``journals.py``, followed in ``followed_audit.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf

from ..causes import ENGINE_ENDED
from ..checks.registry import Violation
from ..events import EngineStarted, Finished
from ..figures.sums import add_tokens
from ..journal.format import gone_by
from ..journal.reader import Batch, Reader
from ..text import utc
from .event_audit import EventAudit
from .verdict import counted


class EngineAudit(EventAudit):
    """One engine's journal, audited. The arguments are those of :class:`~.event_audit.EventAudit`."""

    def read(self, reader: Reader, lock: AbstractContextManager[object] | None = None) -> None:
        """Audit everything in the journal by now, holding ``lock`` for one batch at a time."""
        for _ in self.batches(reader, lock):
            pass

    def batches(
        self, reader: Reader, lock: AbstractContextManager[object] | None = None
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """Like :meth:`read`, and yields each batch after it was audited, with the findings that are new."""
        feed, hold = self.feed, lock or nullcontext()
        workers_read = False
        for batch in reader.poll():
            findings: list[Violation] = []
            if not workers_read and (started := self.engine or _started(batch)) is not None:
                settings = started.configuration
                self.workers.poll(settings.get("transfer"), settings.get("engine_key"))
                workers_read = True
            with hold:
                self._feed_worker_errors()
                number = batch.first_event
                for event in batch.events:
                    new = feed(number, event)
                    if new:
                        findings += new
                    number += 1
                self.journal.events += len(batch.events)
                findings += self.compared()
            yield batch, findings
        if reader.ended:
            with hold:
                self._feed_worker_calls(inf)
                self._feed_worker_steps()
                self.workers.close()
                if not reader.stopped and not reader.continues:
                    self.lose_tail()

    def compared(self) -> list[Violation]:
        """The new findings of comparing the batch with what was recorded elsewhere; nothing is, here."""
        return []

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Add what is still open to the observers that count it, as it stands; no event follows."""
        for account in self.open():
            if account.unknown is not None:
                add_tokens(self.journal.unknown, account.unknown, 1)
            for observer in self.observers:
                observer.add(account)

    def lose_tail(self) -> None:
        """Note that the engine is gone and its last events may be missing. Idempotent.

        Requests that are open at the journal's end become unknown; ended ones keep their verdict.
        """
        journal = self.journal
        if not journal.lost_tails:
            journal.lost_tails = 1
            journal.whole_until, journal.gone_by = self.auditor.ledger.read_to, gone_by(self.path)
        self.auditor.ledger.doubt_open()

    def end(self, *, stopped: bool) -> None:
        """Close the open requests of an engine that has gone, at the end of a journal that was followed.

        ``stopped``: observation ended in good order, so the requests ended there. Otherwise, or if the
        engine ran on without being observed, nobody saw how they ended and they become unknown.
        """
        ledger = self.auditor.ledger
        if not stopped:
            self.lose_tail()
        if not stopped or ledger.stopped == "detached":
            ledger.lose_open()
            self.event = None
            self._add_closed()
        for request in list(ledger.open):
            self.feed(ledger.number, Finished(ledger.at, request, ENGINE_ENDED, -1, -1, -1, -1, -1))
        ledger.forget_steps()
        for observer in self.observers:
            observer.end()

    def note_damage(self, reader: Reader, first: int = 0) -> None:
        """Note what ``reader`` found damaged, from the damage number ``first`` on."""
        rotated = self.auditor.ledger.sums.removed_events
        if rotated:
            removed = f"rotation has removed the first {counted(rotated, 'event')}"
            self.notes.append(f"{removed}: the trace begins at {utc(self.created)}")
        self.journal.notes += [str(damage) for damage in reader.damage[first + bool(rotated) :]]

    def note_end(self, reader: Reader, first: int = 0) -> None:
        """The same, and whether the engine still writes."""
        self.note_damage(reader, first)
        if not reader.ended:
            self.notes.append("the engine is still running, this is up to now")
        elif reader.continues:
            self.notes.append("this segment is not the journal's last")


def _started(batch: Batch) -> EngineStarted | None:
    return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
