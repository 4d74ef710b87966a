"""Requests and sessions that wait, engines that stand still, and outputs dropped, on the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.observed import audited, observe
from tests.scenarios.driving import Driver, start

from kvledger.audit.causes import FIRST_TOKEN, QUEUE, QUEUED
from kvledger.audit.checks.registry import Violation
from kvledger.audit.engines.v1_until_0_26 import Lives020
from kvledger.audit.events import LeftWaiting
from kvledger.audit.ledger.engine_postings import IDLE_CALLS

pytest.importorskip("vllm")

from tests.engines.connectors.test_live import Watch

from kvledger.audit.engines import choose, host_version
from kvledger.audit.journal.recorder import MemoryRecorder

# --- why requests wait for their first admission, on the installed vLLM -----------------------------------


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


# --- an engine that stands still or is livelocked, on the installed vLLM, and engines that only wait ------


STEPS = 2 * IDLE_CALLS + 100


def found(drive: Callable[[Driver], None], **setup: Any) -> list[Violation]:
    _, events = observe(lambda attach: drive(start(attach, **setup)), "")
    return [violation for violation in audited(events).violations if violation.severity == "violation"]


def steps(driver: Driver, count: int = STEPS, **transfers: Any) -> None:
    for _ in range(count):
        driver.step(**transfers)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_larger_than_the_pool_blocks_the_queue(asynchronous: bool) -> None:
    """vLLM#39734: the scheduler asks for its blocks in each step, and admits nobody else."""

    def drive(driver: Driver) -> None:
        driver.add("first", 40, 4)
        driver.add("oversized", 400, 4)
        driver.add("behind", 40, 4)
        steps(driver)

    (violation,) = found(drive, blocks=12, asynchronous=asynchronous)

    assert ("requests/standstill", "oversized") == (violation.id, violation.request)
    assert "scheduled nothing" in violation.message
    assert "though 2 requests can run" in violation.message


def test_an_idle_engine_is_clean() -> None:
    def drive(driver: Driver) -> None:
        driver.add("first", 40, 4)
        driver.run()
        for _ in range(STEPS):
            driver.schedule()
            driver.output()

    assert [] == found(drive)


def test_a_paused_engine_is_clean() -> None:
    interface = pytest.importorskip("vllm.v1.core.sched.interface")
    if not hasattr(interface, "PauseState"):
        pytest.skip("this vLLM can't be paused")

    def drive(driver: Driver) -> None:
        driver.add("first", 40, 400)
        steps(driver, 3)
        driver.scheduler.set_pause_state(interface.PauseState.PAUSED_ALL)
        driver.drain()
        for _ in range(STEPS):
            driver.schedule()
            driver.output()
        driver.scheduler.set_pause_state(interface.PauseState.UNPAUSED)
        driver.run()

    assert [] == found(drive)


def test_an_engine_that_waits_for_a_load_is_clean() -> None:
    def drive(driver: Driver) -> None:
        driver.connector.store("loading", 64, asynchronous=True)
        driver.add("loading", 100, 4)
        steps(driver)
        driver.run()

    assert [] == found(drive, connector="scripted")


def test_an_engine_whose_connector_has_no_answer_yet_is_clean() -> None:
    def drive(driver: Driver) -> None:
        matched = driver.scheduler.connector.get_num_new_matched_tokens
        driver.scheduler.connector.get_num_new_matched_tokens = lambda *_: (None, False)
        driver.add("waiting", 100, 4)
        steps(driver)
        driver.scheduler.connector.get_num_new_matched_tokens = matched
        driver.run()

    assert [] == found(drive, connector="scripted")


def test_a_session_that_waits_for_its_next_chunk_is_clean() -> None:
    def drive(driver: Driver) -> None:
        driver.add("session", 40, 4, resumable=True)
        steps(driver)
        driver.close("session")
        driver.run()

    assert [] == found(drive)


def test_requests_that_are_computed_again_after_each_reset_are_clean() -> None:
    """Each reset has every token computed again, and after it each request gets a new one."""

    def drive(driver: Driver) -> None:
        for number in range(4):
            driver.add(f"r{number}", 300, 400)
        for _ in range(40):
            steps(driver, 12)
            driver.drain()
            driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        driver.run()

    assert [] == found(drive, blocks=256, max_batched_tokens=128)


# --- Sessions that wait for their clients and keep every place of a running request, on the real scheduler.


def paused_sessions(watch: Watch, sessions: int) -> Driver:
    """An engine with two places and so many sessions, each of which has had its first turn."""
    driver = start(watch, max_running=2)
    for number in range(sessions):
        driver.add(f"s{number}", 30, 3, resumable=True)
    for _ in range(8):
        driver.step()
    driver.add("r", 40, 3)
    return driver


def run_on(driver: Driver, watch: Watch, calls: int, seconds: float) -> None:
    """The engine calls schedule() so often in this time."""
    for _ in range(calls):
        watch.now += round(seconds * 1e9 / calls)
        driver.schedule()
        if driver.in_flight:
            driver.output()


def test_a_request_that_no_session_lets_run_is_found_after_ten_minutes() -> None:
    """vLLM#53130: the engine is healthy, and its cache is free."""
    watch = Watch()
    run_on(paused_sessions(watch, 2), watch, 3_000, 1_200)

    (found,) = watch.audited().violations
    assert ("requests/standstill", "r") == (found.id, found.request)
    assert "2 sessions wait for their client's next chunk" in found.message


def test_sessions_that_wait_for_five_minutes_are_clean() -> None:
    watch = Watch()
    run_on(paused_sessions(watch, 2), watch, 3_000, 300)
    assert "clean" == watch.audited().verdict


def test_with_a_place_to_spare_the_request_runs() -> None:
    watch = Watch()
    driver = paused_sessions(watch, 1)
    run_on(driver, watch, 3_000, 1_200)
    assert "clean" == watch.audited().verdict
    assert "r" not in driver.scheduler.requests


# --- which hook reads the local hit of an admission -------------------------------------------------------


USED = "kv_cache_manager.record_prefix_cache_stats"


@pytest.mark.parametrize(("setup", "hooked"), [({}, False), ({"connector": "scripted"}, True)])
def test_the_hit_used_is_read_only_where_it_may_differ_from_the_lookup(
    setup: dict[str, Any], hooked: bool
) -> None:
    """Without a connector the hit used equals the lookup's result, so one hook less runs per request."""
    live: list[str] = []

    def attach(scheduler: Any) -> None:
        observer = choose(scheduler)(scheduler, MemoryRecorder(), version=host_version())
        observer.start()
        live.extend(observer.hooks.live)
        observer.stop("exit")

    start(attach, **setup)

    assert hooked == (USED in live)


# --- which outputs in flight an engine up to 0.26 dropped: told by whether the request's outputs grew -----


class Outputs:
    """A request in flight when a reset preempted it, and the observer's part for the ends of lives."""

    def __init__(self) -> None:
        self.request = SimpleNamespace(request_id="r", num_output_tokens=0, num_tokens=8)
        scheduler = SimpleNamespace(requests={"r": self.request})
        unused: Any = SimpleNamespace()
        observer: Any = SimpleNamespace(scheduler=scheduler, log=unused, step=1, pools=None)
        self.lives = Lives020(observer, unused, unused, unused, unused)
        self.lives.draining.add("r")
        self.stale = self.lives.stale({"r": 1})
        self.lives.output = 0, None, [1]

    def dropped(self) -> list[str]:
        return self.lives.dropped(self.stale)


@pytest.mark.parametrize("delivered", [0, 1])
def test_an_output_that_adds_no_token_was_dropped(delivered):
    outputs = Outputs()
    outputs.request.num_output_tokens += delivered

    assert ([] if delivered else ["r"]) == outputs.dropped()


def test_an_output_that_ends_a_turn_was_delivered():
    """The next chunk was there already, and the engine moves the outputs into the prompt."""
    outputs = Outputs()
    outputs.lives.session_extends(outputs.request)

    assert [] == outputs.dropped()


def test_a_chunk_that_came_between_two_outputs_says_nothing_of_the_next_one():
    outputs = Outputs()
    outputs.lives.output = None
    outputs.lives.session_extends(outputs.request)

    assert ["r"] == outputs.dropped()
