"""Recorded crowds on the real scheduler in simulated time."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.simulate.recordings import arguments, recording, traffic_of

from kvledger.audit.simulate.engine import Timing, by_time
from kvledger.audit.simulate.rows import Run
from kvledger.audit.traffic.reader import RecordedRequest, Traffic

SLOW = [10_000.0, 10.0, 100.0, 0.0, 0.0, 0.0]
"""A step takes 10 milliseconds, and 10 microseconds for each prefill token."""


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return traffic_of(recording(requests=40))


def simulated(traffic: Traffic, *, closed: bool = False, rate: float = 1.0, **changes: int) -> Run:
    run = by_time(traffic, arguments(traffic, **changes), Timing(SLOW, rate, closed), lambda share: None)
    assert "" == run.error
    return run


def apart(traffic: Traffic, microseconds: int) -> Traffic:
    """The same requests, each so long after the one before."""
    for place, request in enumerate(traffic.requests):
        request.at = request.came_after = place * microseconds
        request.outcome, request.parent = "length_capped", -1
    return traffic


def test_every_request_ends_as_recorded(traffic: Traffic) -> None:
    run = simulated(traffic)

    recorded = {request.number: request.outcome for request in traffic.requests}
    assert recorded.keys() == {row.number for row in run.rows}
    assert all(row.outcome == recorded[row.number] for row in run.rows if row.outcome != "aborted")


def test_a_simulation_is_the_same_each_time(traffic: Traffic) -> None:
    assert simulated(traffic).rows == simulated(traffic).rows


def test_a_request_alone_takes_its_steps() -> None:
    alone = apart(traffic_of(recording(requests=6)), 10_000_000)

    run = simulated(alone, num_gpu_blocks=400)

    prompts = {request.number: request.prompt for request in alone.requests}
    assert all(row.queued_us == 0 for row in run.rows)
    for row in run.rows:
        steps = -(-prompts[row.number] // 96)
        assert row.first_token_us <= steps * 10_000 + 10 * prompts[row.number] + 100 * steps


def test_requests_that_come_faster_wait_longer() -> None:
    crowd = apart(traffic_of(recording(requests=60)), 150_000)

    waited = [sum(row.queued_us for row in simulated(crowd, rate=rate).rows) for rate in (1.0, 4.0)]

    assert waited[0] < waited[1]


def test_fewer_blocks_hit_less_and_preempt_more(traffic: Traffic) -> None:
    small, large = simulated(traffic, num_gpu_blocks=20), simulated(traffic, num_gpu_blocks=400)

    assert small.totals.local < large.totals.local
    assert small.totals.preemptions > large.totals.preemptions == 0


def test_a_prompt_that_the_pool_cannot_hold_ends_the_simulation(traffic: Traffic) -> None:
    made = arguments(traffic, num_gpu_blocks=8)

    run = by_time(traffic, made, Timing(SLOW), lambda share: None)

    assert "too few blocks" in run.error


def test_in_a_closed_loop_a_request_comes_after_the_answer_that_it_continues() -> None:
    first = RecordedRequest(0, "a", 0, 0, 64, 16, outcome="length_capped", outputs=16, ended_at=50_000)
    second = RecordedRequest(
        1, "b", 1_050_000, 1_050_000, 96, 4, outcome="length_capped", outputs=4, parent=0
    )
    few = traffic_of(recording(requests=2))
    few.requests = [first, second]

    for closed, came in ((False, 1_050_000), (True, 1_000_000)):
        rows = simulated(few, closed=closed).rows
        ended = rows[0].first_token_us + rows[0].output_us
        assert came == rows[1].added_at - (ended if closed else 0)
