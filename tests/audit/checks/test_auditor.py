"""The auditor: new and repeated findings, verdicts, and checks that raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.audit.checks.false_reports import (
    altered,
    audited,
    miscounted,
    report,
    started,
    violation_ids,
    with_after,
    with_report,
)
from tests.histories import GOLDEN, WOVEN, Golden, Woven, events, weave

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import CATALOGUE, Check, Invariant, Violation, Witness
from kvledger.audit.events import (
    Census,
    Delivered,
    EngineRaised,
    Event,
    Gap,
    HookFailed,
    LookedUp,
    Preempted,
    Reported,
    Snapshot,
    SnapshotRow,
)
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.ledger.ledger import OF_REQUESTS
from kvledger.audit.ledger.ledger_state import ERRORS_KEPT, OTHER_ERRORS

NEVER_LOADED = {"never_loaded", "not_planned"}
STALE = altered(events(100, "A64+0 s36 o+ F"), LookedUp, step=0)


# --- no false alarms -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_golden_histories_are_clean(row: Golden):
    """Except for histories whose promised tokens were never loaded: these have a violation."""
    auditor = audited(row.events())

    broken = NEVER_LOADED & set(row.voided or ())
    assert (["connector/promise-not-loaded"] if broken else []) == [
        violation.id for violation in auditor.violations
    ]
    assert ("violated" if broken else "clean") == auditor.verdict


@pytest.mark.parametrize("row", WOVEN, ids=lambda row: row.title)
def test_golden_histories_woven_together_are_clean(row: Woven):
    auditor = audited(row.events())

    assert ([], "clean") == (auditor.violations, auditor.verdict)


# --- findings ------------------------------------------------------------------------------------


def test_a_finding_names_engine_request_life_and_step():
    (violation,) = audited(STALE).violations

    assert (
        "tokens/stale-lookup",
        "violation",
        "vllm 0.32.0 pid 123",
        "request-0",
        1,
        1,
        ["vLLM#18955", "vLLM#18957"],
    ) == (
        violation.id,
        violation.severity,
        violation.engine,
        violation.request,
        violation.life,
        violation.step,
        [reference.name for reference in violation.references],
    )


def test_a_repeat_is_counted_and_not_returned():
    stream = miscounted(events(50, "A0+0 s10 o s20 o s20 o+ F"), 0, +5)
    stream = miscounted(stream, 1, +5)
    auditor = Auditor(debug=True)

    returned = auditor.feed_all([started(), *stream])

    assert [("tokens/balance", 0, 1)] == [(v.id, v.repeats, v.last_step) for v in returned]
    assert [("tokens/balance", 1, 2)] == [(v.id, v.repeats, v.last_step) for v in auditor.violations]


def test_each_request_has_its_own_finding():
    stream = weave({0: 20, 1: 20}, "a.A0+0 b.A0+0 a.s20&b.s20 a.o+&b.o+ a.P b.P a.F b.F")
    for nth in (0, 1):
        stream = altered(stream, Preempted, nth, held_blocks=1)

    assert ["request-0", "request-1"] == [v.request for v in audited(stream).violations]


@pytest.mark.parametrize("watched", [False, True])
def test_a_drift_is_kept_once_and_for_each_watched_request(
    monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    def drifting(entry: Entry) -> Iterator[Witness]:
        yield Witness({})

    row = Invariant("metrics/made-up", "drift", (LookedUp,), "", (), (), "", "", drifting, once=True)
    monkeypatch.setitem(CATALOGUE, row.id, row)
    auditor = Auditor(watch=lambda _: watched, debug=True)
    auditor.feed(started())
    for request in range(2):
        auditor.feed_all(events(100, "A0+0 s100 o+ F", request=request))

    assert (2 if watched else 1) == sum(one.id == row.id for one in auditor.violations)


def test_findings_are_kept_up_to_a_bound_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvledger.audit.checks.auditor.FINDINGS_KEPT", 2)
    auditor = Auditor(debug=True)
    auditor.feed(started())
    for request in range(5):
        stream = events(100, "A64+0 s36 o+ F", request=request)
        auditor.feed_all(altered(stream, LookedUp, step=0, local_tokens=0))

    assert (2, {"tokens/stale-lookup": 5}) == (len(auditor.violations), auditor.findings.found)


def test_one_request_may_break_several_invariants():
    stream = with_report(STALE, report(100, -28, 0))

    assert ["tokens/stale-lookup", "tokens/negative", "tokens/set-once"] == violation_ids(stream)


def test_a_finding_says_how_many_tokens_it_is_about():
    auditor = audited(with_report(STALE, report(100, -28, 0)))

    assert [None, 28, 92] == [violation.tokens for violation in auditor.violations]
    assert [None, 28, 92] == [row.tokens for row in auditor.totals]


def test_a_repeat_in_the_same_request_adds_no_tokens():
    stream = with_report(events(100, "A64+0 s36 o+ F"), report(100, -28, 0))
    twice = [each for event in stream for each in (event,) * (1 + isinstance(event, Reported))]

    (row,) = [row for row in audited(twice).totals if row.id == "tokens/negative"]
    assert (1, 28) == (row.findings, row.tokens)


def test_findings_have_the_name_given_to_the_engine():
    auditor = Auditor(engine="replica 7", debug=True)
    auditor.feed_all([started(), *STALE])

    assert ["replica 7"] == [violation.engine for violation in auditor.violations]


# --- verdicts ------------------------------------------------------------------------------------


def test_a_violation_makes_the_verdict_violated():
    assert "violated" == audited(STALE).verdict


def test_an_auditor_without_events_is_unknown():
    auditor = Auditor()

    assert ("unknown", ["no engine was seen to start"]) == (auditor.verdict, auditor.doubts)


@pytest.mark.parametrize(
    "loss", [Gap(10_000, 3, "buffer"), HookFailed(10_000, "schedule", "KeyError", False)]
)
def test_lost_events_make_the_verdict_unknown_without_a_violation(loss: Event):
    """Events after a loss prove no violation, whatever they contain."""
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, loss)
    stream = with_after(stream, type(loss), 0, Census(10_000, 1, [0, 5, 5, 5, 5], 0, 0, 0))
    auditor = audited(stream)

    assert ([], "unknown") == (auditor.violations, auditor.verdict)


@pytest.mark.parametrize("lost", [False, True])
def test_an_exception_of_the_engine_is_a_doubt(lost: bool):
    """Without `lost` the accounts go on; with it the open accounts are unknown."""
    stream = events(50, "A0+0 s50 o+ s1 o+ F")
    raised = EngineRaised(10_000, "schedule", "AssertionError", lost)
    auditor = audited(with_after(stream, Delivered, 0, raised))

    phrase = "the engine raised AssertionError in schedule"
    assert ["1 accounts are unknown", phrase][1 - lost :] == auditor.doubts
    assert "unknown" == auditor.verdict


def test_exceptions_of_too_many_kinds_are_counted_together():
    raised = [EngineRaised(0, "m" * 999, f"Error{number}", False) for number in range(99)]
    auditor = audited(raised)

    errors = auditor.ledger.sums.engine_errors
    assert ERRORS_KEPT + 1 == len(errors)
    assert 99 - ERRORS_KEPT == errors[OTHER_ERRORS]
    assert all(len(name) < 200 for name in errors)


def test_a_trace_that_begins_while_a_request_runs_is_unknown():
    row = SnapshotRow(0, "request-0", 100, False, 40, 0, 0, 100, 0)
    auditor = audited([Snapshot(0, 7, [row], 0)])

    assert ("unknown", ["1 accounts are unknown"]) == (auditor.verdict, auditor.doubts)


def test_a_violation_outweighs_a_doubt():
    assert "violated" == audited([*STALE, Gap(10_000, -1, "crash")]).verdict


# --- checks that raise ---------------------------------------------------------------------------


@pytest.fixture
def a_check_that_raises(monkeypatch: pytest.MonkeyPatch) -> str:
    """One more check, which raises."""

    def broken(entry: Entry) -> Iterator[Witness]:
        raise KeyError("oops")

    check: Check = broken
    row = Invariant("tokens/broken", "violation", (LookedUp,), "", (), (), "", "", check)
    monkeypatch.setitem(CATALOGUE, "tokens/broken", row)
    return row.id


def test_a_check_that_raises_is_counted_and_other_findings_remain(a_check_that_raises: str):
    auditor = Auditor(debug=False)
    findings: list[Violation] = auditor.feed_all([started(), *STALE])

    assert ["tokens/stale-lookup"] == [violation.id for violation in findings]
    assert {a_check_that_raises: 1} == auditor.findings.check_failures


def test_a_check_that_raises_leaves_no_clean_verdict(a_check_that_raises: str):
    auditor = Auditor(debug=False)
    auditor.feed_all([started(), *events(100, "A64+0 s36 o+ F")])

    assert ("unknown", ["checks failed: tokens/broken"]) == (auditor.verdict, auditor.doubts)


def test_an_event_that_cannot_be_posted_leaves_no_clean_verdict(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setitem(OF_REQUESTS, LookedUp, (fail,))
    auditor = Auditor(debug=False)

    auditor.feed_all([started(), *events(200, "A0+32 L s56 o s144 o+ F"), LookedUp(9, 0, 1, 0)])

    assert "unknown" == auditor.verdict
    assert ["checks failed: posting LookedUp"] == [doubt for doubt in auditor.doubts if "posting" in doubt]
    with pytest.raises(KeyError):
        Auditor(debug=True).feed(LookedUp(9, 0, 1, 0))


@pytest.mark.usefixtures("a_check_that_raises")
def test_a_check_that_raises_propagates_in_debug_mode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVLEDGER_DEBUG", "1")

    with pytest.raises(KeyError, match="oops"):
        Auditor().feed_all(STALE)
