"""What the KV events of real schedulers with several KV cache groups promise of each request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from tests.engines.test_kv_events import PUBLISHING, driven

from kvledger.audit.analysis.router_index import TokensIndex, UncountedIndex
from kvledger.audit.analysis.routing import EVICTED, EXTERNAL, STORED_SINCE, Routing
from kvledger.audit.causes import STATE, WINDOW
from kvledger.audit.events import EngineStarted, Event, KVEventsReceived, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.recorded_events import routing

NAMES = [
    name
    for name in PUBLISHING
    if any(word in name for word in ("hybrid", "crowd", "states", "window_leaves"))
]


def write(
    folder: Path, events: Sequence[Event], started: EngineStarted, stream: Sequence[KVEventsReceived]
) -> Sequence[Path]:
    """Journals of an engine and of its stream, each batch received when it was published."""
    with closing(JournalWriter(folder / "engine-0-0-0")) as journal:
        journal.write(events)
    with closing(JournalWriter(folder / "events-0-0-0")) as journal:
        journal.write([started, Snapshot(0, 0, [], 0)])
        for batch in stream:
            at = max(0, round((batch.published_seconds - started.began_seconds) * 1e6))
            journal.write([replace(batch, at=at)])
    return journals_at([folder])


def tokens(found: Routing) -> dict[str, int]:
    """The tokens of each cause."""
    return {cause: tokens for (_, cause), (_, tokens) in found.causes().items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_promise_of_several_groups_differs_by_what_the_stream_had_not_said(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journals = write(tmp_path, *driven(name, monkeypatch))
    late = {EVICTED, STORED_SINCE, EXTERNAL}

    found = routing(journals)

    assert found.rows and tokens(found).keys() <= late
    assert sum(row.predicted for row in found.rows) or "states" in name
    for index in (TokensIndex, UncountedIndex):
        assert tokens(routing(journals, index)).keys() <= late | {STATE, WINDOW}


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_index_of_one_group_promises_what_has_no_state(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journals = write(tmp_path, *driven(f"states_hit_between_checkpoints_{how}", monkeypatch))

    assert ({}, {STATE: 48}) == (tokens(routing(journals)), tokens(routing(journals, TokensIndex)))
