"""The times of steps: what an observation covers, what is idle, and what is not observed."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.audit import events as ev
from kvledger.audit.analysis.step_times import STEP_HANDLERS, StepSample, StepTimes, Work

STARTED = ev.EngineStarted(0, 1000.0, "vllm", "0.32.0", "v1", "tokens", 1, {})


def observed(*stream: ev.Event, times: StepTimes | None = None) -> StepTimes:
    times = times or StepTimes()
    for event in (STARTED, ev.Snapshot(0, 0, [], 0), *stream):
        handler = STEP_HANDLERS.get(type(event))
        if handler is not None:
            handler(times, event)
    return times


def rows(times: StepTimes) -> list[tuple[Work, int]]:
    return [(Work(*row[1:-1]), row[-1]) for row in times.sums.sample.rows]


def step(at: int, *changed: int, dropped: Sequence[int] = ()) -> ev.Stepped:
    return ev.Stepped(at, 1, list(changed), list(dropped))


def output(at: int, *changed: int) -> ev.Delivered:
    return ev.Delivered(at, list(changed), [])


def end(at: int, request: int) -> ev.Finished:
    return ev.Finished(at, request, "stopped", -1, -1, -1, -1, -1)


def test_a_step_takes_from_its_scheduling_to_its_output_after_idle_time() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64), output(1500, 0, 1), end(1500, 0), step(9000, 1, 8, 0, 8), output(9100)
    )

    assert [(Work(1, 64), 500), (Work(1, 8), 100)] == rows(times)
    assert 600 == times.sums.busy_us


def test_a_step_takes_from_the_output_before_while_requests_run() -> None:
    times = observed(step(1000, 0, 64, 0, 64), output(1500, 0, 1), step(1600, 0, 1, 0, 65), output(1900))

    assert [(Work(1, 64), 500), (Work(1, 0, 1, 0, 65), 400)] == rows(times)


def test_overlapping_steps_are_not_counted_twice() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64),
        step(1100, 0, 1, 0, 65),
        output(1500, 0, 1),
        step(1510),
        output(1900),
        output(2200),
    )

    assert [500, 400, 300] == [took for _, took in rows(times)]
    assert [0, 65, 66] == [work.context_tokens for work, _ in rows(times)]


def test_repeated_steps_are_observed_with_the_next_output() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        output(200),
        ev.Repeated(650, 3),  # emitted while the next step runs, the last of these came at 500
        step(650),
        output(700),
    )

    assert (Work(4, 0, 4, 0, 12 + 13 + 14 + 15), 500) == rows(times)[-1]


def test_repeated_steps_in_a_pipeline_keep_their_order() -> None:
    times = observed(
        step(0, 0, 10, 0, 10), step(10, 0, 1, 0, 11), output(100, 0, 1), ev.Repeated(900, 5), output(1000)
    )

    assert (Work(6, 0, 6, 0, sum(range(11, 17))), 900) == rows(times)[-1]


def test_repeated_steps_are_observed_when_the_last_request_is_aborted() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        output(200),
        ev.Repeated(500, 3),
        end(9000, 0),
        step(20_000, 1, 5, 0, 5),
        output(20_050),
    )

    assert [(Work(3, 0, 3, 0, 12 + 13 + 14), 300), (Work(1, 5), 50)] == rows(times)[-2:]


def test_a_request_with_drafts_advances_by_what_was_sampled() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        output(100, 0, 1),
        step(110, 0, 4, 3, 14),
        output(200, 0, 3),
        step(210),
        output(300),
    )

    assert Work(1, 0, 1, 3, 14) == rows(times)[1][0]
    assert 14 + 3 == rows(times)[2][0].context_tokens


def test_nothing_is_observed_between_a_gap_and_the_next_output_after_a_snapshot() -> None:
    times = observed(
        step(0, 0, 10, 0, 10),
        ev.Gap(50, 3, "full"),
        output(100, 0, 1),
        step(110, 0, 1, 0, 11),
        ev.Snapshot(900, 5, [], 1),
        step(910, 0, 1, 0, 20),
        output(950),  # of the step before the snapshot
        output(1000),
    )

    assert [(Work(1, 0, 1, 0, 20), 50)] == rows(times)


def test_a_new_segment_loses_no_step_in_flight() -> None:
    times = observed(step(0, 0, 10, 0, 10), ev.Snapshot(50, 1, [], 1), output(100, 0, 1))

    assert [(Work(1, 10), 100)] == rows(times)


def test_only_the_window_counts_as_engine_time() -> None:
    times = observed(
        step(1000, 0, 64, 0, 64),
        output(1500, 0, 1),
        step(1600, 0, 1, 0, 65),
        output(1900),
        times=StepTimes(since_us=1_000_001_600),
    )

    assert 2 == len(rows(times))
    assert 400 == times.sums.busy_us


def test_a_sample_is_bounded_and_even() -> None:
    sample = StepSample(most=100)
    for place in range(10_000):
        sample.add(place, place)

    assert 25 <= len(sample.rows) <= 100
    assert 10_000 == sample.seen
    assert 3000 < sum(row[1] for row in sample.rows) / len(sample.rows) < 7000
    assert 0.5 < sample.weight * len(sample.rows) / 10_000 < 2
