"""Medians with an interval: what every figure of the table is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

RESAMPLES = 4_000


class Estimate(NamedTuple):
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def estimate(samples: Sequence[float]) -> Estimate:
    """The median of ``samples``, and where it lies in 95 % of samples drawn from them again."""
    dice = random.Random(0)
    medians = sorted(median(dice.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return Estimate(median(samples), medians[RESAMPLES // 40], medians[-RESAMPLES // 40])


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that is not below ``percent`` of them."""
    ordered = sorted(samples)
    return ordered[-(-len(ordered) * percent // 100) - 1]
