"""The lanes of the benchmark do the same work in fair turns. No test checks how fast they are."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from benchmarks import scheduler
from benchmarks.instructions import Doubled
from benchmarks.scheduler import BLOCK_STEPS, BY_KEY, EQUAL, LANES, ORDERS, Effort, Lane

real_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="steps a real vLLM")

STEPS = 40


def state(lane: Lane) -> dict[str, list[int]]:
    """The tokens of every request."""
    return {name: list(request.all_token_ids) for name, request in lane.scheduler.requests.items()}


def stepped(lane: Lane) -> Lane:
    for _ in range(STEPS):
        lane.step()
    return lane


@real_engine
@pytest.mark.parametrize("key", ["churn-short", "speculative"])
def test_doubling_the_work_around_the_scheduler_changes_no_step(key: str) -> None:
    workload, effort = replace(BY_KEY[key], running=8), Effort(1, STEPS)
    doubled = Doubled(workload, effort)

    assert state(stepped(Lane(workload, effort, log_stats=True))) == state(stepped(doubled))
    assert doubled.clients.requests == doubled.twin.requests > 0


@real_engine
def test_each_equal_lane_is_observed_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, seen = scheduler.observe, []

    def seeing(engine: Any, *rest: Any) -> Any:
        seen.append(engine)
        return observe(engine, *rest)

    monkeypatch.setattr(scheduler, "observe", seeing)
    workload = replace(BY_KEY["churn-short"], running=8)
    measured = scheduler.measure(workload, Effort(1, BLOCK_STEPS), tmp_path, lambda _: None)

    assert len(EQUAL) == len(seen) == len(set(map(id, seen)))
    assert {1} == {len(ratios) for ratios in (*measured.cpu.values(), *measured.p99.values())}


def test_every_lane_takes_every_place_once() -> None:
    for places in zip(*ORDERS, strict=True):
        assert set(range(len(LANES))) == set(places)


def test_within_a_turn_every_lane_follows_each_other_lane_once() -> None:
    followed = Counter(pair for order in ORDERS for pair in pairwise(order))

    assert {1} == set(followed.values())
    assert len(LANES) * (len(LANES) - 1) == len(followed)


def test_no_lane_takes_two_turns_in_a_row() -> None:
    steps = [place for order in (*ORDERS, *ORDERS) for place in order]

    assert all(one != other for one, other in pairwise(steps))
