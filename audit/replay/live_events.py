"""Read the recorded KV events of one engine as they are written, and compare them with its cache.

The sidecar uses this beside an engine's journal. Whole journals are compared by ``event_journals.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..analysis.live_routing import LiveSide, RecentCounts, RoutedCache, live_row
from ..analysis.routing import Row
from ..errors import LedgerError
from ..events import EngineStarted, Event, KVEventsReceived
from ..figures.sums import merge_tokens
from ..journal.format import is_live, segments
from ..journal.reader import Batch, Position, Reader
from ..ledger.cache_changes import CLEARED
from ..ledger.kv_live import HORIZON_SECONDS, Found, KVEventCounts, LiveComparison
from ..ledger.kv_stream import GPU, Stream
from .recordings import AFTER_END_SECONDS, Identity, Neighbours, identity_of, incomparable, recordings_beside

FORGET_SECONDS = 600.0
"""What the cache of an engine held is forgotten so long after its end."""

Received = tuple[float, KVEventsReceived]
"""A batch and the Unix time at which it was received."""


class _Recording:
    """One recording that is read as it grows."""

    def __init__(self, path: Path, position: Position | None, began: float) -> None:
        self.reader = Reader(path, position)
        self.began = began
        """Unix time from which the recording's times count; 0.0: not read yet."""
        self.identity: Identity = (None, None)
        """The engine whose events were recorded, if the beginning was read."""
        self._published = 0.0
        """When the last batch that was read was published."""
        self._batches: Iterator[Batch] | None = None

    def upto(self, published: float) -> Iterator[Received]:
        """Read until a batch was published after this Unix time."""
        while self._published <= published:
            if self._batches is None:
                self._batches = self.reader.poll()
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                return
            for event in batch.events:
                if isinstance(event, EngineStarted):
                    self.began, self.identity = event.began_seconds, identity_of(event)
                elif isinstance(event, KVEventsReceived):
                    self._published = event.published_seconds
                    yield self.began + event.at / 1e6, event


class LiveEvents:
    """The recordings beside the engine's journal at ``path``."""

    def __init__(self, path: Path) -> None:
        self.cache = RoutedCache()
        """The engine's cache, and the requests that used it."""
        self.comparison = LiveComparison(self.cache)
        """The engine's cache beside its KV events."""
        self.announced = RecentCounts()
        """What the KV events announced, in the order in which they were received."""
        self.ended = math.inf
        """Unix time of the last event of an engine that is gone."""
        self.key: object = None
        """The print of the key under which hash ids were made."""
        self.port: object = None
        """The port at which the engine publishes."""
        self.heard = math.inf
        """Unix time at which the first batch was received."""
        self.positions: dict[str, tuple[Position, float]] = {}
        """Of each recording of this engine: where to read on, and when its times began."""
        self.streams: dict[str, int] = {}
        """Of each recording: the life of the publisher that is this engine's."""
        self.engine_began = 0.0
        """Unix time at which the engine began; 0.0: its KV events are not compared."""
        self.enabled = False
        """Whether anybody reads recordings: the caller sets it."""
        self._path = path
        self._readers: dict[str, _Recording | None] = {}
        """A reader for each recording; None if it is not of this engine, or can't be read."""
        self._searched = False
        """Whether recordings were looked for."""
        self._neighbours = Neighbours(path)
        """The engines beside this one."""

    def feed(self, event: Event) -> None:
        """Read one event of the engine's journal."""
        if isinstance(event, EngineStarted) and not self.engine_began and not incomparable(event):
            self.engine_began = self.comparison.began = event.began_seconds
            self.key, self.port = identity_of(event)
        if self.engine_began:
            self.cache.feed(event)

    def advance(
        self,
        engine: EngineStarted,
        until: float,
        now: float,
        counts: KVEventCounts,
        *,
        at_end: bool,
        ended: bool,
    ) -> list[Found]:
        """Read what was recorded, and return the differences that are certain by now.

        ``until``: Unix time up to which the engine's journal was read. ``at_end``: the journal has no more
        for now. ``ended``: the engine is gone.
        """
        if not self.engine_began:
            return []
        if at_end or not self._searched:
            if self._neighbours.rival(engine):
                self._give_up()
                return []
            self._find(engine)
        last = until + AFTER_END_SECONDS if ended else math.inf
        for name, recording in self._readers.items():
            if recording is None:
                continue
            try:
                for received, batch in recording.upto(math.inf if at_end else until):
                    if self._is_mine(name, batch, last) and self.comparison.receive(batch, received, counts):
                        self._index(batch, received)
                self.positions[name] = recording.reader.resumable, recording.began
            except LedgerError:
                recording.reader.close()
                self._readers[name] = None
        found = self.comparison.advance(now, until, counts, ended=ended)
        if ended:
            self.ended = until
            self.close()
        return found

    def route(self, together: Sequence[LiveEvents], until: float, now: float, counts: KVEventCounts) -> None:
        """Compare the requests that have ended with what the KV events of all engines promised of them.

        ``together``: every engine that is followed. ``until``: Unix time up to which this engine was read.
        """
        if not self.engine_began:
            return
        gone = self.ended < math.inf
        settled = min(now, until, self.comparison.published) - HORIZON_SECONDS
        ready, dropped = self.cache.take(round((settled - self.engine_began) * 1e6), ended=gone)
        counts.not_routed += dropped
        if ready:
            self.comparison.version += 1
            peers = [self, *(one for one in together if one is not self and one._shares(self))]
            sides = [one._side() for one in peers]
            for request in ready:
                row = live_row(sides, 0, request) if self.comparison.published else None
                if row is None:
                    counts.not_routed += 1
                else:
                    _count(row, counts)

    def forget(self, now: float) -> None:
        """Forget what the cache of an engine held that ended long ago."""
        if now > self.ended + FORGET_SECONDS:
            self.cache.recent.forget()
            self.announced.forget()

    def _shares(self, other: LiveEvents) -> bool:
        """Whether both engines are in one router's index."""
        alike = (self.key, self.cache.block_tokens) == (other.key, other.cache.block_tokens)
        return bool(self.engine_began) and alike

    def _side(self) -> LiveSide:
        compared = self.comparison
        return LiveSide(
            self.cache,
            self.announced,
            self.engine_began,
            self.ended,
            compared.lost,
            compared.lost_changes,
            self.port,
            self.heard,
        )

    def _index(self, batch: KVEventsReceived, received: float) -> None:
        self.heard = min(self.heard, received)
        for event, tier in Stream([batch]).events():
            if event.kind == CLEARED:
                self.announced.clear(received)
            elif tier in ("", GPU):
                self.announced.add(received, event.hash_id, event.kind)

    def _is_mine(self, name: str, batch: KVEventsReceived, last: float) -> bool:
        """Whether this engine published a batch, and not one before or after it at the same port."""
        in_time = self.engine_began <= batch.published_seconds <= last
        return in_time and self.streams.setdefault(name, batch.stream) == batch.stream

    def _give_up(self) -> None:
        """Compare nothing any more: another engine publishes at the same port."""
        self.close()
        self.engine_began, self.enabled = 0.0, False
        self.cache = RoutedCache()
        self.comparison = LiveComparison(self.cache)
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
            with Reader(path) as reader:
                first = next(reader.poll(), None)
            started = first.events[0] if first is not None else None
            if not isinstance(started, EngineStarted) or identity_of(started) != identity_of(engine):
                return False
            return is_live(path) or _written(path) >= self.engine_began
        except (LedgerError, OSError):
            return False


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
