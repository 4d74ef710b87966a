"""`make instructions`: how many instructions a step of the real scheduler takes, bare and observed.

Valgrind counts them one by one, so a figure hardly moves from run to run, whatever else the machine
does. Rules of this file:

- Counted is what `make bench` times: ``add_request``, ``schedule`` and ``update_from_output``, and all
  of the writer thread. Valgrind can't be switched on and off within a step, so whole steps are
  counted, and from them is taken what the made-up model and its clients are: a third engine does all
  of that twice, and nothing else.
- The bare engine is counted while nothing is observed in its process: not even a class is wrapped.
- All workloads share a process, with hashes of one seed and no garbage collection: under valgrind it
  takes longer to import vLLM than to count a workload.
- Valgrind is some 50 times slower than the machine. What goes by time would come as many times too
  often, so the writer thread is told when to write, as often as by itself in as many steps.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # as `python -m benchmarks.instructions` has it

from benchmarks import page
from benchmarks.process import settle
from benchmarks.scheduler import BY_KEY, WORKLOADS, Effort, Lane, ObservedLane, Workload
from benchmarks.validity import InvalidRound

from kvledger.audit.conformance.runner import ModelStep

REQUEST_STEPS = 64 * 256
"""What is counted of a workload: about as much as it does between two writes to the journal."""

TOOLS = ("valgrind", "callgrind_control")
DUMP = re.compile(r"^desc: Trigger: .*\bdump (\S+)$", re.MULTILINE)
TOTALS = re.compile(r"^totals: (\d+)$", re.MULTILINE)


class Instructions(NamedTuple):
    """A step's, in the scheduler alone."""

    bare: float
    observed: float

    @property
    def ratio(self) -> float:
        """Observed over bare."""
        return self.observed / self.bare


class Doubled(Lane):
    """A lane in which all but the scheduler's own part of a step is done twice."""

    def __init__(self, workload: Workload, effort: Effort) -> None:
        super().__init__(workload, effort, log_stats=True)
        self.twin = self.make_clients()

    def arrivals(self) -> list[Any]:
        """Requests in place of those that have ended."""
        self.twin.arrivals(self.workload.running - len(self.scheduler.requests))
        return super().arrivals()

    def answer(self, scheduled: Any) -> tuple[ModelStep, Any]:
        """The step that was just scheduled, and the model's output for it."""
        self.twin.answer(self.scheduler, scheduled)
        return super().answer(scheduled)

    def propose(self, step: ModelStep) -> None:
        """Hand in the drafts for the next step."""
        self.twin.propose(self.scheduler, step)
        super().propose(step)


def steps_of(workload: Workload) -> int:
    """How many steps of a workload are counted."""
    return REQUEST_STEPS // workload.running


def scheduler_share(counted: Mapping[str, int], steps: int) -> Instructions:
    """What is the scheduler's of the counts of one workload's passes."""
    around = counted["doubled"] - counted["bare"]
    whole = (counted[name] - counted["nothing"] - around for name in ("bare", "observed"))
    return Instructions(*(instructions / steps for instructions in whole))


def measure(workloads: Sequence[Workload], folder: Path) -> list[tuple[Workload, Instructions]]:
    """Count ``workloads`` under valgrind, in a process that writes below ``folder``."""
    log = folder / "log"
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--log-file={log}"),
        *(f"--callgrind-out-file={folder / 'counted'}", sys.executable, __file__, "--count", str(folder)),
        *(workload.key for workload in workloads),
    ]
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, check=False)
    if done.returncode:
        sys.exit(f"Counting under valgrind ended with {done.returncode}:\n{log.read_text()[-2000:]}")
    dumps = (read_dump(path.read_text()) for path in folder.glob("counted*"))
    counted: dict[str, dict[str, int]] = {}
    for key, name, instructions in filter(None, dumps):
        counted.setdefault(key, {})[name] = instructions
    return [(each, scheduler_share(counted[each.key], steps_of(each))) for each in workloads]


def read_dump(text: str) -> tuple[str, str, int] | None:
    """A workload's key, a pass of it and what callgrind counted, from one of its files.

    None of a file that nobody asked for.
    """
    name, total = DUMP.search(text), TOTALS.search(text)
    if name is None or total is None:
        return None
    key, _, done = name[1].partition(":")
    return key, done, int(total[1])


def count(workload: Workload, folder: Path) -> None:
    """In the process that valgrind runs: have it count each pass of a workload."""
    print(f"{workload.name}: counting", file=sys.stderr, flush=True)
    effort = Effort(1, steps_of(workload))
    _counted("nothing", workload)
    _counted("bare", workload, Lane(workload, effort, log_stats=True))
    _counted("doubled", workload, Doubled(workload, effort))
    observed = ObservedLane(workload, effort, folder)
    _counted("observed", workload, observed)
    observed.close()


def _counted(name: str, workload: Workload, lane: Lane | None = None) -> None:
    if lane is not None:
        lane.warm_up()
        gc.collect()
    if isinstance(lane, ObservedLane):
        lane.write_seconds = math.inf
        lane.settle()
    _control("--instr=on")
    _control("--zero")
    if lane is not None:
        for _ in range(steps_of(workload)):
            lane.step()
    if isinstance(lane, ObservedLane):
        lane.settle()
    _control(f"--dump={workload.key}:{name}")
    _control("--instr=off")


def _control(order: str) -> None:
    subprocess.run(["callgrind_control", order, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)


HEADINGS = ("what", "bare", "observed", "observed - bare", "observed / bare", "command")


def section(rows: Sequence[tuple[Workload, Instructions]]) -> str:
    """The page's second half."""
    return f"""{page.INSTRUCTIONS}
Made by `make instructions ARGS=--write`; do not edit. Instructions a step, counted by valgrind on
{page.software()}.

{_table(rows)}

Counted is what *CPU a step* times above, the writer thread with it. An instruction is counted as one
wherever it runs, so these figures hardly move from run to run and show what a change of the hooks
saves. What they do not show is how long one takes. Our code and data are touched a few times a step,
between megabytes of the engine's own, and are out of the caches by then: an instruction of ours takes
longer than one of the engine's. What observing costs is in the first table.
"""


def _table(rows: Sequence[tuple[Workload, Instructions]]) -> str:
    cells = [
        (
            workload.name,
            f"{found.bare:,.0f}",
            f"{found.observed:,.0f}",
            f"{found.observed - found.bare:,.0f}",
            f"{found.ratio:.4f}",
            f"make instructions ARGS={workload.key}",
        )
        for workload, found in rows
    ]
    return page.table(HEADINGS, cells)


def main() -> int:
    """Counts and prints; 2 where valgrind is not installed."""
    parser = argparse.ArgumentParser(prog="make instructions", description=__doc__)
    parser.add_argument("keys", nargs="*", choices=[*BY_KEY, []], metavar="WORKLOAD", help=", ".join(BY_KEY))
    parser.add_argument("--write", action="store_true", help=f"also write {page.PAGE.relative_to(page.ROOT)}")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    settle()
    workloads = [workload for workload in WORKLOADS if workload.key in (asked.keys or BY_KEY)]
    if asked.count:
        gc.disable()
        try:
            for workload in workloads:
                count(workload, asked.count)
        except InvalidRound as error:
            print(f"The count failed: {error}.", file=sys.stderr)
            return 1
        return 0
    if not all(map(shutil.which, TOOLS)):
        print("Instructions are counted by valgrind, which is not installed.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvledger-instructions-") as name:
        rows = measure(workloads, Path(name))
    print(_table(rows))
    if asked.write:
        page.write_second(section(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
