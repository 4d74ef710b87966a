"""The short path for unchanged steps emits the same events as the long one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.corpus import SCENARIOS

from kvledger.audit.engines.observer import Observer
from kvledger.audit.engines.pool import isolation
from kvledger.audit.engines.step_log import StepLog


class NeverSteady(StepLog):
    """A step log that never expects the next step to be unchanged."""

    steady = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]


def emitted(name: str) -> list[str]:
    """All events but the engine start, which has the time of the start."""
    return [repr(event) for event in observe(SCENARIOS[name])[1][1:]]


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_unchanged_steps_give_the_same_events_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLog, "now", lambda _: 0)
    monkeypatch.setattr(Observer, "hook_time", lambda _: (-1, 0))
    monkeypatch.setattr(isolation, "os", SimpleNamespace(urandom=bytes))  # one key, so equal classes
    by_short_path = emitted(name)
    monkeypatch.setattr("kvledger.audit.engines.observer.StepLog", NeverSteady)

    assert by_short_path == emitted(name)
