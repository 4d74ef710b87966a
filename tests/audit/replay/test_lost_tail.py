"""A journal whose engine is gone without ``EngineStopped``: unknown after its last whole batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.events import CacheReset, EngineStopped, Snapshot
from kvledger.audit.journal import format as seg
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.windows import Window
from kvledger.exporters.sidecar.follower import Follower

BEGAN = journals.STARTED.began_seconds
ENDED = "A0+0 s10 o+ F"
OPEN = "A0+0 s10 o+"
LOST = (
    "the engine did not end in good order, or the journal's last segments were removed: "
    "the trace is whole up to 2023-11-14 22:13:20 UTC"
)
ROOT = Path(__file__).parents[3]


def segmented(folder: Path, *, stopped: bool) -> Path:
    """A journal with three segments, each with one request that began and ended in it."""
    writer = JournalWriter(folder)
    for request in range(3):
        writer.rotate()
        writer.write([journals.STARTED, Snapshot(0, 0, [], 0), *events(10, ENDED, request=request)])
    if stopped:
        writer.write([EngineStopped(1_000_000, "shutdown")])
    writer.close()
    return folder


def followed(folder: Path) -> EngineAudit:
    """The journal's audit as the sidecar has it."""
    follower = Follower(folder)
    follower.catch_up()
    (audit,) = follower.audits
    follower.close()
    return audit


def test_a_journal_without_an_engine_stop_is_unknown_and_its_ended_requests_are_clean(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "killed", events(10, ENDED), stopped=False)

    (audit,) = audit_paths([path]).engines

    assert ("unknown", {("clean", "stopped"): 1}) == (audit.verdict, audit.journal.requests)
    assert [LOST] == audit.all_notes


def test_a_request_that_is_open_at_a_lost_tail_is_unknown(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "killed", events(10, OPEN), stopped=False)

    audit = audit_paths([path])

    assert (1, 1) == (audit.totals.requests, audit.totals.unknown_requests)
    assert ["1 accounts are unknown", LOST, "in 1 of them: its end was not observed"] == audit.notes


@pytest.mark.parametrize("removed", [(3,), (2, 3)])
def test_removed_last_segments_of_a_stopped_engine_are_found(
    tmp_path: Path, removed: tuple[int, ...]
) -> None:
    path = segmented(tmp_path / "engine", stopped=True)
    assert "clean" == audit_paths([path]).verdict
    for number in removed:
        (path / seg.segment_name(number)).unlink()

    (audit,) = audit_paths([path]).engines

    assert ("unknown", {("clean", "stopped"): 3 - len(removed)}) == (audit.verdict, audit.journal.requests)
    assert [LOST] == audit.all_notes


def test_the_sidecar_and_the_command_line_have_the_same_doubts(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "killed", events(10, OPEN), stopped=False)
    (audit,) = audit_paths([path]).engines
    sidecar = followed(path)

    assert ("unknown", audit.doubts) == (sidecar.verdict, sidecar.doubts)
    assert ("clean", []) == (
        (stopped := followed(segmented(tmp_path / "stopped", stopped=True))).verdict,
        stopped.doubts,
    )


def test_a_violation_outweighs_a_lost_tail(tmp_path: Path) -> None:
    stream = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)

    assert "violated" == audit_paths([journals.write(tmp_path / "bad", stream, stopped=False)]).verdict


def test_the_journal_of_a_running_engine_has_no_lost_tail(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "engine")
    writer.rotate()
    writer.write([journals.STARTED, Snapshot(0, 0, [], 0), *events(10, OPEN)])

    audit = audit_paths([tmp_path / "engine"])
    sidecar = followed(tmp_path / "engine")
    writer.close()

    assert ("clean", ["the engine is still running, this is up to now"]) == (audit.verdict, audit.notes)
    assert "clean" == sidecar.verdict
    assert "unknown" == audit_paths([tmp_path / "engine"]).verdict


def test_a_single_segment_that_is_not_the_last_has_no_lost_tail(tmp_path: Path) -> None:
    path = segmented(tmp_path / "engine", stopped=True)
    one = audit_paths([path / seg.segment_name(2)])

    assert ("clean", 1) == (one.verdict, one.totals.requests)
    assert ["this segment is not the journal's last"] == one.notes
    (path / seg.segment_name(3)).unlink()
    assert "unknown" == audit_paths([path / seg.segment_name(2)]).verdict


def test_a_window_that_ended_before_the_lost_tail_is_clean(tmp_path: Path) -> None:
    stream = [*events(10, ENDED), CacheReset(100_000_000, True, False)]
    path = journals.write(tmp_path / "killed", stream, stopped=False)

    assert "clean" == audit_paths([path], window=Window(None, BEGAN + 50)).verdict
    assert "unknown" == audit_paths([path], window=Window(None, BEGAN + 101)).verdict
    assert "unknown" == audit_paths([path], window=Window(BEGAN + 9e9, None)).verdict, "nobody knows when"


# --- the heartbeat, which bounds the time of a kill -------------------------------------------------


def killed(folder: Path, seconds: float) -> Path:
    """The journal of an engine that was killed during a request; its last heartbeat was at ``seconds``."""
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write([journals.STARTED, Snapshot(0, 0, [], 0), *events(10, OPEN)])
    writer.idle()
    os.utime(folder / seg.LOCK, (seconds, seconds))
    writer.abandon()
    return folder


def test_a_window_that_began_after_the_kill_is_clean(tmp_path: Path) -> None:
    """The lost events came before the kill, two heartbeats after the last one at the latest."""
    path = killed(tmp_path / "killed", BEGAN + 1000)
    gone = BEGAN + 1000 + 2 * seg.HEARTBEAT_SECONDS

    assert gone == seg.gone_by(path)
    assert "unknown" == audit_paths([path]).verdict
    assert "unknown" == audit_paths([path], window=Window(gone - 1, None)).verdict
    later = audit_paths([path], window=Window(gone + 1, None))
    assert ("clean", 0) == (later.verdict, later.totals.requests)


def test_a_living_writer_touches_its_lock_file_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = JournalWriter(tmp_path)
    lock = tmp_path / seg.LOCK
    touched = []
    for _ in range(121):
        writer.idle()
        touched.append(lock.stat().st_mtime > 0)
        os.utime(lock, (0, 0))
        now += 1.0

    assert [0, 60, 120] == [second for second, one in enumerate(touched) if one]
    assert seg.HEARTBEAT == lock.read_bytes()
    writer.close()
    assert b"" == lock.read_bytes(), "a writer that closes says nothing about the engine"
    assert float("inf") == seg.gone_by(tmp_path)


# --- a process that is killed -----------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from tests import journals
from tests.histories import events
from kvledger.audit.events import Snapshot
from kvledger.audit.journal.recorder import Recorder

recorder = Recorder(Path(sys.argv[1]), flush_seconds=60)
recorder.restart(journals.STARTED, Snapshot(0, 0, [], 0))
recorder.record_all(events(10, "A0+0 s10 o+ F"))
recorder.flush()
recorder.record_all(events(10, "A0+0 s10 o+ F", request=1))
print("recorded", flush=True)
time.sleep(60)
"""


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written one request and holds another one back."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "engine")],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "recorded\n" == process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_kill_9_between_two_writes_is_unknown(tmp_path: Path, writing: subprocess.Popen[str]) -> None:
    """No byte is torn: the second request is missing, and only the missing EngineStopped shows it."""
    assert "clean" == audit_paths([tmp_path / "engine"]).verdict

    writing.send_signal(signal.SIGKILL)
    writing.wait()
    audit = audit_paths([tmp_path / "engine"])

    assert ("unknown", 1, 0) == (audit.verdict, audit.totals.requests, audit.totals.unknown_requests)
    assert [LOST] == audit.notes
    with Reader(tmp_path / "engine") as reader:
        list(reader.poll())
        assert [] == reader.damage
