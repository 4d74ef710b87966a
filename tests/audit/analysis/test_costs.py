"""Seconds of lost work: against a law that is known, and unknown where step times follow no law."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events
from tests.simulated import Simulated
from tests.simulated_trace import started

from kvledger.audit.analysis.costs import (
    CostCounters,
    CostTally,
    Delays,
    PricedDelays,
    before_first_output,
    priced,
)
from kvledger.audit.analysis.step_model import NO_STEPS, StepModel
from kvledger.audit.analysis.step_times import StepSample
from kvledger.audit.events import Event
from kvledger.audit.ledger.account import Account
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters.reports.summary import ALL, summarize
from kvledger.exporters.reports.why import why

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
