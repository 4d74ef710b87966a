"""Compares `kvledger simulate` with real engines of other sizes that served the same client.

Usage: make proof NAME=simulate ARGS="[--requests N] [--rate N] [--blocks N] [--rounds N] [--keep DIR]"

A client sends the same requests at the same times to a real vLLM engine with a tiny model on this CPU: as
recorded, with half and twice the blocks, and with half the token budget, each --rounds times, interleaved.
The journals of the recorded configuration predict the others. Every row is printed, misses included. Exits
with 1 unless, for every row: hits are within 1 point; preemptions within 10 %, or 5 of fewer than 70; and,
below 80 % of the engine's time, the first token's median and 95th percentile are inside the band of the real
runs, widened by 15 %.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model
from kvledger.audit.demo.process import settle_environment
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.journal.reader import Reader
from kvledger.audit.simulate.settings import Variant
from kvledger.audit.simulate.study import Outcome, Study

BLOCK_TOKENS = 32
RUNNING = 16
SEQUENCE_TOKENS = 512
STEP_TOKENS = 256
SYSTEM_PROMPTS = 8
CONVERSATIONS = 24
LOADED = 0.8
"""Where steps take a larger share of the time, one run's queue differs from the next one's."""


class Arrival(NamedTuple):
    """A request: when it comes, which conversation it continues, new tokens, output tokens."""

    at: float
    conversation: int
    new: list[int]
    output: int


def arrivals(requests: int, rate: float, seed: int) -> tuple[list[list[int]], list[Arrival]]:
    """The first tokens of each conversation, and requests at random times."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY_TOKENS) for _ in range(count)]

    systems = [tokens(rng.randrange(32, 160)) for _ in range(SYSTEM_PROMPTS)]
    begins: list[list[int]] = []
    at, found, running = 0.0, list[Arrival](), list[int]()
    for _ in range(requests):
        at += rng.expovariate(rate)
        if len(running) < CONVERSATIONS or rng.random() < 0.3:
            begins.append(list(rng.choices(systems, [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)])[0]))
            running.append(len(begins) - 1)
            del running[:-CONVERSATIONS]
        found.append(Arrival(at, rng.choice(running), tokens(rng.randrange(8, 48)), rng.randrange(4, 40)))
    return begins, found


class Clock:
    """The time of the engine's only thread on the processor, and the time that it had nothing to do.

    Other programs on the machine would otherwise be in the times of steps.
    """

    def __init__(self) -> None:
        self._skipped = 0
        """Nanoseconds without a request."""

    def __call__(self) -> int:
        return time.thread_time_ns() + self._skipped

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self() / 1e9

    def skip(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self._skipped += max(0, round(seconds * 1e9))

    def observe(self) -> None:
        """Let the observer's log use this clock from now on."""
        gc.unfreeze()  # vLLM hides what it has from the collector
        logs = [each for each in gc.get_objects() if isinstance(each, StepLog)]
        assert logs, "nothing observes the engine"
        for log in logs:
            log._clock, log._began = self, self() - 1000 * log.now()


def run_engine(folder: Path, arguments: argparse.Namespace) -> None:
    """Run the engine in this process; its journal goes to KVLEDGER_DIR."""
    settle_environment(in_process=True)
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    llm: Any = LLM(
        model=str(write_model(folder / "model", 0)),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=arguments.blocks,
        max_model_len=SEQUENCE_TOKENS,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=arguments.budget,
        scheduler_reserve_full_isl=False,  # so that prompts are preempted too
    )
    engine, clock = llm.llm_engine, Clock()
    histories, requests = arrivals(arguments.requests, arguments.rate, arguments.seed)
    of_request: dict[str, int] = {}
    warm = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    engine.add_request("warm", {"prompt_token_ids": list(range(2, 402))}, warm)  # compile what is compiled
    while engine.has_unfinished_requests():
        engine.step()
    clock.observe()  # the observer is there since the first request
    began, place = clock.seconds, 0
    while place < len(requests) or engine.has_unfinished_requests():
        while place < len(requests) and began + requests[place].at <= clock.seconds:
            each = requests[place]
            history = histories[each.conversation]
            if len(history) + len(each.new) + each.output > SEQUENCE_TOKENS - 8:
                del history[160:]
            history += each.new
            sampling = SamplingParams(
                temperature=0.0, max_tokens=each.output, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"r{place}", {"prompt_token_ids": list(history)}, sampling)
            of_request[f"r{place}"] = each.conversation
            place += 1
        if engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:  # the answer is a part of the next prompt
                    histories[of_request[output.request_id]] += output.outputs[0].token_ids
        else:
            clock.skip(began + requests[place].at - clock.seconds)
    engine.engine_core.shutdown()


def recorded(folder: Path, name: str, blocks: int, budget: int, arguments: argparse.Namespace) -> Path:
    """The journal of one run, in a process of its own."""
    journal = folder / name
    if journal.exists():
        return journal
    environment = os.environ | {"KVLEDGER_DIR": str(journal), "KVLEDGER_LEVEL": "blocks"}
    command = [sys.executable, __file__, "--run", "--keep", str(folder), "--blocks", str(blocks)]
    command += ["--budget", str(budget), "--requests", str(arguments.requests)]
    command += ["--rate", str(arguments.rate), "--seed", str(arguments.seed)]
    subprocess.run(command, env=environment, check=True)
    return journal


class Row(NamedTuple):
    """One configuration: figures of the real runs, and of the predictions."""

    name: str
    real: list[Outcome]
    predicted: list[Outcome]


FIGURES = (
    ("hits, %", lambda one: 100 * one.hit_share, 2),
    ("preemptions", lambda one: one.preemptions, 0),
    ("first token p50, ms", lambda one: 1e3 * (one.first_token_p50 or 0), 1),
    ("first token p95, ms", lambda one: 1e3 * (one.first_token_p95 or 0), 1),
    ("load, %", lambda one: 100 * (one.load or 0), 1),
)


def measured(journal: Path, variants: list[Variant], workers: int) -> tuple[Outcome, list[Outcome]]:
    """The recording, its calibration, and the variants in their order."""
    [folder] = [each for each in journal.iterdir() if each.is_dir()]
    with Reader(folder) as reader:
        events = (event for batch in reader.poll() for event in batch.events)
        with Study(events, commands=lambda _: (sys.executable,), workers=workers) as study:
            recording = study.outcome("real", study.traffic.version, study.recorded)
            if not variants:
                return recording, []
            calibration, same = study.calibrate()
            assert same is not None
            found = {one.name: one for one in study.variants([each for each in variants if each.settings])}
            print(
                f"{journal.name}: by step {calibration.differing} of {calibration.requests} requests differ; "
                f"by time hits {calibration.by_time_points:+.2f} points; "
                f"{study.model.refused or 'model accepted'}"
            )
            return recording, [found[each.name] if each.settings else same for each in variants]


def compare(folder: Path, arguments: argparse.Namespace) -> bool:
    """Print every row; whether all are within what is promised."""
    blocks, budget = arguments.blocks, arguments.budget
    setups = {
        "as recorded": (blocks, budget, Variant()),
        "half the blocks": (blocks // 2, budget, Variant("", (("num_gpu_blocks", blocks // 2),))),
        "twice the blocks": (2 * blocks, budget, Variant("", (("num_gpu_blocks", 2 * blocks),))),
        "half the budget": (blocks, budget // 2, Variant("", (("max_num_batched_tokens", budget // 2),))),
    }
    rows = {name: Row(name, [], []) for name in setups}
    for number in range(arguments.rounds):
        for name, (size, tokens, _) in setups.items():
            journal = recorded(folder, f"{name.replace(' ', '-')}-{number}", size, tokens, arguments)
            wanted = [variant for _, _, variant in setups.values()] if name == "as recorded" else []
            real, predicted = measured(journal, wanted, arguments.jobs)
            rows[name].real.append(real)
            for other, outcome in zip(setups, predicted, strict=False):
                rows[other].predicted.append(outcome)
    results = [judged(row) for row in rows.values()]  # print every row
    return all(results)


def judged(row: Row) -> bool:
    """Print a row; whether each prediction is within what is promised."""
    good = True
    unknown = any(one.first_token_p50 is None for one in row.predicted)  # the model of step time was refused
    loaded = unknown or max(one.load or 1.0 for one in row.real) >= LOADED
    for title, read, digits in FIGURES:
        real, predicted = [read(one) for one in row.real], [read(one) for one in row.predicted]
        low, high = min(real), max(real)
        real_words, predicted_words = (
            " ".join(f"{value:.{digits}f}" for value in each) for each in (real, predicted)
        )
        if title == "hits, %":
            within = all(low - 1 <= value <= high + 1 for value in predicted)
        elif title == "preemptions":
            within = all(low - max(5, 0.1 * low) <= value <= high + max(5, 0.1 * high) for value in predicted)
        else:
            within = all(0.85 * low <= value <= 1.15 * high for value in predicted)
        judges = not title.startswith(("load", "first") if loaded else "load")
        good &= within or not judges
        words = ("" if within else "  MISSED") if judges else "  (unknown)" if unknown else "  (not judged)"
        print(f"{row.name:18} {title:20} real {real_words:28} predicted {predicted_words:28}{words}")
    return good


def main() -> int:
    """Run the engines, predict, and print every row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--budget", type=int, default=STEP_TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="predictions at a time")
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        run_engine(arguments.keep, arguments)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if compare(folder, arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
