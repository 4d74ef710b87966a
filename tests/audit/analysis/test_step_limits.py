"""What bound each step: of the real scheduler, where each limit is planted, and where none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import journals

from kvledger.audit.analysis.step_times import (
    BLOCKS,
    BUDGET,
    KEPT_MINUTES,
    LIMITS,
    LOADS,
    NOTHING,
    OTHER,
    SEATS,
    StepLimits,
    StepLimitState,
)
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.ledger.clocks import QueueClock

MINUTE = 29_000_000


def test_the_last_hour_is_kept() -> None:
    limits = StepLimits()
    for minute in range(MINUTE, MINUTE + 100):
        limits.add(minute, SEATS, 2)
    limits.add(MINUTE + 99, NOTHING, 3)

    minutes = limits.by_minute(MINUTE + 99)
    assert (MINUTE + 40, [0, 2, 0, 0, 0, 0]) == minutes[0]
    assert (MINUTE + 99, [0, 2, 0, 0, 3, 0]) == minutes[-1]
    assert len(limits.steps) <= KEPT_MINUTES + 2


def test_engines_after_each_other_share_an_hour() -> None:
    first, second = StepLimits(), StepLimits()
    first.add(MINUTE, BUDGET, 1)
    first.add(MINUTE + 90, BUDGET, 1)
    second.add(MINUTE + 90, BUDGET, 5)

    assert {(MINUTE + 90) * len(LIMITS) + BUDGET: 6} == (first + second).steps


def test_what_was_not_recorded_is_not_called_idle() -> None:
    state = StepLimitState()
    state.step(60.0, QueueClock(recorded=False), 7)

    assert {1 * len(LIMITS) + OTHER: 7} == state.sums.steps


# --- on the real scheduler ------------------------------------------------------------------------------


def counted(drive: Callable[[Any], None], folder: Path, **setup: Any) -> dict[int, int]:
    """The steps of a journal by limit."""
    from tests.engines.observed import observe
    from tests.scenarios.driving import start

    def scenario(attach: Any) -> None:
        drive(start(attach, **setup))

    _, events = observe(scenario)
    writer = JournalWriter(folder / "engine-1-1-0")
    writer.rotate()
    writer.write(events)
    writer.close()
    (audit,) = journals.followed_audits(folder)
    found = dict.fromkeys(LIMITS, 0)
    for key, steps in audit.step_limits.steps.items():
        found[key % len(LIMITS)] += steps
    return {limit: steps for limit, steps in found.items() if steps}


def requests(driver: Any, *, prompt: int = 40, outputs: int = 4) -> None:
    for number in range(4):
        driver.add(f"r{number}", prompt, outputs)
    driver.run()


def late_load(driver: Any) -> None:
    driver.connector.answer_lookups("r0", (32, True))
    driver.add("r0", 60, 2)
    driver.add("r1", 60, 6)
    for _ in range(3):
        driver.step()
    driver.run()


CASES: dict[str, tuple[Callable[[Any], None], dict[str, Any], int]] = {
    "budget": (lambda driver: requests(driver, prompt=40), {"max_batched_tokens": 32}, BUDGET),
    "seats": (requests, {"max_running": 1}, SEATS),
    "blocks": (lambda driver: requests(driver, outputs=40), {"blocks": 8}, BLOCKS),
    "loads": (late_load, {"connector": "scripted"}, LOADS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_limit_is_named_and_no_other(name: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    drive, setup, limit = CASES[name]
    found = counted(drive, tmp_path, **setup)

    assert found.pop(OTHER, 0) <= 1  # the first step, of which the scheduler tells no cause
    assert {limit, NOTHING} == set(found)


def test_where_nothing_waits_nothing_bound(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    assert {NOTHING} == set(counted(requests, tmp_path))
