"""How fast a journal is audited, and in how much memory.

One thread reads and decodes the journal, posts its events, and runs every check. No step of the journals
repeats the step before, because repeats cost almost nothing and would flatter the figure.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.scheduler import Effort, ObservedLane, Workload
from benchmarks.stats import Estimate, estimate

from kvledger.audit import events as ev
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit, Observer
from kvledger.audit.replay.observers import LiveCosts, LiveSteps, LiveTurns, Metrics, Reconciled

OPEN = 8
"""Open requests at any time in the journals for the memory measurement."""

PROMPT_TOKENS = 100


def request_steps_per_second(workload: Workload, steps: int, rounds: int, folder: Path) -> Estimate:
    """Request-steps audited per CPU second, from a journal of ``workload``."""
    lane = ObservedLane(workload, Effort(1, steps), folder)
    for _ in range(steps):
        lane.step()
    lane.close()
    journal = lane.recorder.folder
    request_steps = lane.request_steps - repeated_steps(journal) * workload.running
    audit(journal)
    rates = []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        audit(journal)
        rates.append(request_steps / (time.process_time() - began))
    return estimate(rates)


FOLLOWED = (Metrics, LiveSteps, LiveCosts, Reconciled)
"""What the sidecar observes beside turns."""


def cost_of_turns(workload: Workload, steps: int, rounds: int, folder: Path) -> Estimate:
    """CPU time of the audit of a followed engine that counts turns, by that of one that does not."""
    lane = ObservedLane(workload, Effort(1, steps), folder)
    for _ in range(steps):
        lane.step()
    lane.close()
    journal = lane.recorder.folder
    follow(journal, (*FOLLOWED, LiveTurns))
    ratios = []
    for number in range(rounds):
        seconds = {}
        for turns in (True, False) if number % 2 else (False, True):
            gc.collect()
            began = time.process_time()
            follow(journal, (*FOLLOWED, LiveTurns) if turns else FOLLOWED)
            seconds[turns] = time.process_time() - began
        ratios.append(seconds[True] / seconds[False])
    return estimate(ratios)


def follow(journal: Path, observers: Sequence[type[Observer]]) -> None:
    """Audit ``journal`` as the sidecar does."""
    audit = EngineAudit(journal, observers)
    with Reader(journal) as reader:
        for batch in reader.poll():
            for number, event in enumerate(batch.events, batch.first_event):
                audit.feed(number, event)


def audit(journal: Path) -> Auditor:
    """Replay ``journal``; its verdict must be clean."""
    auditor = Auditor()
    with Reader(journal) as reader:
        for batch in reader.poll():
            for number, event in enumerate(batch.events, batch.first_event):
                auditor.feed(event, number)
    assert auditor.verdict == "clean", (auditor.doubts, auditor.violations[:3])
    return auditor


def repeated_steps(journal: Path) -> int:
    """Steps that the journal only counts, because they repeat the step before."""
    with Reader(journal) as reader:
        events = (event for batch in reader.poll() for event in batch.events)
        return sum(event.times for event in events if isinstance(event, ev.Repeated))


def peak_bytes(requests: int, folder: Path) -> int:
    """The peak memory that Python allocated while auditing a journal of ``requests`` ended requests."""
    writer = JournalWriter(folder / f"{requests}-requests")
    writer.rotate()
    writer.write(_beginning())
    for number in range(requests + OPEN):
        writer.write(list(_step(number, requests)))
    writer.write([ev.EngineStopped(requests, "shutdown")])
    writer.close()
    assert not writer.lost_events
    gc.collect()
    tracemalloc.start()
    try:
        auditor = audit(writer.folder)
        assert auditor.ledger.totals().requests == requests
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _beginning() -> list[ev.Event]:
    return [
        ev.EngineStarted(0, 0.0, "vllm", "0.32.0", "made up", "tokens", 1, {}),
        ev.Snapshot(0, 0, [], 0),
    ]


def _step(number: int, requests: int) -> Iterator[ev.Event]:
    """A step in which request ``number`` arrives and request ``number - OPEN`` has ended."""
    at, step, ended = number, number + 1, number - OPEN + 1
    changed: list[int] = []
    sampled: list[int] = []
    if number < requests:
        yield ev.RequestAdded(at, number, f"request-{number:08d}", PROMPT_TOKENS)
        yield ev.LookedUp(at, number, step, 0)
        yield ev.Admitted(at, number, step, False, 0, 0, False, 0)
        changed += (number, PROMPT_TOKENS, 0, PROMPT_TOKENS)
        sampled = [number, 1]
    if 0 < number <= requests:
        changed += (number - 1, 1, 0, PROMPT_TOKENS + 1)
    yield ev.Stepped(at, step, changed, [ended - 1] if ended > 0 else [])
    yield ev.Delivered(at, sampled, [])
    if number < requests:
        yield ev.Reported(at, number, PROMPT_TOKENS, 0, 0, PROMPT_TOKENS, 0)
    if 0 <= ended < requests:
        tokens = PROMPT_TOKENS + OPEN
        yield ev.Finished(at, ended, "length", tokens - 1, 0, 0, tokens, OPEN)
