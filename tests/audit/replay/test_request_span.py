"""The statement of a request from a part of its journal is that of a whole replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.replay.test_window_start import LONG, segments_with
from tests.histories import weave
from tests.simulated_trace import MIX, cut_trace

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Event, Gap, HookFailed, RequestAdded, Snapshot
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay import journals as replayed
from kvledger.audit.replay.journal_parts import RequestSpan, request_span
from kvledger.audit.replay.journals import statements


@pytest.fixture(scope="module", params=[MIX, LONG], ids=["short requests", "long requests"])
def journal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    requests = 2_500 if request.param is MIX else 300
    return cut_trace(tmp_path_factory.mktemp("trace") / "engine-0", request.param, requests)


def events_of(journal: Path) -> list[Event]:
    with Reader(journal) as reader:
        return [event for batch in reader.poll() for event in batch.events]


def request_ids(journal: Path) -> list[str]:
    return [event.request_id for event in events_of(journal) if isinstance(event, RequestAdded)]


def shown(folder: Path, asked: str) -> list[Any]:
    return [
        (one.engine, one.account, one.lines, one.findings, one.began_seconds, one.suffixed)
        for one in statements([folder], asked)
    ]


def whole(folder: Path, asked: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replayed, "request_span", lambda *_: None)
        return shown(folder, asked)


def span_of(journal: Path, asked: str) -> RequestSpan:
    span = request_span(journal, lambda name: name == asked)
    assert span is not None
    return span


def test_a_part_gives_the_statement_of_a_whole_replay(journal: Path) -> None:
    names = request_ids(journal)
    for name in names[:: len(names) // 5]:
        assert whole(journal, name) == shown(journal, name)


def test_the_replay_begins_shortly_before_the_request_and_ends_with_it(journal: Path) -> None:
    events, names = events_of(journal), request_ids(journal)
    late = span_of(journal, names[-len(names) // 6])

    assert late.cut is not None
    assert len(events) / 3 < late.cut.number < late.until < len(events)
    assert span_of(journal, names[0]).cut is None


def test_a_journal_without_the_request_is_not_replayed(journal: Path) -> None:
    span = span_of(journal, "another")

    assert not span.found
    with pytest.raises(LedgerError, match="No request of"):
        statements([journal], "another")


def lossy(folder: Path, loss: Event) -> Path:
    """A trace that lost events in its middle, with the snapshot that follows."""
    trace = events_of(cut_trace(folder / "trace", MIX, 2_000))
    middle = next(
        place for place, event in enumerate(trace) if place > len(trace) // 2 and isinstance(event, Snapshot)
    )
    writer = JournalWriter(folder / "engine-0")
    writer.rotate()
    for place in range(0, len(trace), 500):
        part = trace[place : place + 500]
        if place <= middle < place + 500:
            part.insert(middle - place, replace(loss, at=trace[middle].at))
        writer.write(part)
    writer.close()
    return writer.folder


@pytest.mark.parametrize("loss", [Gap(0, 3, "made up"), HookFailed(0, "schedule", "KeyError", False)])
def test_no_cut_is_made_where_events_were_lost(tmp_path: Path, loss: Event) -> None:
    folder = lossy(tmp_path, loss)
    events, names = events_of(folder), request_ids(folder)
    lost = next(place for place, event in enumerate(events) if type(event) is type(loss))
    span = span_of(folder, names[-20])

    assert span.cut is not None and span.cut.number < lost
    for name in (names[-20], names[len(names) // 2]):
        assert whole(folder, name) == shown(folder, name)


def test_of_two_requests_with_one_id_the_last_is_shown(tmp_path: Path) -> None:
    first = weave({0: 40, 1: 40}, "a.A0+0 a.s40 a.o+ a.F b.A0+0 b.s40 b.o+ b.F")
    twice = [
        replace(event, request_id="same") if isinstance(event, RequestAdded) else event for event in first
    ]
    folder = journals.write(tmp_path / "engine-0", twice)

    assert whole(folder, "same") == shown(folder, "same")


def test_all_is_replayed_with_blocks_or_workers(tmp_path: Path) -> None:
    blocks = segments_with([[], []], tmp_path / "engine-0", level="blocks")
    folder = segments_with([[], []], tmp_path / "tokens" / "engine-1")

    assert request_span(folder, lambda _: True) is not None
    assert request_span(blocks, lambda _: True) is None
    (folder.parent / "worker-1").mkdir()
    assert request_span(folder, lambda _: True) is None
