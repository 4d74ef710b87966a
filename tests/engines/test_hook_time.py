"""The census reports the time of the hooks, measured in some steps of every ``TIMED_STEPS``."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe

from kvledger.audit import hooks
from kvledger.audit.engines import observer
from kvledger.audit.events import Census
from kvledger.audit.traffic.driver import Driver, EngineSetup


def decode(attach: Any, **_: Any) -> Driver:
    """One request that decodes for 300 steps."""
    driver = Driver(EngineSetup(blocks=64, max_model_len=512))
    attach(driver.scheduler)
    driver.add("long", 16, 300)
    driver.run()
    return driver


def test_some_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 200)

    _, events = observe(decode)

    first = next(event for event in events if isinstance(event, Census))
    assert 0 < first.hook_us
    assert 8 <= first.hook_steps <= 16


def test_a_census_without_a_timed_step_has_no_hook_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 4)
    monkeypatch.setattr(hooks, "TIMED_STEPS", 1 << 20)

    _, events = observe(decode)

    assert {(-1, 0)} == {(event.hook_us, event.hook_steps) for event in events if isinstance(event, Census)}
