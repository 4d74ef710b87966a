"""What a step of the real scheduler costs: with vLLM's own statistics, without them, and observed.

Four engines with the same seed live in one process and take turns of three steps, so that other load on
the machine affects all of them alike. How it is measured:

- The timed part of a step is ``add_request``, ``schedule`` and ``update_from_output``. The scripted
  model's output is prepared outside of it.
- CPU time is that of the stepping thread and, for the observed engine, all of the writer thread: the whole
  process without the benchmark itself.
- All engines execute the same steps. Turns are short, because the speed of a shared machine changes by a
  few percent within 50 ms. The first step of a turn is not timed: the previous engine has filled the CPU
  caches, which makes that step a tenth slower, and an engine in production does not share its process.
  Work that is done every few steps does not fall into untimed steps only, since no such interval is a
  multiple of 3. Each engine follows each other engine equally often (`ORDERS`).
- Sums over blocks of 8 timed steps are compared, and the figure of a round is the Hodges-Lehmann estimate
  of these ratios: it uses every block, and a single disturbed block does not decide it. The writer
  thread's time is spread over all steps of the round; it writes as often as if the observed engine
  ran alone.
- Where an engine's objects lie in memory changes its speed by a few percent for as long as it lives. So each
  of the three equal engines is observed for a third of the round, and the round's figure is the
  geometric mean of the three. Every round creates new engines in random order. The result is the
  median of the rounds.
- Two of the engines are bare and equal. The observed engine is compared with their mean; the distance of
  their own ratio from 1 is the error of the benchmark.
- A round counts only if its journal is complete and audits clean (`benchmarks.validity`).
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.stats import Estimate, estimate, percentile, typical_ratio
from benchmarks.validity import require_complete
from tests.scenarios.driving import images

from kvledger.audit.entry import plugin
from kvledger.audit.journal.recorder import WRITE_SECONDS
from kvledger.audit.traffic.driver import ModelStep, Runner, tokens
from kvledger.audit.traffic.engine_setup import EngineSetup, block_hasher, build_request, build_scheduler

LANES = ("off", "on", "again", "observed")
"""An engine with vLLM's ``log_stats`` off, two with ``log_stats`` on, and one that is also observed."""

ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Williams's square for four: each lane takes each place once and follows each other lane once."""

TIMED_STEPS = 2
"""Timed steps of a turn; the step before them is not timed."""

BLOCK_STEPS = TIMED_STEPS * len(ORDERS)
"""Steps that are summed before they are compared. Shorter blocks would hide what happens in few steps."""

EQUAL = LANES[1:]
"""Lanes with equal engines; each engine is observed in turn, so each is also compared with itself."""

FRESH_STEPS = 16
"""Untimed steps after another engine has become the observed one."""

ENCODER_IMAGES = 64
"""How many images the encoder cache holds."""

FAMILIES = 8
"""Number of shared prefixes; each has its own length."""


@dataclass(frozen=True)
class Workload:
    """What runs, and how much observing it may cost; a ``limit`` of 0.0 sets none.

    Lengths are inclusive ranges of tokens.
    """

    key: str
    name: str
    running: int
    limit: float
    prompt_tokens: tuple[int, int] = (64, 256)
    output_tokens: tuple[int, int] | None = None
    """None: requests decode until the benchmark ends."""
    drafts: int = 0
    level: str = "tokens"
    """The level of observation."""
    blocks: int = 0
    """Blocks of the pool; 0: as many as the requests may need."""
    image_tokens: int = 0
    """Embeddings of the image in each prompt; 0: the model is one of text."""
    weight: int = 1
    """The number of timed steps is divided by this, because the steps are that much longer."""

    @property
    def warm_up_steps(self) -> int:
        """Steps until all requests run, their ends are spread, and every block of the pool was allocated."""
        return self.output_tokens[1] * 5 // 4 if self.output_tokens else 64

    def shrunk(self, share: float) -> Workload:
        """The same workload with this share of its running requests."""
        return replace(self, running=int(self.running * share))


WORKLOADS = (
    Workload("steady-256", "steady decode, 256 running", 256, 1.01),
    Workload("steady-1024", "steady decode, 1,024 running", 1024, 1.01, weight=2),
    Workload("churn", "churn, 1 to 2 ends a step", 256, 1.03, output_tokens=(64, 256)),
    Workload("churn-short", "churn, 6 to 7 ends a step", 256, 0.0, output_tokens=(16, 64)),
    Workload(
        "images",
        "churn, 1 to 2 ends a step, an image in each prompt",
        256,
        1.03,
        output_tokens=(64, 256),
        image_tokens=32,
    ),
    Workload("speculative", "speculative, 3 drafts", 256, 1.03, drafts=3),
    Workload("blocks-256", "level blocks, steady decode, 256 running", 256, 1.03, level="blocks"),
    Workload(
        "blocks-1024", "level blocks, steady decode, 1,024 running", 1024, 1.03, level="blocks", weight=2
    ),
    Workload(
        "blocks-pool",
        "level blocks, steady decode, 256 running, 200,000 blocks",
        256,
        1.03,
        level="blocks",
        blocks=200_000,
    ),
    Workload(
        "blocks-churn",
        "level blocks, churn, 1 to 2 ends a step",
        256,
        1.06,
        output_tokens=(64, 256),
        level="blocks",
    ),
)
BY_KEY = {workload.key: workload for workload in WORKLOADS}


@dataclass(frozen=True)
class Effort:
    """How much is measured: each lane times ``steps`` a round, divided by the workload's weight."""

    rounds: int
    steps: int

    def blocks(self, workload: Workload) -> int:
        """Blocks that are compared while one engine is the observed one."""
        return max(1, self.steps // workload.weight // BLOCK_STEPS // len(EQUAL))

    def sequence_tokens(self, workload: Workload) -> int:
        """The length that a request reaches if it never ends."""
        steps = workload.warm_up_steps + self.steps * (1 + TIMED_STEPS) // TIMED_STEPS
        steps += len(EQUAL) * FRESH_STEPS
        return workload.prompt_tokens[1] + (steps + 8) * (workload.drafts + 1)


class Clients:
    """What surrounds a scheduler: the senders of requests, and the scripted model.

    Clients of the same workload behave alike, step by step.
    """

    def __init__(self, workload: Workload, setup: EngineSetup, longest: int, hasher: Any) -> None:
        """``longest``: output tokens of a request that never ends."""
        self.workload = workload
        self.requests = 0
        self._runner = Runner(setup, seed=1)
        self._longest = longest
        self._hasher = hasher
        self._dice = random.Random(2)

    def arrivals(self, number: int) -> list[Any]:
        """``number`` new requests."""
        return [self._arrive() for _ in range(number)]

    def answer(self, scheduler: Any, scheduled: Any) -> tuple[ModelStep, Any]:
        """The step that was just scheduled, and the model's output for it."""
        step = ModelStep.of(scheduled, scheduler.requests)
        return step, self._runner.answer(step, scheduler.requests, None)

    def propose(self, scheduler: Any, step: ModelStep) -> None:
        """Give the scheduler the draft tokens for the next step."""
        if self.workload.drafts:
            scheduler.update_draft_token_ids(self._runner.drafts(step))

    def _arrive(self) -> Any:
        dice, workload = self._dice, self.workload
        name = f"request-{self.requests:08d}"
        self.requests += 1
        prompt_tokens = dice.randint(*workload.prompt_tokens)
        family = dice.randrange(FAMILIES)
        shared = min(prompt_tokens, 16 * family)
        prompt = _family(family)[:shared] + tokens(prompt_tokens - shared, name)
        output = workload.output_tokens
        return build_request(
            name,
            prompt,
            hasher=self._hasher,
            max_tokens=dice.randint(*output) if output else self._longest,
            of_request=self._image(name) if workload.image_tokens else None,
        )

    def _image(self, name: str) -> dict[str, Any]:
        """An image at the prompt's beginning; half of the requests have one of a few."""
        identity = str(self._dice.randrange(FAMILIES)) if self._dice.random() < 0.5 else name
        return images((identity, 0, self.workload.image_tokens))


class Lane:
    """One engine and its clients, which keep ``running`` requests in it."""

    def __init__(self, workload: Workload, effort: Effort, *, log_stats: bool) -> None:
        self.workload = workload
        most = workload.output_tokens
        longest = most[1] if most else effort.sequence_tokens(workload)
        length = workload.prompt_tokens[1] + longest
        setup = EngineSetup(
            blocks=workload.blocks or workload.running * (-(-length // 16) + 1),
            max_running=workload.running,
            max_model_len=length + 16,
            drafts=workload.drafts,
            encoder_tokens=ENCODER_IMAGES * workload.image_tokens,
            log_stats=log_stats,
        )
        self.scheduler: Any = build_scheduler(setup)
        hasher = block_hasher(self.scheduler)
        self.clients = Clients(workload, setup, longest, hasher)
        self.request_steps = 0
        self.generated_tokens = 0

    def warm_up(self) -> None:
        """Step until the workload is in its steady state."""
        for _ in range(self.workload.warm_up_steps):
            self.step()

    def arrivals(self) -> list[Any]:
        """New requests for those that have ended."""
        return self.clients.arrivals(self.workload.running - len(self.scheduler.requests))

    def answer(self, scheduled: Any) -> tuple[ModelStep, Any]:
        """The step that was just scheduled, and the model's output for it."""
        return self.clients.answer(self.scheduler, scheduled)

    def propose(self, step: ModelStep) -> None:
        """Give the scheduler the draft tokens for the next step."""
        self.clients.propose(self.scheduler, step)

    def step(self) -> tuple[float, float]:
        """One engine step; CPU seconds of this thread and wall seconds in the scheduler."""
        scheduler = self.scheduler
        arrivals = self.arrivals()
        cpu, wall = -time.thread_time(), -time.perf_counter()
        for request in arrivals:
            scheduler.add_request(request)
        scheduled = scheduler.schedule()
        wall += time.perf_counter()
        cpu += time.thread_time()

        step, answer = self.answer(scheduled)
        self.request_steps += len(scheduled.num_scheduled_tokens)
        self.generated_tokens += sum(map(len, answer.sampled_token_ids))

        cpu -= time.thread_time()
        wall -= time.perf_counter()
        scheduler.update_from_output(scheduled, answer)
        wall += time.perf_counter()
        cpu += time.thread_time()
        self.propose(step)
        return cpu, wall


@functools.cache
def _family(number: int) -> list[int]:
    return tokens(16 * FAMILIES, f"family {number}")


class ObservedLane(Lane):
    """A lane that can be observed as by the plugin, with a journal on disk."""

    observer: Any
    recorder: Any

    def __init__(self, workload: Workload, effort: Effort, folder: Path | None = None) -> None:
        super().__init__(workload, effort, log_stats=True)
        self.write_seconds = WRITE_SECONDS
        self._unwritten = -math.inf
        self._request_ids: set[str] = set()
        self._observed_steps = 0
        if folder is not None:
            self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Start to observe the engine."""
        self._request_ids = set(self.scheduler.requests)
        self._observed_steps = 0
        self.observer, self.recorder = observe(self.scheduler, folder, self.workload.level)
        self.recorder._flush_seconds = 3600.0
        self._unwritten = 0.0

    def arrivals(self) -> list[Any]:
        """New requests for those that have ended; the journal must contain each of them."""
        requests = super().arrivals()
        self._request_ids.update(request.request_id for request in requests)
        return requests

    def step(self) -> tuple[float, float]:
        """Step as a bare lane does, and flush the journal once a second of this lane's own time.

        The writer thread itself goes by the clock, which counts the time of all lanes.
        """
        began = time.perf_counter()
        seconds = super().step()
        self._observed_steps += 1
        self._unwritten += time.perf_counter() - began
        if self._unwritten > self.write_seconds:
            self.settle()
            self._unwritten = 0.0
        return seconds

    def settle(self) -> None:
        """Wait until the writer thread has written everything."""
        if not self.recorder.flush(60.0):
            raise RuntimeError("the journal could not be written within 60 s")

    def so_far(self) -> tuple[float, int, int, int]:
        """The writer thread's CPU seconds; journal bytes, requests and generated tokens."""
        self.settle()
        time.sleep(0.02)  # the writer records its CPU time after the flush
        recorder = self.recorder
        return (
            recorder.writer_seconds,
            recorder.written_bytes,
            self.clients.requests,
            self.generated_tokens,
        )

    def close(self) -> None:
        """End observation and journal; raises InvalidRound unless the journal is complete."""
        self.observer.stop("detached")
        self.recorder.close()
        self._unwritten = -math.inf
        require_complete(self.recorder.folder, self._request_ids, self._observed_steps)


def observe(scheduler: Any, folder: Path, level: str = "tokens") -> tuple[Any, Any]:
    """Observe a scheduler as the plugin does; the observer, and the recorder that writes below ``folder``."""
    os.environ["KVLEDGER_DIR"], os.environ["KVLEDGER_LEVEL"] = str(folder), level
    try:
        observer: Any = plugin.observe(scheduler)
    finally:
        del os.environ["KVLEDGER_DIR"], os.environ["KVLEDGER_LEVEL"]
    if observer is None:
        raise RuntimeError("kvledger can't observe this vLLM")
    return observer, observer.log.sink


Progress = Callable[[str], None]


@dataclass
class Measured:
    """The ratios of every pair of lanes, one for each round, and the size of the journals."""

    cpu: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    p99: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    journal_bytes: int = 0
    requests: int = 0
    generated_tokens: int = 0

    def cpu_ratio(self, over: str, under: str) -> Estimate:
        """The ratio of CPU a step, one lane over another."""
        return estimate(self.cpu[over, under])

    def p99_ratio(self, over: str, under: str) -> Estimate:
        """The ratio of the 99th percentile of wall seconds a step, one lane over another."""
        return estimate(self.p99[over, under])


PAIRS = (("observed", "bare"), ("bare", "off"), ("again", "on"))
"""The pairs of lanes that are compared; bare is the mean of ``on`` and ``again``."""


def measure(workload: Workload, effort: Effort, folder: Path, progress: Progress) -> Measured:
    """Run ``workload`` in all lanes, round after round. Raises InvalidRound."""
    measured = Measured({pair: [] for pair in PAIRS}, {pair: [] for pair in PAIRS})
    dice = random.Random(3)
    for number in range(effort.rounds):
        progress(f"{workload.name}: round {number + 1} of {effort.rounds}")
        lanes = _build(workload, effort, dice)
        gc.collect()
        gc.freeze()
        try:
            _round(lanes, effort, folder, measured, dice)
        finally:
            gc.unfreeze()
    return measured


def _build(workload: Workload, effort: Effort, dice: random.Random) -> dict[str, Lane]:
    """New lanes in their steady state, created in random order."""

    def make(name: str) -> Lane:
        return ObservedLane(workload, effort) if name in EQUAL else Lane(workload, effort, log_stats=False)

    lanes = {name: make(name) for name in dice.sample(LANES, len(LANES))}
    for lane in lanes.values():
        lane.warm_up()
    return lanes


def _round(
    lanes: dict[str, Lane], effort: Effort, folder: Path, measured: Measured, dice: random.Random
) -> None:
    """Measure one round, in which each of the equal engines takes each of the equal lanes once."""
    logarithms: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    wall: dict[str, list[float]] = {name: [] for name in LANES}
    for turn in range(len(EQUAL)):
        turned = [lanes[name] for name in EQUAL[turn:] + EQUAL[:turn]]
        cpu = _turns(lanes | dict(zip(EQUAL, turned, strict=True)), effort, folder, measured, dice, wall)
        for over, under in PAIRS:
            logarithms[over, under].append(math.log(typical_ratio(cpu[over], cpu[under])))
    wall["bare"] = wall["on"] + wall["again"]
    for over, under in PAIRS:
        measured.cpu[over, under].append(math.exp(fmean(logarithms[over, under])))
        tails = percentile(wall[over], 99), percentile(wall[under], 99)
        measured.p99[over, under].append(tails[0] / tails[1])


def _turns(
    lanes: dict[str, Lane],
    effort: Effort,
    folder: Path,
    measured: Measured,
    dice: random.Random,
    wall: dict[str, list[float]],
) -> dict[str, list[float]]:
    """CPU seconds of each lane, and of ``bare``, in every block; adds wall seconds of steps to ``wall``."""
    observed = lanes["observed"]
    assert isinstance(observed, ObservedLane)
    observed.begin(folder)
    blocks = effort.blocks(observed.workload)
    names = dice.sample(LANES, len(LANES))
    cpu: dict[str, list[float]] = {name: [] for name in LANES}
    for _ in range(FRESH_STEPS):
        for lane in lanes.values():
            lane.step()
    before = observed.so_far()
    for _ in range(blocks):
        spent = dict.fromkeys(LANES, 0.0)
        for order in ORDERS:
            for place in order:
                lane = lanes[names[place]]
                lane.step()
                for cpu_seconds, wall_seconds in [lane.step() for _ in range(TIMED_STEPS)]:
                    spent[names[place]] += cpu_seconds
                    wall[names[place]].append(wall_seconds)
        for name in LANES:
            cpu[name].append(spent[name])
    writer, written, requests, tokens_ = map(operator.sub, observed.so_far(), before)
    observed.close()
    measured.journal_bytes += int(written)
    measured.requests += int(requests)
    measured.generated_tokens += int(tokens_)
    timed = writer * TIMED_STEPS / (1 + TIMED_STEPS)
    cpu["observed"] = [seconds + timed / blocks for seconds in cpu["observed"]]
    cpu["bare"] = list(map(fmean, zip(cpu["on"], cpu["again"], strict=True)))
    return cpu
