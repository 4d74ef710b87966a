"""Kill processes at any instant: ``python -m tests.fuzz.kills 100`` kills a hundred of each kind.

The kinds are engines, recorders of KV events, compactions, the sidecar's compacting child, and the children
that read journals for a command.

Each process is killed by SIGKILL after a random time. A follower reads all along. What must hold: no counter
falls, no request and no batch counts twice, and what was flushed before the kill counts. Prints a line for
each kind; returns 1 if something did not hold. The sidecar has a test of its own
(``KVLEDGER_KILLS=100 pytest -m crash tests/exporters/sidecar/test_crash.py``).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests import journals
from tests.exporters.facts.test_compact import Engine
from tests.exporters.test_kv_events import KEY, message
from tests.time_limits import RUN_HANGS

from kvledger.audit import events as ev
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.recorder import Recorder
from kvledger.audit.replay.atomic_files import FOLDER
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.parallel import Processes
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.dataset import facts
from kvledger.exporters.kv_events import EventRecorder, Received
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.processes import Compactor

SECONDS = 0.4
"""The longest time until a process is killed."""


def killed(work: Callable[..., None], rng: random.Random, *arguments: Any) -> int:
    """Run the work in a process and kill it; returns the number that it reported last as flushed."""
    reported = multiprocessing.Value("q", 0)
    child = os.fork()
    if not child:
        try:
            work(reported, *arguments)
        finally:
            os._exit(0)
    time.sleep(rng.random() * SECONDS)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    return int(reported.value)


# --- engines ------------------------------------------------------------------------------------------


def serve(reported: Any, folder: Path) -> None:
    """An engine that adds and ends one request after the other, and flushes now and then."""
    recorder, began = Recorder(folder, flush_seconds=0.01), time.monotonic()
    recorder.restart(replace(journals.STARTED, process_id=os.getpid()), ev.Snapshot(0, 0, [], 0))
    for number in count():
        at = int((time.monotonic() - began) * 1e6)
        recorder.record(ev.RequestAdded(at, number, f"{folder.name}-{number}", 17))
        recorder.record(ev.Finished(at, number, "abort", 0, 0, 0, 0, 0))
        if number % 50 == 49 and recorder.flush():
            reported.value = number + 1
        time.sleep(0.0002)


def ended(follower: Follower) -> int:
    """The requests that have ended, in what the sidecar exports."""
    return sum(audit.closed.requests for audit in follower.audits)


def kill_engines(number: int, rng: random.Random, root: Path) -> list[str]:
    """The figures of the follower never fall, and in the end they are those of the journals, each once."""
    wrong, flushed, last = [], 0, 0
    follower = Follower(root)
    for kill in range(number):
        flushed += killed(serve, rng, root / f"engine-{kill}-{kill}-0")
        follower.poll()
        now = ended(follower)
        if now < max(last, flushed):
            wrong.append(f"engine {kill}: {now:,} requests, {last:,} before, {flushed:,} flushed")
        last = now
    with facts([root]) as found:
        ((rows, different),) = found.rows("select count(*), count(distinct request_id) from requests")
    if not rows == different >= last:
        wrong.append(f"{rows:,} rows of {different:,} requests, {last:,} in the sidecar")
    print(f"engines: {number:,} kills, {flushed:,} requests flushed before them, {last:,} counted, each once")
    follower.close()
    return wrong


# --- recorders of KV events ---------------------------------------------------------------------------


class Endless:
    """A publisher that repeats what it sent, from any number on."""

    def __init__(self) -> None:
        self._next = 0

    def next(self) -> Received:
        time.sleep(0.0005)
        self._next += 1
        return message(self._next - 1, self._next * 1e-3)

    def replayed(self, first: int) -> list[Received]:
        return [message(number, number * 1e-3, replayed=True) for number in range(first, self._next)]


def record(reported: Any, folder: Path) -> None:
    recorder = EventRecorder(folder, Endless(), KEY, "tcp://localhost:5557")
    threading.Thread(target=recorder.run, args=(threading.Event(),), daemon=True).start()
    while True:
        batches = recorder.sums.batches
        if recorder._recorder.flush():
            reported.value = batches
        time.sleep(0.005)


def kill_recorders(number: int, rng: random.Random, root: Path) -> list[str]:
    """Each journal has the batches from the first one on, in order and once, and all that were flushed."""
    wrong, total = [], 0
    for kill in range(number):
        folder = root / str(kill)
        flushed = killed(record, rng, folder)
        found = [path for path in folder.glob("*") if any(path.glob("*.kvl"))] if folder.exists() else []
        events = [event for path in found for _, event in read(path)]
        batches = [event.sequence for event in events if isinstance(event, ev.KVEventsReceived)]
        total += len(batches)
        if batches != list(range(len(batches))) or len(batches) < flushed:
            wrong.append(f"recorder {kill}: {len(batches):,} batches, {flushed:,} flushed")
    print(f"recorders of KV events: {number:,} kills, {total:,} batches, each once and in order")
    return wrong


# --- compactions --------------------------------------------------------------------------------------


def keep(_: Any, journal: Path) -> None:
    while True:
        compact(journal)


def kill_compactions(number: int, rng: random.Random, root: Path) -> list[str]:
    """The rows after each kill are those of the journal alone."""
    wrong = []
    engine = Engine(root / "journals", 40 * number)
    for kill in range(number):
        engine.write(3)
        killed(keep, rng, engine.path)
        kept = rows(root / "journals")
        (root / "journals" / FOLDER).mkdir(mode=0o700, exist_ok=True)
        (root / "journals" / FOLDER).rename(root / "aside")
        expected = rows(root / "journals")
        (root / "aside").rename(root / "journals" / FOLDER)
        if kept != expected:
            wrong.append(f"compaction {kill}: {len(kept):,} requests, {len(expected):,} without kept rows")
    engine.stop()
    problem = compact(engine.path).problem
    print(f"compactions: {number:,} kills, {len(rows(root / 'journals')):,} requests, each once {problem}")
    return wrong + [problem] * bool(problem)


def rows(folder: Path) -> list[Any]:
    with facts([folder]) as found:
        return found.rows("select request_id, prompt_tokens, outcome from requests order by all")


# --- children -----------------------------------------------------------------------------------------


def kill_a_child(rng: random.Random, seconds: float, work_ended: threading.Event) -> bool:
    """Kill a process that this process began, at most ``seconds`` later; False: there was none."""
    until = time.monotonic() + 20
    while time.monotonic() < until and not work_ended.is_set():
        if found := list(children()):
            time.sleep(seconds * rng.random())
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(found), signal.SIGKILL)
                return True
        time.sleep(0.005)
    return False


def children() -> Iterator[int]:
    """The processes that this process began, without the one that counts semaphores for Python.

    A fork that has not become its program yet may be that one.
    """
    own = Path("/proc/self/cmdline").read_bytes()
    for path in Path("/proc/self/task").glob("*/children"):
        for each in path.read_text().split():
            with contextlib.suppress(OSError):
                line = Path("/proc", each, "cmdline").read_bytes()
                if line != own and b"resource_tracker" not in line:
                    yield int(each)


def kill_compacting_children(number: int, rng: random.Random, root: Path) -> list[str]:
    """The sidecar's thread goes on, says each failure, and what its next child keeps is right."""
    journals_folder, said = root / "journals", list[str]()
    engine = Engine(journals_folder, 40 * number)
    compactor = Compactor(journals_folder, 0.01, said.append)
    compactor.start()
    kills = 0
    for _ in range(number):
        engine.write(3)
        kills += kill_a_child(rng, 5 * SECONDS, threading.Event())
    engine.stop()
    failures, before = compactor.health.compact_failures, time.time()
    until = time.monotonic() + RUN_HANGS  # the child has a low priority
    while compactor.health.compacted_at < before and time.monotonic() < until:
        time.sleep(0.05)
    compactor.close()
    found = rows(journals_folder)
    (journals_folder / FOLDER).rename(root / "aside")
    wrong = ["the rows are not those of the journal"] * (found != rows(journals_folder))
    wrong += [f"it compacted no more: {said}"] * (compactor.health.compacted_at < before)
    wrong += [f"{kills:,} kills, {failures:,} failures"] * (failures > kills)
    print(f"compacting children: {kills:,} kills, {failures:,} failures, {len(found):,} requests, each once")
    return wrong


def kill_reading_children(number: int, rng: random.Random, root: Path) -> list[str]:
    """A command whose child is killed has all figures, or none and a sentence."""
    for each in range(4):
        journals.clean(root / f"engine-{each}")
    expected = audit_paths([root]).totals.requests
    whole = refused = 0
    wrong = []
    for _ in range(number):
        ended = threading.Event()
        killer = threading.Thread(target=kill_a_child, args=(rng, SECONDS, ended))
        killer.start()
        try:
            found = audit_paths([root], run=Processes(2)).totals.requests
            whole += 1
            wrong += [f"{found:,} requests and not {expected:,}"] * (found != expected)
        except LedgerError as error:
            refused += 1
            wrong += [str(error)] * ("killed" not in str(error))
        ended.set()
        killer.join()
    print(f"reading children: {number:,} tries, {whole:,} whole answers, {refused:,} sentences")
    return wrong


KINDS = {
    "engine": kill_engines,
    "recorder": kill_recorders,
    "compact": kill_compactions,
    "child": kill_compacting_children,
    "reader": kill_reading_children,
}


def main() -> int:
    """Returns 1 if something did not hold."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    wrong = []
    for name in sys.argv[3:] or KINDS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            wrong += KINDS[name](number, random.Random(seed), Path(folder))
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    print(*wrong[:20], f"seed {seed}: {len(wrong):,} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
