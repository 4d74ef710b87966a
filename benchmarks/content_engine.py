"""Tokens a second of the real engine at level ``content`` against level ``blocks``.

As in ``benchmarks.engine``, three engines live in this process and take turns; one is observed at level
``content`` with every hit verified, the two others at level ``blocks``. Prompts begin with one of a few
prefixes, so most of their blocks are hits. The model of *large* has steps of tens of milliseconds; the
demo's tiny model is the worst case.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.engine import NAMES, Serving, start_engine, turns
from benchmarks.scheduler import Progress, observe
from benchmarks.stats import Estimate, estimate

from kvledger.audit.demo.model import VOCABULARY_TOKENS
from kvledger.audit.engines.content.attached import worker_of
from kvledger.audit.replay.journals import audit_paths

PREFIXES, PREFIX_TOKENS = 8, 128

LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""What the configuration of the large model changes in the demo's."""


class ContentServing(Serving):
    """An engine at level ``content``, or at level ``blocks`` beside it."""

    def begin(self, folder: Path) -> None:
        """Start to observe the engine at level ``content``."""
        super().begin(folder)
        assert self._observed is not None
        self._observed[0].watch_content(worker_of(self._engine.engine_core.engine_core))
        if self._observed[0].content is None:
            raise RuntimeError("level content does not know this engine's KV caches")

    def begin_beside(self, folder: Path) -> None:
        """Start to observe the engine at level ``blocks``."""
        super().begin(folder)

    def observe(self, folder: Path) -> tuple[Any, Any]:
        """Observe the scheduler."""
        return observe(self._scheduler, folder, "blocks")

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that begins with one of a few prefixes."""
        prefix = self._dice.randrange(PREFIXES)
        shared = [2 + (prefix * 7919 + at * 104729) % (VOCABULARY_TOKENS - 2) for at in range(PREFIX_TOKENS)]
        return shared + super().prompt(tokens // 2)


class Rates(NamedTuple):
    """Ratios of tokens a second, and what was checked."""

    content: Estimate
    error: Estimate
    step_milliseconds: float
    compared: int


def measure(large: bool, rounds: int, blocks: int, folder: Path, progress: Progress) -> Rates:
    """Content over blocks, and for comparison blocks over blocks, of one of the two models."""
    engines = [
        ContentServing(start_engine(folder / str(number), LARGE if large else None).llm_engine)
        for number in range(len(NAMES))
    ]
    content, error, seconds = list[float](), list[float](), list[float]()
    try:
        gc.collect()
        gc.freeze()
        for number in range(rounds):
            progress(f"content: {'large' if large else 'tiny'} model, round {number + 1} of {rounds}")
            ratios = [turns(engines[turn:] + engines[:turn], blocks, folder) for turn in range(len(engines))]
            content.append(geometric_mean(ratio for ratio, _ in ratios))
            error.append(geometric_mean(ratio for _, ratio in ratios))
            seconds += [engine.step() for engine in engines for _ in range(5)]
        compared = sum(_compared(folder / "journals"))
        return Rates(estimate(content), estimate(error), 1e3 * median(seconds), compared)
    finally:
        gc.unfreeze()
        for engine in engines:
            engine.shutdown()


def _compared(journals: Path) -> Iterator[int]:
    """The compared hit blocks of each journal; raises if one differed."""
    for engine in audit_paths([journals]).engines:
        counts = engine.auditor.ledger.sums.contents
        if engine.violations or counts.get("differed"):
            raise RuntimeError(f"{engine.path.name}: a hit block differed: {counts}")
        yield counts.get("compared", 0)
