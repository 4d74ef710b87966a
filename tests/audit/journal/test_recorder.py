"""The recorder never blocks the engine, never raises into it, and counts lost events."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.time_limits import HANGS

from kvledger.audit import events as ev
from kvledger.audit.journal import recorder as recording
from kvledger.audit.journal.format import is_live, segments
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.recorder import MemoryRecorder, Recorder
from kvledger.audit.journal.writer import JournalWriter, Limits

SOURCE = str(Path(__file__).parents[3] / "src")


def started(at: int = 0) -> ev.EngineStarted:
    return ev.EngineStarted(at, 1.7e9, "vllm", "0.32", "v1", "tokens", 7, {"block_size": 16})


def snapshot(at: int = 0) -> ev.Snapshot:
    return ev.Snapshot(at, 0, [], 0)


def repeated(number: int) -> ev.Repeated:
    return ev.Repeated(number, number)


def events(folder: Path) -> list[ev.Event]:
    return [event for _, event in read(folder)]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Stuck:
    """A disk whose writes block until ``free`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.entered = threading.Event()
        write = JournalWriter.write

        def slow(journal: JournalWriter, batch: Any) -> None:
            self.entered.set()
            self.free.wait(2 * HANGS)
            write(journal, batch)

        monkeypatch.setattr(JournalWriter, "write", slow)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    disk = Stuck(monkeypatch)
    yield disk
    disk.free.set()


# --- recorded events are written -------------------------------------------------------------------


def test_recorded_events_are_read_in_order_with_an_engine_stop_at_the_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    for number in range(1000):
        recorder.record(repeated(number))
    recorder.close("detached")

    recorded = events(tmp_path / "engine")

    assert [started(), snapshot(), *map(repeated, range(1000))] == recorded[:-1]
    assert isinstance(recorded[-1], ev.EngineStopped)
    assert "detached" == recorded[-1].reason
    assert 1003 == recorder.recorded_events == recorder.written_events
    assert (0, 0, 0) == (recorder.lost_events, recorder.write_failures, recorder.failures)
    assert recorder.written_bytes == (tmp_path / "engine" / "00000001.kvl").stat().st_size
    assert recorder.writer_seconds > 0


def test_queued_numbers_are_encoded_and_read_back_as_a_list(tmp_path: Path) -> None:
    """The garbage collector of the engine's process would walk every queued list."""
    recorder = Recorder(tmp_path / "engine", flush_seconds=60)
    recorder.restart(started(), snapshot())
    numbers = [ev.CACHED, -1, 0, 7, 3, 300, -(2**63), 2**64 - 1]
    kept = recorder.keep(numbers)
    recorder.record(ev.PoolCalls(1, 1, [], kept))
    numbers.clear()
    assert not gc.is_tracked(kept)
    recorder.close()

    expected = [ev.CACHED, -1, 0, 7, 3, 300, -(2**63), 2**64 - 1]
    assert ev.PoolCalls(1, 1, [], expected) == events(tmp_path / "engine")[2]


@pytest.mark.parametrize("odd", [object(), 2**80], ids=["no number", "too large"])
def test_numbers_that_cannot_be_encoded_are_a_gap(tmp_path: Path, odd: Any) -> None:
    recorder = Recorder(tmp_path / "engine", flush_seconds=60)
    recorder.restart(started(), snapshot())
    recorder.record(ev.Stepped(1, 1, recorder.keep([1, odd]), []))
    recorder.record(repeated(2))
    recorder.close()

    gap, after = events(tmp_path / "engine")[2:4]
    assert isinstance(gap, ev.Gap)
    assert (1, repeated(2)) == (gap.lost_events, after)
    assert 1 == recorder.lost_events


def test_no_folder_is_created_before_the_first_event(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine", flush_seconds=0.001)
    time.sleep(0.02)
    assert recorder.flush()
    recorder.close()

    assert [] == list(tmp_path.iterdir())


def test_events_are_written_without_a_flush(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine", flush_seconds=0.01)
    recorder.restart(started(), snapshot())

    wait_until(lambda: recorder.written_events == 2)

    assert is_live(tmp_path / "engine")
    recorder.close()
    assert not is_live(tmp_path / "engine")


def test_many_queued_events_are_written_before_the_flush_interval(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine", capacity_events=80, flush_seconds=60)
    recorder.restart(started(), snapshot())
    for number in range(12):
        recorder.record(repeated(number))

    wait_until(lambda: recorder.written_events == 14)
    recorder.close()


def test_an_engine_stop_is_not_recorded_twice(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    recorder.record(ev.EngineStopped(7, "shutdown"))
    recorder.close()
    recorder.close("again")
    recorder.record(repeated(1))

    assert [started(), snapshot(), ev.EngineStopped(7, "shutdown")] == events(tmp_path / "engine")
    assert 1 == recorder.lost_events


def test_the_engine_stop_has_the_time_of_the_observers_clock(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(5_000_000), snapshot(5_000_000))
    recorder.close()

    assert 5_000_000 <= events(tmp_path / "engine")[-1].at < 10_000_000


def test_the_engine_stop_is_never_earlier_than_the_event_before_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    recorder.record(repeated(10**12))
    recorder.close()

    assert ev.EngineStopped(10**12, "exit") == events(tmp_path / "engine")[-1]


def test_record_all_accepts_as_many_events_as_single_calls(tmp_path: Path, stuck: Stuck) -> None:
    recorder = Recorder(tmp_path / "engine", capacity_events=4, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    assert stuck.entered.wait(HANGS)
    recorder.record_all([repeated(1), repeated(2), repeated(3)])
    recorder.record_all([repeated(4), repeated(5)])
    stuck.free.set()
    recorder.close()

    *recorded, gap, _ = events(tmp_path / "engine")[2:]
    assert list(map(repeated, range(1, 5))) == recorded
    assert 1 == getattr(gap, "lost_events", None) == recorder.lost_events


# --- snapshots and segments ------------------------------------------------------------------------


def test_a_snapshot_is_wanted_at_the_start_and_once_at_every_rotation(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine", Limits(segment_bytes=4096), flush_seconds=0.001)
    restarts = 0
    assert recorder.wants_snapshot
    for number in range(20_000):
        if recorder.wants_snapshot:
            recorder.restart(started(number), snapshot(number))
            restarts += 1
        recorder.record(repeated(number))
        if number % 200 == 0:
            recorder.flush()
    recorder.close()

    assert restarts > 10
    assert restarts == len(segments(tmp_path / "engine"))
    segment_starts = [
        batch.events[:2] for batch in Reader(tmp_path / "engine").poll() if batch.begins_segment
    ]
    assert restarts == len(segment_starts)
    assert {(ev.EngineStarted, ev.Snapshot)} == {(type(a), type(b)) for a, b in segment_starts}
    recorded = [event for event in events(tmp_path / "engine") if isinstance(event, ev.Repeated)]
    assert list(map(repeated, range(20_000))) == recorded


def test_an_overflow_is_a_gap_followed_by_a_snapshot(tmp_path: Path, stuck: Stuck) -> None:
    recorder = Recorder(tmp_path / "engine", capacity_events=100, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    assert stuck.entered.wait(HANGS)
    for number in range(250):
        recorder.record(repeated(number))
    assert 150 == recorder.lost_events
    assert not recorder.wants_snapshot  # the queue has no room for a snapshot yet

    stuck.free.set()
    wait_until(lambda: recorder.wants_snapshot)
    recorder.record(repeated(999))  # lost as well: after a loss the next event must be a snapshot
    recorder.restart(started(7), snapshot(7))
    recorder.record(repeated(1000))
    recorder.close()

    assert [
        started(),
        snapshot(),
        *map(repeated, range(100)),
        ev.Gap(7, 151, "the recorder was full"),
        started(7),
        snapshot(7),
        repeated(1000),
    ] == events(tmp_path / "engine")[:-1]
    assert 151 == recorder.lost_events
    assert 2 == len(segments(tmp_path / "engine"))


def test_an_overflow_without_a_later_snapshot_is_a_gap_at_the_end(tmp_path: Path, stuck: Stuck) -> None:
    recorder = Recorder(tmp_path / "engine", capacity_events=10, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    assert stuck.entered.wait(HANGS)
    for number in range(15):
        recorder.record(repeated(number))
    recorder.record(ev.EngineStopped(99, "shutdown"))
    stuck.free.set()
    recorder.close()

    gap, stopped = events(tmp_path / "engine")[-2:]
    assert isinstance(gap, ev.Gap)
    assert 6 == gap.lost_events
    assert isinstance(stopped, ev.EngineStopped)


def test_a_stuck_disk_blocks_neither_recording_nor_closing_for_long(tmp_path: Path, stuck: Stuck) -> None:
    recorder = Recorder(tmp_path / "engine", flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    assert stuck.entered.wait(HANGS)

    begun = time.monotonic()
    recorder.record(repeated(1))
    assert not recorder.flush(timeout=0.05)
    recorder.close(timeout=0.05)

    assert time.monotonic() - begun < HANGS


# --- failures never reach the engine ----------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_whatever_ends_the_writer_is_logged_and_counted(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_self: JournalWriter, _events: list[ev.Event]) -> None:
        raise error

    monkeypatch.setattr(JournalWriter, "write", write)
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "engine", flush_seconds=0.001)
        recorder.restart(started(), snapshot())
        recorder._thread.join(HANGS)
        recorder.record(repeated(1))
        recorder.close()

    logged = [text for text in caplog.messages if str(tmp_path) in text]  # others may end meanwhile
    assert 1 == recorder.failures == len(logged)
    assert type(error).__name__ in logged[0]
    assert not recorder.wants_snapshot


def test_a_folder_that_cannot_be_created_logs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        recorder = Recorder(tmp_path / "file" / "engine", flush_seconds=0.001)
        recorder.restart(started(), snapshot())
        recorder._thread.join(HANGS)
        for number in range(10):
            recorder.record(repeated(number))
        recorder.restart(started(), snapshot())
        recorder.flush()
        recorder.close()

    assert 1 == recorder.failures == len(caplog.records)
    assert not recorder.wants_snapshot
    assert 12 == recorder.lost_events


def test_a_folder_that_was_removed_is_made_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, every later event went to a file without a name, and nothing said so."""
    recorder = Recorder(tmp_path / "journals" / "engine", flush_seconds=60)
    recorder.restart(started(), snapshot())
    recorder.flush()
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        for turn in range(2):
            shutil.rmtree(tmp_path / "journals")
            recorder.record(repeated(1))
            recorder.flush()
            wait_until(lambda: recorder.wants_snapshot)
            recorder.restart(started(2 + turn), snapshot(2 + turn))
            recorder.record(repeated(4))
            recorder.flush()
            assert is_live(recorder.folder)
    recorder.close()

    assert [started(3), snapshot(3), repeated(4)] == events(recorder.folder)[-4:-1]
    assert 0 == recorder.failures
    (record,) = caplog.records
    assert f"files of the journal {recorder.folder} were moved, removed or cut" in record.message


def test_a_folder_that_cannot_be_made_again_is_made_later_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "journals" / "engine", flush_seconds=0.002)
    recorder.restart(started(), snapshot())
    recorder.flush()
    shutil.rmtree(tmp_path / "journals")
    (tmp_path / "journals").write_text("no folder")
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        wait_until(lambda: caplog.records)
        for number in range(10):
            recorder.record(repeated(number))
            recorder.flush()
    assert [f"kvledger can't make the journal {recorder.folder} again"] == [
        record.message.partition(":")[0] for record in caplog.records
    ]
    (tmp_path / "journals").unlink()
    wait_until(lambda: recorder.wants_snapshot)
    recorder.restart(started(), snapshot())
    recorder.close()

    assert 0 == recorder.failures < recorder.write_failures
    assert any(recorder.folder.glob("*.kvl"))


def test_a_locked_folder_makes_the_recorder_inert(tmp_path: Path) -> None:
    other = JournalWriter(tmp_path)
    recorder = Recorder(tmp_path, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    recorder._thread.join(HANGS)
    assert 1 == recorder.failures
    recorder.close()
    other.close()

    assert {} == segments(tmp_path)


def test_a_broken_writer_never_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(JournalWriter, "write", broken)
    recorder = Recorder(tmp_path / "engine", capacity_events=50, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    recorder._thread.join(HANGS)
    for number in range(200):
        recorder.record(repeated(number))
    recorder.restart(started(), snapshot())
    recorder.close()

    assert 200 <= recorder.lost_events
    assert not is_live(tmp_path / "engine")
    assert 1 == len(caplog.records)


def test_a_waiting_flush_returns_when_the_writer_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(JournalWriter, "write", broken)
    recorder = Recorder(tmp_path / "engine", flush_seconds=0.05)
    recorder.restart(started(), snapshot())

    begun = time.monotonic()
    recorder.flush(timeout=2 * HANGS)

    assert time.monotonic() - begun < HANGS


def test_a_waiting_flush_returns_when_an_event_before_it_breaks_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    recorder = Recorder(tmp_path / "engine", flush_seconds=60)
    recorder.restart(started(), snapshot())
    assert recorder.flush()
    monkeypatch.setattr(JournalWriter, "write", broken)
    recorder.record(repeated(1))

    begun = time.monotonic()
    recorder.flush(timeout=2 * HANGS)

    assert time.monotonic() - begun < HANGS


@pytest.mark.parametrize("odd", [object(), {"an": "object"}], ids=["not encodable", "encodable"])
@pytest.mark.parametrize("last", [False, True])
def test_only_the_object_that_is_no_event_is_lost(tmp_path: Path, odd: Any, last: bool) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    if last:
        recorder.record(repeated(1))
        recorder.record(odd)
    else:
        recorder.record(odd)
        recorder.record(repeated(1))
    recorder.close()

    assert repeated(1) in events(tmp_path / "engine")
    assert 1 == recorder.lost_events
    assert 0 == recorder.failures
    assert 5 == recorder.recorded_events


def test_an_event_that_cannot_be_encoded_is_a_gap_in_its_place(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine", flush_seconds=60)
    recorder.restart(started(), snapshot())
    odd: Any = object()
    recorder.record_all([repeated(1), ev.Repeated(2, odd), ev.Repeated(2, 2**80), repeated(3)])
    recorder.record(ev.Repeated(4, odd))
    recorder.close()

    one, gap, two, last, stopped = events(tmp_path / "engine")[2:]
    assert (repeated(1), repeated(3)) == (one, two)
    assert ev.Gap(1, 2, "an event can't be encoded: TypeError") == gap
    assert ev.Gap(3, 1, "an event can't be encoded: TypeError") == last
    assert isinstance(stopped, ev.EngineStopped)
    assert 3 == recorder.lost_events


def test_a_failing_observer_at_exit_does_not_keep_the_journal_open(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    recorder.on_exit = lambda: 1 // 0

    recorder._exit()

    assert "exit" == getattr(events(tmp_path / "engine")[-1], "reason", None)


# --- processes --------------------------------------------------------------------------------------

PROCESS = """
import multiprocessing, os, sys, time, functools
sys.path.insert(0, sys.argv[1])
from kvledger.audit.events import EngineStarted, EngineStopped, Repeated, Snapshot
from kvledger.audit.journal.recorder import Recorder

def engine(folder):
    recorder = Recorder(folder, flush_seconds=60)
    recorder.restart(EngineStarted(0, 0.0, "", "", "", "", 1, {}), Snapshot(0, 0, [], 0))
    recorder.on_exit = functools.partial(recorder.record, EngineStopped(5, "last words"))
    recorder.record(Repeated(1, 1))
    if sys.argv[3] == "raise":
        raise SystemExit(3)

if __name__ == "__main__":
    if sys.argv[3] == "main":
        engine(sys.argv[2])
    else:
        how = "spawn" if sys.argv[3] == "spawn" else "fork"
        process = multiprocessing.get_context(how).Process(target=engine, args=(sys.argv[2],))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("how", ["main", "fork", "spawn", "raise"])
def test_queued_events_are_written_when_the_process_ends(tmp_path: Path, how: str) -> None:
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    folder = tmp_path / "engine"

    subprocess.run([sys.executable, script, SOURCE, folder, how], check=True, timeout=60)

    recorded = events(folder)
    assert [ev.Repeated(1, 1), ev.EngineStopped(5, "last words")] == recorded[2:]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_is_inert_and_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    recorder = Recorder(folder, flush_seconds=0.001)
    recorder.restart(started(), snapshot())
    recorder.flush()
    (start_read, start_write), (checked_read, checked_write) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        failed = 1
        try:
            recorder.record(repeated(666))
            recorder.restart(started(666), snapshot(666))
            recorder.flush()
            recorder.close()
            failed = int(recorder.wants_snapshot or not is_live(folder))
            os.close(checked_write)
            os.close(start_write)
            os.read(start_read, 1)
        finally:
            os._exit(failed)

    os.close(checked_write)
    os.read(checked_read, 1)  # returns when the child has checked
    recorder.record(repeated(1))
    recorder.close()

    assert not is_live(folder)  # although the child still runs
    for end in (start_read, start_write, checked_read):
        os.close(end)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert [started(), snapshot(), repeated(1)] == events(folder)[:-1]


# --- what it costs ----------------------------------------------------------------------------------


def test_recording_an_event_takes_less_than_600_ns(tmp_path: Path) -> None:
    """The budget is 150 ns; the bound is wide because the machine that runs this is shared."""
    recorder = Recorder(tmp_path / "engine", flush_seconds=10)
    event = repeated(1)
    best = float("inf")
    gc.disable()
    try:
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(1000):
                recorder.record(event)
            best = min(best, time.perf_counter() - begun)
    finally:
        gc.enable()
    recorder.close()

    assert best / 1000 < 600e-9


def test_an_idle_recorder_uses_almost_no_time(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.restart(started(), snapshot())
    recorder.flush()
    time.sleep(0.3)
    before = recorder.writer_seconds
    size = recorder.written_bytes

    time.sleep(1.2)

    assert recorder.writer_seconds - before < 0.012
    assert size == recorder.written_bytes
    recorder.close()


# --- in memory --------------------------------------------------------------------------------------


def test_in_memory_recorded_events_are_taken_once() -> None:
    recorder = MemoryRecorder()
    assert recorder.wants_snapshot
    recorder.restart(started(), snapshot())
    recorder.record(repeated(1))

    assert [started(), snapshot(), repeated(1)] == recorder.take()
    assert [] == recorder.take()
    assert not recorder.wants_snapshot
    recorder.record(repeated(2))
    assert recorder.flush()
    recorder.close("detached")
    recorder.record(repeated(3))
    last = recorder.take()
    assert repeated(2) == last[0]
    assert "detached" == getattr(last[1], "reason", None)
    assert (5, 1) == (recorder.recorded_events, recorder.lost_events)


def test_in_memory_an_overflow_is_a_gap_too() -> None:
    recorder = MemoryRecorder(capacity_events=10)
    recorder.restart(started(), snapshot())
    for number in range(20):
        recorder.record(repeated(number))
    assert not recorder.wants_snapshot
    assert 10 == len(recorder.take())
    assert recorder.wants_snapshot
    recorder.record(repeated(20))
    recorder.restart(started(5), snapshot(5))

    assert [ev.Gap(5, 13, recording.OVERFLOW), started(5), snapshot(5)] == recorder.take()
    assert 13 == recorder.lost_events


def test_in_memory_an_engine_stop_is_not_recorded_twice() -> None:
    recorder = MemoryRecorder()
    recorder.restart(started(), snapshot())
    recorder.record(ev.EngineStopped(7, "detached"))
    recorder.take()
    recorder.close()

    assert [] == recorder.take()


@pytest.mark.parametrize("name", [n for n in vars(MemoryRecorder) if not n.startswith("_")])
def test_both_recorders_have_the_same_interface(tmp_path: Path, name: str) -> None:
    recorder = Recorder(tmp_path / "engine")
    recorder.close()

    assert name == "take" or hasattr(recorder, name)
