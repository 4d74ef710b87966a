"""Read what ``kvledger routing`` compares: requests and caches of engines, and their recorded KV events.

All journals are read at once, so little of each is kept. Another index than our own can't be asked how it was
a short time ago. So it is replayed in between: a first reading finds the requests and the batches, the index
is asked in the order of arrival, and a second reading explains what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..analysis.router_index import Index, contents_of
from ..analysis.routing import Contents, RoutedRequest, Routing, Row, Sides, before_of
from ..client_ids import client_names
from ..errors import JournalError
from ..events import KVEventsReceived
from ..journal.host_folders import engine_name
from .event_journals import EventJournal, read_together
from .parallel import attempting, whole_ones
from .recorded_events import Promised
from .recordings import Neighbours, incomparable, same_port

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
        if batches is not None:
            events.on_batch = lambda at, batch, number=number: batches.append((at, number, batch))
    read_together(engines, each)
    names = list(whole_ones(map(attempting(_checked), engines)))
    rows.sort(key=lambda row: (row.request.arrived, row.request.engine, row.request.step))
    arrived = sum(events.cache.arrived for events in together)
    gaps = sum(engine.counts.gaps + bool(engine.events.comparison.begins) for engine in engines)
    return Routing(names, rows, arrived - len(rows), gaps)


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
