"""Journals whose oldest segments their own bound has removed: that is no loss.

Requests that began before the first kept segment are left out, and the verdict of the rest stands.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.histories import Engine, request_id

from kvledger.audit.events import EngineStopped, Snapshot, SnapshotRow
from kvledger.audit.journal import format as seg
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.windows import Window
from kvledger.exporters.sidecar.follower import Follower

BEGAN = journals.STARTED.wall_seconds
HOUR = 3600.0
DAY = 24 * HOUR
LIMITS = Limits(segment_bytes=4_000, folder_bytes=16_000)
"""A day of :class:`Service` fills about half of these bytes."""


@dataclass
class ClockedEngine(Engine):
    """An engine whose clock the test sets."""

    at: int = 0

    def _at(self) -> int:
        return self.at


class Service:
    """One engine process on simulated time, and its journal, which rotates as a recorder's does.

    A long request is always running, so that each segment begins in the middle of one.
    """

    def __init__(self, folder: Path, now: float, limits: Limits = LIMITS) -> None:
        self.engine = ClockedEngine()
        self.writer = JournalWriter(folder, limits)
        self.folder = folder
        self._started = now
        self._written = 0
        self._next = 0
        self._long = -1
        self._begin_segment(now)

    def hour(self, now: float) -> None:
        """Three requests begin and end, and the long request is replaced by another."""
        self._tick(now - 60)
        if self._long >= 0:
            self._end(self._long, 20)
        self._long = self._begin(20)
        for _ in range(3):
            self._end(self._begin(30), 10)
        self._write()
        if self.writer.wants_rotation:
            self._begin_segment(now - 30)
        self._tick(now - 10)

    def stop(self, now: float) -> None:
        """The engine aborts the long request and ends in good order."""
        self._tick(now)
        self.engine.finish(self._long, "aborted")
        self._write()
        self.writer.write([EngineStopped(self.engine.at, "shutdown")])
        self.writer.close()

    def _tick(self, now: float) -> None:
        self.engine.at = round((now - self._started) * 1e6)

    def _begin(self, tokens: int) -> int:
        """Begin a request with a prompt of 40 tokens, of which a first step computes ``tokens``."""
        request, self._next = self._next, self._next + 1
        self.engine.add(request, 40)
        self.engine.look_up(request, 0, 0, False)
        self.engine.admit(request, 0, 0, False)
        self.engine.schedule([(request, tokens, 0)], restated=[request])
        self.engine.deliver({})
        return request

    def _end(self, request: int, tokens: int) -> None:
        """Compute the rest of a prompt, sample a token, and end."""
        self.engine.schedule([(request, tokens, 0)], restated=[request])
        self.engine.deliver({request: 1})
        self.engine.finish(request, "stopped")

    def _write(self) -> None:
        events = self.engine.events
        self.writer.write(events[self._written :])
        self._written = len(events)

    def _begin_segment(self, now: float) -> None:
        self._tick(now)
        rows = []
        if self._long >= 0:
            one = self.engine.requests[self._long]
            rows.append(SnapshotRow(self._long, request_id(self._long), 40, False, one.computed, 0, 0, 40, 0))
        at = self.engine.at
        self.writer.rotate()
        self.writer.write(
            [replace(journals.STARTED, at=at, wall_seconds=now), Snapshot(at, self.engine.step, rows, 0)]
        )


def rotated(folder: Path, hours: int = 100) -> Path:
    """The journal of an engine that ran for ``hours``, without its oldest segments."""
    service = Service(folder, BEGAN)
    for hour in range(1, hours):
        service.hour(BEGAN + hour * HOUR)
    service.stop(BEGAN + hours * HOUR)
    assert min(seg.segments(folder)) > 1
    return folder


def run(*words: str | Path) -> tuple[object, str]:
    """The exit code and the output of a command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = exit_code(*words)
    return code, printed.getvalue()


def test_a_rotated_journal_is_clean_and_counts_what_it_left_out(tmp_path: Path) -> None:
    (audit,) = audit_paths([rotated(tmp_path / "engine")]).engines
    totals = audit.totals()

    assert ("clean", []) == (audit.verdict, audit.doubts)
    assert (1, 1) == (totals.began_before, totals.unknown_requests)
    assert {"clean"} == {verdict for verdict, _ in audit.journal.requests}
    assert totals.requests - 1 == sum(audit.journal.requests.values())
    removed, began = audit.all_notes
    assert removed.startswith("rotation has removed the first ")
    assert "1 request began before the first kept segment, no figure includes them" == began


def test_the_report_of_a_rotated_journal_counts_what_it_left_out(tmp_path: Path) -> None:
    path = rotated(tmp_path / "engine")
    code, printed = run("audit", path, "--format", "json")
    data = json.loads(printed)

    assert (0, "clean", 1, 1) == (code, data["verdict"], data["unknown"], data["began_before"])
    code, printed = run("audit", path)
    first, second, *rest = printed.splitlines()
    assert first == data["examined"]
    assert second == f"{data['requests'] - 1} requests, 0 violations, 0 preemptions"
    assert "1 request began before the first kept segment" in " ".join(rest)
    assert 0 == run("export", "html", path, "-o", tmp_path / "page.html")[0]


def test_a_sidecar_that_starts_on_a_rotated_journal_counts_no_loss(tmp_path: Path) -> None:
    path = rotated(tmp_path / "engine")
    (whole,) = journals.followed_audits(path)
    follower = Follower(path)
    follower.catch_up()
    (audit,) = follower.audits
    follower.close()

    assert ("clean", []) == (audit.verdict, audit.doubts)
    assert (0, 0, 0) == (
        audit.metrics.gaps_of_known_size,
        audit.metrics.gaps_of_unknown_size,
        audit.metrics.lost_events,
    )
    assert whole.journal.requests == audit.journal.requests
    assert {"clean"} == set(audit.metrics.sequence_tokens)


def test_segments_removed_before_a_sidecar_read_them_are_a_loss(tmp_path: Path) -> None:
    """The sidecar has read the beginning, so that it knows of requests whose ends it never sees."""
    service = Service(tmp_path / "engine", BEGAN)
    service.hour(BEGAN + HOUR)
    follower = Follower(tmp_path / "engine")
    follower.poll()
    for hour in range(2, 200):
        service.hour(BEGAN + hour * HOUR)
    service.stop(BEGAN + 200 * HOUR)
    follower.poll()
    (audit,) = follower.audits
    follower.close()

    assert "unknown" == audit.verdict
    assert "events were lost once" in audit.doubts


@pytest.mark.parametrize("place", [1, -2])
def test_a_removed_segment_in_the_middle_is_a_loss(tmp_path: Path, place: int) -> None:
    path = rotated(tmp_path / "engine")
    numbers = list(seg.segments(path))
    (path / seg.segment_name(numbers[place])).unlink()

    (audit,) = journals.followed_audits(path)

    assert "unknown" == audit.verdict
    assert "events were lost once" in audit.doubts
    assert 1 == audit.totals().began_before


def test_a_damaged_first_segment_of_a_rotated_journal_is_a_loss(tmp_path: Path) -> None:
    path = rotated(tmp_path / "engine")
    first = next(iter(seg.segments(path).values()))
    data = bytearray(first.read_bytes())
    data[40] ^= 1
    first.write_bytes(data)

    assert "unknown" == audit_paths([path]).verdict


def test_every_single_segment_of_a_journal_is_clean(tmp_path: Path) -> None:
    for path in seg.segments(rotated(tmp_path / "engine")).values():
        audit = audit_paths([path])
        assert ("clean", 1) == (audit.verdict, audit.totals.began_before), path


def test_a_request_that_began_before_counts_in_the_window_of_its_end_only(tmp_path: Path) -> None:
    path = rotated(tmp_path / "engine")
    (began,) = (audit.began_seconds for audit in journals.followed_audits(path))
    assert began is not None
    counts = [
        audit_paths([path], window=Window(BEGAN + hour * HOUR, BEGAN + (hour + 1) * HOUR)).totals.began_before
        for hour in range(101)
    ]

    assert 1 == sum(counts)


class Fleet:
    """A folder in which an engine runs for weeks and restarts every three days, with a cron job beside it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        self.service = Service(folder / "engine-0", BEGAN)

    def run(self, day: int) -> None:
        """One day; in the last hour of every third day the engine restarts."""
        for hour in range(24):
            now = BEGAN + day * DAY + (hour + 1) * HOUR
            self.service.hour(now)
        if day % 3 == 2:
            self.service.stop(now)
            self.service = Service(self.folder / f"engine-{day + 1}", now)

    def audit(self, day: int, *options: str) -> tuple[int, dict[str, Any]]:
        """What ``kvledger audit`` answers at the end of a day."""
        self._patch.setattr("time.time", lambda: BEGAN + (day + 1) * DAY)
        code, printed = run("audit", self.folder, "--format", "json", "--jobs", "1", *options)
        return code, json.loads(printed)


def test_a_cron_job_returns_0_week_after_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four weeks with nine restarts; every journal has lost its oldest segments to rotation."""
    fleet = Fleet(tmp_path / "journals", monkeypatch)
    answers = []
    for day in range(28):
        fleet.run(day)
        code, hour = fleet.audit(day, "--since", "1h")
        answers.append((code, hour["verdict"]))
        if day % 7 == 6:
            assert 0 == fleet.audit(day)[0], f"day {day}"
    code, everything = fleet.audit(27)
    fleet.service.writer.close()

    assert [(0, "clean")] * 28 == answers
    assert (0, "clean", 10) == (code, everything["verdict"], len(everything["journals"]))
    assert 9 <= everything["began_before"] <= 10
    rotated = [path for path in fleet.folder.iterdir() if min(seg.segments(path)) > 1]
    assert 9 <= len(rotated)


def test_a_loss_makes_the_windows_that_include_it_unknown_and_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path / "journals", monkeypatch)
    for day in range(6):
        fleet.run(day)
    path = fleet.folder / "engine-3"
    middle = list(seg.segments(path))[1]
    (path / seg.segment_name(middle)).unlink()

    assert 3 == fleet.audit(5)[0]
    assert 3 == fleet.audit(5, "--since", "3d")[0]
    fleet.run(6)
    code, hour = fleet.audit(6, "--since", "1h")
    fleet.service.writer.close()

    assert (0, "clean") == (code, hour["verdict"])
    assert 4 <= hour["requests"] <= 5
