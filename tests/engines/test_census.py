"""A census compares the counts of every admitted request, running or waiting, and a last one at the end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, findings, observe
from tests.engines.test_corpus import KNOWN_FINDINGS, OF_BLOCKS
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import Attach, Driver, start

from kvledger.audit.engines import observer, steps
from kvledger.audit.events import Census, EngineStopped, Event
from kvledger.audit.ledger import engine_postings


@pytest.fixture
def census_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 1)
    monkeypatch.setattr(steps, "AT_REST_STEPS", 1)


def of(events: list[Event], *invariants: str) -> Any:
    """The first finding; the findings are of these invariants."""
    auditor = audited(events)
    assert set(invariants) == {id for id, _ in findings(auditor)}
    return auditor.violations[0]


def decoding(attach: Attach, **setup: Any) -> Driver:
    """Two requests that decode."""
    driver = start(attach, **setup)
    driver.add("a", 64, 300)
    driver.add("b", 20, 300)
    for _ in range(3):
        driver.step()
    return driver


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_is_never_scheduled_again_is_found_at_the_end(asynchronous: bool) -> None:
    """Its count is 3 too high, so the scheduler waits for tokens that never come."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, asynchronous=asynchronous)
        driver.scheduler.requests["a"].num_computed_tokens += 3
        for _ in range(200):
            driver.step()
        return driver

    driver, events = observe(scenario)
    violation = of(events, "tokens/balance", "tokens/beyond-sequence")

    engine = driver.scheduler.requests["a"].num_computed_tokens
    assert ("a", "census") == (violation.request, violation.figures["instant"])
    assert engine == violation.figures["computed_tokens"] == violation.figures["ledger_tokens"] + 3
    assert isinstance(events[-1], EngineStopped) and isinstance(events[-2], Census)


def test_a_request_that_is_never_scheduled_again_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 32)
    monkeypatch.setattr(engine_postings, "STALLED_STEPS", 100)
    monkeypatch.setattr(engine_postings, "STEPS_SECONDS", 0)

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach)
        driver.scheduler.requests["a"].num_computed_tokens += 3
        for _ in range(200):
            driver.step()
        return driver

    auditor = audited(observe(scenario)[1])

    found = {"tokens/balance", "tokens/beyond-sequence", "requests/stalled"}
    assert {(id, "a") for id in found} == findings(auditor)


@pytest.mark.usefixtures("census_after_each_step")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_count_of_a_waiting_request_is_compared(asynchronous: bool) -> None:
    """A preempted request waits for blocks, and its count is not 0."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, asynchronous=asynchronous, max_running=2)
        driver.preempt("a")
        driver.add("c", 20, 300)
        driver.scheduler.waiting.remove(driver.scheduler.requests["a"])  # it is never resumed
        driver.scheduler.requests["a"].num_computed_tokens = 16
        for _ in range(3):
            driver.step()
        return driver

    auditor = audited(observe(scenario)[1])
    violation = next(found for found in auditor.violations if found.id == "tokens/balance")

    assert {("tokens/balance", "a"), ("requests/queued-once", "a")} == findings(auditor)
    assert ("a", 16, 0) == (
        violation.request,
        violation.figures["computed_tokens"],
        violation.figures["ledger_tokens"],
    )


@pytest.mark.usefixtures("census_after_each_step")
def test_a_request_that_is_queued_twice_does_not_hide_one_that_is_in_no_queue() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, max_running=2)
        for name in ("c", "d"):
            driver.add(name, 20, 300)
        waiting = driver.scheduler.waiting
        waiting.remove(driver.scheduler.requests["c"])
        waiting.add_request(driver.scheduler.requests["d"])
        for _ in range(3):
            driver.step()
        return driver

    assert {("requests/queued-once", "c"), ("requests/queued-once", "d")} == findings(
        audited(observe(scenario)[1])
    )


@pytest.mark.usefixtures("census_after_each_step")
@pytest.mark.parametrize("level", ["tokens", "blocks"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_census_after_each_step_finds_nothing_more(name: str, level: str) -> None:
    scenario = SCENARIOS[name]
    if scenario.lacking():
        pytest.skip("; ".join(scenario.lacking()))
    _, events = observe(scenario, level)
    auditor = audited(events)

    of_blocks = OF_BLOCKS.get(name, set()) if level == "blocks" else set()
    assert KNOWN_FINDINGS.get(name, set()) | of_blocks == findings(auditor)
    assert [] == auditor.doubts


@pytest.mark.usefixtures("census_after_each_step")
def test_waiting_requests_are_in_a_census_once_they_have_been_admitted() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, max_running=2)
        driver.add("never admitted", 20, 3)
        driver.preempt("a")
        driver.scheduler.waiting.remove(driver.scheduler.requests["a"])
        driver.step()
        driver.step()
        return driver

    driver, events = observe(scenario)
    last = [event for event in events if isinstance(event, Census)][-1]

    assert [0, 0, 0, 0, driver.scheduler.requests["a"].num_tokens] == last.waiting_rows


@pytest.mark.parametrize("where", ["schedule", "update_from_output"])
def test_an_engine_that_is_interrupted_in_a_step_has_no_last_census(where: str) -> None:
    """A signal raises SystemExit anywhere; the counts are then in between."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, connector="scripted")
        inner = "_update_after_schedule" if where == "schedule" else "_update_request_with_output"
        original = getattr(driver.scheduler, inner)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            raise SystemExit(143)

        setattr(driver.scheduler, inner, interrupted)
        with pytest.raises(SystemExit):
            driver.step()
        delattr(driver.scheduler, inner)
        driver.scheduler.shutdown()
        return driver

    _, events = observe(scenario)

    assert not [event for event in events if isinstance(event, Census)]
    assert isinstance(events[-1], EngineStopped) and "shutdown" == events[-1].reason
    assert set() == findings(audited(events))
