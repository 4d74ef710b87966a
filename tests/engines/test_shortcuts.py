"""What is left out or put off, for its cost, tells the same as if it were not."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe

from kvledger.audit.conformance.courses import COURSES
from kvledger.audit.engines import hash_names
from kvledger.audit.engines.observer import Observer
from kvledger.audit.engines.steps import StepLog
from kvledger.audit.engines.untold import Untold


class Busy(StepLog):
    """A log that is never quiet."""

    quiet = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]


class AtOnce(list[Any]):
    """Calls that are written as they come."""

    def __init__(self, untold: Untold) -> None:
        self._untold = untold

    def append(self, call: Any) -> None:
        super().append(call)
        self._untold.write()


@pytest.fixture(autouse=True)
def same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs differ in nothing: their clock stands still, and hashes have the same names."""
    monkeypatch.setattr(StepLog, "now", lambda _: 0)
    monkeypatch.setattr(Observer, "_hook_time", lambda _: (-1, 0))
    monkeypatch.setattr(hash_names.os, "urandom", bytes)


def told(name: str, level: str) -> list[str]:
    """All but the start of the engine, which says when that was."""
    return [repr(event) for event in observe(COURSES[name], level=level)[1][1:]]


@pytest.mark.parametrize("name", list(COURSES))
def test_a_quiet_engine_is_told_as_any_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortly = told(name, "tokens")
    monkeypatch.setattr("kvledger.audit.engines.observer.StepLog", Busy)

    assert shortly == told(name, "tokens")


@pytest.mark.parametrize("name", list(COURSES))
def test_calls_that_are_written_later_are_told_as_they_came(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = told(name, "blocks")
    begin = Untold.__init__

    def begins(self: Untold, watch: Any) -> None:
        begin(self, watch)
        self.calls = watch.log.calls = AtOnce(self)

    monkeypatch.setattr(Untold, "__init__", begins)

    assert later == told(name, "blocks")
