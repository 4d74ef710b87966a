"""The long run of `make proof NAME=long_run`, for some simulated minutes, and its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from proofs.long_run.__main__ import LongRun, Plan
from proofs.long_run.engine import Served
from proofs.long_run.gauges import Trend, fastest_tenth
from proofs.long_run.sums import Sums, served

from kvledger.audit import events as ev


@pytest.mark.serving
def test_every_sum_is_equal_after_restarts_of_every_process(tmp_path: Path) -> None:
    result = LongRun(Plan(hours=0.2, engines=5), tmp_path, lambda _: None).run()

    assert all(one.equal for one in result.sums), [one for one in result.sums if not one.equal]
    assert result.resets == 0
    assert len(result.restarts) == 6  # engine, sidecar and Prometheus, each by SIGTERM and by SIGKILL
    assert 14_300 < result.sums[0].emitted <= 14_400


def test_requests_arrive_at_the_rate_of_simulated_time() -> None:
    served = Served(seed=1, rate=20, seconds=30)
    arrived = [
        event.at for batch in served.batches() for event in batch if isinstance(event, ev.RequestAdded)
    ]
    arrived += [event.at for event in served.abort() if isinstance(event, ev.RequestAdded)]

    assert len(arrived) == 600
    assert 280 < sum(at < 15e6 for at in arrived) <= 301


def test_an_aborted_engine_has_ended_every_request() -> None:
    served = Served(seed=2, rate=20, seconds=5)
    events = [event for batch in served.batches() for event in batch] + served.abort()

    assert sum(isinstance(event, ev.Finished) for event in events) == 100
    assert isinstance(events[-1], ev.EngineStopped)


def test_one_token_more_or_less_is_not_equal() -> None:
    assert Sums("tokens", 7, 7, 7).equal and Sums("tokens", 7, 7, None).equal
    assert not Sums("tokens", 7, 8, 7).equal
    assert not Sums("tokens", 7, 7, 6).equal


def test_growth_over_a_tenth_is_not_flat() -> None:
    assert Trend(first=10, third=100, last=110, most=120).flat
    assert not Trend(first=100, third=100, last=111, most=111).flat


def test_other_work_on_the_machine_hardly_moves_the_fastest_tenth() -> None:
    idle = [5.0 + 0.01 * number for number in range(50)]
    busy = [time if number % 5 == 0 else 6 * time for number, time in enumerate(idle)]

    assert fastest_tenth(busy) < 1.1 * fastest_tenth(idle)
    assert fastest_tenth([6.0 * time for time in idle]) > 5 * fastest_tenth(idle)
    assert fastest_tenth([5.0]) == 5.0


def test_counters_of_engines_are_read_from_the_page() -> None:
    page = 'kvledger_a_total{engine="m / engine 0",source="local"} 3.0\nkvledger_b_total 4\n'
    assert served(page) == {("kvledger_a_total", "engine=m / engine 0,source=local"): 3.0}
