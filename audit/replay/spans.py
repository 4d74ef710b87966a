"""One journal read by several processes, with exactly the result of one.

A journal is cut at segments, which begin with a snapshot of the running requests. Each process replays one
*span*. A snapshot does not tell what these requests did before, so the process before replays on beyond the
cut until they all have ended: there it *hands over*. The process behind the cut begins its sums at the same
event. Both then compute a digest of everything that decides how the replay goes on: open accounts, steps in
flight, transfers, blocks. Equal digests prove that the sums of the spans add up to those of one replay. If
they differ, or requests run too long for a hand-over, the journal is read by one process after all.

Only journals of level ``tokens`` without workers' journals are cut: the blocks of two replays that began at
different times take too long to become equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from hashlib import sha256
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import TypeVar

import msgspec

from ..events import Census, EngineStarted, Snapshot
from ..journal.format import segments
from ..journal.reader import Batch, Position, Reader
from ..ledger.account import Account
from ..ledger.ledger import Ledger
from ..pool_calls import AnyEvent
from .engine_audit import EngineAudit
from .observers import Steps, taken
from .parallel import (
    Failed,
    Processes,
    Result,
    Run,
    attempting,
    cores,
    readable,
    size_bytes,
    whole_ones,
)
from .serialize import plain
from .window_start import engine_of
from .worker_journals import WorkerJournals

Part = TypeVar("Part")

WORTH_BYTES = 32 << 20
"""A smaller journal is read by one process."""

SETTLED_EVENTS = 2_000
"""Events between the end of the last request that ran at a cut and the hand-over."""

SUMS = frozenset(
    {
        "closed",
        "counted",
        "delivered_steps",
        "entries",
        "keep_closed",
        "scheduled_steps",
        "sums",
        "watch",
    }
)
"""Attributes of a ledger that do not decide how a replay goes on; counts of steps begin anew."""


class Span(msgspec.Struct, frozen=True):
    """A part of a journal: from segment ``first`` (0: its beginning) to the hand-over behind segment
    ``until`` (0: its end). ``engine``: how the engine described itself at the journal's beginning."""

    path: Path
    first: int = 0
    until: int = 0
    engine: EngineStarted | None = None
    bytes: int = 0


def spans(path: Path, parts: int, worth_bytes: int | None = None) -> list[Span]:
    """The journal cut into at most ``parts`` spans of about equal size; one if it can't be cut."""
    whole = [Span(path, bytes=size_bytes(path))]
    worth = WORTH_BYTES if worth_bytes is None else worth_bytes
    if parts < 2 or whole[0].bytes < worth or not path.is_dir():
        return whole
    engine = engine_of(path)
    if engine is None or engine.level != "tokens" or WorkerJournals(path).beside():
        return whole
    cuts, before = [0], 0
    for number, file in sorted(segments(path).items()):
        if before >= whole[0].bytes * len(cuts) / parts:
            cuts.append(number)
        before += size_bytes(file)
    ends = [*cuts[1:], 0]
    return [
        Span(path, first, until, engine, whole[0].bytes // len(cuts))
        for first, until in zip(cuts, ends, strict=True)
    ]


class SpanAudit:
    """Audits one span. After :meth:`accounts`, ``begin`` and ``end`` are the digests of its hand-overs.

    b"": there was none, as at the beginning and the end of a journal.
    """

    def __init__(self, audit: EngineAudit, span: Span) -> None:
        self.audit = audit
        """The audit; after the span's first hand-over, its sums are of this span alone."""
        self.span = span
        """Where the audit begins and ends."""
        self.begin = b""
        self.end = b""

    def accounts(self) -> Iterator[list[Account]]:
        """Replay the span; yields the accounts that close in it, if the audit keeps them."""
        for _, accounts, counted in self.batches():
            if counted:
                yield accounts

    def batches(self) -> Iterator[tuple[list[AnyEvent], list[Account], bool]]:
        """The same with the events, and with whether a batch belongs to this span: those up to its beginning
        belong to the span before."""
        audit, span = self.audit, self.span
        takes_over = HandOver(span.first) if span.first else None
        gives_over = HandOver(span.until) if span.until else None
        damage = 0
        start = None
        if takes_over is not None and span.engine is not None:
            start = Position(segment=span.first, event=-1)
            audit.feed(0, span.engine)
        with Reader(audit.path, start) as reader:
            for batch, _ in audit.batches(reader):
                accounts = taken(audit)
                yield batch.events, accounts, takes_over is None
                if takes_over is not None and takes_over.reached(batch, audit.auditor.ledger):
                    self.begin, takes_over = digest(audit), None
                    damage = len(reader.damage)
                    audit.take_sums()
                if gives_over is not None and gives_over.reached(batch, audit.auditor.ledger):
                    self.end = digest(audit)
                    audit.note_damage(reader, damage)
                    return
            audit.note_end(reader, damage)
        audit.finish()
        yield [], taken(audit), True


class HandOver:
    """Finds the event at which the audit of one span may end and that of the next begin."""

    def __init__(self, segment: int) -> None:
        self._segment = segment
        """The segment that begins at the cut."""
        self._running: set[int] | None = None
        """The requests that ran at the cut and have not ended yet; None before the cut."""
        self._events = 0
        """Events since the last of those requests ended, with all of the batch in which it did."""
        self._has_census = False
        """Whether a later batch has a census: then no request of before the cut decides what is progress."""

    def reached(self, batch: Batch, ledger: Ledger) -> bool:
        """Whether the end of this batch, which was just audited, is the hand-over."""
        if self._running is None:
            if not batch.begins_segment or batch.start.segment != self._segment:
                return False
            snapshots = (event for event in batch.events if isinstance(event, Snapshot))
            self._running = {row.request for snapshot in snapshots for row in snapshot.rows}
        self._running &= ledger.living.keys()
        if self._running:
            return False
        self._has_census |= self._events > 0 and any(isinstance(event, Census) for event in batch.events)
        self._events += len(batch.events)
        return self._has_census and self._events >= SETTLED_EVENTS


def digest(audit: EngineAudit) -> bytes:
    """A checksum over everything that decides how a replay goes on. Steps are counted anew from here."""
    ledger, steps = audit.auditor.ledger, audit.observer(Steps)
    _count_steps_anew(ledger)
    if steps is not None:
        steps.times.count_steps_anew()
    times = () if steps is None else steps.times.state()
    state = {name: value for name, value in sorted(vars(ledger).items()) if name not in SUMS}
    found_in = sorted((request, sorted(ids)) for request, ids in audit.auditor.found_in.items())
    found = plain((list(state), list(state.values()), found_in, times))
    return sha256(msgspec.msgpack.encode(found)).digest()


def _count_steps_anew(ledger: Ledger) -> None:
    """Set the counts of steps and the readings of clocks to 0; only differences of them are ever used."""
    scheduled = ledger.scheduled_steps
    ledger.open  # noqa: B018 - posts the steady accounts up to now
    for account in ledger.steady.values():
        account.steady_scheduled = account.steady_delivered = 0
    ledger.idle = {request: (row[0], row[1] - scheduled, row[2]) for request, row in ledger.idle.items()}
    (steps, found_at, calls), (since, at) = ledger.stood_still, ledger.no_progress_since
    ledger.stood_still, ledger.no_progress_since = (
        (steps - scheduled, found_at, calls),
        (since - scheduled, at),
    )
    ledger.scheduled_steps = ledger.delivered_steps = 0
    lives = [account.life for account in ledger.living.values() if account.life is not None]
    ledger.step_clock.read_anew(life for life in lives if life.step_tokens)
    ledger.queue.read_anew()


class Piece(msgspec.Struct):
    """The audit of a span, and its digests."""

    audit: EngineAudit
    begin: bytes
    end: bytes


def split_run(
    run: Run,
    journals: Sequence[Path],
    work: Callable[[Span], Part],
    join: Callable[[Sequence[Part]], Result | None],
    whole: Callable[[Path], Result],
) -> Iterator[Result]:
    """The result of each journal: ``join`` of the ``work`` on its spans, if there are processes to spare and
    the journal can be cut; else that of ``whole``."""
    parts = (run.jobs or cores()) // max(1, len(journals)) if isinstance(run, Processes) else 1
    cut = [spans(journal, parts) for journal in journals] if parts > 1 else []
    if not isinstance(run, Processes) or all(len(one) == 1 for one in cut):
        yield from readable(run, whole, journals)
        return
    items = [span for one in cut for span in one]
    done = run.each(attempting(work), items, [span.bytes for span in items])

    def outcome(journal: Path, found: Sequence[Part | Failed]) -> Result | Failed:
        read = [part for part in found if not isinstance(part, Failed)]
        result = join(read) if len(read) == len(found) else None
        return attempting(whole)(journal) if result is None else result

    yield from whole_ones(
        outcome(journal, [next(done) for _ in one]) for journal, one in zip(journals, cut, strict=True)
    )


def joined(pieces: Sequence[Piece]) -> EngineAudit | None:
    """The state of the last span, with the sums of all; None if the hand-overs do not fit."""
    for before, after in pairwise(pieces):
        if not before.end or before.end != after.begin:
            return None
    last = pieces[-1].audit
    last.sums = reduce(add, [piece.audit.sums for piece in pieces])
    return last
