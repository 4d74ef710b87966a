"""What kvledger costs SGLang's real scheduler loop on a CPU, beside SGLang's own metrics.

Usage: .venv/bin/python scripts/releases.py run sglang-0.5.23 -- python -m benchmarks.sglang_loop [--turns N]

Four engines with the demo's model, each in a process of its own, run SGLang's event loop over the same
endless requests, so all execute the same steps: one observed, two bare, and one with ``--enable-metrics``.
They take turns of a few iterations, in random order, and each of the first three is the observed one for a
third of the turns. CPU time of the whole process counts, the journal's writer included, which writes once a
second of the engine's own time. Groups of turns are compared; printed are the median and its 95 % bootstrap
interval.
*Without the model* leaves out the CPU time of the forward passes: a real model runs on a device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduler import observe
from benchmarks.stats import estimate
from benchmarks.validity import require_complete

from kvledger.audit.demo.sglang.run import ENVIRON, write_endless_model
from kvledger.audit.journal.recorder import WRITE_SECONDS

ITERATIONS = 10
"""Of a turn."""
GROUP = 5
"""Turns whose sums are compared."""
FRESH_TURNS = 3
"""Turns after a change of the observed engine that do not count."""
ROLES = (True, False, False, None)
"""Whether an engine is observed; None: bare, and with ``--enable-metrics``."""


class Workload(NamedTuple):
    """``open`` requests at a time, with lengths in tokens from and to."""

    name: str
    open: int
    prompt: tuple[int, int]
    shared: int
    outputs: tuple[int, int]
    arguments: dict[str, Any]
    limit: float


WORKLOADS = (
    Workload(
        "steady, 16 requests",
        16,
        (32, 64),
        0,
        (300, 400),
        {"max_total_tokens": 16_384, "max_running_requests": 16, "chunked_prefill_size": 512},
        1.02,
    ),
    Workload(
        "retraction and chunked prefill, 16 requests",
        16,
        (100, 200),
        80,
        (40, 120),
        {
            "max_total_tokens": 1_800,
            "max_running_requests": 16,
            "chunked_prefill_size": 64,
            "schedule_conservativeness": 0.05,
        },
        1.03,
    ),
)


class Spent(NamedTuple):
    """CPU seconds of one engine: of the process, and of the forward passes."""

    process: float
    forward: float

    @property
    def beside(self) -> float:
        """Without the model."""
        return self.process - self.forward


class _Engine:
    """One engine in this process; the parent's words come at the beginning of an iteration."""

    def __init__(self, workload: Workload, metrics: bool, model: str) -> None:
        from kvledger.audit.demo.sglang import loop

        self._workload, self._loop = workload, loop
        self._scheduler = loop.build(
            model, disable_overlap_schedule=False, enable_metrics=metrics, **workload.arguments
        )
        self._numbers, self._sent, self._forward, self._unwritten = random.Random(0), 0, 0.0, 0.0
        self._observed: tuple[Any, Any] | None = None
        self._prefix = [self._numbers.randrange(2, 500) for _ in range(workload.shared)]
        worker = getattr(self._scheduler.tp_worker, "worker", self._scheduler.tp_worker)
        runner = worker.model_runner
        runner.forward = functools.partial(self._forwarded, runner.forward)
        iterations, engine = self._iterations(), self

        class Endless(loop.Plan):
            def _receive(self) -> list[Any]:
                next(iterations)
                return engine._arrivals(len(self.told))

        Endless(self._scheduler).run()

    def _forwarded(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = forward(*args, **kwargs)
        self._forward += time.thread_time() - began
        return result

    def _arrivals(self, ended: int) -> list[Any]:
        """A request for each one that has ended."""
        made, workload = [], self._workload
        while self._sent - ended < workload.open:
            self._sent += 1
            tokens = self._numbers.randint(*workload.prompt) - workload.shared
            prompt = self._prefix + [self._numbers.randrange(2, 500) for _ in range(tokens)]
            first = self._sent <= workload.open  # they end one after the other
            outputs = self._numbers.randint(1 if first else workload.outputs[0], workload.outputs[1])
            made.append(self._loop.request(f"r{self._sent}", prompt, outputs))
        return made

    def _iterations(self) -> Iterator[None]:
        """Goes on by one iteration of the event loop at a time."""
        for line in sys.stdin:
            if line == "observe\n":
                self._observed = observe(self._scheduler, Path(os.environ["JOURNALS"]))
                self._observed[1]._flush_seconds = 3_600.0
            elif line == "stop\n" and self._observed is not None:
                observer, recorder = self._observed
                self._observed = None
                observer.stop("detached")
                recorder.close()
                require_complete(recorder.folder, ())
            elif line == "run\n":
                began, forward = time.process_time(), self._forward
                for _ in range(ITERATIONS):
                    yield
                self._unwritten += time.process_time() - began
                if self._observed is not None and self._unwritten > WRITE_SECONDS:
                    self._unwritten = 0.0
                    assert self._observed[1].flush(60.0), "the journal could not be written"
                spent = Spent(time.process_time() - began, self._forward - forward)
                print("\nspent " + json.dumps(spent), flush=True)
        raise self._loop.Done


class _Process:
    """An engine in a process of its own."""

    def __init__(self, place: int, metrics: bool, folder: Path) -> None:
        folder.mkdir()
        write_endless_model(folder / "model")
        command = [
            sys.executable,
            "-m",
            "benchmarks.sglang_loop",
            "--engine",
            str(place),
            str(folder / "model"),
        ]
        self._log = folder / "log"
        self._process = subprocess.Popen(
            [*command, *["--metrics"] * metrics],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env={**os.environ, **ENVIRON, "JOURNALS": str(folder), "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        )

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def turn(self) -> Spent:
        self.say("run")
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("spent "):
                return Spent(*json.loads(line[6:]))
        raise RuntimeError(self._log.read_text()[-2000:])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(place: int, turns: int, folder: Path) -> None:
    """Print the rows of one workload."""
    workload, dice = WORKLOADS[place], random.Random(0)
    engines = [_Process(place, role is None, folder / str(number)) for number, role in enumerate(ROLES)]
    rows: dict[str, list[float]] = {}
    try:
        for _ in range(40 // ITERATIONS * 5):
            for engine in engines:
                engine.turn()
        for observed in range(3):
            others = [each for each in range(3) if each != observed]
            engines[observed].say("observe")
            spent: list[list[Spent]] = []
            for _ in range(FRESH_TURNS + turns // 3):
                order = dice.sample(range(len(engines)), len(engines))
                found = {number: engines[number].turn() for number in order}
                spent.append([found[number] for number in (observed, *others, 3)])
            engines[observed].say("stop")
            for at in range(FRESH_TURNS, len(spent) - GROUP + 1, GROUP):
                for what, ratio in _ratios(spent[at : at + GROUP]):
                    rows.setdefault(what, []).append(ratio)
                rows.setdefault("ms", []).append(
                    1e3 * _sums(spent[at : at + GROUP])[1].process / GROUP / ITERATIONS
                )
    finally:
        for engine in engines:
            engine.end()
    print(f"{workload.name}: {estimate(rows.pop('ms')).median:.1f} ms of CPU an iteration")
    for what, ratios in rows.items():
        found_ratio, limit = estimate(ratios), f"at most {workload.limit}" if what == OBSERVED else ""
        interval = f"{found_ratio.low:.4f} to {found_ratio.high:.4f}"
        print(f"| {workload.name}: {what} | {found_ratio.median:.4f} | {interval} | {limit} |", flush=True)


OBSERVED = "CPU of the loop, observed / bare"


def _sums(turns: Sequence[Sequence[Spent]]) -> list[Spent]:
    """Of each engine."""
    return [Spent(*map(sum, zip(*each, strict=True))) for each in zip(*turns, strict=True)]


def _ratios(turns: Sequence[Sequence[Spent]]) -> Iterator[tuple[str, float]]:
    observed, bare, again, metrics = _sums(turns)
    mean = (bare.process + again.process) / 2
    yield OBSERVED, observed.process / mean
    yield f"{OBSERVED}, without the model", 2 * observed.beside / (bare.beside + again.beside)
    yield "CPU of the loop, bare / bare, two engines", again.process / bare.process
    yield "CPU of the loop, SGLang's --enable-metrics on / off", metrics.process / mean


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=600)
    parser.add_argument("--engine", nargs=2, help="for the processes of this command")
    parser.add_argument("--metrics", action="store_true", help="for the processes of this command")
    given = parser.parse_args(arguments)
    if given.engine:
        _Engine(WORKLOADS[int(given.engine[0])], given.metrics, given.engine[1])
        return
    for place in range(len(WORKLOADS)):
        with tempfile.TemporaryDirectory() as folder:
            measure(place, given.turns, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
