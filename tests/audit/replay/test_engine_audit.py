"""Replayed journals: totals, verdicts, kept accounts, and account statements of single requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Gap, Reported, RequestAdded
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.journals import audit_paths, statement, statements


def test_a_clean_journal_has_no_findings_and_settled_totals(tmp_path: Path) -> None:
    audit = audit_paths([journals.clean(tmp_path / "one")])

    assert "clean" == audit.verdict
    assert [] == audit.violations
    assert [] == audit.notes
    totals = audit.totals
    settled = (totals.local, totals.external, totals.computed, totals.unattained)
    assert (0, 104, 96, 0) == settled


def test_several_journals_are_summed(tmp_path: Path) -> None:
    journals.golden(tmp_path)

    audit = audit_paths([tmp_path])

    assert len(GOLDEN) == len(audit.engines)
    assert sum(row.scheduled for row in GOLDEN) == audit.totals.scheduled
    assert sum(row.rework for row in GOLDEN) == sum(audit.totals.rework.values())


def test_the_verdict_is_the_worst_of_all_journals(tmp_path: Path) -> None:
    journals.clean(tmp_path / "a")
    journals.write(tmp_path / "b", [*events(10, "A0+0 s10 o+"), Gap(500, 3, "full")])
    assert "unknown" == audit_paths([tmp_path]).verdict

    journals.violated(tmp_path / "c")
    assert "violated" == audit_paths([tmp_path]).verdict


def test_notes_name_the_journal_where_there_are_several(tmp_path: Path) -> None:
    journals.clean(tmp_path / "a")
    journals.write(tmp_path / "b", events(10, "A0+0 s10 o+ F"), stopped=False)

    (note,) = audit_paths([tmp_path]).notes

    assert note.startswith("b: the engine did not end in good order")


def test_an_engine_audit_keeps_no_closed_account(tmp_path: Path) -> None:
    """The open accounts bound the memory."""
    (engine_audit,) = audit_paths([journals.clean(tmp_path / "one")]).engines

    assert {} == engine_audit.auditor.ledger.closed


def test_an_engine_audit_counts_ended_requests_by_verdict_and_outcome(tmp_path: Path) -> None:
    (good,) = audit_paths([journals.clean(tmp_path / "good")]).engines
    (bad,) = audit_paths([journals.violated(tmp_path / "bad")]).engines

    assert {("clean", "stopped"): 1} == good.journal.requests
    assert {("violated", "stopped"): 1} == bad.journal.requests


def test_a_violating_request_is_never_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a finding beyond the number of findings that are kept."""
    monkeypatch.setattr("kvledger.audit.checks.auditor.FINDINGS_KEPT", 1)
    wrong = [
        replace(event, request=request) if isinstance(event, Reported) else event
        for request in range(3)
        for event in journals.reported(
            events(200, journals.CLEAN, request=request), local=-128, external=160, computed=168
        )
    ]
    (engine_audit,) = audit_paths([journals.write(tmp_path / "bad", wrong)]).engines

    assert {("violated", "stopped"): 3} == engine_audit.journal.requests
    assert {} == engine_audit.auditor.found_in


def test_figures_of_closed_accounts_never_fall(tmp_path: Path) -> None:
    """Counters are made of these figures; the test compares them after each event of each golden history."""
    for row in GOLDEN:
        engine_audit = FollowedAudit(tmp_path)
        before = (0, 0, 0, 0, 0)
        for number, event in enumerate(row.events()):
            engine_audit.feed(number, event)
            closed = engine_audit.closed
            rework = sum(closed.rework.values())
            now = (closed.first_prompt, closed.first_output, rework, closed.rejected, closed.overrun)
            assert all(a <= b for a, b in zip(before, now, strict=True)), row.title
            before = now


def test_an_account_statement_has_every_entry(tmp_path: Path) -> None:
    account_statement = statement([journals.clean(tmp_path / "one")], "request-0")

    assert 200 == account_statement.account.prompt_tokens
    assert account_statement.lines[-1].text == "discarded: request ended"
    assert 0 == account_statement.lines[-1].balance == account_statement.account.computed
    balance = 0
    for line in account_statement.lines:
        balance += line.credit - line.debit
        assert balance == line.balance


def test_an_account_statement_has_the_findings_of_its_request(tmp_path: Path) -> None:
    account_statement = statement([journals.violated(tmp_path / "one")], "request-0")

    assert "tokens/negative" in [violation.id for violation in account_statement.findings]


def test_the_id_of_the_response_is_enough(tmp_path: Path) -> None:
    folder = journals.write(tmp_path / "one", [RequestAdded(1, 0, "chatcmpl-a-0a1b2c3d", 5)])

    for asked in ("chatcmpl-a", "a", "chatcmpl-a-0a"):
        assert "chatcmpl-a-0a1b2c3d" == statement([folder], asked).account.request_id


def test_an_unknown_request_id_suggests_close_ones(tmp_path: Path) -> None:
    folder = journals.clean(tmp_path / "one")

    with pytest.raises(LedgerError, match=r"No request of .* 'reqest-0'; there are request-0\."):
        statement([folder], "reqest-0")


def test_a_call_of_two_requests_is_no_single_statement(tmp_path: Path) -> None:
    two = [RequestAdded(1, 0, "0_chatcmpl-a-0a1b2c3d", 5), RequestAdded(2, 1, "1_chatcmpl-a-0a1b2c3d", 5)]
    folder = journals.write(tmp_path / "one", two)

    with pytest.raises(LedgerError, match=r"'a' names 2 requests: 0_chatcmpl-a-0a1b2c3d, 1_chat"):
        statement([folder], "a")
    assert 2 == len(statements([folder], "chatcmpl-a"))


def test_requests_of_a_trace_are_found_by_its_id(tmp_path: Path) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    context = f"00-{trace}-00f067aa0ba902b7-01"
    folder = journals.write(
        tmp_path / "one",
        [
            RequestAdded(1, 0, "a", 5, traceparent=context),
            RequestAdded(2, 1, "b", 5),
            RequestAdded(3, 2, "c", 5, traceparent=context),
        ],
    )

    assert ["a", "c"] == [each.account.request_id for each in statements([folder], trace)]
    assert ["a", "c"] == [each.account.request_id for each in statements([folder], context)]


def test_the_clients_request_id_is_preferred_to_a_beginning(tmp_path: Path) -> None:
    """vLLM appends a suffix to the client's id: of 10-abc and 1-def, the id 1 means the second."""
    two = [RequestAdded(1, 0, "10-0a1b2c3d", 5), RequestAdded(2, 1, "1-4e5f6a7b", 5)]
    folder = journals.write(tmp_path / "one", two)

    assert "1-4e5f6a7b" == statement([folder], "1").account.request_id


def test_engine_reported_counts_are_on_the_account_statement(tmp_path: Path) -> None:
    lines = statement([journals.violated(tmp_path / "one")], "request-0").lines

    (reported_line,) = (line for line in lines if line.text.startswith("reported"))
    assert ("reported: -128 local, 160 external, 168 computed", 0, 0) == (
        reported_line.text,
        reported_line.credit,
        reported_line.debit,
    )


def test_an_open_request_has_an_account_statement(tmp_path: Path) -> None:
    folder = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+"))

    assert -1 == statement([folder], "request-0").account.closed_at
