"""The throughput of the real engine, observed against bare.

Three engines with the demo's tiny model live in this process and serve the same endless workload: a new
request replaces each one that ends, as long as those of *churn*. They take turns of three steps, of
which the first is not timed, and each is observed equally often; ``benchmarks.scheduler`` explains why.
All time counts. Once a second of the observed engine's own time, the engine waits until the recorder has
written the journal. The smaller the model, the larger the share of kvledger: steps of about five
milliseconds are the worst case.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.scheduler import BY_KEY, FRESH_STEPS, TIMED_STEPS, Progress, observe
from benchmarks.stats import Estimate, estimate, typical_ratio
from benchmarks.validity import require_complete

from kvledger.audit.demo.engine import tiny_engine
from kvledger.audit.demo.model import MAX_POSITIONS, VOCABULARY_TOKENS, config, write_model
from kvledger.audit.journal.recorder import WRITE_SECONDS

REQUESTS = 32
BLOCK_TOKENS = 32
CHURN = BY_KEY["churn"]
NAMES = ("observed", "on", "again")
"""The roles that the engines take in turn; the last two are bare and equal."""

ORDERS = tuple(itertools.permutations(range(len(NAMES))))


class Serving:
    """A live engine, kept at ``REQUESTS`` running requests."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._dice = random.Random(0)
        self._requests = 0
        self._running = 0
        self._observed: tuple[Any, Any] | None = None
        self._request_ids: set[str] = set()
        self._unwritten = 0.0
        for _ in range(CHURN.warm_up_steps):
            self.step()

    def begin(self, folder: Path) -> None:
        """Start to observe the engine."""
        self._request_ids = set(self._scheduler.requests)
        self._observed = self.observe(folder)
        self._observed[1]._flush_seconds = 3600.0
        self._unwritten = 0.0

    def begin_beside(self, folder: Path) -> None:
        """The engine is compared with the one that :meth:`begin` observes, and stays bare."""

    def observe(self, folder: Path) -> tuple[Any, Any]:
        """Observe the scheduler; the observer and its recorder."""
        return observe(self._scheduler, folder)

    def end(self) -> None:
        """Stop observing; raises InvalidRound unless the journal is complete."""
        if self._observed is not None:
            observer, recorder = self._observed
            self._observed = None
            observer.stop("detached")
            recorder.close()
            require_complete(recorder.folder, self._request_ids)

    def step(self) -> float:
        """Seconds of one engine step, including the requests that arrive before it."""
        arrivals = [self._arrival() for _ in range(REQUESTS - self._running)]
        began = time.perf_counter()
        for arrival in arrivals:
            self._engine.add_request(*arrival)
        outputs = self._engine.step()
        seconds = time.perf_counter() - began
        self._running += len(arrivals) - sum(output.finished for output in outputs)
        if self._observed is not None and arrivals:
            self._request_ids.update(self._scheduler.requests)
        return seconds

    def written(self, seconds: float) -> float:
        """Count ``seconds`` of this engine. If a write is due, wait for it and return the seconds waited."""
        self._unwritten += seconds
        if self._observed is None or self._unwritten < WRITE_SECONDS:
            return 0.0
        self._unwritten = 0.0
        began = time.perf_counter()
        if not self._observed[1].flush(60.0):
            raise RuntimeError("the journal could not be written within 60 s")
        return time.perf_counter() - began

    def shutdown(self) -> None:
        """End the engine."""
        self.end()
        self._engine.engine_core.shutdown()

    def _arrival(self) -> tuple[Any, ...]:
        from vllm import SamplingParams

        assert CHURN.output_tokens is not None
        output_tokens, prompt_tokens = (
            self._dice.randint(*lengths) for lengths in (CHURN.output_tokens, CHURN.prompt_tokens)
        )
        prompt = {"prompt_token_ids": self.prompt(prompt_tokens)}
        self._requests += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        return str(self._requests), prompt, sampling

    def prompt(self, tokens: int) -> list[int]:
        """A prompt of so many random tokens."""
        return self._dice.choices(range(2, VOCABULARY_TOKENS), k=tokens)


def measure(rounds: int, blocks: int, folder: Path, progress: Progress) -> tuple[Estimate, Estimate]:
    """The ratio of generated tokens per second, observed over bare, and for comparison bare over bare.

    In each round every engine is observed for ``blocks`` blocks, and a block contains each order of
    the three engines once.
    """
    engines = [Serving(start_engine(folder / str(number)).llm_engine) for number in range(len(NAMES))]
    observed, error = list[float](), list[float]()
    try:
        gc.collect()
        gc.freeze()
        for number in range(rounds):
            progress(f"engine: round {number + 1} of {rounds}")
            ratios = [turns(engines[turn:] + engines[:turn], blocks, folder) for turn in range(len(engines))]
            observed.append(geometric_mean(ratio for ratio, _ in ratios))
            error.append(geometric_mean(ratio for _, ratio in ratios))
        return estimate(observed), estimate(error)
    finally:
        gc.unfreeze()
        for engine in engines:
            engine.shutdown()


def turns(engines: Sequence[Serving], blocks: int, folder: Path) -> tuple[float, float]:
    """Two ratios of seconds: bare over the first engine, which is observed; third engine over second."""
    try:
        engines[0].begin(folder / "journals")
        for engine in engines[1:]:
            engine.begin_beside(folder / "journals")
        for _ in range(FRESH_STEPS):
            for engine in engines:
                engine.step()
        seconds: tuple[list[float], ...] = [], [], []
        for _ in range(blocks):
            spent = [0.0] * len(engines)
            for order in ORDERS:
                for place in order:
                    engine = engines[place]
                    untimed = engine.step()
                    timed = sum(engine.step() for _ in range(TIMED_STEPS))
                    whole = untimed + timed
                    spent[place] += timed + timed / whole * engine.written(whole)
            for sums, one in zip(seconds, spent, strict=True):
                sums.append(one)
        bare = [fmean(pair) for pair in zip(*seconds[1:], strict=True)]
        return typical_ratio(bare, seconds[0]), typical_ratio(seconds[2], seconds[1])
    finally:
        for engine in engines:
            engine.end()


def start_engine(folder: Path, changes: Mapping[str, Any] | None = None) -> Any:
    """The engine of the demo's model; with ``changes`` to its configuration, its weights are random."""
    model = write_model(folder / "model", 0)
    if changes:
        (model / "config.json").write_text(json.dumps({**config(), **changes}))
    return tiny_engine(
        model,
        load_format="dummy" if changes else "auto",
        disable_log_stats=False,
        num_gpu_blocks_override=REQUESTS * MAX_POSITIONS // BLOCK_TOKENS + 1,
        max_model_len=MAX_POSITIONS,
        max_num_seqs=REQUESTS,
    )
