"""Medians with an interval: what every figure of the table is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from statistics import fmean, median
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


def typical_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """How many times one is the other, pair by pair: the Hodges-Lehmann estimate of the logarithms.

    That is the median of all means of two. Unlike a median it counts what is large in few pairs, and
    unlike a mean it does not follow a single one.
    """
    logarithms = [math.log(one / other) for one, other in zip(over, under, strict=True)]
    return math.exp(median(map(fmean, combinations_with_replacement(logarithms, 2))))


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that is not below ``percent`` of them."""
    ordered = sorted(samples)
    return ordered[-(-len(ordered) * percent // 100) - 1]
