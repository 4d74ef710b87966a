"""Compares the audit's CPU time with that of an earlier commit: `python -m benchmarks.against COMMIT`.

Journals are recorded from the real scheduler once. Then a process of each version audits each of them again
and again, in turns, so that both have the same machine. The rows of one level with more and more running
requests tell whether the time per event depends on how many run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.page import ROOT, table
from benchmarks.scheduler import Effort, ObservedLane, Workload

EARLIER = "83ddd39d"
ROUNDS = 5
SHORT = (16, 64)
LONG = (64, 256)

AUDIT = """
import gc, sys, time
from pathlib import Path
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.parallel import collect_rarely

collect_rarely()  # as a command that reads journals
for line in sys.stdin:
    audit = EngineAudit(Path(line.strip()))
    gc.collect()
    began = time.process_time()
    with Reader(audit.path) as reader:
        audit.read(reader)
    print(time.process_time() - began, audit.auditor.verdict, audit.journal.events, flush=True)
"""


def workloads() -> Iterator[tuple[Workload, int]]:
    """Each workload, and its steps."""
    for level in ("tokens", "blocks"):
        name = f"level {level}, 6 to 7 ends a step"
        yield Workload(f"{level}-short", name, 256, 0.0, output_tokens=SHORT, level=level), 500
        yield Workload(f"{level}-steady", f"level {level}, steady decode", 256, 0.0, level=level), 500
        for running, steps in ((64, 1_600), (256, 500), (1_024, 200), (4_096, 60)):
            name = f"level {level}, churn, {running:,} running"
            yield Workload(f"{level}-{running}", name, running, 0.0, output_tokens=LONG, level=level), steps


def recorded(workload: Workload, steps: int, folder: Path) -> Path:
    """A journal of the workload."""
    lane = ObservedLane(workload, Effort(1, steps), folder / workload.key)
    if lane.observer.pools is not None:
        lane.observer.pools.prefixes = None  # its event is newer than the earlier version
    for _ in range(steps):
        lane.step()
    lane.close()
    return Path(lane.recorder.folder)


@contextmanager
def version(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that audits journals with the code of a work tree."""
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", AUDIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def audited(process: subprocess.Popen[str], journal: Path) -> tuple[float, int]:
    """CPU seconds of one audit, and the events of the journal."""
    assert process.stdin is not None and process.stdout is not None
    print(journal, file=process.stdin, flush=True)
    seconds, verdict, events = process.stdout.readline().split()
    assert verdict == "clean"
    return float(seconds), int(events)


def compared(now: subprocess.Popen[str], before: subprocess.Popen[str], journal: Path) -> tuple[str, ...]:
    """The cells of one journal: microseconds an event before and now, and the median of the ratios."""
    audited(now, journal), audited(before, journal)
    times: dict[bool, list[float]] = {True: [], False: []}
    events = 0
    for number in range(ROUNDS):
        for new in (True, False) if number % 2 else (False, True):
            seconds, events = audited(now if new else before, journal)
            times[new].append(seconds)
    each = [f"{1e6 * median(times[new]) / events:.1f}" for new in (False, True)]
    return (*each, f"{median(new / old for new, old in zip(times[True], times[False], strict=True)):.2f}")


def main(commit: str) -> None:
    """Print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "earlier"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            with version(ROOT) as now, version(tree) as before:
                for workload, steps in workloads():
                    journal = recorded(workload, steps, Path(folder))
                    rows.append((workload.name, *compared(now, before, journal)))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(table(("audit", f"{commit}, µs an event", "now", "now / before"), rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default=EARLIER)
    main(parser.parse_args().commit)
