"""Every cause of a difference between a log and the ledger, and the near miss that has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from kvledger.audit.analysis.usage import CallIndex, Told, ToldOfCalls, Usage
from kvledger.audit.ledger.account import Account, AccountStatement, Settlement

PROMPT = 100


def account(
    request_id: str,
    local: int = 0,
    external: int = 0,
    *,
    output: int = 5,
    outcome: str = "length",
    plan: tuple[int, int] | None = None,
    reported: tuple[int, int, int] | None = None,
    transferred: bool = False,
    remote_decode: bool = False,
    remote_request: str = "",
    voided: dict[str, int] | None = None,
    unknown: str | None = None,
    at: int = 0,
) -> AccountStatement:
    """The account of a request with a prompt of 100 tokens."""
    opened: Any = Account(0, request_id, PROMPT, at)
    opened.sequence_tokens = PROMPT + output
    opened.outcome, opened.plan, opened.reported = outcome, plan, reported
    opened.transferred, opened.unknown = transferred, unknown
    opened.remote_decode, opened.remote_request = remote_decode, remote_request
    opened.voided = Counter(voided or {})
    opened.settlements.append(
        Settlement(PROMPT, 0, local, external, PROMPT - local - external, 0, at=at, step=1)
    )
    return AccountStatement(
        **{name: getattr(opened.freeze(), name) for name in AccountStatement.__struct_fields__}
    )


def told(call: str, cached: int | None, prompt: int | None = PROMPT, output: int | None = 5) -> Told:
    return Told((call,), prompt, cached, output, 1)


def reconciled(
    log: list[Told], *accounts: AccountStatement, engines: Sequence[str] = (), tenants: Sequence[str] = ()
) -> Usage:
    told = ToldOfCalls(log)
    index = CallIndex(told, suffixed=True)
    for each, engine, tenant in zip_longest(accounts, engines, tenants, fillvalue=""):
        index.add(each, engine, tenant=tenant)  # type: ignore[arg-type]
    return Usage(told, index)


def row(log: Told, *accounts: AccountStatement) -> tuple[str, tuple[str, ...]]:
    (only,) = reconciled([log], *accounts).calls()
    return only.verdict, only.causes


def one(*counts: int, **more: Any) -> AccountStatement:
    """The only request of the call ``cmpl-a``."""
    return account("cmpl-a-0-0a1b2c3d", *counts, **more)


SAMPLES = (account("0_cmpl-a-0-0a1b2c3d"), account("1_cmpl-a-0-0a1b2c3d", 96))
PROMPTS = (account("cmpl-a-0-0a1b2c3d", 32), account("cmpl-a-1-0a1b2c3e", 64))


@pytest.mark.parametrize(
    ("log", "accounts", "verdict", "causes"),
    [
        (told("cmpl-a", 64), [one(64)], "equal", ()),
        (told("cmpl-a", 64), [one(32, 32)], "equal", ()),
        (told("cmpl-a", None), [one(64)], "equal", ("not-told",)),
        (told("cmpl-a", 0, output=10), SAMPLES, "equal", ()),
        (told("cmpl-a", 96, output=10), SAMPLES, "explained", ("one-sample",)),
        (told("cmpl-a", 95, output=10), SAMPLES, "unexplained", ("unexplained cached",)),
        (told("cmpl-a", 0, 200, 10), SAMPLES, "explained", ("prompt-per-sample",)),
        (told("cmpl-a", 96, 200, 10), PROMPTS, "equal", ()),
        (told("cmpl-a", 64, 200, 10), PROMPTS, "explained", ("one-prompt",)),
        (told("cmpl-a", 48), [one(16, plan=(16, 32))], "explained", ("plan",)),
        (told("cmpl-a", 64), [one(16, plan=(16, 32))], "unexplained", ("unexplained cached",)),
        (told("cmpl-a", 64), [one(0, 64, transferred=True)], "explained", ("transfer",)),
        (told("cmpl-a", 0), [one(0, 64, transferred=True)], "equal", ()),
        (told("cmpl-a", 99), [one(64, reported=(99, 0, 1))], "explained", ("engine-report",)),
        (told("cmpl-a", 0, output=3), [one(outcome="aborted")], "explained", ("aborted",)),
        (told("cmpl-a", 0, output=9), [one(outcome="aborted")], "unexplained", ("unexplained output",)),
        (told("cmpl-a", 0, output=3), [one()], "unexplained", ("unexplained output",)),
        (told("cmpl-a", 0, 99), [one()], "unexplained", ("unexplained prompt",)),
        (told("cmpl-a", 9), [one(unknown="events are missing")], "unknown", ()),
        (told("cmpl-b", 0), [one()], "not in the trace", ()),
        (told("cmpl-a", 0), [account("cmpl-a0-0-0a1b2c3d")], "not in the trace", ()),
    ],
)
def test_a_call_beside_the_ledger(log: Told, accounts: Any, verdict: str, causes: tuple[str, ...]) -> None:
    assert (verdict, causes) == row(log, *accounts)


def test_a_call_that_a_gateway_repeated_leaves_one_that_nobody_was_told_of() -> None:
    first = account("cmpl-a-0-00000001", 0, outcome="aborted", at=1)
    second = account("cmpl-a-0-00000002", 96, at=2)

    result = reconciled([told("cmpl-a", 96)], first, second)

    assert ["equal"] == [each.verdict for each in result.calls()]
    assert [["cmpl-a-0-00000001"]] == [
        [each.account.request_id for each in call] for call in result.unlogged()
    ]


def test_two_lines_of_one_id_take_a_call_each() -> None:
    both = [account("cmpl-a-0-00000001", 0, at=1), account("cmpl-a-0-00000002", 96, at=2)]

    result = reconciled([told("cmpl-a", 96), told("cmpl-a", 0)], *both)

    assert ["equal", "equal"] == [each.verdict for each in result.calls()]
    assert [] == list(result.unlogged())


def test_calls_in_no_line_are_listed() -> None:
    result = reconciled(
        [], account("cmpl-a-0-0a1b2c3d"), account("1_cmpl-a-0-0a1b2c3d"), account("17-0a1b2c3d")
    )

    assert [2, 1] == [len(call) for call in result.unlogged()]


def test_the_first_known_id_of_a_line_counts() -> None:
    log = Told(("lite-1", "a"), PROMPT, 64, 5, 1)

    assert "equal" == row(log, account("chatcmpl-a-0a1b2c3d", 64))[0]


def test_a_prompt_of_two_engines_counts_once() -> None:
    """The prefill engine hits 32 tokens and computes 68, of which the decode engine receives 96."""
    prefill = account("cmpl-a-0-0a1b2c3d", 32, output=1)
    decode = account("cmpl-a-0-0a1b2c3e", 0, 96, transferred=True)
    log = told("cmpl-a", 32)

    result = reconciled([log], decode, prefill, engines=["decode engine", "a prefill engine"])
    (only,) = result.calls()

    assert only.ledger is not None
    assert ("equal", (2, 1, 100, 32, 5)) == (only.verdict, only.ledger[:5])
    assert ["a prefill engine", "decode engine"] == [each.engine for each in only.requests]


def test_a_transfer_that_is_told_as_hits_is_explained() -> None:
    log = told("cmpl-a", 96)

    prefill = account("cmpl-a-0-0a1b2c3d", 32, output=1)
    decode = account("cmpl-a-0-0a1b2c3e", 0, 96, transferred=True)
    (only,) = reconciled([log], prefill, decode, engines=["a prefill engine", "decode engine"]).calls()

    assert ("transfer",) == only.causes


def test_differences_are_summed_by_tenant_cause_and_sign() -> None:
    """Calls of ``a`` are told 16 too much, one of ``b`` 3 too little and one 40 too much, ``c`` is equal."""
    rows = [("a", 16, 0)] * 30 + [("b", -3, 0), ("b", 40, 0), ("c", 0, 0), ("", 0, 2)]
    log = [
        Told((f"cmpl-c{n}", f"c{n}"), PROMPT, 32 + cached, 5 + output, n)
        for n, (_, cached, output) in enumerate(rows)
    ]
    accounts = [account(f"cmpl-c{n}-0-0a1b2c3d", 32) for n in range(len(rows))]

    assert [
        ("", "a", "cached", "unexplained cached", "+", 30, 1440, 960, 16, 16),
        ("", "b", "cached", "unexplained cached", "+", 1, 72, 32, 40, 40),
        ("", "b", "cached", "unexplained cached", "-", 1, 29, 32, -3, -3),
        ("", "", "output", "unexplained output", "+", 1, 7, 5, 2, 2),
    ] == reconciled(log, *accounts, tenants=[tenant for tenant, _, _ in rows]).differences


def test_a_figure_that_nobody_was_told_is_no_difference_and_causes_have_their_figure() -> None:
    def of(log: Told, *accounts: AccountStatement) -> list[tuple[Any, ...]]:
        return [each[2:8] for each in reconciled([log], *accounts).differences]

    assert [] == of(told("cmpl-a", None), one(64))
    assert [] == of(told("cmpl-a", 9), one(unknown="events are missing"))
    assert [("prompt", "prompt-per-sample", "+", 1, 200, 100)] == of(told("cmpl-a", 0, 200, 10), *SAMPLES)
    assert [("output", "aborted", "-", 1, 3, 5)] == of(told("cmpl-a", 0, output=3), one(outcome="aborted"))
