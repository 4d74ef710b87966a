"""The time to a first output: its causes, and that they sum to it.

The events of a history are 10 microseconds apart.
"""

from __future__ import annotations

import pytest
from tests.histories import GOLDEN, Golden, events

from kvledger.audit.causes import FIRST_TOKEN
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.ledger import Ledger


def first_token(prompt_tokens: int, words: str, *, pooling: bool = False) -> dict[str, int] | None:
    """Microseconds by cause; causes without any are left out."""
    ledger = Ledger(keep_closed=True)
    for event in events(prompt_tokens, words, pooling=pooling):
        ledger.apply(event)
    found = _only(ledger).first_token
    return found and {cause: spent for cause, spent in zip(FIRST_TOKEN, found, strict=True) if spent}


def _only(ledger: Ledger) -> Account:
    (account,) = ledger.accounts()
    return account


def test_a_request_is_queued_until_its_admission_and_then_prefills():
    assert {"queued": 20, "prefill": 20} == first_token(32, "A0+0 s32 o+ F")


def test_the_time_between_lives_is_preempted_and_later_lives_prefill_again():
    expected = {"queued": 20, "prefill": 30, "preempted": 20, "prefill_again": 20}
    assert expected == first_token(32, "A0+0 s16 o P A0+0 s32 o+ F")


def test_a_preemption_after_the_first_output_adds_nothing():
    expected = first_token(32, "A0+0 s32 o+ F")
    assert expected == first_token(32, "A0+0 s32 o+ P A0+0 s33 o+ F")


def test_the_output_of_a_step_that_comes_after_the_preemption_ends_the_time():
    found = first_token(32, "A0+0 s32 P o+ A0+0 s33 o+ F")
    assert found == {"queued": 20, "prefill": 20, "preempted": 10}


def test_an_asynchronous_load_is_waited_for_and_then_a_step():
    expected = {"queued": 30, "remote_load": 10, "ready": 10, "prefill": 10}
    assert expected == first_token(32, "A0+16 L s16 o+ F")


def test_a_synchronous_load_is_part_of_the_prefill():
    assert {"queued": 30, "prefill": 30} == first_token(32, "A0+16 C16 s16 L o+ F")


def test_a_request_waits_again_after_a_failed_load_and_has_not_prefilled_before():
    expected = {"queued": 30, "remote_load": 20, "ready": 10, "load_failed": 20, "prefill": 20}
    assert expected == first_token(32, "A0+16a L0 A0+0 s32 o+ F")


def test_a_request_without_output_has_no_time():
    assert first_token(32, "A0+0 s16 o F:aborted") is None


def test_a_request_for_a_pooling_model_has_no_time():
    assert first_token(32, "A0+0 s32 o F", pooling=True) is None


def test_a_session_has_the_time_of_its_first_turn():
    assert first_token(32, "A0+0 s32 o+ F") == first_token(32, "A0+0 s32 o+ S X16 s17 o+ F")


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_causes_sum_to_the_time(golden: Golden):
    """The first output is read off the events by itself: the first delivered token of the request."""
    ledger = Ledger(keep_closed=True)
    first = None
    for event in golden.events():
        ledger.apply(event)
        if first is None and any(a.sequence_tokens > a.prompt_tokens for a in ledger.accounts()):
            first = event.at
    account = _only(ledger)
    if account.first_token is None:
        assert first is None or account.unknown is not None or account.pooling
    else:
        assert sum(account.first_token) == (first or 0) - account.added_at
        assert min(account.first_token) >= 0
