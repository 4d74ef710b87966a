"""Time windows: they select requests by their end and never split an account."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events, weave

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import (
    CacheReset,
    EngineRaised,
    EngineStopped,
    Event,
    Finished,
    Gap,
    HookFailed,
    Reported,
    Snapshot,
    SnapshotRow,
)
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.windows import Window, instant, window

BEGAN = journals.STARTED.began_seconds
TWO = "a.A0+0 a.s40 a.o+ a.F b.A16+0 b.s8 b.o+ b.F"


def segment_start(at: int, *rows: SnapshotRow) -> list[Event]:
    """The first events of a segment that begins at ``at``."""
    wall_seconds = journals.STARTED.wall_seconds + at / 1e6
    return [
        replace(journals.STARTED, at=at, wall_seconds=wall_seconds),
        Snapshot(at, 1, list(rows), 0),
    ]


def end_seconds(stream: list[Event]) -> list[float]:
    return [BEGAN + event.at / 1e6 for event in stream if isinstance(event, Finished)]


def test_relative_times_count_back_from_now() -> None:
    assert Window(1000.0 - 90, 1000.0 - 15) == window("1.5m", "15s", now=1000.0)


@pytest.mark.parametrize(
    "words", ["2026-01-31T12:00:00+00:00", "2026-01-31T12:00:00Z", "2026-01-31T13:00+01:00"]
)
def test_iso_times_may_have_a_time_zone(words: str) -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=timezone.utc).timestamp()

    assert Window(noon, None) == window(words)


NOON = datetime(2026, 3, 4, 12).timestamp()
"""In the zone of this machine."""


@pytest.mark.parametrize(
    ("words", "hours"),
    [
        ("11:30", -0.5),
        ("13:30", -22.5),
        ("12:00:01", 1 / 3600 - 24),
        ("yesterday", -36),
        ("today", -12),
        ("yesterday 15:12", 3.2 - 24),
        ("today 15:12", 3.2),
        ("2h30m", -2.5),
    ],
)
def test_a_time_may_be_one_of_the_clock(words: str, hours: float) -> None:
    assert pytest.approx(NOON + 3600 * hours) == instant(words, NOON)


@pytest.mark.parametrize(
    "words", ["tomorrow", "25:00", "12:61", "15 m", "-3m", "99999-01-01", "m", "yesterday15"]
)
def test_a_time_in_another_format_is_refused(words: str) -> None:
    with pytest.raises(LedgerError, match="is no time: write 2026"):
        window(words)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(LedgerError, match="Nothing lies between --since 1m and --until 2m"):
        window("1m", "2m")


def test_a_request_is_in_the_window_it_ended_in_with_its_whole_account(tmp_path: Path) -> None:
    stream = weave({0: 40, 1: 24}, TWO)
    first, second = end_seconds(stream)
    path = journals.write(tmp_path / "two", stream)

    before = audit_paths([path], window=Window(None, second)).totals
    after = audit_paths([path], window=Window(second, None)).totals

    assert (1, 40, 0) == (before.requests, before.prompt_tokens, before.local)
    assert (1, 24, 16) == (after.requests, after.prompt_tokens, after.local)
    assert first < second


def test_adjacent_windows_have_every_request_once(tmp_path: Path) -> None:
    stream = weave({0: 40, 1: 24}, TWO)
    path = journals.write(tmp_path / "two", stream)
    whole = audit_paths([path]).totals
    for cut in (*end_seconds(stream), BEGAN, BEGAN + 9e9):
        parts = [audit_paths([path], window=w).totals for w in (Window(None, cut), Window(cut, None))]
        assert whole.requests == sum(part.requests for part in parts)
        assert whole.scheduled == sum(part.scheduled for part in parts)


def test_open_requests_are_in_windows_without_an_end(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "open", events(10, "A0+0 s10 o+"), stopped=False)

    assert 1 == audit_paths([path], window=Window(BEGAN, None)).totals.requests
    assert 0 == audit_paths([path], window=Window(None, BEGAN + 9e9)).totals.requests


def test_a_window_has_only_findings_of_its_requests(tmp_path: Path) -> None:
    path = journals.violated(tmp_path / "violated")
    (end,) = end_seconds(
        journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    )

    inside, outside = (audit_paths([path], window=w) for w in (Window(end, None), Window(None, end)))
    assert ("violated", "clean") == (inside.verdict, outside.verdict)
    assert inside.violations
    assert [] == outside.violations


@pytest.mark.parametrize(
    ("window", "verdict"),
    [
        (Window(), "unknown"),
        (Window(BEGAN, None), "unknown"),
        (Window(BEGAN + 150, BEGAN + 160), "unknown"),
        (Window(None, BEGAN + 99), "clean"),
        (Window(BEGAN + 201, None), "clean"),
    ],
)
def test_lost_events_make_a_window_unknown_that_may_include_them(
    tmp_path: Path, window: Window, verdict: str
) -> None:
    """The event before the Gap is at 100 s and the one after it at 200 s: the loss lies between them."""
    lost = [CacheReset(100_000_000, True, False), Gap(150_000_000, 5, "full")]
    stream = [*lost, *segment_start(200_000_000), EngineStopped(400_000_000, "shutdown")]
    path = journals.write(tmp_path / "lost", stream, stopped=False)

    assert verdict == audit_paths([path], window=window).verdict


@pytest.mark.parametrize(
    "trouble",
    [
        HookFailed(150_000_000, "schedule", "KeyError", False),
        EngineRaised(150_000_000, "schedule", "AssertionError", True),
    ],
    ids=["a hook failed", "the engine raised"],
)
def test_a_failure_makes_only_the_windows_unknown_that_may_include_it(tmp_path: Path, trouble: Event) -> None:
    stream = [CacheReset(149_000_000, True, False), trouble, *segment_start(151_000_000)]
    path = journals.write(
        tmp_path / "failed", [*stream, EngineStopped(400_000_000, "shutdown")], stopped=False
    )
    windows = Window(), Window(BEGAN + 100, BEGAN + 200), Window(None, BEGAN + 99), Window(BEGAN + 201, None)

    verdicts = [audit_paths([path], window=window).verdict for window in windows]
    assert ["unknown", "unknown", "clean", "clean"] == verdicts


def test_every_window_after_an_observer_that_kept_failing_is_unknown(tmp_path: Path) -> None:
    """The engine runs on, and nobody sees what it does."""
    failed = HookFailed(150_000_000, "schedule", "KeyError", True)
    stopped = EngineStopped(150_000_001, "the observer of schedule kept failing")
    stream = [CacheReset(149_000_000, True, False), failed, stopped]
    path = journals.write(tmp_path / "failed", stream, stopped=False)

    assert "clean" == audit_paths([path], window=Window(None, BEGAN + 99)).verdict
    assert "unknown" == audit_paths([path], window=Window(BEGAN + 3_000, None)).verdict
    assert "unknown" == audit_paths([path], window=Window(BEGAN + 3_000, BEGAN + 4_000)).verdict


def test_a_request_that_lost_events_touched_makes_the_window_of_its_end_unknown(tmp_path: Path) -> None:
    """The events were lost before the window, and the request ended in it, at 300 s."""
    row = SnapshotRow(0, "request-0", 10, False, 10, 0, 0, 11, 0)
    stream = [
        *events(10, "A0+0 s10 o+"),
        Gap(100_000_000, 5, "full"),
        *segment_start(200_000_000, row),
        Finished(300_000_000, 0, "stopped", 10, 0, 0, 11, 1),
        EngineStopped(400_000_000, "shutdown"),
    ]
    path = journals.write(tmp_path / "lost", stream, stopped=False)

    assert "unknown" == audit_paths([path], window=Window(BEGAN + 250, None)).verdict
    assert "clean" == audit_paths([path], window=Window(BEGAN + 350, None)).verdict


def test_a_window_reconciles_only_reports_of_its_requests(tmp_path: Path) -> None:
    stream = journals.reported(events(200, journals.CLEAN), local=0, external=32, computed=168)
    path = journals.write(tmp_path / "one", stream)
    assert any(isinstance(event, Reported) for event in stream)

    assert 0 == audit_paths([path], window=Window(None, BEGAN)).reconciliation.reports
