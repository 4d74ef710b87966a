"""The ledger gives the golden figures; `tests/differential` compares it with an oracle on other histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.columns import CAUSES, by_cause, by_title, expect_row, statement_figures
from tests.drawn import drawn_histories
from tests.histories import GOLDEN, WOVEN, Golden, Woven, compressed, request_id, weave, whole_outputs
from tests.positions import SUMS

from kvledger.audit.events import Event

Ledger = pytest.importorskip("kvledger.audit.ledger.ledger").Ledger


def post(ledger: Any, event: Event) -> None:
    """Post one event and ignore its entries."""
    entries = ledger.apply(event)
    if entries is not None:
        for _ in entries:
            pass


def ledger_of(events: Iterable[Event]) -> Any:
    """A ledger after all events, with closed accounts kept."""
    ledger = Ledger(keep_closed=True)
    for event in events:
        post(ledger, event)
    return ledger


def figures_of(ledger: Any, request: int) -> dict[str, Any]:
    """The figures of one account, named as in a golden row."""
    statement = ledger.account(request_id(request))
    assert statement is not None
    return {**statement_figures(statement), "unknown": statement.unknown}


def expect(row: Golden, figures: dict[str, Any]) -> None:
    """Every column of one golden row; nothing is in flight at its end, or unknown."""
    expect_row(row, figures)
    assert (0, None) == (figures["in_flight"], figures["unknown"])


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history(row: Golden) -> None:
    """The figures are right to the token."""
    expect(row, figures_of(ledger_of(row.events()), 0))


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history_with_repeated_steps(row: Golden) -> None:
    """The same figures when unchanged steps are written as one ``Repeated``."""
    expect(row, figures_of(ledger_of(compressed(row.events())), 0))


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history_with_whole_outputs(row: Golden) -> None:
    """The same figures when outputs are written as ``DeliveredWhole``."""
    expect(row, figures_of(ledger_of(whole_outputs(row.events())), 0))


@pytest.mark.parametrize("woven", WOVEN, ids=by_title)
def test_requests_that_share_steps_have_separate_accounts(woven: Woven) -> None:
    """Each request has the figures of its own row."""
    ledger = ledger_of(woven.events())

    for number, row in enumerate(woven.rows):
        expect(row, figures_of(ledger, number))


def test_totals_are_the_sum_of_the_accounts() -> None:
    """Every known account is counted once, open or closed."""
    for events in drawn_histories():
        ledger = ledger_of(events)
        frozen = [account.freeze() for account in ledger.accounts()]
        accounts, totals = [account for account in frozen if account.unknown is None], ledger.totals()

        assert (len(frozen), len(frozen) - len(accounts)) == (totals.requests, totals.unknown_requests)
        for name in set(SUMS) - set(CAUSES):
            assert sum(getattr(account, name) for account in accounts) == getattr(totals, name), name
        for name in CAUSES:
            expected: Counter[str] = Counter()
            for account in accounts:
                expected.update(by_cause(getattr(account, name)))
            assert expected == by_cause(getattr(totals, name)), name


# --- steady decode --------------------------------------------------------------------------------


def posted_at_once(events: Iterable[Event]) -> Any:
    """A ledger whose accounts are read after every event, so that none lags behind."""
    ledger = Ledger(keep_closed=True)
    for event in events:
        post(ledger, event)
        ledger.open  # noqa: B018
    return ledger


LONG = (
    "a.A0+0 b.A16+0 a.s40&b.s8 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x20 a.P (b.s1 b.o+)x9 b.F a.A32+0 a.s29 a.o+ F",
    "a.A0+0 b.A16+0 a.s40&b.s8 a.s1&b.s1 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x20 a.P a.o+&b.o+ b.F",
    "a.A0+0 b.A16+0 a.s40&b.s8 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x9 a.s1&b.s4/3 a.o+&b.o1/3 a.s1&b.s1 a.o+&b.o+"
    " (a.s1&b.s1 a.o+&b.o+)x9 a.F b.F",
)


@pytest.mark.parametrize("words", LONG)
@pytest.mark.parametrize("repeats", [False, True])
def test_steady_accounts_equal_accounts_posted_at_once(words: str, repeats: bool) -> None:
    stream = weave({0: 40, 1: 24}, words)
    stream = compressed(stream) if repeats else stream
    lazy, eager = ledger_of(stream), posted_at_once(stream)

    assert [account.freeze() for account in eager.accounts()] == [a.freeze() for a in lazy.accounts()]
    assert eager.totals() == lazy.totals()


def test_steady_decode_is_posted_when_the_account_is_read() -> None:
    ledger = Ledger()
    for event in weave({0: 40}, "A0+0 s40 o+ (s1 o+)x50"):
        post(ledger, event)

    assert {0} == ledger.steady.keys()
    assert 50 == ledger.open[0].first_output
    assert {0} == ledger.steady.keys()


def test_reading_accounts_changes_nothing() -> None:
    for events in drawn_histories():
        lazy, eager = ledger_of(events), posted_at_once(events)

        assert [account.freeze() for account in eager.accounts()] == [a.freeze() for a in lazy.accounts()]
