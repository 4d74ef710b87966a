"""How the requests of a step share its time, and that the shares sum to it.

The events of a history are 10 microseconds apart; arrival, lookup and admission are an event each.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.histories import GOLDEN, Golden, compressed, weave

from kvledger.audit.events import Event
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.clocks import DECODE_PLACE, PREFILL_PLACE
from kvledger.audit.ledger.ledger import Ledger


def accounts(stream: Iterable[Event]) -> dict[int, Account]:
    ledger = Ledger(keep_closed=True)
    for event in stream:
        ledger.apply(event)
    return {account.request: account for account in ledger.accounts()}


def prefill(words: str, **prompts: int) -> dict[int, tuple[int, int] | None]:
    found = accounts(weave(dict(enumerate(prompts.values())), words))
    return {request: account.prefill_parts for request, account in found.items()}


def decode(words: str, **prompts: int) -> dict[int, tuple[int, int] | None]:
    found = accounts(weave(dict(enumerate(prompts.values())), words))
    return {request: account.decode_parts for request, account in found.items()}


def test_a_request_alone_has_all_of_its_time():
    assert {0: (20, 0)} == prefill("A0+0 s32 o+ F", a=32)
    assert {0: (50, 0)} == decode("A0+0 s32 o+ s1 o+ s1 o+ F", a=32)


def test_a_step_is_shared_by_tokens():
    """The admissions are 30 and 10 microseconds before the step, which lasts 10."""
    found = prefill("A0+0 b.A0+0 s32&b.s128 o+&b.o+ F b.F", a=32, b=128)
    assert {0: (30 + 2, 8), 1: (10 + 8, 2)} == found


def test_a_step_without_the_request_is_of_others():
    found = prefill("b.A0+0 b.s32 b.o+ A0+0 s16 o b.s1 b.o+ s16 o+ F b.F", a=32, b=32)
    assert (10 + 20 + 10, 20) == found[0]


def test_decode_beside_a_prefill_has_the_share_of_one_token():
    """The request decodes for 50 microseconds alone, then for 20 beside 99 tokens, then it ends."""
    found = decode("A0+0 s32 o+ s1 o+ b.A0+0 s1&b.s99 o+&b.o+ F b.F", a=32, b=99)
    assert (50, 20) == found[0]


def test_a_request_that_left_the_steps_shares_no_more():
    """The other request is preempted; its tokens are in no later step."""
    found = prefill("b.A0+0 b.s32 b.o+ A0+0 b.P s32 o+ F b.F:aborted", a=32, b=32)
    assert found[0] == (10 + 10 + 10, 0)


def test_a_decode_has_its_share_of_each_step_until_its_end():
    """The step of the prefills lasts another 10 microseconds, then both have a half."""
    found = decode("A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x2 F b.F", a=32, b=128)
    assert {0: (2 + 20, 8 + 20), 1: (8 + 25, 2 + 25)} == found


@pytest.mark.parametrize("reading", [1, 3**20, (1 << 63) - 2])
def test_what_the_clock_reads_at_first_changes_no_share(reading: int):
    stream = weave({0: 32, 1: 128}, "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x3 F b.F")
    ledger = Ledger(keep_closed=True)
    ledger.step_clock.reading = reading
    for event in stream:
        ledger.apply(event)
    plain = accounts(stream)
    for account in ledger.accounts():
        assert account.decode_parts == plain[account.request].decode_parts
        assert account.prefill_parts == plain[account.request].prefill_parts


def test_a_clock_that_is_read_anew_changes_no_share():
    stream = weave({0: 32, 1: 128}, "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x3 F b.F")
    plain = accounts(stream)
    ledger = Ledger(keep_closed=True)
    for event in stream:
        ledger.apply(event)
        lives = [account.life for account in ledger.living.values() if account.life is not None]
        ledger.step_clock.read_anew(life for life in lives if life.step_tokens)
    for account in ledger.accounts():
        assert account.decode_parts == plain[account.request].decode_parts
        assert account.prefill_parts == plain[account.request].prefill_parts


def test_unchanged_steps_give_the_same_shares():
    words = "A0+0 b.A0+0 s32&b.s128 o+&b.o+ (s1&b.s1 o+&b.o+)x20 F b.F"
    stream = weave({0: 32, 1: 128}, words)
    plain, fewer = accounts(stream), accounts(compressed(stream))
    for request in (0, 1):
        assert plain[request].decode_parts == fewer[request].decode_parts
        assert plain[request].prefill_parts == fewer[request].prefill_parts


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.title)
def test_the_parts_sum_to_their_cause(golden: Golden):
    (found,) = accounts(golden.events()).values()
    if found.first_token is not None:
        assert found.prefill_parts is not None
        assert sum(found.prefill_parts) == found.first_token[PREFILL_PLACE]
        assert min(found.prefill_parts) >= 0
    if found.output_time is not None:
        assert found.decode_parts is not None
        assert sum(found.decode_parts) == found.output_time[DECODE_PLACE]
        assert min(found.decode_parts) >= 0
