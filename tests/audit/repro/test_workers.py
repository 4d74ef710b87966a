"""Worker processes of repro: forks of one process, replaced when one ends, and alike wherever they run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.time_limits import HANGS

from kvledger.audit.repro.workers import Job, Pool
from kvledger.audit.traffic import processes
from kvledger.audit.traffic.script import Workload

NO_ENGINE = Workload(release="", engine={"no such setting": 1}, requests={}, script=())
"""Ends before vLLM is imported."""
JOB = msgspec.json.encode(Job("tokens/balance", NO_ENGINE))


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ask(pool: Pool) -> None:
    """Ask each worker for something."""
    for worker in workers(pool):
        found = worker.ask(JOB, 60.0)
        assert found is not None and b'"error":"TypeError' in found


def workers(pool: Pool) -> list[processes.Worker]:
    assert pool.workers is not None
    return pool.workers.all


def test_workers_are_forks_of_one_process(pool: Pool):
    ask(pool)

    first, second = (worker.pid for worker in workers(pool))
    assert first != second
    assert parent_of(first) == parent_of(second) != os.getpid()


def test_a_worker_that_was_killed_is_replaced(pool: Pool):
    ask(pool)
    worker = workers(pool)[0]
    killed = worker.pid
    os.kill(killed, signal.SIGKILL)

    assert worker.ask(JOB, 60.0) is None
    ask(pool)
    assert worker.pid not in (0, killed)


def test_a_process_with_a_second_thread_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    monkeypatch.setattr(processes, "_BOOT", thread + processes._BOOT)

    with Pool(2) as pool:
        ask(pool)
        assert all(worker.own is not None for worker in workers(pool))


def test_a_thread_of_jemalloc_does_not_forbid_a_fork(monkeypatch: pytest.MonkeyPatch):
    thread = (
        "import threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)\n"
        "thread.start()\n"
        "with open('/proc/self/task/%d/comm' % thread.native_id, 'w') as name:\n"
        "    name.write('jemalloc_bg_thd')\n"
    )
    monkeypatch.setattr(processes, "_BOOT", thread + processes._BOOT)

    with Pool(2) as pool:
        ask(pool)
        assert all(worker.own is None for worker in workers(pool))


def test_no_process_is_left_behind():
    with Pool(2) as pool:
        ask(pool)
        started = {worker.pid for worker in workers(pool)}
        started.add(parent_of(min(started)))

    until = time.monotonic() + HANGS
    while any(map(is_running, started)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, started))


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
