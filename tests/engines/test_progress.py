"""An engine that stands still or is livelocked, on the installed vLLM, and engines that only wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.scenarios.driving import Driver, start
from tests.scenarios.matrix import observed

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import Violation
from kvledger.audit.ledger.engine_postings import IDLE_CALLS

pytest.importorskip("vllm")

STEPS = 2 * IDLE_CALLS + 100


def found(drive: Callable[[Driver], None], **setup: Any) -> list[Violation]:
    auditor = Auditor(debug=True)
    with observed(auditor) as attach:
        drive(start(attach, **setup))
    return [violation for violation in auditor.violations if violation.severity == "violation"]


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
