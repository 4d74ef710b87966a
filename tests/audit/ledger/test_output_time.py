"""The time from the first output to the last: its causes, and that they sum to it.

The events of a history are 10 microseconds apart.
"""

from __future__ import annotations

import pytest
from tests.histories import GOLDEN, Golden, events

from kvledger.audit.causes import OUTPUT_TIME
from kvledger.audit.events import Finished
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.ledger import Ledger


def account(prompt_tokens: int, words: str) -> Account:
    ledger = Ledger(keep_closed=True)
    for event in events(prompt_tokens, words):
        ledger.apply(event)
    (found,) = ledger.accounts()
    return found


def spent(prompt_tokens: int, words: str) -> dict[str, int] | None:
    """Microseconds by cause; causes without any are left out."""
    found = account(prompt_tokens, words).output_time
    return found and {cause: us for cause, us in zip(OUTPUT_TIME, found, strict=True) if us}


def test_a_request_decodes_from_its_first_output_to_its_end():
    assert {"decode": 50} == spent(32, "A0+0 s32 o+ s1 o+ s1 o+ F")
    assert 2 == account(32, "A0+0 s32 o+ s1 o+ s1 o+ F").later_tokens


def test_a_preemption_is_waited_for_and_the_work_is_done_again():
    expected = {"decode": 40, "decode_preempted": 20, "decode_loading": 10, "decode_again": 10}
    assert expected == spent(32, "A0+0 s32 o+ s1 o+ P A0+0 s34 o+ F")


def test_a_preemption_before_the_first_output_adds_nothing():
    assert {"decode": 30} == spent(32, "A0+0 s16 o P A0+0 s32 o+ s1 o+ F")


def test_the_first_output_may_come_after_a_preemption():
    found = spent(32, "A0+0 s32 P o+ A0+0 s33 o+ F")
    assert found == {"decode": 10, "decode_preempted": 20, "decode_loading": 10, "decode_again": 10}


@pytest.mark.parametrize("words", ["A0+0 s32 o+ s1 o+ F:aborted", "A0+0 s32 o+ S X16 s17 o+ F"])
def test_aborted_requests_and_sessions_have_no_time(words: str):
    assert spent(32, words) is None


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_causes_sum_to_the_time(golden: Golden):
    ledger = Ledger(keep_closed=True)
    end = None
    for event in golden.events():
        ledger.apply(event)
        if isinstance(event, Finished):
            end = event.at
    (found,) = ledger.accounts()
    if found.output_time is not None:
        assert found.first_token is not None
        assert sum(found.output_time) == (end or 0) - found.added_at - sum(found.first_token)
        assert min(found.output_time) >= 0
