"""An exception that leaves a hooked method of the engine is recorded; the verdict is then not clean."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, findings, observe
from tests.scenarios.driving import Attach, Driver, start

from kvledger.audit.events import EngineRaised, Event, HookFailed
from kvledger.audit.traffic import release

LEVELS = pytest.mark.parametrize("level", ["tokens", "blocks"])
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def raised(events: list[Event]) -> list[tuple[str, str]]:
    """Method and exception of each exception that was recorded; no hook may have failed."""
    assert not [event for event in events if isinstance(event, HookFailed)]
    return [(event.method, event.error) for event in events if isinstance(event, EngineRaised)]


def running(attach: Attach, asynchronous: bool) -> Driver:
    """An engine in which `a` decodes and `b` is about to be scheduled."""
    driver = start(attach, connector="scripted", asynchronous=asynchronous)
    driver.add("a", 40, 30)
    for _ in range(3):
        driver.step()
    driver.add("b", 96, 4)
    return driver


@LEVELS
@BOTH
@pytest.mark.parametrize("method", ["get_num_new_matched_tokens", "build_connector_meta"])
@pytest.mark.parametrize("runs_on", [False, True])
def test_a_connector_that_raises_in_schedule_leaves_no_clean_verdict(
    method: str, asynchronous: bool, level: str, runs_on: bool
) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, asynchronous)
        driver.connector.script.failing.add(method)
        with pytest.raises(AssertionError, match="of a prompt"):
            driver.step()
        driver.connector.script.failing.clear()
        if runs_on:  # as no engine core does; the observer must survive it
            driver.run()
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)
    left = [(f"connector.{method}", "AssertionError"), ("schedule", "AssertionError")]

    assert left == raised(events)
    assert "of a prompt" not in repr(events)
    assert (set(), "unknown") == (findings(auditor), auditor.verdict)
    sentence = f"the engine raised AssertionError in connector.{method}, AssertionError in schedule"
    assert sentence in auditor.doubts


@LEVELS
@BOTH
def test_an_exception_while_an_output_is_processed_keeps_the_ends_in_it(
    asynchronous: bool, level: str
) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, asynchronous)
        driver.runner.stop_at["a"] = 5
        driver.connector.script.failing.add("request_finished")
        with pytest.raises(AssertionError, match="of a prompt"):
            driver.run()
        driver.connector.script.failing.clear()
        driver.add("c", 50, 3)
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)

    left = ["update_from_output", "connector.request_finished", "_free_request"]
    assert [(method, "AssertionError") for method in left] == raised(events)
    assert (set(), "unknown") == (findings(auditor), auditor.verdict)
    account = auditor.ledger.account("a")
    assert account is not None and account.outcome == "stopped"


@LEVELS
@BOTH
@pytest.mark.skipif(bool(release.lacking(["dropped output"])), reason="no such reset in this release")
def test_a_reset_that_raises_leaves_right_figures_and_a_doubt(asynchronous: bool, level: str) -> None:
    """A load is pending, so the reset of the prefix cache raises; the running request was preempted."""

    def scenario(attach: Attach) -> Driver:
        driver = start(attach, connector="scripted", asynchronous=asynchronous)
        driver.connector.answer_lookups("b", (96, True))
        driver.add("a", 40, 9)
        driver.step()
        driver.step()
        driver.add("b", 96, 4)
        driver.step()
        driver.step(finished_recving="all")
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            driver.reset_prefix_cache(running=True)
        driver.run()
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)

    assert [("reset_prefix_cache", "RuntimeError")] == raised(events)
    assert ["the engine raised RuntimeError in reset_prefix_cache"] == auditor.doubts
    assert set() == findings(auditor)
    assert 0 == auditor.ledger.totals().unknown_requests
    b = auditor.ledger.account("b")
    assert b is not None and b.settled is not None and (96, 0) == (b.settled.external, b.settled.computed)


def test_an_engine_that_raises_nothing_has_no_doubt() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, False)
        driver.run()
        return driver

    _, events = observe(scenario)

    assert [] == raised(events)
    assert [] == audited(events).doubts
