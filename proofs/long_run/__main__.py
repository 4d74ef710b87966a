"""Sends a day of requests through journal, rotation, compaction, sidecar and Prometheus, accelerated.

A simulated engine emits the events of 20 requests a second and writes real journals; the sidecar, Prometheus,
`kvledger journals compact` and `kvledger summary` are real. Engines end in good order and by SIGKILL, so do
the sidecar and Prometheus. At the end every sum must be the same in all places.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from benchmarks import page
from proofs.long_run import sums
from proofs.long_run.engine import Emitted
from proofs.long_run.gauges import Watcher
from proofs.long_run.report import Result, section
from tests.serving.processes import SETTLE_SECONDS, Prometheus, Sidecar, wait_until

from kvledger.audit.journal import catalogue
from kvledger.dashboards import deploy_files

HOUR = 3600.0
RATE = 20.0
REQUEST_BYTES = 264
"""Bytes of a request in the journal."""

MOST_COMPACT_SECONDS = 15.0
LOOK_SECONDS = 2.0
LEAST_JOURNAL_BYTES = 4 << 20
KEPT_SHARE = 0.6
"""The share of an engine's journal that rotation keeps."""


class Plan(NamedTuple):
    """Simulated hours, how many times faster than time they pass, and the number of engines, in turn."""

    hours: float = 24.0
    speed: float = 96.0
    engines: int = 8

    @property
    def engine_seconds(self) -> float:
        """Simulated seconds from the start to the end of an engine."""
        return self.hours * HOUR / self.engines

    @property
    def compact_seconds(self) -> float:
        """Wall seconds between two starts of ``journals compact``: a small part of what rotation keeps."""
        kept = KEPT_SHARE * self.engine_seconds / self.speed
        return min(MOST_COMPACT_SECONDS, max(1.0, kept / 4))

    @property
    def journal_bytes(self) -> int:
        """The bound of a journal."""
        return max(LEAST_JOURNAL_BYTES, round(KEPT_SHARE * self.engine_seconds * RATE * REQUEST_BYTES))


class LongRun:
    """The processes of the run."""

    def __init__(self, plan: Plan, folder: Path, progress: Callable[[str], None]) -> None:
        self.plan, self._progress = plan, progress
        self.journals = folder / "journals"
        self.journals.mkdir()
        self.sidecar = Sidecar(folder, self.journals)
        self.prometheus = Prometheus(folder, {"kvledger": self.sidecar}, deploy_files.write_rules(folder))
        self.watcher = Watcher(self.sidecar, self.prometheus, self.journals)
        self.emitted: list[Emitted] = []
        self.restarts: dict[str, int] = {}
        self._wall = time.time() - plan.hours * HOUR
        self._compacting: subprocess.Popen[bytes] | None = None
        self._compact_at = self._look_at = 0.0

    def run(self) -> Result:
        """Run every engine, then compare."""
        began = time.monotonic()
        try:
            self.sidecar.start()
            self.prometheus.start()
            for number in range(self.plan.engines):
                self._progress(f"engine {number + 1} of {self.plan.engines}")
                self.emitted.append(self._engine(number))
            self._compact()
            return self._compared(began)
        finally:
            self.prometheus.kill()
            self.sidecar.kill()

    def _engine(self, number: int) -> Emitted:
        """Run one engine to its end; halfway, restart something else."""
        plan = self.plan
        options = {
            "number": number,
            "wall": self._wall + number * plan.engine_seconds,
            "seconds": plan.engine_seconds,
            "rate": RATE,
            "speed": plan.speed,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        killed = number % 2 == 1
        command = [sys.executable, "-m", "proofs.long_run.engine", str(self.journals), *words]
        bounds = {
            catalogue.JOURNAL_BYTES: str(plan.journal_bytes),
            catalogue.TOTAL_BYTES: str(3 * plan.journal_bytes),
        }
        paths = os.pathsep.join((str(page.ROOT / "src"), str(page.ROOT)))
        engine = subprocess.Popen(
            [*command, *(["--kill"] if killed else [])],
            env=os.environ | bounds | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
        )
        half = time.monotonic() + plan.engine_seconds / plan.speed / 2
        restart = self._restart_of(number)
        while engine.poll() is None:
            time.sleep(0.2)
            if restart is not None and time.monotonic() > half:
                restart()
                restart = None
            self._tick()
        if restart is not None:
            restart()
        assert engine.stdout is not None
        assert engine.returncode == (-9 if killed else 0), engine.returncode
        self._count(f"engine by {'SIGKILL' if killed else 'SIGTERM'}")
        self._compact()  # before the next engine may remove the journal
        return msgspec.json.decode(engine.stdout.read(), type=Emitted)

    def _tick(self) -> None:
        now = time.monotonic()
        if now > self._look_at:
            self.watcher.look()
            self._look_at = time.monotonic() + LOOK_SECONDS
        if now > self._compact_at and (self._compacting is None or self._compacting.poll() is not None):
            self._compacting = self._start_compacting()
            self._compact_at = now + self.plan.compact_seconds

    def _start_compacting(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvledger", "journals", "compact", str(self.journals)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _compact(self) -> None:
        """Compact the journals."""
        if self._compacting is not None:
            self._compacting.wait()
        code = self._start_compacting().wait()
        assert code in (0, 3), code  # 3: a killed engine's journal is unknown

    def _restart_of(self, number: int) -> Callable[[], None] | None:
        """What is restarted halfway through an engine; nothing in the first."""
        if not number:
            return None
        server, how = (
            (self.sidecar, "SIGTERM"),
            (self.prometheus, "SIGTERM"),
            (self.sidecar, "SIGKILL"),
            (self.prometheus, "SIGKILL"),
        )[(number - 1) % 4]

        def restart() -> None:
            self._count(f"{'sidecar' if server is self.sidecar else 'Prometheus'} by {how}")
            if how == "SIGKILL":
                server.kill()
            else:
                server.stop()
            server.start()

        return restart

    def _count(self, what: str) -> None:
        self.restarts[what] = self.restarts.get(what, 0) + 1

    def _compared(self, began: float) -> Result:
        """Wait until Prometheus holds what the sidecar serves, and compare everything."""

        def settled() -> bool:
            return bool(held := sums.held(self.prometheus)) and held == sums.served(
                self.sidecar.get("/metrics")
            )

        events = sum(one.events for one in self.emitted)
        query = "sum(kvledger_events_total)"
        wait_until(lambda: self.prometheus.value(query) == events and settled(), SETTLE_SECONDS, lambda: "")
        counters = sums.held(self.prometheus)
        seconds = time.monotonic() - began
        return Result(
            self.plan.hours,
            seconds,
            sums.sums(self.emitted, self.prometheus, self.journals),
            len(counters),
            sums.resets(self.prometheus, counters, seconds + 60),
            self.watcher,
            self.restarts,
            sum(one.removed_segments for one in self.emitted),
            sum(one.journal_bytes for one in self.emitted),
            self.plan.engines,
            self.plan.engines - len(list(self.journals.glob("engine-*"))),
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run, print the tables; exit with 1 if a sum differs."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="make proof NAME=long_run", description=__doc__)
    parser.add_argument("--hours", type=float, default=plan.hours, help="simulated hours")
    parser.add_argument("--speed", type=float, default=plan.speed, help="simulated seconds in a second")
    parser.add_argument("--engines", type=int, default=plan.engines, help="engines, one after the other")
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/performance.md")
    arguments = parser.parse_args(words)
    ran_on = page.machine()
    with tempfile.TemporaryDirectory(prefix="kvledger-long-run-") as folder:
        chosen = Plan(arguments.hours, arguments.speed, arguments.engines)
        result = LongRun(chosen, Path(folder), lambda line: print(line, file=sys.stderr, flush=True)).run()
    text = section(result, ran_on)
    print(text)
    if arguments.write:
        page.put(text)
    return 0 if result.right else 1


if __name__ == "__main__":
    sys.exit(main())
