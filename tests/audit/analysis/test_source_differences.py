"""Named differences lead from the settled figures to the planned split and to the engine's report."""

from __future__ import annotations

import msgspec
import pytest
from tests.histories import GOLDEN, Golden
from tests.journals import titled

from kvledger.audit.analysis.source_differences import Figures, Reconciliation, ended_early
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


def differences_to_plan(row: Golden) -> dict[str, Figures]:
    differences = reconciled(row.events()).to_plan
    return {cause: difference.figures for cause, difference in differences.items()}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_named_differences_explain_every_golden_history(row: Golden) -> None:
    """Settled figures plus named differences equal the planned split; no difference is unexplained."""
    reconciliation = reconciled(row.events())
    differences = reconciliation.to_plan

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
def test_a_difference_to_the_plan_has_a_named_cause(title: str, cause: str, figures: Figures) -> None:
    assert {cause: figures} == differences_to_plan(titled(title))


def test_a_request_that_ran_as_planned_has_no_difference() -> None:
    assert {} == differences_to_plan(titled("external, asynchronous, loaded"))


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ((0, 160, 40), "last_admission"),
        ((-128, 160, 168), "mixed_instants"),
        ((0, 160, 168), "mixed_instants"),
        ((1, 32, 167), "unexplained"),
    ],
)
def test_a_report_that_differs_from_the_plan_has_a_named_cause(
    report: tuple[int, int, int], cause: str
) -> None:
    """Releases report vLLM#36752 as the last admission, as a mix of two, or as a mix clamped at 0."""
    stream = titled("vLLM#36752").events()
    event = Reported(stream[-1].at, 0, 200, *report, report[0] + report[1])

    differences = reconciled([*stream[:-1], event, stream[-1]]).to_reported

    assert [cause] == list(differences)
    assert Figures(report[0], report[1] - 32, report[2] - 168) == differences[cause].figures


def test_an_aborted_prefill_is_a_not_reported_difference() -> None:
    differences = reconciled(titled("aborted in mid-prefill").events()).to_reported

    assert Figures(computed=-300) == differences["not_reported"].figures


@pytest.mark.parametrize(("title", "early"), [("chunked prefill", False), ("aborted in mid-prefill", True)])
def test_a_request_that_ends_with_its_first_output_did_not_end_early(title: str, early: bool) -> None:
    ledger = Ledger(keep_closed=True)
    for event in titled(title).events():
        ledger.apply(msgspec.structs.replace(event, at=7))

    assert [early] == [ended_early(account) for account in ledger.accounts()]


def test_tokens_of_an_open_account_are_unsettled() -> None:
    stream = titled("chunked prefill").events()[:-4]

    assert {"unsettled": 200} == {
        cause: difference.figures.total for cause, difference in reconciled(stream).to_plan.items()
    }
