"""Violations and near misses of the invariants of requests."""

from __future__ import annotations

import msgspec
import pytest
from tests.audit.checks.false_reports import audited, violation_ids
from tests.audit.checks.watched import Watched

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import (
    Admitted,
    Census,
    Delivered,
    Event,
    Extended,
    Finished,
    LookedUp,
    Preempted,
    Repeated,
    RequestAdded,
    RolledBack,
    Stepped,
)
from kvledger.audit.ledger.engine_postings import (
    IDLE_CALLS,
    LIVELOCKED_STEPS,
    STALLED_SECONDS,
    STALLED_STEPS,
    STEPS_SECONDS,
)
from kvledger.audit.traffic.engine_setup import build_request

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

SECOND = 1_000_000


def admitted(request: int) -> list[Event]:
    return [LookedUp(0, request, 1, 0), Admitted(0, request, 1, False, 0, 0, False, 0)]


def census(seconds: float) -> Census:
    return Census(int(seconds * SECOND), 9, [], 0, 1, 1)


def left_out(resumable: bool = False) -> list[Event]:
    """Request 0 runs in one step and in none after it; request 1 goes on."""
    return [
        RequestAdded(0, 0, "left out", 50, resumable=resumable),
        RequestAdded(0, 1, "other", 20),
        *admitted(0),
        *admitted(1),
        Stepped(0, 1, [0, 50, 0, 50, 1, 20, 0, 20], []),
        Delivered(0, [0, 1, 1, 1], []),
        Stepped(0, 2, [1, 1, 0, 21], [0]),
        Delivered(0, [], []),
    ]


def overtaken(later: int = 1, priority: int = 0) -> list[Event]:
    """Request 0 waits; request 1, which comes `later` and has this priority, runs."""
    return [
        *([RequestAdded(5, 1, "other", 20, priority=priority)] if later < 0 else []),
        RequestAdded(10, 0, "waiting", 50),
        *([RequestAdded(15, 1, "other", 20, priority=priority)] if later > 0 else []),
        *admitted(1),
        Stepped(20, 1, [1, 20, 0, 20], []),
        Delivered(20, [1, 1], []),
        Stepped(20, 2, [1, 1, 0, 21], []),
        Delivered(20, [], []),
    ]


def after(stream: list[Event], steps: int, seconds: float, **configuration: int) -> Auditor:
    """The audit of a stream, with two censuses so far apart; request 1 runs in each step between them."""
    more = (
        [census(1), Repeated(2 * SECOND, steps), census(1 + seconds)]
        if steps
        else [census(1), census(1 + seconds)]
    )
    return audited([*stream, *more], **configuration)


# --- requests/stalled ----------------------------------------------------------------------------


@violates("requests/stalled")
@pytest.mark.parametrize(("steps", "seconds"), [(STALLED_STEPS, STEPS_SECONDS), (10, STALLED_SECONDS)])
def test_a_running_request_that_no_step_schedules_is_found(steps: int, seconds: int):
    (violation,) = after(left_out(), steps, seconds).violations

    assert ("requests/stalled", "left out") == (violation.id, violation.request)
    assert (
        f"No step has scheduled request left out for {steps} steps and {seconds} seconds, while others ran."
    ) == violation.message


@violates("requests/stalled")
def test_a_waiting_request_that_a_later_one_overtook_is_found():
    (violation,) = after(overtaken(), 10, STALLED_SECONDS).violations

    assert ("requests/stalled", "waiting") == (violation.id, violation.request)
    assert "has waited for 10 steps and 600 seconds, and requests that came later run" in violation.message


def test_a_stalled_request_is_one_finding():
    stream = [*left_out(), census(1)]
    for round in range(1, 4):
        stream += [Repeated(round * STEPS_SECONDS * SECOND, STALLED_STEPS), census(1 + round * STEPS_SECONDS)]

    (violation,) = audited(stream).violations

    assert 2 == violation.repeats


@near_miss("requests/stalled")
@pytest.mark.parametrize(
    ("steps", "seconds"),
    [(STALLED_STEPS - 1, STEPS_SECONDS), (STALLED_STEPS, STEPS_SECONDS - 1), (0, STALLED_SECONDS)],
)
def test_a_running_request_that_is_left_out_for_a_while_is_clean(steps: int, seconds: int):
    """Without a step nobody ran, so nobody was left out."""
    assert [] == after(left_out(), steps, seconds).violations


@near_miss("requests/stalled")
def test_a_request_that_runs_now_and_then_is_clean():
    stream = [*left_out(), census(1)]
    for round in range(3):
        stream += [
            Repeated(round * STEPS_SECONDS * SECOND, STALLED_STEPS - 8),
            Stepped(SECOND, 3, [0, 1, 0, 51 + round], []),
            Delivered(SECOND, [], []),
            Stepped(SECOND, 4, [], [0]),
            Delivered(SECOND, [], []),
            census(1 + round * STEPS_SECONDS),
        ]

    assert [] == violation_ids(stream)


@near_miss("requests/stalled")
def test_a_session_that_waits_for_its_next_chunk_is_clean():
    ended = RolledBack(0, 0, "session", 50, 50)
    next_chunk = [Extended(700 * SECOND, 0, 60, 50)]
    auditor = after([*left_out(resumable=True), ended], STALLED_STEPS, STALLED_SECONDS)
    auditor.feed_all(next_chunk)

    assert [] == auditor.violations


@near_miss("requests/stalled")
@pytest.mark.parametrize(
    ("stream", "configuration"),
    [
        (overtaken(later=-1), {}),
        (overtaken(priority=-1), {}),
        (overtaken(), {"loras": 2}),
    ],
    ids=["the other came first", "the other is more urgent", "the other may have another LoRA"],
)
def test_a_request_that_waits_its_turn_is_clean(stream: list[Event], configuration: dict[str, int]):
    assert [] == after(stream, STALLED_STEPS, STALLED_SECONDS, **configuration).violations


@near_miss("requests/stalled")
def test_a_request_that_waits_for_a_load_is_not_stalled():
    """After ten minutes it is ``connector/never-finished``, and only that."""
    waiting = [LookedUp(12, 0, 1, 0), Admitted(12, 0, 1, False, 0, 32, True, 32)]
    stream = [*overtaken(), *waiting]

    assert ["connector/never-finished"] == [
        violation.id for violation in after(stream, STALLED_STEPS, STALLED_SECONDS + 1).violations
    ]


# --- requests/queued-once -------------------------------------------------------------------------


def queued(**places: int) -> Census:
    return Census(10, 9, [], 0, 1, 1, misqueued=places)


TWO = [RequestAdded(10, 0, "a", 50), RequestAdded(10, 1, "b", 50)]
ENDED = Finished(20, 1, "aborted", 0, 0, 0, 50, 0)


@violates("requests/queued-once")
@pytest.mark.parametrize(
    ("stream", "request_id", "message"),
    [
        (
            [*TWO, queued(b=0)],
            "b",
            "Request b is open and in none of the scheduler's queues, so no step will",
        ),
        ([*TWO, queued(b=2)], "b", "Request b is in 2 places of the scheduler's queues."),
        (
            [*TWO, ENDED, queued(b=1)],
            None,
            "Request b has ended and is still in the scheduler's queues, at 1 place.",
        ),
    ],
    ids=["in none", "in two", "ended"],
)
def test_a_request_that_is_not_queued_as_it_should_be_is_found(
    stream: list[Event], request_id: str | None, message: str
):
    (violation,) = audited(stream).violations

    assert ("requests/queued-once", request_id) == (violation.id, violation.request)
    assert violation.message.startswith(message)


@near_miss("requests/queued-once")
@pytest.mark.parametrize(
    "stream",
    [[*TWO, queued()], [*TWO, queued(a=1, b=1)], [*TWO, ENDED, queued(b=0)]],
    ids=["all are queued once", "so it is said", "ended and in none"],
)
def test_a_request_that_is_queued_as_it_should_be_is_clean(stream: list[Event]):
    assert [] == violation_ids(stream)


@near_miss("requests/queued-once")
def test_a_request_that_was_put_into_a_queue_by_hand_has_not_ended():
    watched = Watched()
    driver = watched.start()
    driver.add("a", 40, 3)
    request = build_request("b", [7] * 40, hasher=None, max_tokens=3)
    request.status = type(request.status).WAITING_FOR_REMOTE_KVS
    driver.scheduler.kv_holding_waiting.add_request(request)
    driver.step()

    assert [] == watched.violation_ids()


# --- requests/standstill -------------------------------------------------------------------------


def idle(seconds: float, calls: int, ready: int = 1, **more: int) -> Census:
    return Census(int(seconds * SECOND), 9, [], 0, 1, 1, idle_calls=calls, ready_requests=ready, **more)


WAITING = [RequestAdded(10, 0, "first", 500), RequestAdded(20, 1, "behind", 50)]


@violates("requests/standstill")
def test_calls_that_schedule_nothing_though_requests_are_ready_are_found():
    stream = [*WAITING, idle(1, 8), idle(2, IDLE_CALLS - 1, 2), idle(3, 1, 2)]
    (violation,) = audited(stream).violations

    assert ("requests/standstill", "first") == (violation.id, violation.request)
    assert (
        "1024 calls of schedule() in a row scheduled nothing, in 2 seconds, though 2 requests can run; "
        "first is the first of them."
    ) == violation.message


@near_miss("requests/standstill")
@pytest.mark.parametrize(
    "stream",
    [
        [*WAITING, idle(1, 8), idle(2, IDLE_CALLS - 1)],
        [*WAITING, idle(1, 8), idle(2, 1_000), idle(3, 8, ready=0), idle(4, 1_000)],
        [*WAITING, idle(1, 8), idle(2, 0, ready=-1), idle(3, 1_000)],
        [idle(1, 8), idle(2, IDLE_CALLS)],
    ],
    ids=["too few calls", "nobody was ready in between", "not counted in between", "no request"],
)
def test_an_engine_that_stands_still_for_a_while_is_clean(stream: list[Event]):
    assert [] == violation_ids(stream)


@near_miss("requests/standstill")
def test_a_step_in_between_is_progress():
    step = [*admitted(1), Stepped(20, 1, [1, 50, 0, 50], []), Delivered(20, [1, 1], [])]

    assert [] == violation_ids([*WAITING, idle(1, 8), idle(2, 1_000), *step, idle(3, 1_000)])


@violates("requests/standstill")
def test_a_running_request_waits_for_no_connector():
    running = [0, 0, 0, 0, 500]
    stream = [*WAITING, idle(1, 8), msgspec.structs.replace(idle(2, IDLE_CALLS), rows=running)]

    assert ["requests/standstill"] == [found.id for found in audited(stream, connector="any").violations]


@near_miss("requests/standstill")
def test_a_connector_may_let_a_request_run_for_ten_minutes():
    stream = [*WAITING, idle(1, 8), idle(2, IDLE_CALLS), idle(STALLED_SECONDS, 8)]
    late = [*stream, idle(STALLED_SECONDS + 1, 8)]

    assert [] == audited(stream, connector="any").violations
    assert ["requests/standstill"] == [found.id for found in audited(late, connector="any").violations]


@violates("requests/standstill")
@near_miss("requests/standstill")
def test_a_client_may_end_a_session_that_keeps_a_place_for_ten_minutes():
    def held(seconds: float, calls: int) -> Census:
        return idle(seconds, calls, first_ready=1, paused_sessions=2)

    stream = [*WAITING, held(1, 8), held(2, IDLE_CALLS), held(STALLED_SECONDS, 8)]
    assert [] == violation_ids(stream)

    (violation,) = audited([*stream, held(STALLED_SECONDS + 1, 8)]).violations
    assert ("requests/standstill", "behind") == (violation.id, violation.request)
    assert violation.message.endswith(
        "though 1 requests can run; behind is the first of them. 2 sessions wait for their client's next "
        "chunk and keep the places of running requests."
    )


# --- requests/livelock ---------------------------------------------------------------------------


def preempting(rounds: int, at: float = 1, new: int = 0) -> list[Event]:
    """Each round computes 48 of 50 tokens and gives them up; with ``new``, that many more each round."""
    stream: list[Event] = []
    for number in range(rounds):
        end = 48 + new * number
        stream += [
            *admitted(0),
            Stepped(0, 2 * number + 1, [0, end, 0, end], []),
            Delivered(0, [0, 0], []),
            Preempted(0, 0, 2 * number + 1, "blocks", end, 0, 0, 0, 0, True),
        ]
    return [*stream, census(at)]


@violates("requests/livelock")
def test_steps_that_compute_the_same_tokens_again_and_again_are_found():
    stream = [RequestAdded(0, 0, "again", 50), *preempting(2), *preempting(LIVELOCKED_STEPS, 3)]
    (violation,) = [each for each in audited(stream).violations if each.id == "requests/livelock"]

    assert "again" == violation.request
    assert violation.message.startswith(
        "512 steps in a row, in 2 seconds, scheduled 24576 tokens and gave none"
    )


@near_miss("requests/livelock")
@pytest.mark.parametrize(
    "stream",
    [
        [*preempting(2), *preempting(LIVELOCKED_STEPS - 1, 3)],
        [*preempting(2), *preempting(LIVELOCKED_STEPS, 3, new=1)],
    ],
    ids=["too few steps", "a new token in each round"],
)
def test_steps_that_compute_tokens_again_for_a_while_are_clean(stream: list[Event]):
    assert "requests/livelock" not in violation_ids([RequestAdded(0, 0, "again", 5_000), *stream])


@near_miss("requests/livelock")
def test_another_request_that_goes_on_is_progress():
    stream = [RequestAdded(0, 1, "other", 20), RequestAdded(0, 0, "again", 50), *admitted(1)]
    stream += [Stepped(0, 1, [1, 20, 0, 20], []), Delivered(0, [1, 1], []), *preempting(2)]
    stream += [
        *preempting(LIVELOCKED_STEPS)[:-1],
        Stepped(0, 2, [1, 1, 0, 21], []),
        Delivered(0, [], []),
        census(3),
    ]

    assert "requests/livelock" not in violation_ids(stream)
