"""Violations and near misses of the account of a token pool."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace
from tests.audit.checks.false_reports import violation_ids
from tests.engines.sglang.small_scheduler import Batch, Request, Scheduler

from kvledger.audit.entry.attach import attach
from kvledger.audit.events import Census, Event, RequestAdded

violates, near_miss = pytest.mark.violates, pytest.mark.near_miss


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("sglang")
    module.__version__ = "0.5.23"
    monkeypatch.setitem(sys.modules, "sglang", module)


def steps(scheduler: Scheduler, request: Request, many: int) -> None:
    for _ in range(many):
        scheduler.step(Batch((request, request.kv_committed_len, 1), extends=False))


@violates("pool/slots")
@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (3, "3 of 100 slots are in no count after step 3"),
        (-3, "3 slots more than the 100 of the pool are counted after step 3"),
    ],
)
def test_slots_that_are_in_no_count_are_found_with_what_was_done_before(lost: int, says: str) -> None:
    scheduler, stays, leaves = Scheduler(), Request("stays", outputs=50), Request("leaves", outputs=50)
    audit = attach(scheduler)
    for request in stays, leaves:
        scheduler._add_request_to_queue(request)
    scheduler.step(Batch((stays, 0, 8), (leaves, 0, 8)))
    scheduler.step(Batch((stays, 8, 1), (leaves, 8, 1), extends=False))
    scheduler.retracts = [(leaves, True)]
    scheduler.step(Batch((stays, 9, 1), extends=False))
    scheduler.lost = lost
    steps(scheduler, stays, 3)

    (found,) = (each for each in audit.violations if each.id == "pool/slots")
    assert says in found.message
    assert found.message.endswith("It was not so after step 2: leaves was preempted.")


@near_miss("pool/slots")
def test_a_difference_that_the_next_account_does_not_have_is_none() -> None:
    scheduler, request = Scheduler(), Request("a", outputs=50)
    audit = attach(scheduler)
    scheduler._add_request_to_queue(request)
    scheduler.step(Batch((request, 0, 8)))
    for lost in 3, 0, 1, 2, 0:
        scheduler.lost = lost
        steps(scheduler, request, 1)

    assert audit.verdict == "clean"


USES = {
    "free_slots": 80,
    "evictable_slots": 13,
    "protected_slots": 7,
    "held_slots": 0,
    "uncached_slots": 0,
    "slots": 100,
}
REST = [Census(at * 1_000_000, 9, [], 0, 1, 1, **USES) for at in (0, 5, 11)]


@violates("pool/protected-at-rest")
def test_cached_tokens_that_stay_protected_at_rest_are_a_drift() -> None:
    assert "pool/protected-at-rest" in violation_ids(REST)


@near_miss("pool/protected-at-rest")
@pytest.mark.parametrize(
    "stream",
    [
        [RequestAdded(0, 0, "a", 50), *REST],
        REST[:2],
        [replace(each, paused_sessions=1) for each in REST],
        [replace(each, evictable_slots=10, held_slots=3) for each in REST],
    ],
    ids=["a request is open", "a moment", "a session is open", "a session holds tokens"],
)
def test_protected_tokens_that_somebody_uses_are_none(stream: list[Event]) -> None:
    assert "pool/protected-at-rest" not in violation_ids(stream)
