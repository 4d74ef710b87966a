"""What the benchmark's figures are, on numbers that are known."""

from __future__ import annotations

import random

import pytest
from benchmarks.stats import typical_ratio


def test_equal_pairs_have_a_ratio_of_one() -> None:
    assert typical_ratio([2.0, 3.0, 5.0], [2.0, 3.0, 5.0]) == pytest.approx(1.0)


def test_the_ratio_is_found_whatever_the_pairs_have_in_common() -> None:
    under = [random.Random(0).uniform(1.0, 9.0) for _ in range(16)]

    assert typical_ratio([1.02 * seconds for seconds in under], under) == pytest.approx(1.02)


def test_a_single_pair_that_met_a_neighbour_does_not_decide() -> None:
    assert typical_ratio([1.02] * 15 + [3.0], [1.0] * 16) == pytest.approx(1.02)


def test_a_cost_in_four_of_ten_pairs_is_seen() -> None:
    """A median would not see it."""
    assert typical_ratio([1.1] * 4 + [1.0] * 6, [1.0] * 10) > 1.04


def test_of_two_equal_engines_neither_is_found_dearer() -> None:
    """The median of many rounds of noise with a long tail is 1, within what so many rounds can show."""
    dice = random.Random(1)

    def cpu() -> list[float]:
        return [1.0 + dice.expovariate(50.0) for _ in range(16)]

    ratios = sorted(typical_ratio(cpu(), cpu()) for _ in range(1_000))

    assert ratios[500] == pytest.approx(1.0, abs=0.001)
