"""Every difference between settled figures, plan and report has a name, and they add up."""

from __future__ import annotations

import msgspec
import pytest
from tests.histories import GOLDEN, Golden
from tests.journals import titled

from kvledger.audit.analysis.reconciliation import Figures, Reconciliation, ended_early
from kvledger.audit.causes import DIFFERENCES
from kvledger.audit.events import Event, Reported
from kvledger.audit.ledger.ledger import Ledger


def reconciled(stream: list[Event]) -> Reconciliation:
    ledger = Ledger(keep_closed=True)
    for event in stream:
        ledger.apply(event)
    reconciliation = Reconciliation()
    for account in ledger.accounts():
        reconciliation.add(account)
    return reconciliation


def to_plan(row: Golden) -> dict[str, Figures]:
    steps = reconciled(row.events()).to_plan.differences
    return {cause: difference.figures for cause, difference in steps.items()}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_every_golden_history_is_explained(row: Golden) -> None:
    """Settled + named differences = plan, and none of them is called unexplained."""
    reconciliation = reconciled(row.events())
    differences = reconciliation.to_plan.differences

    total = Figures()
    total.add(reconciliation.settled)
    for difference in differences.values():
        total.add(difference.figures)

    assert total == reconciliation.plan
    assert "unexplained" not in differences
    assert set(differences) <= set(DIFFERENCES)


@pytest.mark.parametrize(
    ("title", "cause", "figures"),
    [
        ("vLLM#36752", "resumed_with_hits", Figures(external=-72, computed=72)),
        ("asynchronous load fails in part", "load_failed", Figures(external=96, computed=-96)),
        ("aborted in mid-prefill", "ended_early", Figures(computed=172, unattained=-172)),
        ("aborted while waiting", "never_ran", Figures(local=-64, unattained=-236)),
    ],
)
def test_a_difference_is_named(title: str, cause: str, figures: Figures) -> None:
    assert {cause: figures} == to_plan(titled(title))


def test_no_difference_where_the_plan_came_true() -> None:
    assert {} == to_plan(titled("external, asynchronous, loaded"))


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ((0, 160, 40), "last_admission"),
        ((-128, 160, 168), "mixed_instants"),
        ((0, 160, 168), "mixed_instants"),
        ((1, 32, 167), "unexplained"),
    ],
)
def test_a_report_that_is_not_the_plan_is_named(report: tuple[int, int, int], cause: str) -> None:
    """What releases made of vLLM#36752: the last admission, two instants, the same cut off at 0."""
    stream = titled("vLLM#36752").events()
    said = Reported(stream[-1].at, 0, 200, *report, report[0] + report[1])

    found = reconciled([*stream[:-1], said, stream[-1]]).to_reported.differences

    assert [cause] == list(found)
    assert Figures(report[0], report[1] - 32, report[2] - 168) == found[cause].figures


def test_an_aborted_request_is_not_reported() -> None:
    found = reconciled(titled("aborted in mid-prefill").events()).to_reported.differences

    assert Figures(computed=-300) == found["not_reported"].figures


@pytest.mark.parametrize(("title", "early"), [("chunked prefill", False), ("aborted in mid-prefill", True)])
def test_who_ends_with_the_first_output_has_had_one(title: str, early: bool) -> None:
    ledger = Ledger(keep_closed=True)
    for event in titled(title).events():
        ledger.apply(msgspec.structs.replace(event, at=7))

    assert [early] == [ended_early(account) for account in ledger.accounts()]


def test_an_open_account_is_not_settled() -> None:
    stream = titled("chunked prefill").events()[:-4]

    assert {"unsettled": 200} == {
        cause: difference.figures.total
        for cause, difference in reconciled(stream).to_plan.differences.items()
    }
