"""A quiet engine asks less a step, and is told as any other."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.corpus import SCENARIOS

from kvledger.audit.engines.event_log import StepLog
from kvledger.audit.engines.observer import Observer


class Busy(StepLog):
    """A log that is never quiet."""

    steady = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]


def told(name: str) -> list[str]:
    """All but the start of the engine, which says when that was."""
    return [repr(event) for event in observe(SCENARIOS[name])[1][1:]]


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_quiet_engine_is_told_as_any_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLog, "now", lambda _: 0)
    monkeypatch.setattr(Observer, "hook_time", lambda _: (-1, 0))
    shortly = told(name)
    monkeypatch.setattr("kvledger.audit.engines.observer.StepLog", Busy)

    assert shortly == told(name)
