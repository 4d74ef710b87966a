"""Causes of prefix-cache misses: golden histories to the token, and causes that add up on any history."""

from __future__ import annotations

import pytest
from tests.drawn import drawn_histories
from tests.histories import GOLDEN, events

from kvledger.audit.analysis.cache_misses import missed_ranges, never_came
from kvledger.audit.causes import MISSES
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import Event
from kvledger.audit.ledger.account import Account

BLOCK = 16

HISTORIES = (
    # Prompt 100 is six blocks and four tokens.
    ("cold", 100, "A0+0 s100 o+ s1 o+ F", {"not_knowable": 96, "below_block": 4}),
    ("a whole hit but for the remainder", 100, "A96+0 s4 o+ F", {"below_block": 4}),
    ("whole blocks, nothing hit", 96, "A0+0 s96 o+ F", {"not_knowable": 96}),
    ("whole blocks, all hit: the last is computed", 96, "A80+0 s16 o+ F", {"last_token": 16}),
    ("full external hit, the last token again", 96, "A0+96 L R1 s1 o+ F", {"last_token": 1}),
    (
        "preempted in decode, resumed cold",
        64,
        "A0+0 s64 o+ s1 o+ P A0+0 s66 o+ F",
        {"not_knowable": 64, "preempted": 64},
    ),
    (
        "preempted, resumed from the cache but for the prompt's last block",
        64,
        "A0+0 s64 o+ s1 o+ P A48+0 s18 o+ F",
        {"not_knowable": 64, "preempted": 16},
    ),
    (
        "preempted before the load was done",
        200,
        "A0+160a P A0+0 s200 o+ F",
        {"preempted": 160, "not_knowable": 32, "below_block": 8},
    ),
    (
        "reset while running",
        40,
        "A0+0 s40 o+ s1 p:reset A0+0 s41 o+ o+ F",
        {"not_knowable": 32, "below_block": 8, "cache_reset": 40},
    ),
    (
        "asynchronous load fails in part",
        200,
        "A0+160 L64 s136 o+ F",
        {"load_failed": 96, "not_knowable": 32, "below_block": 8},
    ),
    (
        "synchronous load failure takes a local hit with it",
        200,
        # The failed load invalidates positions 32 to 159; positions 160 to 199 are executed twice.
        "A64+96 s40 L-32 o s168 o+ F",
        {"load_failed": 128 + 40, "not_knowable": 32, "below_block": 8},
    ),
    (
        "never loaded",
        200,
        "A0+160a s40 o+ F",
        {"promised_and_void": 160, "not_knowable": 32, "below_block": 8},
    ),
    (
        "half in the plan",
        200,
        "A32+128 C64 s40 o+ F",
        {"promised_and_void": 64, "not_knowable": 32, "below_block": 8},
    ),
    (
        "replay window",
        100,
        "A64+0 R16:replay s52 o+ F",
        {"replayed": 16, "not_knowable": 32, "below_block": 4},
    ),
    ("aborted in mid-prefill", 300, "A0+0 s128 o F", {"not_knowable": 128, "ended_first": 172}),
    ("aborted while waiting for remote KV", 300, "A64+128 F", {"ended_first": 236}),
    ("a session's second chunk", 20, "A0+0 s20 o+ S X10 s10 o+ F", {"not_knowable": 16, "below_block": 14}),
)


def accounts(stream: list[Event]) -> list[Account]:
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(stream)
    return list(auditor.ledger.accounts())


def tokens_by_cause(account: Account, block_size: int = BLOCK) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for start, end, cause in missed_ranges(account, block_size):
        assert 0 <= start < end
        tokens[cause] = tokens.get(cause, 0) + end - start
    return tokens


@pytest.mark.parametrize(("title", "prompt", "words", "expected"), HISTORIES, ids=[h[0] for h in HISTORIES])
def test_missed_tokens_of_a_golden_history_have_these_causes(
    title: str, prompt: int, words: str, expected: dict[str, int]
) -> None:
    (account,) = accounts(events(prompt, words))

    assert expected == tokens_by_cause(account)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_without_a_block_size_no_token_is_below_a_block(row: object) -> None:
    (account,) = accounts(row.events())  # type: ignore[attr-defined]

    assert "below_block" not in tokens_by_cause(account, block_size=0)


def assert_causes_add_up(account: Account) -> None:
    """The causes cover the tokens executed once, the tokens executed again and the tokens without KV."""
    tokens = tokens_by_cause(account)
    assert tokens.keys() <= MISSES.keys()
    recomputed = sum(end - start for start, end, _ in account.executed_again)
    without_kv = sum(end - start for start, end in never_came(account)) if account.closed_at >= 0 else 0
    assert account.first_prompt + recomputed + without_kv == sum(tokens.values())
    assert recomputed <= sum(account.rework.values())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_causes_add_up_in_golden_histories(row: object) -> None:
    for account in accounts(row.events()):  # type: ignore[attr-defined]
        assert_causes_add_up(account)


def test_causes_add_up_in_any_history() -> None:
    for history in drawn_histories():
        for account in accounts(list(history)):
            if account.unknown is None:
                assert_causes_add_up(account)
