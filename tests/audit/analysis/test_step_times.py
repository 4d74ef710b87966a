"""The times of steps, the model of them, and the seconds of lost work that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events
from tests.simulated import Simulated
from tests.simulated_trace import started

from kvledger.audit import events as ev
from kvledger.audit.analysis.costs import (
    CostCounters,
    CostTally,
    Delays,
    PricedDelays,
    before_first_output,
    priced,
)
from kvledger.audit.analysis.step_model import FEATURES, NO_STEPS, StepModel, fit
from kvledger.audit.analysis.step_times import STEP_HANDLERS, StepSample, StepTimes, Work
from kvledger.audit.events import Event
from kvledger.audit.ledger.account import Account
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters.reports.summary import ALL, summarize
from kvledger.exporters.reports.why import why

# --- the times of steps: what an observation covers, what is idle, and what is not observed ---------------


STARTED = ev.EngineStarted(0, 1000.0, "vllm", "0.32.0", "v1", "tokens", 1, {})


def observed(*stream: ev.Event, times: StepTimes | None = None) -> StepTimes:
    times = times or StepTimes()
    for event in (STARTED, ev.Snapshot(0, 0, [], 0), *stream):
        handler = STEP_HANDLERS.get(type(event))
        if handler is not None:
            handler(times, event)
    return times


def rows(times: StepTimes) -> list[tuple[Work, int]]:
    return [(Work(*row[1:-1]), row[-1]) for row in times.sums.sample.rows]


def step(at: int, *changed: int, dropped: Sequence[int] = ()) -> ev.Stepped:
    return ev.Stepped(at, 1, list(changed), list(dropped))


def output(at: int, *changed: int) -> ev.Delivered:
    return ev.Delivered(at, list(changed), [])


def end(at: int, request: int) -> ev.Finished:
    return ev.Finished(at, request, "stopped", -1, -1, -1, -1, -1)


def test_a_step_takes_from_its_scheduling_to_its_output_after_idle_time() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64), output(1500, 0, 1), end(1500, 0), step(9000, 1, 8, 0, 8), output(9100)
    )

    assert [(Work(1, 64), 500), (Work(1, 8), 100)] == rows(times)
    assert 600 == times.sums.busy_us


def test_a_step_takes_from_the_output_before_while_requests_run() -> None:
    times = observed(step(1000, 0, 64, 0, 64), output(1500, 0, 1), step(1600, 0, 1, 0, 65), output(1900))

    assert [(Work(1, 64), 500), (Work(1, 0, 1, 0, 65), 400)] == rows(times)


def test_overlapping_steps_are_not_counted_twice() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64),
        step(1100, 0, 1, 0, 65),
        output(1500, 0, 1),
        step(1510),
        output(1900),
        output(2200),
    )

    assert [500, 400, 300] == [took for _, took in rows(times)]
    assert [0, 65, 66] == [work.context_tokens for work, _ in rows(times)]


def test_repeated_steps_are_observed_with_the_next_output() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        output(200),
        ev.Repeated(650, 3),  # emitted while the next step runs, the last of these came at 500
        step(650),
        output(700),
    )

    assert (Work(4, 0, 4, 0, 12 + 13 + 14 + 15), 500) == rows(times)[-1]


def test_repeated_steps_in_a_pipeline_keep_their_order() -> None:
    times = observed(
        step(0, 0, 10, 0, 10), step(10, 0, 1, 0, 11), output(100, 0, 1), ev.Repeated(900, 5), output(1000)
    )

    assert (Work(6, 0, 6, 0, sum(range(11, 17))), 900) == rows(times)[-1]


def test_repeated_steps_are_observed_when_the_last_request_is_aborted() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        output(200),
        ev.Repeated(500, 3),
        end(9000, 0),
        step(20_000, 1, 5, 0, 5),
        output(20_050),
    )

    assert [(Work(3, 0, 3, 0, 12 + 13 + 14), 300), (Work(1, 5), 50)] == rows(times)[-2:]


def test_a_request_with_drafts_advances_by_what_was_sampled() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 4, 3, 14),
        output(200, 0, 3),
        step(210),
        output(300),
    )

    assert Work(1, 0, 1, 3, 14) == rows(times)[1][0]
    assert 14 + 3 == rows(times)[2][0].context_tokens


def test_nothing_is_observed_between_a_gap_and_the_next_output_after_a_snapshot() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        ev.Gap(50, 3, "full"),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        ev.Snapshot(900, 5, [], 1),
        step(910, 0, 1, 0, 20),
        output(950),  # of the step before the snapshot
        output(1000),
    )

    assert [(Work(1, 0, 1, 0, 20), 50)] == rows(times)


def test_a_new_segment_loses_no_step_in_flight() -> None:
    times = observed(step(0, 0, 10, 0, 10), ev.Snapshot(50, 1, [], 1), output(100, 0, 1))

    assert [(Work(1, 10), 100)] == rows(times)


def test_only_the_window_counts_as_engine_time() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64),
        output(1500, 0, 1),
        step(1600, 0, 1, 0, 65),
        output(1900),
        times=StepTimes(since_us=1_000_001_600),
    )

    assert 2 == len(rows(times))
    assert 400 == times.sums.busy_us


def test_a_sample_is_bounded_and_even() -> None:
    sample = StepSample(most=100)
    for place in range(10_000):
        sample.add(place, place)

    assert 25 <= len(sample.rows) <= 100
    assert 10_000 == sample.seen
    assert 3000 < sum(row[1] for row in sample.rows) / len(sample.rows) < 7000
    assert 0.5 < sample.weight * len(sample.rows) / 10_000 < 2


# --- The model of step time: it finds a known law, withstands outliers, and is refused where there is no law.


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


# --- seconds of lost work: against a law that is known, and unknown where step times follow no law --------


TOKEN = 40e-6
"""Seconds that the simulated engine takes for a token, beside 8 ms a step (``tests/simulated.py``)."""


def trace(folder: Path, seed: int | None = None) -> Path:
    """A simulated engine's journal; with ``seed``, each step takes a random time instead."""
    dice, clock, at = Random(seed), 0, {0: 0}
    stream: list[Event] = []
    for batch in Simulated(400, 3).events():
        for event in batch:
            if event.at not in at:
                clock += dice.randrange(1_000, 300_000)
                at[event.at] = clock
            stream.append(event if seed is None else replace(event, at=at[event.at]))
    configuration = started(0, 0).configuration
    return journals.write(folder, stream, configuration=configuration)


def test_rework_is_priced_by_the_law_of_the_trace(tmp_path: Path) -> None:
    (row,) = summarize([trace(tmp_path)], with_costs=True, gpu_hour=3600.0)

    assert row.costs is not None
    (model,) = row.costs.models
    assert "" == model.model.refused
    rework = [each for each in row.costs.rows if each.kind == "rework"]
    assert row.rework == sum(each.tokens for each in rework) > 0
    for each in rework:
        assert each.seconds == pytest.approx(TOKEN * each.tokens, rel=0.01)
        assert each.money == pytest.approx(each.seconds)
        assert each.share == pytest.approx(TOKEN * each.tokens / row.costs.engine_seconds, rel=0.01)


def test_saved_seconds_are_what_computing_the_loaded_tokens_would_have_taken(tmp_path: Path) -> None:
    (row,) = summarize([trace(tmp_path)], with_costs=True)

    assert row.costs is not None
    (loads,) = row.costs.loads
    assert "LMCacheConnectorV1" == loads.connector
    assert row.loaded == loads.asynchronous_tokens + loads.synchronous_tokens
    assert loads.saved_seconds == pytest.approx(TOKEN * row.loaded, rel=0.01)
    assert loads.waited_seconds > 0


def test_misses_are_priced_by_the_law_of_the_trace(tmp_path: Path) -> None:
    result = why([trace(tmp_path)], gpu_hour=3600.0)

    for row in result.causes:
        if row.cause == "ended_first":
            assert row.seconds is None
        else:
            assert row.seconds == pytest.approx(TOKEN * row.tokens, rel=0.01)
            assert row.first_token_median_seconds is not None and row.first_token_p95_seconds is not None
            assert row.first_token_median_seconds <= row.first_token_p95_seconds


def test_random_step_times_leave_seconds_unknown(tmp_path: Path) -> None:
    path = trace(tmp_path, seed=1)
    (row,), result = summarize([path], with_costs=True, gpu_hour=1.0), why([path], gpu_hour=1.0)

    assert row.costs is not None
    assert row.costs.models[0].model.refused
    assert {None} == {each.seconds for each in row.costs.rows}
    assert {None} == {each.money for each in row.costs.rows}
    assert {None} == {each.seconds for each in result.causes}
    assert row.costs.engine_seconds > 0
    assert row.costs.loads[0].waited_seconds > 0 and row.costs.loads[0].saved_seconds is None


def test_groups_add_up_to_all_requests(tmp_path: Path) -> None:
    *groups, everything = summarize([trace(tmp_path)], r"^(\w+)-", with_costs=True)

    assert ALL == everything.group and everything.costs is not None
    lost = [group.costs.lost_seconds or 0 for group in groups if group.costs]
    assert 4 == len(lost)
    if everything.costs.lost_seconds is not None:
        assert everything.costs.lost_seconds == pytest.approx(sum(lost))
    assert {everything.costs.engine_seconds} == {
        group.costs.engine_seconds for group in groups if group.costs
    }


def test_the_same_requests_cost_the_same_in_metrics(tmp_path: Path) -> None:
    path = trace(tmp_path)
    (engine,) = journals.followed_audits(path)
    (row,) = summarize([path], with_costs=True)

    assert row.costs is not None
    rework = sum(each.seconds or 0 for each in row.costs.rows if each.kind == "rework")
    assert engine.cost_counters.lost_us["rework"] / 1e6 == pytest.approx(rework, rel=0.02)
    assert engine.step_times.busy_us / 1e6 == pytest.approx(row.costs.engine_seconds)


def test_counters_wait_for_the_first_accepted_model() -> None:
    counters, account = CostCounters(), Account(0, "one", 10, 0)
    account.rework = {"blocks": 100}
    counters.close(account, StepSample())

    assert not counters.lost_us
    counters.model = StepModel(refused="", coefficients={})
    counters.close(account, StepSample())
    assert not counters.lost_us  # accepted, and the price of a prefill token is not known

    assert {"rework": {"prefill": 200}} == counters.waiting


@pytest.mark.parametrize(
    ("words", "early", "waited"),
    [
        ("A0+0 s60 o P A0+0 s100 o+ s1 o+ F", {"blocks": 60}, True),
        ("A0+0 s100 o+ s1 o+ P A0+0 s102 o+ F", {}, False),
        ("A0+0 s60 o P A0+0 s100 o+ s1 o+ P A0+0 s102 o+ F", {}, True),
    ],
    ids=["before the first output", "after the first output", "both"],
)
def test_only_work_before_the_first_output_delays_the_first_token(
    tmp_path: Path, words: str, early: dict[str, int], waited: bool
) -> None:
    audit = audit_paths([journals.write(tmp_path / "one", events(100, words))], (KeptAccounts,))
    (account,) = audit.engines[0].of(KeptAccounts).sums

    tokens, us = before_first_output(account)

    assert early == tokens
    assert waited == (us > 0)


def test_an_unknown_request_costs_nothing() -> None:
    tally, account = CostTally(), Account(0, "one", 10, 0)
    account.rework, account.unknown = {"blocks": 100}, "lost"
    tally.add(account)

    assert not priced(tally, NO_STEPS, 0, "none").lost


def test_quantiles_weigh_what_each_delay_stands_for() -> None:
    delays = PricedDelays(3, [(1.0, 1), (5.0, 3), (2.0, 1)])

    assert (5.0, 5.0, 1.0) == (delays.quantile(0.5), delays.quantile(0.95), delays.quantile(0.2))
    assert PricedDelays().quantile(0.5) is None
    many = Delays()
    for tokens in range(5000):
        many.add(tokens, tokens)
    assert many.seconds(1.0).quantile(0.5) == pytest.approx(2500, rel=0.15)
