"""Sessions that wait for their clients and keep every place of a running request, on the real scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.connectors.test_abandoned_loads import Watch
from tests.scenarios.driving import Driver, start


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
