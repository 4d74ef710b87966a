"""Read what ``kvledger routing`` compares: requests and caches of engines, and their recorded KV events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from .. import events as ev
from ..analysis.block_trace import TraceReader
from ..analysis.routing import (
    EngineSide,
    Index,
    OwnIndex,
    RoutedRequest,
    Routing,
    contents_of,
    rows,
)
from ..client_ids import client_names
from ..errors import LedgerError
from ..journal.hosts import engine_name
from ..journal.reader import Reader
from ..ledger.cache_changes import CacheChanges
from ..ledger.kv_stream import compare
from .event_journals import RecordedEvents
from .recordings import (
    AFTER_END_SECONDS,
    Neighbours,
    identity_of,
    incomparable,
    recordings_beside,
    same_port,
)

MakeIndex = Callable[[Mapping[int, int]], Index]
"""Makes an index; by hash id, it is given a keyed hash of the tokens, as far as it was recorded."""


PredictedByPort = Mapping[str, Mapping[int, int]]
"""What a router predicted: by a request's id, the tokens of each engine by the port of its KV events."""


class _EngineReader:
    """Reads one engine's journal."""

    def __init__(self, path: Path) -> None:
        self.cache, self.trace = CacheChanges(), TraceReader(str(path), partial(engine_name, path=path))
        self.started: ev.EngineStarted | None = None
        self.at, self.stopped = 0, False
        self.added: dict[int, tuple[int, ev.RequestAdded]] = {}
        """By request number: its index in the trace, and its arrival."""
        self.admitted: list[tuple[int, ev.RequestAdded, ev.Admitted, int]] = []
        """First admissions: index in the trace, arrival, admission, and changes of the cache before it."""
        self.failed: dict[int, int] = {}
        """By index in the trace: the first position that a failed load left invalid."""
        with Reader(path) as reader:
            for batch in reader.poll():
                for event in batch.events:
                    self._feed(event)
            self.ended = reader.ended
            """Whether the engine is gone."""

    def _feed(self, event: ev.Event) -> None:
        self.at = event.at
        self.trace.feed(event)
        self.cache.feed(event)
        if isinstance(event, ev.EngineStarted):
            self.started = self.started or event
        elif isinstance(event, ev.EngineStopped):
            self.stopped = True
        elif isinstance(event, ev.RequestAdded):
            self.added[event.request] = len(self.trace.trace.requests) - 1, event
        elif isinstance(event, ev.Admitted) and event.request in self.added and not event.resumed:
            place, added = self.added[event.request]
            self.admitted.append((place, added, event, len(self.cache.changes)))
        elif isinstance(event, ev.LoadFailed) and event.request in self.added:
            self.failed.setdefault(self.added[event.request][0], event.computed_tokens)
        elif isinstance(event, ev.Finished):
            self.added.pop(event.request, None)

    def requests(self, engine: int, began: float) -> list[RoutedRequest]:
        """The requests whose first admission is in the journal."""
        trace, found, seen = self.trace.trace, [], set()
        size = trace.block_tokens
        for place, added, admitted, changes in self.admitted:
            if place in seen:
                continue
            seen.add(place)
            local, external = admitted.local_tokens, admitted.external_tokens
            valid = self.failed.get(place, local + external)
            hashes = trace.requests[place].hashes[: added.prompt_tokens // size]
            known = hashes.index(0) if 0 in hashes else len(hashes)
            found.append(
                RoutedRequest(
                    added.request_id,
                    added.request,
                    engine,
                    added.prompt_tokens,
                    hashes[:known],
                    began + added.at / 1e6,
                    admitted.step,
                    changes,
                    min(local, valid),
                    external,
                    min(external, max(0, local + external - valid)),
                )
            )
        return found


def routing(
    journals: Sequence[Path], index: MakeIndex | None = None, predicted: PredictedByPort | None = None
) -> Routing:
    """Replay the recorded KV events of all engines through one index, request by request.

    ``index`` makes it, of the tokens of the blocks that were announced. Raises LedgerError if no engine has a
    recording that can be compared with its blocks. ``predicted`` takes the place of the index.
    """
    sides: list[EngineSide] = []
    started_by: list[ev.EngineStarted] = []
    requests: list[RoutedRequest] = []
    arrived = gaps = 0
    for path in journals:
        reader = _EngineReader(path)
        started = reader.started
        reason = "no engine was seen to start" if started is None else incomparable(started)
        if reason or started is None:
            raise LedgerError(f"{path}: {reason}.")
        trace = reader.trace.finish()
        until = started.began_seconds + reader.at / 1e6
        recorded = RecordedEvents(recordings_beside(path))
        stream = recorded.of(started, until if reader.stopped else until + AFTER_END_SECONDS)
        if not stream.batches and reader.cache.changes:
            raise LedgerError(f"{path}: no KV events of this engine were recorded beside its journal.")
        if rival := Neighbours(path).rival(started):
            raise LedgerError(f"{path}: {same_port(rival)}.")
        result = compare(reader.cache, started.began_seconds, reader.at, stream)
        gaps += len(stream.missing)
        batches = [(recorded.received(batch), batch) for batch in stream.batches]
        lost = {change for change, _ in result.lost}
        requests += reader.requests(len(sides), started.began_seconds)
        arrived += len(trace.requests)
        last = started.began_seconds + reader.at / 1e6 if reader.ended else math.inf
        name = engine_name(started, path)
        sides.append(EngineSide(name, trace.block_tokens, reader.cache, lost, batches, last))
        started_by.append(started)
    sides = [side._replace(before=_before(n, sides, started_by)) for n, side in enumerate(sides)]
    contents = contents_of(batch for side in sides for _, batch in side.batches)
    predictions = None if predicted is None else _predictions(predicted, requests, sides, started_by)
    found = list(rows(sides, requests, index(contents) if index else OwnIndex(), contents, predictions))
    return Routing([side.name for side in sides], found, arrived - len(found), gaps)


def _before(number: int, sides: Sequence[EngineSide], started: Sequence[ev.EngineStarted]) -> int:
    """The last engine at the same address that was gone before this one began; -1: none."""
    mine = started[number]
    earlier = [
        (side.ended, other)
        for other, side in enumerate(sides)
        if identity_of(started[other]) == identity_of(mine) and side.ended <= mine.began_seconds
    ]
    return max(earlier, default=(0.0, -1))[1]


def _predictions(
    predicted: PredictedByPort,
    requests: Sequence[RoutedRequest],
    sides: Sequence[EngineSide],
    started: Sequence[ev.EngineStarted],
) -> dict[tuple[str, int], dict[int, int]]:
    """The predictions of these requests, in blocks of each engine that was there when the request arrived."""
    found = {}
    for request in requests:
        names = sorted(client_names(request.request_id, None))
        name = next((name for _, name in names if name in predicted), None)
        if name is None:
            continue
        there = {
            identity_of(started[engine])[1]: engine
            for engine, side in enumerate(sides)
            if started[engine].began_seconds <= request.arrived <= side.ended
        }
        size = sides[request.engine].block_tokens
        found[request.request_id, request.engine] = {
            there[port]: tokens // size for port, tokens in predicted[name].items() if port in there
        }
    return found
