"""Which part of a journal is read: for a time window, or for one request.

The accounts of that part are those of a whole replay.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from .. import events as ev
from ..errors import LedgerError
from ..events import EngineStarted, Snapshot
from ..journal.format import segments
from ..journal.reader import Batch, Position, Reader
from ..ledger.ledger_state import Watch
from .engine_audit import EngineAudit
from .worker_journals import WorkerJournals

# --- window start --------------------------------------------------------------------------------------
#
# Where the replay of a journal may begin, so that the requests of a time window get their whole accounts.
#
# Each segment begins with a snapshot of the running requests. A replay that begins there knows the whole
# account of every request that arrives later. So it may begin at a segment whose running requests all end
# before the window begins. They do if none of them runs at the last segment that begins before the window.
#
# Only journals of level ``tokens`` without workers' journals are read in part. At level ``blocks`` the
# causes of misses come from blocks that were cached long ago.


class _Beginning(NamedTuple):
    """The time at which a segment begins, and the requests that run then."""

    at: int
    running: frozenset[int]


def skip_to_window(audit: EngineAudit) -> Position | None:
    """Where the replay for the audit's window may begin; None: at the journal's beginning.

    If it may begin later, the audit learns how the engine described itself at the beginning.
    """
    path, window = audit.path, audit.window
    if window.since is None or audit.auditor.ledger.watch is not None or not path.is_dir():
        return None
    try:
        engine = engine_of(path)
        if engine is None or engine.level != "tokens" or audit.workers.beside():
            return None
        began = engine.began_seconds if audit.clock is None else audit.clock
        number = _first_segment(path, round((window.since - began) * 1e6))
    except (LedgerError, OSError):  # the replay says what is wrong
        return None
    if not number:
        return None
    audit.feed(0, engine)
    return Position(segment=number, event=-1)


def engine_of(path: Path) -> EngineStarted | None:
    """How the engine described itself at the journal's beginning."""
    with Reader(path) as reader:
        for batch in reader.poll():
            return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
    return None


def _first_segment(path: Path, since: int) -> int:
    """The last segment whose running requests have ended when the last segment before ``since`` begins.

    0: there is none behind the journal's first.
    """
    before: list[tuple[int, _Beginning]] = []
    for number in sorted(segments(path))[1:]:
        beginning = _beginning(path, number)
        if beginning is None or beginning.at > since:
            break
        before.append((number, beginning))
    running = before[-1][1].running if before else frozenset[int]()
    return next((number for number, one in reversed(before) if not one.running & running), 0)


def _beginning(path: Path, segment: int) -> _Beginning | None:
    """The beginning of a segment; None if it can't be read."""
    with Reader(path, Position(segment=segment, event=-1)) as reader:
        for batch in reader.poll():
            if batch.start.segment != segment or not batch.begins_segment:
                return None
            snapshots = [event for event in batch.events if isinstance(event, Snapshot)]
            running = frozenset(row.request for snapshot in snapshots for row in snapshot.rows)
            return _Beginning(snapshots[0].at, running) if snapshots else None
    return None


# --- request span --------------------------------------------------------------------------------------
#
# Which part of a journal is replayed for one request, so that its account is that of a whole replay.
#
# A scan decodes all of the journal and notes only who arrives, who ends, and where a census is. From that
# follows a *cut*: the end of a batch before the request arrived, whose running requests had all ended by
# then, with a later census and some more events in between. So a replay from the cut has the state of a
# whole one when the request arrives. It is over when the request has ended.
#
# Only journals of level ``tokens`` without workers' journals are read in part. Where events were lost, no
# later cut is made.


SETTLED_EVENTS = 2_000
"""Events between the end of the last request that ran at a cut and that from which a replay is exact."""


class Cut(NamedTuple):
    """The end of a batch, at event ``number``; ``undelivered`` steps still await their output there."""

    start: Position
    number: int
    at: int
    step: int
    undelivered: int


class RequestSpan(NamedTuple):
    """From ``cut`` (None: the journal's beginning) to event ``until`` (-1: the journal's end)."""

    engine: ev.EngineStarted
    found: bool
    """Whether the journal has the request; if not, only ``engine`` is replayed."""
    cut: Cut | None
    until: int

    def replay(self, audit: EngineAudit) -> None:
        """Feed this part of its journal to ``audit``."""
        start, cut = None, self.cut
        if cut is not None or not self.found:
            audit.feed(0, self.engine)
        if not self.found:
            return
        if cut is not None:
            start = cut.start
            audit.feed(cut.number, ev.Snapshot(cut.at, cut.step, [], cut.undelivered))
        for _ in audit.replay(start, self.until):
            pass


def request_span(path: Path, watch: Watch) -> RequestSpan | None:
    """The part of a journal in which the requests are that ``watch`` names; None: all of it is needed."""
    if WorkerJournals(path).beside():
        return None
    scan = _Scan(watch)
    with Reader(path) as reader:
        for batch in reader.poll():
            scan.read(batch, reader.position)
            if scan.engine is None or scan.engine.level != "tokens":
                return None
    return scan.span


class _Scan:
    """What a journal says of the requests in it, as far as it was read."""

    def __init__(self, watch: Watch) -> None:
        self.engine: ev.EngineStarted | None = None
        """How the engine described itself first."""
        self._watch = watch
        """Names the requests that are asked for, by id or trace context."""
        self._open: dict[int, int] = {}
        """Open requests, the oldest first, with the number of the event that showed each first."""
        self._asked: set[int] = set()
        """The open requests that are asked for."""
        self._cut: Cut | None = None
        """Where the replay begins, once a request was found."""
        self._found = False
        """Whether a request that is asked for arrived."""
        self._until = -1
        """The number of the event with which the last of them ended."""
        self._running: deque[Cut] = deque()
        """Cuts that an open request spans."""
        self._ended: deque[tuple[int, Cut]] = deque()
        """Cuts that none spans, each behind the number of the last event of the batch that showed it."""
        self._settled: Cut | None = None
        """The newest cut from which a replay has the state of a whole one by now."""
        self._lost = False
        """Whether events were lost."""
        self._undelivered = 0
        """Steps in flight."""

    @property
    def span(self) -> RequestSpan | None:
        """The part; None if the engine did not describe itself."""
        until = -1 if self._asked else self._until
        return None if self.engine is None else RequestSpan(self.engine, self._found, self._cut, until)

    def read(self, batch: Batch, after: Position) -> None:
        """Take the next batch. ``after``: the position behind it."""
        census = None
        for number, event in enumerate(batch.events, batch.first_event):
            kind = type(event)
            if kind is ev.Stepped:
                self._undelivered += 1
            elif kind is ev.Delivered or kind is ev.DeliveredWhole:
                self._undelivered -= self._undelivered > 0
            elif type(event) is ev.RequestAdded:
                self._arrive(number, event.request, event.request_id, event.traceparent)
            elif type(event) is ev.Finished:
                self._end(number, event.request)
            elif type(event) is ev.Census:
                census = event
            elif type(event) is ev.Snapshot:
                self._take(number, event)
            elif type(event) is ev.EngineStarted:
                self.engine = self.engine or event
            elif self.engine is not None and (
                kind is ev.Gap or kind is ev.HookFailed or (type(event) is ev.EngineRaised and event.lost)
            ):
                self._lost = True
        if census is not None and not self._lost:
            self._settle(Cut(after, after.event - 1, after.at, census.step, self._undelivered))

    def _arrive(self, number: int, request: int, request_id: str, traceparent: str | None) -> None:
        self._end(number, request)
        self._open[request] = number
        if self._watch(request_id) or (traceparent and self._watch(traceparent)):
            self._cut = self._cut if self._found else self._settled
            self._found = True
            self._asked.add(request)

    def _end(self, number: int, request: int) -> None:
        self._open.pop(request, None)
        if request in self._asked:
            self._asked.remove(request)
            self._until = number

    def _take(self, number: int, snapshot: ev.Snapshot) -> None:
        """Take a snapshot: it shows running requests first, or that others have ended unseen."""
        if self._lost or not self._open:
            self._undelivered = snapshot.undelivered_steps
        running = {row.request: row for row in snapshot.rows}
        for request in self._open.keys() - running.keys():
            self._end(number, request)
        for request in running.keys() - self._open.keys():
            self._arrive(number, request, running[request].request_id, None)

    def _settle(self, cut: Cut) -> None:
        """Take the cut behind a batch with a census, and judge those before it."""
        while self._ended and cut.number - self._ended[0][0] >= SETTLED_EVENTS:
            self._settled = self._ended.popleft()[1]
        oldest = next(iter(self._open.values()), cut.number)
        while self._running and self._running[0].number < oldest:
            self._ended.append((cut.number, self._running.popleft()))
        self._running.append(cut)
