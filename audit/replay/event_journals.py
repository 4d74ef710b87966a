"""Compare the recorded KV events of an engine with its prefix cache, once both are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import LedgerError
from ..events import EngineStarted, EngineStopped, KVEventsReceived
from ..journal.reader import Reader
from ..ledger.cache_changes import CLEARED, REMOVED, STORED, CacheChanges
from ..ledger.kv_stream import Comparison, Stream, StreamSubject, compare
from ..ledger.subjects import Entry
from .engine_audit import EngineAudit, counted
from .recordings import (
    AFTER_END_SECONDS,
    Identity,
    Neighbours,
    identity_of,
    incomparable,
    recordings_beside,
    same_port,
)


class RecordedEvents:
    """The recordings in one folder, each read once."""

    def __init__(self, recordings: list[Path]) -> None:
        self._began: dict[int, float] = {}
        """By a batch's identity: Unix time from which the times of its recording count."""
        self._streams = [stream for path in recordings for stream in self._read(path)]
        """The batches of each stream, with the key and the port of its engine."""

    def of(self, engine: EngineStarted, until: float) -> Stream:
        """The batches that one engine published up to the Unix time ``until``."""
        wanted = identity_of(engine)
        batches: list[KVEventsReceived] = []
        for identity, received in self._streams:
            times = [batch.published_seconds for batch in received]
            if identity == wanted and max(times) >= engine.began_seconds and min(times) <= until:
                batches += received
        return Stream(batches)

    def received(self, batch: KVEventsReceived) -> float:
        """Unix time at which a batch was received."""
        return self._began[id(batch)] + batch.at / 1e6

    def _read(self, path: Path) -> Iterator[tuple[Identity, list[KVEventsReceived]]]:
        """The streams of one recording."""
        identity: Identity = (None, None)
        streams: dict[tuple[int, int], list[KVEventsReceived]] = {}
        began = 0.0
        with contextlib.suppress(LedgerError), Reader(path) as reader:
            for batch in reader.poll():
                for event in batch.events:
                    if isinstance(event, EngineStarted):
                        identity, began = identity_of(event), event.began_seconds
                    elif isinstance(event, KVEventsReceived):
                        self._began[id(event)] = began
                        streams.setdefault((event.stream, event.rank), []).append(event)
        for received in streams.values():
            yield identity, received


def changes_of(path: Path) -> tuple[CacheChanges, int, int | None]:
    """The changes of the prefix cache in a journal, the time of its last event, and of the engine's end."""
    cache, at, stopped = CacheChanges(), 0, None
    with Reader(path) as reader:
        for batch in reader.poll():
            for event in batch.events:
                cache.feed(event)
                at = event.at
                if isinstance(event, EngineStopped):
                    stopped = at
    return cache, at, stopped


def compare_events(audit: EngineAudit) -> Comparison | None:
    """Compare an audited engine's recorded KV events with its cache; add the findings and a note.

    None if nothing was recorded beside the journal, or nothing can be compared: a note says why.
    """
    recordings = recordings_beside(audit.path)
    engine = audit.engine
    if not recordings or engine is None:
        return None
    if (reason := incomparable(engine)) or audit.window.bounded:
        audit.notes.append(reason or "the KV events are compared only without --since and --until")
        return None
    cache, at, stopped = changes_of(audit.path)
    until = engine.began_seconds + at / 1e6
    if rival := Neighbours(audit.path).rival(engine):
        audit.notes.append(same_port(rival))
        return None
    stream = RecordedEvents(recordings).of(engine, until if stopped else until + AFTER_END_SECONDS)
    if not stream.batches:
        audit.notes.append("the recorded KV events beside this journal are not of this engine")
        return None
    result = compare(cache, engine.began_seconds, at, stream)
    ledger = audit.auditor.ledger
    for subject, step, found_at in result.subjects:
        audit.auditor.check([_entry(subject, ledger.number, step, found_at)])
    audit.notes.append(_note(result))
    return result


def _entry(subject: StreamSubject, number: int, step: int, at: int) -> Entry:
    return Entry(number, step, at, subject, None)


def _note(result: Comparison) -> str:
    """What the comparison found, in one sentence."""
    found = result.matched
    batches = f"{result.batches:,} {'batch' if result.batches == 1 else 'batches'}"
    parts = [
        f"{batches} of KV events agree with the cache on "
        f"{counted(found[STORED], 'store')}, {counted(found[REMOVED], 'removal')} and "
        f"{counted(found[CLEARED], 'reset')}"
    ]
    rest = (
        (result.in_flight, "in flight at the end"),
        (result.before, "before the recording or the journal began"),
        (result.repeated, "repeated stores of cached blocks"),
        (result.other_tiers, "in other tiers"),
    )
    parts += [f"{count:,} {words}" for count, words in rest if count]
    return "; ".join(parts)
