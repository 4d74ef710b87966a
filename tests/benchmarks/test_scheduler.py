"""The lanes of the benchmark do the same work, in fair turns. What it costs is no test's business."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.instructions import Doubled
from benchmarks.scheduler import BY_KEY, LANES, ORDERS, Effort, Lane

real_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="steps a real vLLM")

STEPS = 40


def state(lane: Lane) -> dict[str, list[int]]:
    """All tokens of every request."""
    return {name: list(request.all_token_ids) for name, request in lane.scheduler.requests.items()}


def stepped(lane: Lane) -> Lane:
    for _ in range(STEPS):
        lane.step()
    return lane


@real_engine
@pytest.mark.parametrize("key", ["churn-short", "speculative"])
def test_a_lane_that_does_all_around_the_scheduler_twice_steps_as_any_other(key: str) -> None:
    workload, effort = replace(BY_KEY[key], running=8), Effort(1, STEPS)
    doubled = Doubled(workload, effort)

    assert state(stepped(Lane(workload, effort, log_stats=True))) == state(stepped(doubled))
    assert doubled.clients.requests == doubled.twin.requests > 0


def test_every_lane_has_every_place_once() -> None:
    for places in zip(*ORDERS, strict=True):
        assert set(range(len(LANES))) == set(places)


def test_every_lane_comes_once_after_each_other_one_within_a_turn() -> None:
    followed = Counter(pair for order in ORDERS for pair in pairwise(order))

    assert {1} == set(followed.values())
    assert len(LANES) * (len(LANES) - 1) == len(followed)


def test_no_lane_has_two_turns_in_a_row() -> None:
    steps = [place for order in (*ORDERS, *ORDERS) for place in order]

    assert all(one != other for one, other in pairwise(steps))
