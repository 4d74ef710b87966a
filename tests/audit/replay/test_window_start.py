"""A replay that skips what its window does not need gives the figures of a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import journals
from tests.histories import weave
from tests.simulated import Mix
from tests.simulated_trace import MIX, cut_trace

from kvledger.audit.events import Snapshot, SnapshotRow
from kvledger.audit.journal.catalogue import facts
from kvledger.audit.journal.format import segments
from kvledger.audit.journal.reader import Position, Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journal_parts import skip_to_window
from kvledger.audit.replay.journals import audit_paths, statement
from kvledger.audit.replay.observers import Lost, Steps
from kvledger.audit.replay.windows import Window
from kvledger.exporters.facts import replayed
from kvledger.exporters.reports import page as pages
from kvledger.exporters.reports.audit import report
from kvledger.exporters.reports.costs import costs_of
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.why import why
from kvledger.exporters.writers import as_json

CORRECT = 1.7e9
"""When the clock of an engine was corrected."""

MINUTE_US = 60_000_000

LONG = Mix(running=6, waiting=2, median_output=2_000)
"""Few requests, which run while several segments are written."""


@pytest.fixture(scope="module", params=[MIX, LONG], ids=["short requests", "long requests"])
def journal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    requests = 800 if request.param is MIX else 200
    return cut_trace(tmp_path_factory.mktemp("trace") / "engine-0", request.param, requests, 20_000)


def late(journal: Path, share: float, length: float = 1.0) -> Window:
    """The window that begins at this share of the journal's time."""
    audit = EngineAudit(journal)
    with Reader(journal) as reader:
        audit.read(reader)
    began, seconds = audit.began_seconds or 0.0, audit.last_at / 1e6
    until = None if share + length > 1 else began + (share + length) * seconds
    return Window(began + share * seconds, until)


def start_of(journal: Path, window: Window) -> Position | None:
    return skip_to_window(EngineAudit(journal, window=window))


def answers(journal: Path, window: Window) -> Any:
    """What audit, why and report say. Seconds come from a model of the steps that were read."""
    audit = audit_paths([journal], (Lost, Steps), window=window)
    page = pages.gather([journal], window=window)
    said = json.loads(as_json(report(audit, costs_of(audit.engines))))
    del said["journals"][0]["events"]  # as many as were read
    shown = [why([journal], window=window), page.costs, page.waits, page.preempted, page.series]
    return without_models([said, msgspec.to_builtins(shown, str_keys=True)])


def without_models(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: without_models(one) for name, one in data.items() if name != "models"}
    return list(map(without_models, data)) if isinstance(data, list | tuple) else data


def approximately(data: Any) -> Any:
    return json.loads(json.dumps(data), parse_float=lambda text: pytest.approx(float(text), rel=0.01))


@pytest.mark.parametrize(("share", "length"), [(0.3, 0.2), (0.6, 1.0), (0.95, 1.0)])
def test_a_skipping_replay_gives_the_figures_of_a_whole_one(
    journal: Path, share: float, length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = late(journal, share, length)
    start = start_of(journal, window)
    skipping = answers(journal, window)
    monkeypatch.setattr(replayed, "skip_to_window", lambda _: None)

    assert skipping == approximately(answers(journal, window))
    assert share < 0.9 or (start is not None and start.segment > len(segments(journal)) / 3)


def test_the_replay_begins_before_the_requests_that_run_when_the_window_begins(tmp_path: Path) -> None:
    """Segment 4 begins last before the window. A request that began in segment 2 still runs there."""
    folder = segments_with([[], [1], [1, 2], [2]], folder=tmp_path / "engine-0")
    at = journals.STARTED.began_seconds + 35e-6

    assert Position(segment=2, event=-1) == start_of(folder, Window(at))
    assert start_of(segments_with([[1], [1], [1], [1]], folder=tmp_path / "engine-1"), Window(at)) is None
    last = start_of(segments_with([[1], [1], [1], []], folder=tmp_path / "engine-2"), Window(at))
    assert Position(segment=4, event=-1) == last


@pytest.fixture
def corrected(tmp_path: Path) -> Path:
    """An engine that starts in 1970. The clock is right when its second segment begins, a minute later."""
    folder = tmp_path / "engine-0"
    writer = JournalWriter(folder)
    for number, wall_seconds in enumerate((30.0, CORRECT), 1):
        stream = weave({number: 40}, "a.A0+0 a.s40 a.o+ a.F")
        at = 0 if number == 1 else MINUTE_US
        writer.rotate()
        started = msgspec.structs.replace(journals.STARTED, at=at, wall_seconds=wall_seconds)
        moved = [msgspec.structs.replace(event, at=event.at + at) for event in stream]
        writer.write([started, Snapshot(at, 0, [], 0), *moved])
    writer.close()
    return folder


def test_a_clock_that_was_corrected_later_counts_for_the_whole_journal(corrected: Path) -> None:
    def requests(window: Window) -> int:
        return audit_paths([corrected], window=window).totals.requests

    assert 2 == requests(Window(CORRECT - 300))
    assert 1 == requests(Window(CORRECT))
    assert 1 == requests(Window(CORRECT - 300, CORRECT))
    assert 0 == requests(Window(None, CORRECT - 300))


def test_what_is_listed_shown_and_kept_of_a_journal_has_the_corrected_clock(corrected: Path) -> None:
    listed = facts(corrected)
    assert CORRECT - 60 == listed.began_seconds
    assert listed.until_seconds is not None and CORRECT < listed.until_seconds < CORRECT + 60
    assert CORRECT - 60 == statement([corrected], "request-1").began_seconds

    for query in ("SELECT epoch(min(added_time)) FROM requests", "SELECT epoch(min(time)) FROM activity"):
        ((at,),) = ask([corrected], query).rows
        assert CORRECT - 120 < at < CORRECT, query


def segments_with(running: list[list[int]], folder: Path, level: str = "tokens") -> Path:
    """A journal whose segments begin at 10, 20, ... microseconds with these running requests."""
    writer = JournalWriter(folder)
    for number, requests in enumerate(running, 1):
        rows = [SnapshotRow(one, f"r{one}", 8, False, 8, 0, 0, 9, 0) for one in requests]
        writer.rotate()
        started = msgspec.structs.replace(journals.STARTED, at=10 * number, level=level)
        writer.write([started, Snapshot(10 * number, number, rows, 0)])
    writer.close()
    return folder


def test_all_is_read_with_blocks_watched_requests_or_workers_and_without_a_window(
    tmp_path: Path,
) -> None:
    blocks = segments_with([[], []], tmp_path / "engine-0", level="blocks")
    folder = segments_with([[], []], tmp_path / "tokens" / "engine-1")
    window = Window(journals.STARTED.began_seconds + 1.0)

    assert start_of(folder, window) is not None
    assert start_of(blocks, window) is None
    assert start_of(folder, Window(None, window.since)) is None
    assert skip_to_window(EngineAudit(folder, window=window, watch=lambda _: True)) is None
    (folder.parent / "worker-1").mkdir()
    assert start_of(folder, window) is None


def test_a_drift_that_goes_on_is_in_each_window_in_which_it_was_found(journal: Path) -> None:
    """Drifts are kept once for an engine, as they were found first."""
    windows = late(journal, 0.2, 0.3), late(journal, 0.5)
    kept = [audit_paths([journal], window=window).violations for window in windows]
    requests = [{one.id: one.request for one in several} for several in kept]

    both = requests[0].keys() & requests[1].keys()
    assert "metrics/chunks-in-one-step" in both
    assert all(requests[0][id] != requests[1][id] for id in both)
