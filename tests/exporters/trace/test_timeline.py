"""The timeline: valid trace events, and slices that match the accounts."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.audit.analysis.test_step_times import trace
from tests.exporters.labels import labelled
from tests.histories import GOLDEN, Golden

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import BlockStatesReported, PoolSeen
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts, Lost, Steps
from kvledger.exporters.trace.timeline import save


def drawn(*paths: Path) -> list[dict[str, Any]]:
    file = paths[0].parent / "timeline.json"
    count = save(paths, file)
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    assert count == len(events)
    return events


@pytest.mark.parametrize("history", GOLDEN, ids=lambda row: row.title)
def test_slices_add_up_to_the_accounts(history: Golden, tmp_path: Path) -> None:
    path = journals.write(tmp_path / "journal", history.events())
    lives = [event for event in drawn(path) if event.get("cat") == "life"]

    totals = audit_paths([path]).totals
    assert totals.scheduled == sum(life["args"]["scheduled"] for life in lives)
    assert totals.loaded == sum(life["args"]["loaded"] for life in lives)
    assert totals.promised == sum(life["args"]["external"] for life in lives)


@pytest.mark.parametrize("history", GOLDEN, ids=lambda row: row.title)
def test_the_format(history: Golden, tmp_path: Path) -> None:
    """Every event has the fields of its phase, and slices of a track do not overlap."""
    events = drawn(journals.write(tmp_path / "journal", history.events()))
    required = {
        "X": {"name", "ts", "dur", "pid", "tid"},
        "M": {"name", "pid", "args"},
        "C": {"name", "ts", "pid", "args"},
        "i": {"name", "ts", "pid", "s"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    }
    for event in events:
        assert required[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
    for track in {event["tid"] for event in events if event["ph"] == "X"}:
        slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        ends = [start + duration for start, duration in slices]
        assert all(end <= start for end, (start, _) in zip(ends, slices[1:], strict=False))


def test_an_arrow_from_a_preemption_to_the_life_that_resumes(tmp_path: Path) -> None:
    events = drawn(journals.clean(tmp_path / "journal"))

    (start,) = [event for event in events if event["ph"] == "s"]
    (finish,) = [event for event in events if event["ph"] == "f"]
    first, second = [event for event in events if event.get("cat") == "life"]
    assert start["id"] == finish["id"]
    assert first["ts"] + first["dur"] == start["ts"]
    assert second["ts"] == finish["ts"]
    assert "blocks" == first["args"]["ended by"]


def test_request_counters_end_at_zero(tmp_path: Path) -> None:
    events = drawn(journals.clean(tmp_path / "journal"))

    counts = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert {"running": 1, "waiting": 0} in counts
    assert {"running": 0, "waiting": 0} == counts[-1]


def test_findings_are_marks_on_their_request(tmp_path: Path) -> None:
    events = drawn(journals.violated(tmp_path / "journal"))

    marks = [event for event in events if event["ph"] == "i" and event["name"] == "tokens/negative"]
    (track,) = {event["tid"] for event in events if event.get("cat") == "life"}
    assert [track] == [mark["tid"] for mark in marks]


def test_engines_are_processes(tmp_path: Path) -> None:
    journals.clean(tmp_path / "all" / "a")
    journals.clean(tmp_path / "all" / "b")

    events = drawn(tmp_path / "all")

    assert Counter({1: 1, 2: 1}) == Counter(e["pid"] for e in events if e["name"] == "process_name")


def test_a_timeline_that_can_not_be_written_leaves_no_file(tmp_path: Path) -> None:
    path = journals.clean(tmp_path / "journal")

    with pytest.raises(LedgerError, match="can't be written"):
        save([path], tmp_path / "nowhere" / "t.json")
    with pytest.raises(LedgerError, match="There is no"):
        save([tmp_path / "none"], tmp_path / "t.json")
    assert ["journal"] == sorted(path.name for path in tmp_path.iterdir())


def test_free_blocks_come_from_census_and_pools(tmp_path: Path) -> None:
    """From a census and, at level blocks, from every pool."""
    history = next(iter(GOLDEN)).events()
    stated = [PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, 16, 2]), BlockStatesReported(1, 1, 1, 0, [], 5, -1)]
    events = drawn(journals.write(tmp_path / "journal", [*stated, *history], level="blocks"))

    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C" and "free" in e["args"]}
    assert {"free blocks": {"free": 7}, "free blocks, pool 1": {"free": 5}} == counters


def test_requests_share_lanes_and_never_overlap(tmp_path: Path) -> None:
    """Of 400 requests there are no more lanes than were in the engine at once."""
    path = trace(tmp_path / "trace")
    events = drawn(path)
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event.get("cat") in ("life", "wait")]

    most, inside = 0, Counter[str]()
    for account in audit_paths([path], (KeptAccounts,)).engines[0].of(KeptAccounts).sums:
        inside[account.added_at] += 1
        inside[account.closed_at] -= 1
    now = 0
    for at in sorted(inside):
        now += inside[at]
        most = max(most, now)
    assert most <= len(lanes) - 1 <= most + max(inside.values()) < 400
    assert {event["tid"] for event in slices} <= set(lanes.values()) - {lanes["steps"]}
    for lane in set(lanes.values()):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == lane)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_steps_have_a_track_with_the_time_of_the_engine(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace")
    steps = [event for event in drawn(path) if event.get("cat") == "step"]

    engine_audit = audit_paths([path], (Lost, Steps)).engines[0]
    assert engine_audit.of(Steps).sums.busy_us == sum(step["dur"] for step in steps)
    assert str(engine_audit.auditor.ledger.step) == steps[-1]["name"].split()[-1]
    assert {0} == {step["tid"] for step in steps}
    spans = sorted((step["ts"], step["ts"] + step["dur"]) for step in steps)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_a_life_is_named_after_its_request(tmp_path: Path) -> None:
    lives = [event for event in drawn(labelled(tmp_path / "labelled")) if event.get("cat") == "life"]

    names = [f"{life['args']['request']}" for life in lives]
    assert 4 == len(lives)
    assert [f"{names[1]}, life 1", f"{names[1]}, life 2"] == [life["name"] for life in lives[1:3]]
    assert names[0] == lives[0]["name"]


def test_blocks_by_state_are_a_counter(tmp_path: Path) -> None:
    history = next(iter(GOLDEN)).events()
    stated = [PoolSeen(0, 0, 0, 8, 0, 7, 0, [0, 16, 2])]
    events = drawn(journals.write(tmp_path / "journal", [*stated, *history], level="blocks"))

    (blocks,) = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "blocks"]
    assert 8 >= sum(blocks.values()) > 0
