"""vLLM's ways to end an engine, wrapped: journals get the time to end, and nothing reaches the engine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests import journals

from kvledger.audit import engines
from kvledger.audit.entry import engine_end
from kvledger.audit.entry.engine_end import GRACE_SECONDS
from kvledger.audit.events import Snapshot, WorkerStepped
from kvledger.audit.journal.format import take_lock
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.recorder import Recorder

LIVE, DEAD = 4711, 4712


class Process:
    """An engine core as the front end sees it."""

    def __init__(self, pid: int, *, alive: bool = True) -> None:
        self.pid = pid
        self.is_alive = lambda: alive


@pytest.fixture
def timeouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's ``shutdown`` as wrapped, which returns the timeout that it was called with."""

    def shutdown(procs: Any, timeout: float | None = None) -> float | None:
        return timeout

    module = SimpleNamespace(shutdown=shutdown)
    monkeypatch.setattr(engines, "engine_processes", lambda: module)
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    for pid in (LIVE, DEAD):
        (tmp_path / f"engine-1700000000000-{pid}-0").mkdir()
    with locked(tmp_path / f"engine-1700000000000-{LIVE}-0"):
        engine_end.give_time()
        yield module.shutdown


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A journal whose writer lives."""

    descriptor = take_lock(folder)
    yield
    os.close(descriptor)


def test_an_observed_engine_core_is_given_time_before_it_is_killed(timeouts: Any) -> None:
    assert GRACE_SECONDS == timeouts([Process(LIVE)], timeout=0)
    assert GRACE_SECONDS == timeouts([Process(DEAD), Process(LIVE)], 0)


@pytest.mark.parametrize("timeout", [None, GRACE_SECONDS, 30.0])
def test_a_longer_timeout_and_vllms_default_are_not_changed(timeouts: Any, timeout: float | None) -> None:
    assert timeout == timeouts([Process(LIVE)], timeout=timeout)


def test_an_engine_core_without_a_live_journal_is_ended_as_vllm_does(
    timeouts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert 0 == timeouts([], timeout=0)
    assert 0 == timeouts([Process(DEAD), Process(1)], timeout=0)
    assert 0 == timeouts([Process(LIVE, alive=False)], timeout=0)
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path / "nowhere"))
    assert 0 == timeouts([Process(LIVE)], timeout=0)


def test_a_failure_to_look_for_journals_leaves_the_shutdown_alone(
    timeouts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvledger"):
        assert 0 == timeouts([object()], timeout=0)

    assert "kvledger can't tell whether an engine is observed" in caplog.text


def test_an_import_that_fails_at_the_end_leaves_the_shutdown_alone(
    timeouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of kvledger may have been installed while the engine ran."""
    monkeypatch.setitem(sys.modules, "kvledger.audit.journal.catalogue", None)

    assert 0 == timeouts([Process(LIVE)], timeout=0)


def test_wrapping_twice_is_wrapping_once(timeouts: Any) -> None:
    engine_end.give_time()

    assert not hasattr(timeouts.__wrapped__, "__wrapped__")


# --- the engine core --------------------------------------------------------------------------------


class Scheduler:
    """Something that an observer watches."""


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for vLLM's class of engine cores; ``happened`` has what happened, in order."""

    class EngineCore:
        happened: ClassVar[list[str]] = []

        def __init__(self) -> None:
            self.scheduler = Scheduler()

        def shutdown(self) -> None:
            self.happened.append("the workers are released")

    EngineCore.happened = []
    monkeypatch.setattr(engines, "engine_core", lambda: EngineCore)
    return EngineCore


class Observer:
    """Notes that its journal ended."""

    def __init__(self, happened: list[str], error: Exception | None = None) -> None:
        self._happened = happened
        self._error = error

    def shutting_down(self) -> None:
        self._happened.append("the journal ends")
        if self._error is not None:
            raise self._error


def test_the_journal_ends_before_the_workers_are_released(core: Any) -> None:
    engine, other = core(), core()
    observer = Observer(core.happened)
    engine_end.end_before_shutdown(engine.scheduler, observer)
    engine_end.end_before_shutdown(Scheduler(), Observer(core.happened))

    other.shutdown()
    assert ["the workers are released"] == core.happened
    engine.shutdown()
    assert ["the journal ends", "the workers are released"] == core.happened[1:]


def test_the_events_of_workers_are_written_before_the_workers_are_released(core: Any, tmp_path: Path) -> None:
    """The front end may kill the process while the workers are released."""
    recorder = Recorder(tmp_path / "worker-1-2-0", flush_seconds=60.0)
    recorder.restart(journals.STARTED, Snapshot(0, 0, [], 0))
    assert recorder.flush()
    recorder.record(WorkerStepped(1, 1, 0, True, [], 1, 0, True, [], [], [], []))
    engine, observer = core(), Observer(core.happened)
    engine_end.end_before_shutdown(engine.scheduler, observer)

    engine.shutdown()

    assert WorkerStepped in {type(event) for _, event in read(tmp_path / "worker-1-2-0")}
    recorder.close()


def test_an_observer_that_fails_does_not_keep_the_engine_from_ending(core: Any) -> None:
    engine = core()
    observer = Observer(core.happened, RuntimeError("broken"))
    engine_end.end_before_shutdown(engine.scheduler, observer)

    engine.shutdown()

    assert ["the journal ends", "the workers are released"] == core.happened


def test_an_engine_that_is_dropped_is_not_kept_alive(core: Any) -> None:
    engine = core()
    engine_end.end_before_shutdown(engine.scheduler, Observer(core.happened))
    before = len(engine_end._observers)

    del engine

    assert before - 1 == len(engine_end._observers)
