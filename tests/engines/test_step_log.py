"""An output is emitted as differences or whole, whichever is shorter; both mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.audit.engines import step_log
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.events import Delivered, DeliveredWhole, EngineStarted, Event, Snapshot
from kvledger.audit.journal.memory_recorder import MemoryRecorder

STARTED = EngineStarted(0, 0.0, "vllm", "0.32.0", "made up", "tokens", 1, {})
ORDER = [f"r{number}" for number in range(32)]
FEW_CHANGES = [1] * 31 + [2]
MIXED = [2, 3, 4, 1] * 8


class Log:
    """A step log that has emitted one output of every request, and its sink."""

    def __init__(self) -> None:
        self.sink = MemoryRecorder()
        self.log = StepLog(self.sink)
        for name in ORDER:
            self.log.intern(name)
        self.restart()
        self.delivered(FEW_CHANGES)

    def restart(self) -> None:
        self.log.restart(STARTED, Snapshot(0, 0, [], 0))

    def delivered(self, lengths: list[int], order: list[str] = ORDER) -> list[Event]:
        """The events emitted for this output."""
        self.sink.take()
        self.log.delivered(0, lengths, order, order, [])
        return self.sink.take()


def test_an_output_with_few_changes_is_emitted_as_differences() -> None:
    assert [Delivered(0, [1, 3], [])] == Log().delivered([1, 3, *FEW_CHANGES[2:]])


def test_an_output_with_many_changes_is_emitted_whole_and_its_order_once() -> None:
    log = Log()

    assert [DeliveredWhole(0, list(range(32)), bytes(MIXED))] == log.delivered(MIXED)
    assert [DeliveredWhole(0, [], bytes(MIXED[::-1]))] == log.delivered(MIXED[::-1])
    assert [Delivered(0, [31, 5], [])] == log.delivered([*MIXED[:0:-1], 5])


def test_a_length_over_255_is_emitted_as_a_difference() -> None:
    (event,) = Log().delivered([256] * 32)

    assert isinstance(event, Delivered)


def test_a_changed_order_is_emitted_again() -> None:
    log, reversed_order = Log(), ORDER[::-1]
    log.delivered(MIXED)
    log.delivered(MIXED, reversed_order)

    (event,) = log.delivered(MIXED[::-1], reversed_order)

    assert DeliveredWhole(0, list(range(32))[::-1], bytes(MIXED[::-1])) == event


def test_a_new_segment_gets_the_order_again() -> None:
    log = Log()
    log.delivered(MIXED)
    log.restart()
    log.delivered(FEW_CHANGES)

    assert [DeliveredWhole(0, list(range(32)), bytes(MIXED))] == log.delivered(MIXED)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_whole_outputs_and_differences_give_the_same_accounts(
    asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from tests.engines.observed import audited, observe
    from tests.scenarios.workloads import crowd

    def scenario(whole: float) -> tuple[set[type[Event]], list[Any]]:
        monkeypatch.setattr(step_log, "WHOLE_SHARE", whole)
        _, events = observe(crowd, seed=seed, requests=40, asynchronous=asynchronous, drafts=3)
        auditor = audited(events)
        assert "clean" == auditor.verdict
        accounts = [account.freeze() for account in auditor.ledger.accounts()]
        figures = [
            (one.request_id, one.first_prompt, one.first_output, one.rework, one.rejected, one.overrun)
            for one in accounts
        ]
        return set(map(type, events)), figures

    (kinds, whole), (others, by_differences) = scenario(-1.0), scenario(1.0)

    assert DeliveredWhole in kinds and DeliveredWhole not in others
    assert whole == by_differences
