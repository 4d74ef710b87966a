"""Journals beside the recorded KV events of their engines, read to their end a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..analysis.routing import Contents
from ..events import EngineStarted
from ..journal.reader import Reader
from ..ledger.entries import Entry
from ..ledger.kv_events import CLEARED, KINDS, REMOVED, STORED, KVEventCounts
from .engine_audit import EngineAudit
from .recorded_events import RecordedEvents
from .recordings import Neighbours, incomparable, recordings_beside, same_port
from .verdict import counted

CORRECTED = "the KV events can't be compared: the machine's clock was corrected while the engine ran"


class EventJournal:
    """One engine's journal, and its recorded KV events up to where the journal was read."""

    def __init__(self, path: Path, contents: Contents | None = None) -> None:
        self.path = path
        """The journal."""
        self.events = RecordedEvents(path, contents)
        """The recordings beside the journal."""
        self.counts = KVEventCounts()
        """What the comparison and the routing of this engine counted."""
        self.started: EngineStarted | None = None
        """How the engine described itself."""
        self.until = 0.0
        """Unix time up to which the journal was read."""
        self.over = False
        """Whether everything was read."""
        self._reader = Reader(path)
        """Reads the journal."""
        self._batches = self._reader.poll()
        """The batches that were not read yet."""

    def step(self) -> None:
        """Read one batch of the journal, or find that there is none and read the rest of the recordings."""
        batch = next(self._batches, None)
        for event in batch.events if batch is not None else ():
            self.events.feed(event)
            if isinstance(event, EngineStarted):
                self.started = self.started or event
            if self.started is not None:
                self.until = self.started.began_seconds + event.at / 1e6
        self.over = batch is None
        if self.started is not None:
            gone = self.until if self._reader.ended else math.inf
            self.events.advance(
                self.started,
                self.until,
                self.until,
                self.counts,
                at_end=self.over,
                ended=gone if self.over else None,
            )
        if self.over:
            self._reader.close()


def read_together(
    journals: Sequence[EventJournal], each: Callable[[EventJournal, float], None] | None = None
) -> None:
    """Read journals to their end, always the one that is behind the others.

    ``each`` is called with a journal after a step, and the Unix time up to which all others were read.
    """
    waiting = list(journals)
    while waiting:
        journal = min(waiting, key=lambda one: one.until)
        journal.step()
        waiting = [one for one in waiting if not one.over]
        if each is not None:
            each(journal, min((one.until for one in waiting if one is not journal), default=math.inf))


def compare_events(audit: EngineAudit) -> KVEventCounts | None:
    """Compare an audited engine's recorded KV events with its cache; add the findings and a note.

    All of the journal is read, and the findings are those of the audit's window.
    None if nothing was recorded beside the journal, or nothing can be compared: a note says why.
    """
    engine = audit.engine
    if not recordings_beside(audit.path) or engine is None:
        return None
    if reason := incomparable(engine):
        audit.notes.append(reason)
        return None
    if rival := Neighbours(audit.path).rival(engine):
        audit.notes.append(same_port(rival))
        return None
    journal = EventJournal(audit.path)
    read_together([journal])
    if journal.events.corrected:
        audit.notes.append(CORRECTED)
        return None
    if not journal.counts.batches:
        audit.notes.append("the recorded KV events beside this journal are not of this engine")
        return None
    number = audit.auditor.ledger.number
    for subject, step, at in journal.events.comparison.differences():
        if audit.holds(at):
            audit.auditor.check([Entry(number, step, at, subject, None)])
    note = _note(journal.counts)
    audit.notes.append(f"in the whole journal, {note}" if audit.window.bounded else note)
    return journal.counts


def _note(counts: KVEventCounts) -> str:
    """What the comparison found, in one sentence."""
    stores, removals, resets = (counts.matched.get(KINDS[kind], 0) for kind in (STORED, REMOVED, CLEARED))
    batches = f"{counts.batches:,} {'batch' if counts.batches == 1 else 'batches'}"
    parts = [
        f"{batches} of KV events agree with the cache on "
        f"{counted(stores, 'store')}, {counted(removals, 'removal')} and {counted(resets, 'reset')}"
    ]
    rest = (
        (counts.in_flight, "in flight at the end"),
        (counts.before, "before the recording or the journal began"),
        (counts.dropped, "too many to compare"),
        (counts.repeated, "repeated stores of cached blocks"),
        (counts.copies, "unannounced removals of a block whose hash stays cached"),
        (counts.other_tiers, "in other tiers"),
    )
    parts += [f"{number:,} {words}" for number, words in rest if number]
    return "; ".join(parts)
