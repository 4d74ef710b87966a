"""Read the recorded KV events of one engine as they are written, and compare them with its cache.

The sidecar does this beside a journal that grows; below, the same beside one that is read to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..analysis.routing import (
    Contents,
    EngineSide,
    Index,
    IndexState,
    OpenRequest,
    RecentCounts,
    RoutedCache,
    RoutedRequest,
    Routing,
    Row,
    Sides,
    before_of,
    contents_of,
    row_of,
)
from ..client_ids import client_names
from ..errors import JournalError, LedgerError
from ..events import EngineStarted, EngineStopped, Event, KVEventsReceived
from ..figures.sums import merge_tokens
from ..journal.format import is_live, segments
from ..journal.host_folders import engine_name
from ..journal.reader import Batch, Position, Reader
from ..journal.writer import CLOCK_SECONDS
from ..ledger.blocks.contents import Change as PoolChange
from ..ledger.blocks.contents import Contents as BlockContents
from ..ledger.entries import Entry
from ..ledger.kv_events import (
    CLEARED,
    GPU,
    HORIZON_SECONDS,
    KINDS,
    REMOVED,
    STORED,
    KVComparison,
    KVEventCounts,
    kv_events,
    of_group,
)
from ..text import counted
from .engine_audit import EngineAudit
from .find import AFTER_END_SECONDS, Neighbours, identity_of, incomparable, recordings_beside, same_port
from .journal_parts import engine_of
from .parallel import attempting, whole_ones

FORGET_SECONDS = 600.0
"""What the cache of an engine held is forgotten so long after its end."""

Received = tuple[float, KVEventsReceived]
"""A batch and the Unix time at which it was received."""

Promised = Callable[[RoutedRequest, Sides], Mapping[int, int] | None]
"""What another index promised of a request: blocks by the number of each engine; None: it was not asked."""


class _Recording:
    """One recording that is read as it grows."""

    def __init__(self, path: Path, position: Position | None, began: float) -> None:
        self.reader = Reader(path, position)
        """Reads the recording from the position on."""
        self.began = began
        """Unix time from which the recording's times count; 0.0: not read yet."""
        self._batch: Batch | None = None
        """The batch that is not taken whole."""
        self._rest: list[KVEventsReceived] = []
        """What is left of it, the last first."""
        self._batches: Iterator[Batch] | None = None
        """What is left of the present poll; None: the reader has to poll again."""

    @property
    def position(self) -> Position:
        """Where to read on; what was taken of a batch that is not taken whole comes again."""
        return self._batch.start if self._rest and self._batch is not None else self.reader.resumable

    def upto(self, published: float) -> Iterator[Received]:
        """Take what was published up to this Unix time."""
        while self._rest or self._read():
            if self._rest[-1].published_seconds > published:
                return
            event = self._rest.pop()
            yield self.began + event.at / 1e6, event

    def _read(self) -> bool:
        """Read on to a batch that has KV events; False if there is none by now."""
        while not self._rest:
            if self._batches is None:
                self._batches = self.reader.poll()
            self._batch = next(self._batches, None)
            if self._batch is None:
                self._batches = None
                return False
            for event in self._batch.events:
                if isinstance(event, EngineStarted):
                    self.began = event.began_seconds
                elif isinstance(event, KVEventsReceived):
                    self._rest.append(event)
            self._rest.sort(key=lambda event: (event.published_seconds, event.sequence), reverse=True)
        return True


class RecordedEvents(msgspec.Struct, dict=True, eq=False):
    """The recorded KV events of one engine, beside its cache. A checkpoint saves the fields."""

    cache: RoutedCache = msgspec.field(default_factory=RoutedCache)
    """The engine's cache, and the requests that used it."""
    comparison: KVComparison = msgspec.field(default_factory=KVComparison)
    """The engine's cache beside its KV events."""
    announced: RecentCounts = msgspec.field(default_factory=RecentCounts)
    """What the KV events announced, in the order in which they were received."""
    by_tokens: RecentCounts = msgspec.field(default_factory=RecentCounts)
    """The same by the hash of the tokens."""
    ended: float = math.inf
    """Unix time of the last event of an engine that is gone."""
    stopped: bool = False
    """Whether the engine ended in good order."""
    over: bool = False
    """Whether nothing follows in the journal."""
    key: object = None
    """The print of the key under which hash ids were made."""
    port: object = None
    """The port at which the engine publishes."""
    heard: float = math.inf
    """Unix time at which the first batch was received."""
    positions: dict[str, tuple[Position, float]] = {}
    """Of each recording of this engine: where to read on, and when its times began."""
    streams: dict[str, int] = {}
    """Of each recording: the life of the publisher that is this engine's."""
    engine_began: float = 0.0
    """Unix time at which the engine began; 0.0: its KV events are not compared."""
    corrected: bool = False
    """Whether the clock was corrected while the engine ran: its KV events are not compared."""

    def __post_init__(self) -> None:
        self.enabled = False
        """Whether anybody reads recordings: the caller sets it."""
        self.state: IndexState | None = None
        """What an index that is kept from these KV events is worth; None: the caller does not want it."""
        self.on_batch: Callable[[float, KVEventsReceived], None] | None = None
        """Called with each batch of this engine, of the KV cache group that is followed alone, and the Unix
        time at which it was received."""
        self._contents: Contents = {}
        """By hash id, a keyed hash of the tokens."""
        self._path = Path()
        self._readers: dict[str, _Recording | None] = {}
        """A reader for each recording; None if it is not of this engine, or can't be read."""
        self._searched = False
        """Whether recordings were looked for."""
        self._neighbours = Neighbours(self._path)
        """The engines beside this one."""
        self.comparison.cache = self.cache

    @classmethod
    def beside(cls, path: Path, contents: Contents | None = None) -> RecordedEvents:
        """The recordings beside the engine's journal at ``path``.

        ``contents``: by hash id, a keyed hash of the tokens; it makes an index of the tokens beside that of
        the hash ids.
        """
        events = cls()
        events._path, events._neighbours, events._contents = path, Neighbours(path), contents or {}
        return events

    def take_up(self, saved: RecordedEvents) -> None:
        """Go on from what was saved."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(saved, name))

    def feed(self, event: Event, changes: Sequence[PoolChange]) -> None:
        """Read one event of the engine's journal, and its ``changes`` of the pools."""
        if isinstance(event, EngineStarted) and self.engine_began:
            if abs(event.began_seconds - self.engine_began) > CLOCK_SECONDS:
                self.corrected = True
                self._give_up()
        elif isinstance(event, EngineStarted) and not self.corrected and not incomparable(event):
            self.engine_began = self.comparison.began = event.began_seconds
            self.key, self.port = identity_of(event)
        self.stopped = isinstance(event, EngineStopped)
        if self.engine_began:
            self.cache.feed(event, changes)

    def advance(
        self,
        engine: EngineStarted,
        until: float,
        now: float,
        counts: KVEventCounts,
        *,
        at_end: bool,
        ended: float | None,
    ) -> None:
        """Read what was recorded, and compare it as far as that is possible by now.

        ``until``: Unix time up to which the engine's journal was read. ``at_end``: the journal has no more
        for now. ``ended``: Unix time after which the engine was gone, infinity if it runs; None: the journal
        may grow.
        """
        if not self.engine_began:
            return
        if at_end or not self._searched:
            if self._neighbours.rival(engine):
                self._give_up()
                return
            self._find(engine)
        last = until if ended is None or self.stopped else until + AFTER_END_SECONDS
        for name, recording in self._readers.items():
            if recording is None:
                continue
            try:
                for received, batch in recording.upto(until if ended is None else math.inf):
                    if self._is_mine(name, batch, last) and self.comparison.receive(batch, received, counts):
                        self._index(batch, received)
                self.positions[name] = recording.position, recording.began
            except LedgerError:
                recording.reader.close()
                self._readers[name] = None
        self.comparison.advance(now, until, counts, ended=ended is not None)
        if ended is not None:
            self.over, self.ended = True, ended
            self.close()

    def route(
        self,
        together: Sequence[RecordedEvents],
        until: float,
        now: float,
        counts: KVEventCounts,
        promised: Promised | None = None,
    ) -> list[Row]:
        """Compare the requests that have ended with what the KV events of all engines promised of them.

        ``together``: every engine that is followed. ``until``: Unix time up to which this engine was read.
        ``now``: Unix time up to which all others were read. ``promised`` is another index; requests of
        which it says nothing are left out.
        """
        if not self.engine_began:
            return []
        over = self.over and now >= until
        settled = min(now, until, self.comparison.published) - HORIZON_SECONDS
        ready, dropped = self.cache.take(round((settled - self.engine_began) * 1e6), ended=over)
        counts.not_routed += dropped
        if not ready:
            return []
        self.comparison.version += 1
        sides = {number: one._side() for number, one in enumerate(together) if one._shares(self)}
        rows = []
        for waiting in ready:
            request = self._known(waiting, together.index(self), sides) if self.comparison.published else None
            if request is None:
                counts.not_routed += 1
                continue
            held = None if promised is None else promised(request, sides)
            if promised is None or held is not None:
                rows.append(row_of(sides, request, held, self._contents))
                _count(rows[-1], counts)
        return rows

    def _known(self, waiting: OpenRequest, number: int, sides: Sides) -> RoutedRequest | None:
        """A request of this engine; None if too much was forgotten since it arrived."""
        arrived = self.engine_began + waiting.arrived_at / 1e6
        size = self.cache.block_tokens
        if not size or waiting.changes < self.cache.recent.since:
            return None
        if any(arrived < other.announced.since for other in sides.values() if other.ended >= arrived):
            return None
        given = waiting.local + waiting.external
        valid = waiting.valid if waiting.valid >= 0 else given
        hashes = waiting.hashes[: waiting.prompt_tokens // size]
        known = hashes.index(0) if 0 in hashes else len(hashes)
        return RoutedRequest(
            waiting.request_id,
            waiting.number,
            number,
            waiting.prompt_tokens,
            hashes[:known],
            arrived,
            waiting.step,
            waiting.changes,
            min(waiting.local, valid),
            waiting.external,
            min(waiting.external, max(0, given - valid)),
        )

    def forget(self, now: float) -> None:
        """Forget what the cache of an engine held that ended long ago."""
        if now > self.ended + FORGET_SECONDS:
            for counts in (self.cache.recent, self.announced, self.by_tokens):
                counts.forget()

    def _shares(self, other: RecordedEvents) -> bool:
        """Whether both engines are in one router's index."""
        alike = (self.key, self.cache.block_tokens) == (other.key, other.cache.block_tokens)
        return bool(self.engine_began) and alike

    def _side(self) -> EngineSide:
        return EngineSide(
            self.cache,
            self.announced,
            self.by_tokens,
            self.engine_began,
            self.ended,
            self.comparison.lost,
            self.comparison.lost_changes,
            self.port,
            self.heard,
        )

    def _index(self, batch: KVEventsReceived, received: float) -> None:
        self.heard = min(self.heard, received)
        followed = of_group(batch, self.cache.followed) if self.cache.others else batch
        if self.state is not None:
            self.state.take(batch, self.announced.now, self.cache.followed, self.cache.block_tokens)
        if self.on_batch is not None:
            self.on_batch(received, followed)
        _add(self.announced, batch, received)
        if self._contents:
            _add(self.by_tokens, followed, received, self._contents)

    def _is_mine(self, name: str, batch: KVEventsReceived, last: float) -> bool:
        """Whether this engine published a batch, and not one before or after it at the same port.

        ``last``: Unix time up to which this engine may have published its first batch.
        """
        if batch.published_seconds < self.engine_began:
            return False
        if name not in self.streams and batch.published_seconds <= last:
            self.streams[name] = batch.stream
        return self.streams.get(name) == batch.stream

    def _give_up(self) -> None:
        """Compare nothing any more: another engine published at the same port at the same time, or the times
        of KV events and of the journal are by different clocks."""
        self.close()
        self.engine_began, self.enabled = 0.0, False
        self.cache = RoutedCache()
        self.comparison = KVComparison()
        self.comparison.cache = self.cache
        self.announced = RecentCounts()

    def close(self) -> None:
        """Close the files; nothing is read any more."""
        for recording in self._readers.values():
            if recording is not None:
                recording.reader.close()
        self._readers = dict.fromkeys(self._readers)

    def _find(self, engine: EngineStarted) -> None:
        """Open the recordings that are new, and forget those that were removed."""
        self._searched = True
        beside = {path.name: path for path in recordings_beside(self._path)}
        for name in sorted(beside.keys() - self._readers.keys()):
            position, began = self.positions.get(name, (None, 0.0))
            recording = _Recording(beside[name], position, began)
            mine = position is not None or self._is_of(beside[name], engine)
            self._readers[name] = recording if mine else None
        for name in self._readers.keys() - beside.keys():
            gone = self._readers.pop(name)
            self.positions.pop(name, None)
            self.streams.pop(name, None)
            if gone is not None:
                gone.reader.close()

    def _is_of(self, path: Path, engine: EngineStarted) -> bool:
        """Whether a recording is of this engine, or of an engine before it at the same port."""
        try:
            started = engine_of(path)
            if started is None or identity_of(started) != identity_of(engine):
                return False
            return is_live(path) or _written(path) >= self.engine_began
        except (LedgerError, OSError):
            return False


def _add(
    index: RecentCounts, batch: KVEventsReceived, received: float, contents: Contents | None = None
) -> None:
    """Take the blocks of vLLM's own tier. ``contents``: by hash id, what names a block in the index."""
    for event, tier in kv_events(batch):
        if event.kind == CLEARED:
            index.clear(received)
        elif tier in ("", GPU):
            index.add(received, (contents or {}).get(event.hash_id, event.hash_id), event.kind)


def _count(row: Row, counts: KVEventCounts) -> None:
    """Add one row to the counts."""
    counts.routed += 1
    counts.predicted += row.predicted
    counts.found += row.found
    merge_tokens(counts.missed, row.missed)
    merge_tokens(counts.surplus, row.surplus)


def _written(path: Path) -> float:
    """Unix time at which a recording was written last."""
    return max((each.stat().st_mtime for each in segments(path).values()), default=0.0)


# --- event journals ------------------------------------------------------------------------------------
#
# Journals beside the recorded KV events of their engines, read to their end a batch at a time.


CORRECTED = "the KV events can't be compared: the machine's clock was corrected while the engine ran"


class EventJournal:
    """One engine's journal, and its recorded KV events up to where the journal was read."""

    def __init__(self, path: Path, contents: Contents | None = None) -> None:
        self.path = path
        """The journal."""
        self.events = RecordedEvents.beside(path, contents)
        """The recordings beside the journal."""
        self.counts = KVEventCounts()
        """What the comparison and the routing of this engine counted."""
        self.started: EngineStarted | None = None
        """How the engine described itself."""
        self.until = 0.0
        """Unix time up to which the journal was read."""
        self.over = False
        """Whether everything was read."""
        self._blocks = BlockContents()
        """What the engine's blocks contain."""
        self._reader = Reader(path)
        """Reads the journal."""
        self._batches = self._reader.poll()
        """The batches that were not read yet."""

    def step(self) -> None:
        """Read one batch of the journal, or find that there is none and read the rest of the recordings."""
        batch = next(self._batches, None)
        for event in batch.events if batch is not None else ():
            self.events.feed(event, self._blocks.read(event))
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


# --- routed --------------------------------------------------------------------------------------------
#
# Read what ``kvledger check routing`` compares: requests and caches of engines, and their recorded KV events.
#
# All journals are read at once, so little of each is kept. Another index than our own can't be asked how it
# was a short time ago. So it is replayed in between: a first reading finds the requests and the batches, the
# index is asked in the order of arrival, and a second reading explains what it said.


MakeIndex = Callable[[Contents], Index]
"""Makes an index; by hash id, it is given a keyed hash of the tokens, as far as it was recorded."""

PredictedByPort = Mapping[str, Mapping[int, int]]
"""What a router predicted: by a request's id, the tokens of each engine by the port of its KV events."""

Arrived = tuple[float, int, KVEventsReceived]
"""A batch, the Unix time at which it was received, and the number of its engine."""


def routing(
    journals: Sequence[Path], index: MakeIndex | None = None, predicted: PredictedByPort | None = None
) -> Routing:
    """What the recorded KV events of all engines promised of each request, and what it then found.

    ``index`` makes another index, of the tokens of the blocks that were announced. Raises LedgerError if an
    engine has no recording that can be compared with its blocks. ``predicted`` takes the place of the index.
    """
    if index is None and predicted is None:
        return _routing(journals)
    batches: list[Arrived] = []
    asked: list[tuple[RoutedRequest, Sides]] = []
    _routing(journals, promised=lambda *each: asked.append(each), batches=batches)
    contents = contents_of(batch for _, _, batch in batches)
    if index is not None:
        said = asked_in_order(index(contents), asked, batches)
        return _routing(journals, contents, lambda request, _: said[request.engine, request.number])
    return _routing(journals, contents, partial(_predicted, predicted or {}))


def _routing(
    journals: Sequence[Path],
    contents: Contents | None = None,
    promised: Promised | None = None,
    batches: list[Arrived] | None = None,
) -> Routing:
    """Read the journals once. ``batches`` gets every batch."""
    engines = [EventJournal(path, contents) for path in journals]
    together = [engine.events for engine in engines]
    rows: list[Row] = []

    def each(engine: EventJournal, others: float) -> None:
        for one in engines if engine.over else (engine,):
            rows.extend(one.events.route(together, one.until, others, one.counts, promised))

    for number, events in enumerate(together):
        events.state = IndexState()
        if batches is not None:
            events.on_batch = lambda at, batch, number=number: batches.append((at, number, batch))
    read_together(engines, each)
    names = list(whole_ones(map(attempting(_checked), engines)))
    rows.sort(key=lambda row: (row.request.arrived, row.request.engine, row.request.step))
    arrived = sum(events.cache.arrived for events in together)
    gaps = sum(engine.counts.gaps + bool(engine.events.comparison.begins) for engine in engines)
    return Routing(names, rows, arrived - len(rows), gaps, list(map(_index_state, engines)))


def _index_state(engine: EventJournal) -> IndexState:
    """What the engine's index is worth, with what only the comparison with its cache tells."""
    state, compared = engine.events.state or IndexState(), engine.events.comparison
    state.lost = compared.gaps[-1].after if compared.gaps else compared.begins
    if engine.counts.repeated:
        state.lacks = {"reported-twice": engine.counts.repeated, **state.lacks}
    return state


def _checked(engine: EventJournal) -> str:
    """The engine's name. Raises JournalError if its KV events can't be compared with its requests."""
    started, cache = engine.started, engine.events.cache
    if started is None:
        raise JournalError(f"{engine.path}: no engine was seen to start.")
    if reason := incomparable(started):
        raise JournalError(f"{engine.path}: {reason}.")
    if rival := Neighbours(engine.path).rival(started):
        raise JournalError(f"{engine.path}: {same_port(rival)}.")
    if not cache.block_tokens:
        raise JournalError(
            f"{engine.path}: this command needs block events of an engine with a KV cache group of full "
            "attention, which KVLEDGER_LEVEL=blocks records."
        )
    if not engine.counts.batches and cache.number:
        raise JournalError(f"{engine.path}: no KV events of this engine were recorded beside its journal.")
    return engine_name(started, engine.path)


def asked_in_order(
    index: Index, asked: Sequence[tuple[RoutedRequest, Sides]], batches: list[Arrived]
) -> dict[tuple[int, int], dict[int, int]]:
    """What an index says of each request when it arrives, by the request's engine and number."""
    batches.sort(key=lambda each: each[:2])
    said, place = {}, 0
    heard: set[int] = set()
    for request, sides in sorted(asked, key=lambda each: each[0].arrived):
        while place < len(batches) and batches[place][0] <= request.arrived:
            _, number, batch = batches[place]
            heard.add(number)
            index.apply(number, batch)
            place += 1
        every = index.held(request.hashes)
        there = {number for number, side in sides.items() if side.ended >= request.arrived}
        held = {number: blocks for number, blocks in every.items() if number in there}
        before = before_of(sides, request.engine)
        if request.engine not in heard and before in every:
            held[request.engine] = every[before]
        said[request.engine, request.number] = held
    return said


def _predicted(predicted: PredictedByPort, request: RoutedRequest, sides: Sides) -> dict[int, int] | None:
    """A router's prediction in blocks of each engine that was there when the request arrived, if any."""
    names = sorted(client_names(request.request_id, None))
    name = next((name for _, name in names if name in predicted), None)
    if name is None:
        return None
    there = {
        side.address: engine for engine, side in sides.items() if side.began <= request.arrived <= side.ended
    }
    size = sides[request.engine].cache.block_tokens
    return {there[port]: tokens // size for port, tokens in predicted[name].items() if port in there}
