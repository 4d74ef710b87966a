"""The time before the first admission: its causes, and that they sum to it.

The events of a history are 10 microseconds apart. A word ``W:budget`` says that a step left requests waiting
because its token budget was spent.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.audit.checks.false_reports import started
from tests.histories import events, weave

from kvledger.audit.causes import FIRST_TOKEN, QUEUE, QUEUED
from kvledger.audit.events import Event, Gap, RequestAdded
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.ledger import Ledger

RAN = "A0+0 s32 o+ F"


def accounts(stream: Iterable[Event], *, recorded: bool = True) -> dict[int, Account]:
    ledger = Ledger(keep_closed=True)
    ledger.apply(started(queue_causes=recorded))
    for event in stream:
        ledger.apply(event)
    return {account.request: account for account in ledger.accounts()}


def queued(account: Account) -> dict[str, int] | None:
    """Microseconds by cause without its prefix; causes without any are left out."""
    found = account.queued
    if found is None:
        return None
    assert account.first_token is not None
    assert sum(found) == account.first_token[list(FIRST_TOKEN).index(QUEUED)]
    assert min(found) >= 0
    return {cause.removeprefix("queued_"): spent for cause, spent in zip(QUEUE, found, strict=True) if spent}


def of(words: str) -> dict[str, int] | None:
    (account,) = accounts(events(32, words)).values()
    return queued(account)


def test_a_request_that_the_next_step_admits_waited_for_that_step():
    assert {"next_step": 20} == of(RAN)


@pytest.mark.parametrize("cause", ["budget", "running_limit", "blocks", "preemption", "paused", "unknown"])
def test_a_request_waits_for_the_cause_from_the_first_step_that_left_it_waiting(cause: str):
    assert {"next_step": 10, cause: 20} == of(f"W:{cause} {RAN}")


def test_each_cause_lasts_until_the_next_one():
    assert {"next_step": 10, "budget": 20, "blocks": 20} == of(f"W:budget W:budget W:blocks {RAN}")


def test_a_cause_of_a_newer_release_is_unknown():
    assert {"next_step": 10, "unknown": 20} == of(f"W:moon {RAN}")


def test_the_queue_after_a_preemption_is_no_part_of_it():
    assert {"next_step": 20} == of("A0+0 s16 o P W:blocks A0+0 s32 o+ F")


def test_a_request_without_output_has_no_queue():
    assert of("W:budget A0+0 s16 o F:aborted") is None
    assert of("W:budget F:aborted") is None


def test_a_request_that_comes_later_waits_for_a_step_before_the_cause_that_holds():
    """The first request is left waiting; the second one comes after that and is admitted with the first."""
    stream = weave({0: 32, 1: 32}, "W:budget A0+0 b.A0+0 s32&b.s32 o+&b.o+ F b.F")
    second = stream.pop(1)
    assert isinstance(second, RequestAdded)
    late = RequestAdded(stream[1].at + 5, *_fields(second)[1:])
    found = accounts([*stream[:2], late, *stream[2:]])
    assert {"next_step": 20, "budget": 20} == queued(found[0])
    assert {"next_step": 35} == queued(found[1])


def test_a_request_that_comes_during_a_pause_waits_for_its_end():
    stream = events(32, "W:next_step " + RAN)
    paused = events(32, "W:paused")[1]
    found = accounts([type(paused)(5, paused.cause), *stream])
    assert {"paused": 10, "next_step": 20} == queued(found[0])


@pytest.mark.parametrize("words", ["W:budget W:budget W:blocks ", "W:paused W:next_step ", ""])
def test_a_clock_that_is_read_anew_changes_no_cause(words: str):
    ledger = Ledger(keep_closed=True)
    ledger.apply(started(queue_causes=True))
    for event in events(32, words + RAN):
        ledger.apply(event)
        ledger.queue.read_anew()
    (account,) = ledger.accounts()
    assert of(words + RAN) == queued(account)


def test_without_a_record_of_the_causes_all_is_unknown():
    (account,) = accounts(events(32, RAN), recorded=False).values()
    assert {"unknown": 20} == queued(account)


def test_a_request_that_comes_after_lost_events_has_none_of_the_causes_before():
    stream = events(32, RAN)
    before = events(32, "W:budget")[1]
    found = accounts([type(before)(2, before.cause), Gap(4, 3, "test"), *stream])
    assert found[0].unknown is not None


def _fields(event: Event) -> tuple[object, ...]:
    return tuple(getattr(event, name) for name in event.__struct_fields__)
