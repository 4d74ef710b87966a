"""Hits on cached blocks before the step that writes them was given to the workers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched, manager
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.withdrawn import STATES

from kvledger.audit.ledger.account import Settlement

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

FINDING = "blocks/uncommitted-hit"


@pytest.fixture
def watched() -> Watched:
    return Watched()


def settled(watched: Watched, request_id: str) -> tuple[int, int, int, int]:
    """Local, computed and unattained tokens, and the invalid hits among the unattained."""
    account = watched.audits[0].ledger.account(request_id)
    assert account is not None
    figures = account.settled
    assert isinstance(figures, Settlement)
    return figures.local, figures.computed, figures.unattained, figures.invalid_hits


# --- steps that were withdrawn ----------------------------------------------------------------------


@violates("blocks/uncommitted-hit")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_request_that_hits_a_block_of_its_withdrawn_step_is_named(watched, mode):
    """It has computed 64 tokens and hits 80."""
    SCENARIOS[f"withdrawn_step_{mode}"](watched.attach)

    finding = watched.finding(FINDING)
    assert ("low", 16, 64, 80) == (
        finding.request,
        *(finding.figures[name] for name in ("tokens", "start", "end")),
    )
    assert "low was preempted in the step that was to compute them" in finding.message
    assert (0, 80, 16, 16) == settled(watched, "low")


@violates("blocks/uncommitted-hit")
def test_who_retries_an_aborted_request_may_hit_blocks_of_its_withdrawn_step(watched):
    SCENARIOS["withdrawn_step_then_abort_sync"](watched.attach)

    finding = watched.finding(FINDING)
    assert ("retry", 16, "low") == (finding.request, finding.figures["tokens"], finding.figures["filler"])
    assert (64, 16, 16, 16) == settled(watched, "retry")


@violates("blocks/uncommitted-hit")
def test_a_state_of_a_withdrawn_step_that_is_hit_is_named(watched):
    SCENARIOS["withdrawn_state_sync"](watched.attach)

    finding = watched.finding(FINDING)
    assert ("turn", 1, 95) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert 2 == len(finding.figures["blocks"])  # a block of each group


@near_miss("blocks/uncommitted-hit")
def test_blocks_below_a_withdrawn_step_are_valid(watched):
    driver = watched.start(
        policy="priority", blocks=9, scheduler_options=(("long_prefill_token_threshold", 32),)
    )
    driver.add("first", 3, 8, priority=0)
    driver.add("low", 96, 4, priority=9)
    driver.step()
    driver.add("high", 16, 2, priority=0)
    while not driver.scheduler.requests["low"].num_preemptions:
        driver.step()
    driver.abort("low")
    driver.add("below", 70, 4, shares=("low", 64))
    driver.run()

    assert FINDING not in watched.violation_ids()
    assert (64, 6, 0, 0) == settled(watched, "below")


@near_miss("blocks/uncommitted-hit")
def test_a_block_of_a_withdrawn_step_that_is_allocated_again_is_valid(watched):
    """Under async scheduling the request that preempts takes the last block of the withdrawn step."""
    SCENARIOS["withdrawn_state_async"](watched.attach)

    assert [] == watched.violation_ids()


# --- steps that run ---------------------------------------------------------------------------------


@near_miss("blocks/uncommitted-hit")
def test_a_hit_before_the_output_of_the_step_that_writes_is_valid(watched):
    """Steps run in order, so the state is there when the next step reads it."""
    driver = watched.start(groups=STATES, blocks=128, asynchronous=True)
    driver.add("a", 64, 4)
    driver.schedule()
    driver.add("b", 90, 4, shares=("a", 64))
    driver.schedule()
    assert 2 == len(driver.in_flight)
    driver.run()

    assert [] == watched.violation_ids()
    assert (64, 26, 0, 0) == settled(watched, "b")


@near_miss("blocks/uncommitted-hit")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_of_an_aborted_request_runs_all_the_same(watched, mode):
    """vLLM#56525 suspects this hit: the step was given to the workers before the abort."""
    SCENARIOS[f"abort_in_flight_{mode}"](watched.attach)

    assert [] == watched.violation_ids()
    assert (64, 36, 0, 0) == settled(watched, "retry")


# --- states that are hit in their step --------------------------------------------------------------


class Forgetful(set[Any]):
    """States that were cached in this step, as releases before the fence know them: none."""

    def add(self, _: Any) -> None:
        pass


@violates("blocks/uncommitted-hit")
def test_a_state_that_is_hit_in_the_step_that_writes_it_is_named(watched):
    """vLLM#29387: in 0.12.0 a request takes the state that another one is about to compute."""

    def attach(scheduler: Any) -> None:
        watched.attach(scheduler)
        scheduler.kv_cache_manager.coordinator.single_type_managers[1].cached_blocks_this_step = Forgetful()

    SCENARIOS["states_in_one_step_sync"](attach)

    finding = watched.finding(FINDING)
    assert ("b", 64, 0, "in_step") == (
        finding.request,
        *(finding.figures[name] for name in ("tokens", "start", "why")),
    )
    assert (0, 26, 64, 64) == settled(watched, "b")


@near_miss("blocks/uncommitted-hit")
def test_a_request_that_waits_for_the_next_step_reads_the_state(watched):
    driver = SCENARIOS["states_in_one_step_sync"](watched.attach)

    assert hasattr(manager(driver, 1), "cached_blocks_this_step")
    assert [] == watched.violation_ids()
    assert (64, 26, 0, 0) == settled(watched, "b")


@near_miss("blocks/uncommitted-hit")
def test_kv_that_is_hit_in_the_step_that_computes_it_is_valid(watched):
    """With attention a step writes before it reads."""
    driver = watched.start(blocks=128)
    driver.add("a", 64, 4)
    driver.add("b", 90, 4, shares=("a", 64))
    driver.run()

    assert [] == watched.violation_ids()
    assert (64, 26, 0, 0) == settled(watched, "b")
