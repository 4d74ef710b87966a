"""Compares `kvledger simulate` with real engines of other sizes that served the same client.

Usage: make proof NAME=simulate ARGS="[--closed-loop] [--http] [--requests N] [--rate N] [--blocks N]
    [--rounds N] [--keep DIR]"

A client sends the same requests at the same times to a real vLLM engine with a tiny model on this CPU: as
recorded, with half and twice the blocks, half the token budget, priorities, blocks of twice the size, and
without asynchronous scheduling, each --rounds times, interleaved. With --closed-loop a conversation goes on
only some time after its answer. With --http the engine is vLLM's OpenAI-compatible server, in real time. The
journals of the recorded configuration predict the others. Every row is
printed, misses included. Exits
with 1 unless, for every row: hits are within 1 point; preemptions within 10 %, or 5 of fewer than 70; and,
below 80 % of the engine's time, the first token's median and 95th percentile are inside the band of the real
runs, widened by 15 %.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import http.client
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.serving.processes import Engine

from kvledger.audit.demo.engine import EXECUTOR, settle_environment, tiny_engine
from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.journal.reader import Reader
from kvledger.audit.simulate.study import Outcome, Study, Variant, recording

BLOCK_TOKENS = 32
RUNNING = 16
SEQUENCE_TOKENS = 512
STEP_TOKENS = 256
SYSTEM_PROMPTS = 8
CONVERSATIONS = 24
LOADED = 0.8
"""Where steps take a larger share of the time, one run's queue differs from the next one's."""


class Arrival(NamedTuple):
    """A request: when it comes, which conversation it continues, new tokens, output tokens.

    ``pause``: in a closed loop it comes so many seconds after the conversation's last answer.
    """

    at: float
    conversation: int
    new: list[int]
    output: int
    pause: float
    priority: int


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
        new, output = tokens(rng.randrange(8, 48)), rng.randrange(4, 40)
        pause, priority = rng.expovariate(rate / CONVERSATIONS), rng.randrange(3)
        found.append(Arrival(at, rng.choice(running), new, output, pause, priority))
    return begins, found


class Client:
    """Sends the requests of conversations; in a closed loop each waits for the answer before it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.histories, self._requests = arrivals(arguments.requests, arguments.rate, arguments.seed)
        self._closed: bool = arguments.closed_loop
        self._waiting: dict[int, list[Arrival]] = {}
        """By conversation: the requests that wait for its answer, the first one first."""
        self._due: list[tuple[float, int, Arrival]] = []
        """A heap of the requests that are not sent: when they come, and their number."""
        for number, each in enumerate(self._requests):
            before = self._waiting.get(each.conversation)
            if self._closed and before is not None:
                before.append(each)
            else:
                self._waiting[each.conversation] = []
                heapq.heappush(self._due, (each.at, number, each))
        self._sent = len(self._requests)

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None: none is due."""
        return self._due[0][0] if self._due else None

    def take(self) -> Arrival:
        """The next request, whose prompt is now the conversation's history."""
        _, _, each = heapq.heappop(self._due)
        history = self.histories[each.conversation]
        if len(history) + len(each.new) + each.output > SEQUENCE_TOKENS - 8:
            del history[160:]
        history += each.new
        return each

    def answered(self, each: Arrival, tokens: Sequence[int], at: float) -> None:
        """The answer is a part of the next prompt."""
        self.histories[each.conversation] += tokens
        if waiting := self._waiting[each.conversation] if self._closed else []:
            self._sent += 1
            following = waiting.pop(0)
            heapq.heappush(self._due, (at + following.pause, self._sent, following))


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
    from vllm import SamplingParams

    llm = tiny_engine(
        write_model(folder / "model", 0),
        max_model_len=SEQUENCE_TOKENS,
        max_num_seqs=RUNNING,
        scheduler_reserve_full_isl=False,  # so that prompts are preempted too
        **json.loads(arguments.options),
    )
    engine, clock, client = llm.llm_engine, Clock(), Client(arguments)
    sent: dict[str, Arrival] = {}
    warm = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    engine.add_request("warm", {"prompt_token_ids": list(range(2, 402))}, warm)  # compile what is compiled
    while engine.has_unfinished_requests():
        engine.step()
    clock.observe()  # the observer is there since the first request
    began = clock.seconds
    while client.next_at is not None or engine.has_unfinished_requests():
        while client.next_at is not None and began + client.next_at <= clock.seconds:
            each = client.take()
            name, prompt = f"r{len(sent)}", {"prompt_token_ids": list(client.histories[each.conversation])}
            sampling = SamplingParams(
                temperature=0.0, max_tokens=each.output, ignore_eos=True, detokenize=False
            )
            engine.add_request(name, prompt, sampling, priority=each.priority)
            sent[name] = each
        if engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens = output.outputs[0].token_ids
                    client.answered(sent[output.request_id], tokens, clock.seconds - began)
        elif client.next_at is not None:
            clock.skip(began + client.next_at - clock.seconds)
    engine.engine_core.shutdown()


class HttpEngine(Engine):
    """vLLM's server with the same engine arguments."""

    def __init__(self, folder: Path, journals: Path, arguments: argparse.Namespace) -> None:
        super().__init__(folder, journals)
        self._arguments: dict[str, Any] = json.loads(arguments.options)
        self._client = Client(arguments)
        self._answers: queue.SimpleQueue[tuple[Arrival, list[int]]] = queue.SimpleQueue()
        """The requests that have ended, with their output."""

    def command(self) -> list[str]:
        options: dict[str, Any] = {
            "model": self._model,
            "served_model_name": "tiny",
            "dtype": "float32",
            "max_model_len": SEQUENCE_TOKENS,
            "max_num_seqs": RUNNING,
            "distributed_executor_backend": EXECUTOR,
            "host": "127.0.0.1",
            "port": self.port,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "scheduler_reserve_full_isl": False,
            **self._arguments,
        }
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in options.items():
            flag = name.replace("_", "-")
            words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else []
            words += [] if isinstance(value, bool) else [f"--{flag}", str(value)]
        return words

    def environment(self) -> dict[str, str]:
        return super().environment() | {"KVLEDGER_LEVEL": "blocks"}

    def serve(self) -> None:
        """Send all requests, each in a thread of its own, and stop the server after their answers."""
        client, running = self._client, 0
        self._complete(Arrival(0, 0, [], 40, 0, 0), list(range(2, 402)))
        self._answers.get()
        began = time.monotonic()
        while client.next_at is not None or running:
            wait = None if client.next_at is None else began + client.next_at - time.monotonic()
            try:
                each, tokens = self._answers.get(timeout=None if wait is None else max(0.0, wait))
            except queue.Empty:
                each = client.take()
                prompt = list(client.histories[each.conversation])
                threading.Thread(target=self._complete, args=(each, prompt), daemon=True).start()
                running += 1
            else:
                running -= 1
                client.answered(each, tokens, time.monotonic() - began)
        self.stop()

    def _complete(self, each: Arrival, prompt: list[int]) -> None:
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": each.output,
            "priority": each.priority if "scheduling_policy" in self._arguments else 0,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        self._answers.put((each, answer["choices"][0]["token_ids"]))


def recorded(folder: Path, name: str, options: Mapping[str, Any], arguments: argparse.Namespace) -> Path:
    """The journal of one run with these engine arguments, in a process of its own."""
    journal = folder / name
    if journal.exists():
        return journal
    environment = os.environ | {"KVLEDGER_DIR": str(journal), "KVLEDGER_LEVEL": "blocks"}
    if arguments.http:
        server = HttpEngine(
            folder, journal, argparse.Namespace(**vars(arguments) | {"options": json.dumps(options)})
        )
        server.start()
        try:
            server.serve()
        finally:
            server.kill()
        return journal
    command = [sys.executable, __file__, "--run", "--keep", str(folder), "--options", json.dumps(options)]
    command += ["--requests", str(arguments.requests), "--rate", str(arguments.rate)]
    command += ["--seed", str(arguments.seed), *["--closed-loop"] * arguments.closed_loop]
    subprocess.run(command, env=environment, check=True)
    return journal


SETTINGS = {"num_gpu_blocks_override": "num_gpu_blocks"}
"""Names of settings, by the argument of vLLM's engine where that is another."""


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


def measured(
    journal: Path, variants: list[Variant], arguments: argparse.Namespace
) -> tuple[Outcome, list[Outcome]]:
    """The recording, its calibration, and the variants in their order."""
    [folder] = [each for each in journal.iterdir() if each.is_dir()]
    with Reader(folder) as reader:
        events = (event for batch in reader.poll() for event in batch.events)
        with Study(
            recording(events),
            commands=lambda _: (sys.executable,),
            workers=arguments.jobs,
            closed=arguments.closed_loop,
        ) as study:
            real = study.outcome("real", study.traffic.version, study.recorded)
            if not variants:
                return real, []
            calibration, same = study.calibrate()
            assert same is not None
            found = {one.name: one for one in study.variants([each for each in variants if each.settings])}
            print(
                f"{journal.name}: by step {calibration.differing} of {calibration.requests} requests differ; "
                f"by time hits {calibration.by_time_points:+.2f} points; "
                f"{study.model.refused or 'model accepted'}"
            )
            return real, [found[each.name] if each.settings else same for each in variants]


def compare(folder: Path, arguments: argparse.Namespace) -> bool:
    """Print every row; whether all are within what is promised."""
    blocks = arguments.blocks
    as_recorded: dict[str, Any] = {
        "num_gpu_blocks_override": blocks,
        "max_num_batched_tokens": STEP_TOKENS,
        "block_size": BLOCK_TOKENS,
    }
    changes: dict[str, dict[str, Any]] = {
        "as recorded": {},
        "half the blocks": {"num_gpu_blocks_override": blocks // 2},
        "twice the blocks": {"num_gpu_blocks_override": 2 * blocks},
        "half the budget": {"max_num_batched_tokens": STEP_TOKENS // 2},
        "priorities": {"scheduling_policy": "priority"},
        "blocks twice as long": {"num_gpu_blocks_override": blocks // 2, "block_size": 2 * BLOCK_TOKENS},
        "not asynchronous": {"async_scheduling": False},
    }
    variants = [
        Variant("", tuple((SETTINGS.get(key, key), value) for key, value in change.items()))
        for change in changes.values()
    ]
    rows = {name: Row(name, [], []) for name in changes}
    for number in range(arguments.rounds):
        for name, change in changes.items():
            journal = recorded(folder, f"{name.replace(' ', '-')}-{number}", as_recorded | change, arguments)
            wanted = variants if name == "as recorded" else []
            real, predicted = measured(journal, wanted, arguments)
            rows[name].real.append(real)
            for other, outcome in zip(changes, predicted, strict=False):
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
        print(f"{row.name:20} {title:20} real {real_words:28} predicted {predicted_words:28}{words}")
    return good


def main() -> int:
    """Run the engines, predict, and print every row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--closed-loop", action="store_true", help="a conversation waits for its answers")
    parser.add_argument("--http", action="store_true", help="a server, in real time")
    parser.add_argument("--options", help=argparse.SUPPRESS)
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
