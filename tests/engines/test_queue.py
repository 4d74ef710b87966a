"""Why requests wait for their first admission, on the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engines.observed import audited, observe
from tests.scenarios.driving import Driver, start

from kvledger.audit.causes import FIRST_TOKEN, QUEUE, QUEUED
from kvledger.audit.events import LeftWaiting

pytest.importorskip("vllm")


BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def causes(drive: Callable[[Driver], None], request_id: str, **setup: Any) -> set[str]:
    """The causes of a request's time in the queue, without their prefix."""

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        drive(driver)
        return driver

    _, events = observe(scenario, **setup)
    account = audited(events).ledger.closed[request_id]
    assert account.queued is not None and account.first_token is not None
    assert sum(account.queued) == account.first_token[list(FIRST_TOKEN).index(QUEUED)]
    spent = zip(QUEUE, account.queued, strict=True)
    return {cause.removeprefix("queued_") for cause, microseconds in spent if microseconds}


@BOTH
def test_a_request_that_is_admitted_at_once_waits_for_the_next_step(asynchronous: bool) -> None:
    def drive(driver: Driver) -> None:
        driver.add("one", 40, 4)
        driver.run()

    assert {"next_step"} == causes(drive, "one", asynchronous=asynchronous)


@BOTH
def test_a_long_prompt_spends_the_token_budget(asynchronous: bool) -> None:
    def drive(driver: Driver) -> None:
        driver.add("long", 200, 4)
        driver.add("behind", 40, 4)
        driver.run()

    found = causes(drive, "behind", asynchronous=asynchronous, max_batched_tokens=64, blocks=64)
    assert {"next_step", "budget"} == found


@BOTH
def test_as_many_requests_run_as_may(asynchronous: bool) -> None:
    def drive(driver: Driver) -> None:
        driver.add("runs", 40, 8)
        driver.add("behind", 40, 4)
        driver.run()

    found = causes(drive, "behind", asynchronous=asynchronous, max_running=1)
    assert {"next_step", "running_limit"} == found


@BOTH
def test_the_pool_has_no_blocks_for_the_request(asynchronous: bool) -> None:
    def drive(driver: Driver) -> None:
        driver.add("holds", 100, 8)
        driver.add("behind", 100, 4)
        driver.run()

    found = causes(drive, "behind", asynchronous=asynchronous, blocks=12)
    assert {"next_step", "unknown", "blocks"} == found


def test_a_refusal_after_the_first_one_is_seen_in_its_step() -> None:
    def drive(driver: Driver) -> None:
        driver.add("a", 100, 8)
        driver.add("b", 100, 8)
        driver.run()
        driver.add("c", 100, 8)
        driver.add("d", 100, 8)
        driver.run()

    assert {"next_step", "blocks"} == causes(drive, "d", blocks=12)


def test_a_step_that_preempts_admits_nobody() -> None:
    def drive(driver: Driver) -> None:
        driver.add("first", 60, 40)
        driver.add("second", 60, 40)
        while not any(each.status.name == "PREEMPTED" for each in driver.scheduler.requests.values()):
            driver.step()
            if "third" not in driver.scheduler.requests:
                driver.add("third", 100, 4)
        driver.run()

    assert {"next_step", "unknown", "blocks", "preemption"} == causes(drive, "third", blocks=11)


@BOTH
def test_a_paused_engine_admits_nobody(asynchronous: bool) -> None:
    interface = pytest.importorskip("vllm.v1.core.sched.interface")
    if not hasattr(interface, "PauseState"):
        pytest.skip("this vLLM can't be paused")

    def drive(driver: Driver) -> None:
        driver.add("before", 40, 4)
        driver.step()
        driver.scheduler.set_pause_state(interface.PauseState.PAUSED_ALL)
        driver.drain()
        driver.add("during", 40, 4)
        driver.scheduler.set_pause_state(interface.PauseState.UNPAUSED)
        driver.run()

    assert {"paused", "next_step"} == causes(drive, "during", asynchronous=asynchronous)


def test_a_connector_without_an_answer_is_no_cause_of_a_step() -> None:
    def drive(driver: Driver) -> None:
        matched = driver.scheduler.connector.get_num_new_matched_tokens
        driver.scheduler.connector.get_num_new_matched_tokens = lambda *_: (None, False)
        driver.add("waiting", 100, 4)
        for _ in range(5):
            driver.step()
        driver.scheduler.connector.get_num_new_matched_tokens = matched
        driver.run()

    assert {"next_step", "unknown"} == causes(drive, "waiting", connector="scripted")


def test_a_prompt_that_does_not_fit_in_one_step_without_chunks_is_not_short_of_blocks() -> None:
    """The lookup is followed by no allocation."""

    def drive(driver: Driver) -> None:
        driver.add("first", 40, 2)
        driver.add("behind", 40, 2)
        driver.run()

    found = causes(drive, "behind", max_batched_tokens=64, max_model_len=64, chunked_prefill=False)
    assert {"next_step", "unknown"} == found


def test_waiting_requests_cost_no_event_while_the_cause_stays() -> None:
    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        for name in "abcd":
            driver.add(name, 40, 50)
        driver.run()
        return driver

    _, events = observe(scenario, max_running=1)
    assert 1 == sum(isinstance(event, LeftWaiting) for event in events)


def test_the_scheduler_keeps_its_own_allocation_between_steps() -> None:
    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        manager = driver.scheduler.kv_cache_manager
        driver.add("one", 100, 40)
        driver.add("refused", 100, 4)
        for _ in range(3):
            driver.step()
            assert manager.allocate_slots.__func__ is type(manager).allocate_slots

        allocate = type(manager).allocate_slots

        def fails(*_: Any, **__: Any) -> Any:
            raise ValueError

        type(manager).allocate_slots = fails
        try:
            with pytest.raises(ValueError):
                driver.schedule()
        finally:
            type(manager).allocate_slots = allocate
        return driver

    driver, _ = observe(scenario, blocks=12)
    manager = driver.scheduler.kv_cache_manager
    assert manager.allocate_slots.__func__ is type(manager).allocate_slots
