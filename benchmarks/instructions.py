"""`make instructions`: counts the instructions of a step of the real scheduler, bare and observed.

Valgrind counts every instruction, so a figure hardly changes from run to run, whatever else the machine
does. How it is counted:

- `make bench` times ``add_request``, ``schedule``, ``update_from_output`` and all of the writer thread, and
  the same is counted here. Valgrind can't be switched on and off within a step, so whole steps are
  counted, and the share of the scripted model and its clients is subtracted: a third engine executes
  that share twice in each step.
- The bare engine is counted before anything is observed in the process, so no class is wrapped yet.
- All workloads share one process, with a fixed hash seed and without garbage collection, because under
  valgrind importing vLLM takes longer than counting a workload.
- Valgrind runs about 50 times slower than the machine. Whatever goes by the clock would happen 50 times
  too often, so the benchmark decides when the writer thread writes: as often as it would in as many
  steps at full speed.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.instructions` adds this itself

from benchmarks import page
from benchmarks.process import settle
from benchmarks.scheduler import BY_KEY, WORKLOADS, Effort, Lane, ObservedLane, Workload
from benchmarks.validity import InvalidRound

from kvledger.audit.traffic.driver import ModelStep

REQUEST_STEPS = 64 * 256
"""Request-steps counted of a workload, about as many as between two writes to the journal."""

TOOLS = ("valgrind", "callgrind_control")
DUMP = re.compile(r"^desc: Trigger: .*\bdump (\S+)$", re.MULTILINE)
TOTALS = re.compile(r"^totals: (\d+)$", re.MULTILINE)


class Instructions(NamedTuple):
    """Instructions of a step, in the scheduler alone."""

    bare: float
    observed: float

    @property
    def ratio(self) -> float:
        """The ratio of observed to bare."""
        return self.observed / self.bare


class Doubled(Lane):
    """A lane that does everything twice in a step except the scheduler's own part."""

    def __init__(self, workload: Workload, effort: Effort) -> None:
        super().__init__(workload, effort, log_stats=True)
        self.twin = self.make_clients()

    def arrivals(self) -> list[Any]:
        """New requests for those that have ended."""
        self.twin.arrivals(self.workload.running - len(self.scheduler.requests))
        return super().arrivals()

    def answer(self, scheduled: Any) -> tuple[ModelStep, Any]:
        """The step that was just scheduled, and the model's output for it."""
        self.twin.answer(self.scheduler, scheduled)
        return super().answer(scheduled)

    def propose(self, step: ModelStep) -> None:
        """Give the scheduler the draft tokens for the next step."""
        self.twin.propose(self.scheduler, step)
        super().propose(step)


def steps_of(workload: Workload) -> int:
    """The number of steps of a workload that are counted."""
    return REQUEST_STEPS // workload.running


def scheduler_share(counted: Mapping[str, int], steps: int) -> Instructions:
    """The scheduler's share of the instructions counted in the passes of one workload."""
    around = counted["doubled"] - counted["bare"]
    whole = (counted[name] - counted["nothing"] - around for name in ("bare", "observed"))
    return Instructions(*(instructions / steps for instructions in whole))


def measure(workloads: Sequence[Workload], folder: Path) -> list[tuple[Workload, Instructions]]:
    """Count ``workloads`` under valgrind, in a process that writes its counts below ``folder``."""
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
    """The workload's key, the pass and the count in one of callgrind's files.

    None for a file that was not requested, such as the one that callgrind writes at the end.
    """
    name, total = DUMP.search(text), TOTALS.search(text)
    if name is None or total is None:
        return None
    key, _, done = name[1].partition(":")
    return key, done, int(total[1])


def count(workload: Workload, folder: Path) -> None:
    """Count each pass of a workload, in the process that valgrind runs. Raises :class:`InvalidRound`."""
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


def _control(command: str) -> None:
    subprocess.run(["callgrind_control", command, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)


HEADINGS = ("what", "bare", "observed", "observed - bare", "observed / bare", "command")


def section(rows: Sequence[tuple[Workload, Instructions]]) -> str:
    """The second half of docs/performance.md."""
    return f"""{page.INSTRUCTIONS}
Generated by `make instructions ARGS=--write`; do not edit. Instructions a step, counted by valgrind on
{page.software()}.

{_table(rows)}

The instructions are those of the part that *CPU a step* times above, including the writer thread. The
counts hardly change from run to run, so they show how much a change of the hooks saves. They do not show
how long an instruction takes. The hooks run a few times a step, between megabytes of the engine's own
data, and find little of their code and data in the CPU caches. So an instruction of the hooks takes longer
than one of the engine. The first table shows the cost in time.
"""


def _table(rows: Sequence[tuple[Workload, Instructions]]) -> str:
    cells = [
        (
            workload.name,
            f"{instructions.bare:,.0f}",
            f"{instructions.observed:,.0f}",
            f"{instructions.observed - instructions.bare:,.0f}",
            f"{instructions.ratio:.4f}",
            f"make instructions ARGS={workload.key}",
        )
        for workload, instructions in rows
    ]
    return page.table(HEADINGS, cells)


def main() -> int:
    """Count and print. Returns 1 if a count is not valid, 2 if valgrind is not installed."""
    parser = argparse.ArgumentParser(prog="make instructions", description=__doc__)
    parser.add_argument("keys", nargs="*", choices=[*BY_KEY, []], metavar="WORKLOAD", help=", ".join(BY_KEY))
    parser.add_argument(
        "--write", action="store_true", help=f"also write the table into {page.PAGE.relative_to(page.ROOT)}"
    )
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settle()
    workloads = [workload for workload in WORKLOADS if workload.key in (arguments.keys or BY_KEY)]
    if arguments.count:
        gc.disable()
        try:
            for workload in workloads:
                count(workload, arguments.count)
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
    if arguments.write:
        page.put(section(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
