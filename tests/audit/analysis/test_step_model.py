"""The model of step time: it finds a known law, withstands outliers, and is refused where there is no law."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvledger.audit.analysis.step_model import FEATURES, fit
from kvledger.audit.analysis.step_times import StepSample, Work

LAW = (4_000.0, 55.0, 30.0, 20.0, 0.08)
"""Microseconds of a step, a prefill token, a decoding request, a draft token and a context token."""


def steps(seed: int, count: int, took: Callable[[Work, Random], float], drafts: bool = True) -> StepSample:
    """Steps of an engine under changing load."""
    dice, sample = Random(seed), StepSample()
    for place in range(count):
        decodes = dice.randrange(1, 129)
        prefill = dice.choice((0, 0, 0, dice.randrange(16, 2048)))
        drafted = 3 * dice.randrange(0, decodes) if drafts else 0
        times = dice.choice((1, 1, 1, dice.randrange(2, 40)))
        context = decodes * dice.randrange(50, 2000)
        work = Work(times, prefill if times == 1 else 0, decodes * times, drafted * times, context * times)
        sample.add(place, *work, max(1, round(took(work, dice))))
    return sample


def law(work: Work, _: Random) -> float:
    return sum(each * amount for each, amount in zip(LAW, work, strict=True))


def noisy(work: Work, dice: Random) -> float:
    return law(work, dice) * dice.lognormvariate(0, 0.08)


def test_an_exact_law_is_found() -> None:
    model = fit(steps(1, 600, law))

    assert "" == model.refused
    found = [model.coefficients[name].seconds for name in FEATURES]
    assert [each / 1e6 for each in LAW] == pytest.approx(found, rel=1e-3)
    assert model.relative_error is not None and model.relative_error < 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_law_is_found_within_the_stated_error(seed: int) -> None:
    model = fit(steps(seed, 3000, noisy))

    assert "" == model.refused
    assert model.r2 is not None and model.r2 > 0.9
    for name, each in zip(FEATURES, LAW, strict=True):
        found = model.coefficients[name]
        assert found.seconds is not None and found.error is not None
        assert abs(found.seconds - each / 1e6) <= 1.5 * found.error, name
        assert found.error < 0.25 * found.seconds


def test_a_few_steps_that_compile_do_not_move_the_prices() -> None:
    def compiling(work: Work, dice: Random) -> float:
        return noisy(work, dice) + (30e6 if dice.random() < 0.02 else 0)

    model, without = fit(steps(2, 2000, compiling)), fit(steps(2, 2000, noisy))

    assert "" == model.refused
    assert model.prefill_seconds == pytest.approx(without.prefill_seconds, rel=0.05)
    assert model.outliers is not None and 0.001 < model.outliers < 0.06


def test_random_durations_are_refused() -> None:
    model = fit(steps(3, 2000, lambda _, dice: dice.uniform(1_000, 200_000)))

    assert model.refused
    assert model.prefill_seconds is None and model.decode_seconds is None


def test_durations_of_other_steps_are_refused() -> None:
    """The same durations as under the law, in another order: as plausible, and without meaning."""
    sample = steps(4, 2000, noisy)
    took = [row[-1] for row in sample.rows]
    Random(4).shuffle(took)
    sample.rows = [(*row[:-1], us) for row, us in zip(sample.rows, took, strict=True)]

    assert fit(sample).refused


def test_equal_durations_have_no_price() -> None:
    assert "don't follow work" in fit(steps(5, 500, lambda work, _: 5_000.0 * work.steps)).refused


def test_few_steps_are_refused() -> None:
    model = fit(steps(6, 63, law))

    assert "only 63 steps were timed, and a model takes 64" == model.refused
    assert "" == fit(steps(6, 64, law)).refused


def test_work_that_never_happened_has_no_price() -> None:
    model = fit(steps(7, 1000, noisy, drafts=False))

    assert "" == model.refused
    assert model.draft_seconds is None
    assert model.decode_seconds == pytest.approx((30 + 0.08 * 1025) / 1e6, rel=0.1)
