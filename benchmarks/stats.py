"""The statistics of every figure in the tables: medians with an interval, ratios, percentiles."""

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
    """The median of ``samples``, and the interval that holds the median of 95 % of bootstrap resamples."""
    dice = random.Random(0)
    medians = sorted(median(dice.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    return Estimate(median(samples), medians[RESAMPLES // 40], medians[-RESAMPLES // 40])


def typical_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The ratio ``over / under``, pair by pair: the Hodges-Lehmann estimate of the logarithms.

    That is the median of the means of all pairs of values. Unlike a median, it notices a large ratio that
    occurs in few pairs; unlike a mean, it does not follow a single outlier.
    """
    logarithms = [math.log(one / other) for one, other in zip(over, under, strict=True)]
    return math.exp(median(map(fmean, combinations_with_replacement(logarithms, 2))))


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that is at least as large as ``percent`` of the samples."""
    ordered = sorted(samples)
    return ordered[-(-len(ordered) * percent // 100) - 1]
