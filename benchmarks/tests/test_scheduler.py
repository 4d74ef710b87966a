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
from benchmarks.scheduler import BLOCK_STEPS, BY_KEY, EQUAL, LANES, ORDERS, Effort

real_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="steps a real vLLM")


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
