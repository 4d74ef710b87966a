"""The text of an audit: the answer first, tables that fit, request ids that are not read as markup."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.reports.printed import text
from tests.histories import events

from kvledger.audit.checks.auditor import Found
from kvledger.audit.events import Gap, RequestAdded
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters import terminal
from kvledger.exporters.reports import audit
from kvledger.exporters.reports.audit import AuditReport, FindingData, report

EXAMINED = "at level tokens: counts, progress; not examined: block contents, ownership"


def finding(request: str, *, id: str = "tokens/negative", repeats: int = 0) -> FindingData:
    return FindingData(
        id=id,
        severity="violation",
        engine="e",
        request=request,
        life=1,
        step=7,
        at_seconds=0.1,
        message=f"wrong for {request}.",
        figures={},
        references=[],
        repeats=repeats,
        last_step=9,
    )


def test_a_finding_says_when_it_was_found_in_utc(tmp_path: Path) -> None:
    """journals.write starts its engine at Unix time 1,700,000,000."""
    row, *_ = report(audit_paths([journals.violated(tmp_path / "one")])).violations

    assert "2023-11-14 22:13:20.000 UTC" == row.when
    assert f"2023-11-14 22:13:20.000 UTC, step {row.step}: " in text(audit.findings([row]))
    assert "    step 7: wrong for a." in text(audit.findings([finding("a")]))


def test_every_difference_is_printed_between_its_two_rows(tmp_path: Path) -> None:
    shown = text(audit.answer(report(audit_paths([journals.violated(tmp_path / "one")]))))

    assert (
        """\
tokens                                     local  external  computed  unattained  total  requests
Ledger, settled                                0       104        96           0    200         1
  preempted in prefill, resumed with hits              -72       +72                            1
Planned, at first admission                    0        32       168           0    200         1
  reported from two admissions              -128      +128                                      1
Reported by the engine                      -128       160       168           0    200         1"""
        in shown
    )
    assert shown.startswith(f"violated {EXAMINED}\n1 request, ")


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_figure_is_cut_and_no_line_is_too_long(tmp_path: Path, width: int, verbose: bool) -> None:
    journals.golden(tmp_path)
    result = report(audit_paths([tmp_path]))
    shown = text(audit.answer(result, verbose=verbose), width)

    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for tokens in (result.totals.computed, result.plan.external, result.work.scheduled):
        assert f"{tokens:,}" in shown


# --- the first lines ------------------------------------------------------------------------------------


def test_a_clean_audit_starts_with_its_verdict_and_sources(tmp_path: Path) -> None:
    result = report(audit_paths([journals.clean(tmp_path / "one")]))

    assert [
        f"clean {EXAMINED}",
        "1 request, 0 violations, 1 preemption",
        "200 prompt tokens: 0 local (0.0 %), 104 external (52.0 %), 96 computed.",
        "97 scheduled tokens: 0 rework (0.0 %).",
        "Read 20 events in 1 journal of vllm 0.32.0.",
        "KVLEDGER_LEVEL=blocks examines ownership, KVLEDGER_LEVEL=content examines block contents.",
        "",
        "Where prompt tokens came from",
    ] == text(audit.answer(result)).splitlines()[:8]


def test_a_violated_audit_names_its_invariants_before_any_table(tmp_path: Path) -> None:
    result = report(audit_paths([journals.violated(tmp_path / "one")]))
    shown = text(audit.answer(result))

    assert shown.startswith(f"violated {EXAMINED}\n1 request, 2 violations, 1 preemption\n")
    assert shown.index("violation  tokens/negative") < shown.index("Where prompt tokens came from")


def with_drifts(result: AuditReport, drifts: int) -> AuditReport:
    id = "connector/failed-load-counted"
    rows = [replace(finding(str(number), id=id), severity="drift") for number in range(drifts)]
    found = [Found(id=id, severity="drift", findings=drifts, listed=drifts, tokens=1_240)]
    return replace(result, drift=drifts, violations=rows, found=found)


def test_a_clean_audit_with_drifts_says_so_and_explains_drifts(tmp_path: Path) -> None:
    result = report(audit_paths([journals.clean(tmp_path / "one")]))
    first, second, third, *_ = text(audit.answer(with_drifts(result, 11)), 140).splitlines()

    assert f"clean {EXAMINED}" == first
    assert "1 request, 0 violations, 11 drifts of 1 kind: 1,240 tokens, 1 preemption" == second
    assert third.startswith("A drift is a figure that the engine counts by a deliberate but misleading rule")


def test_an_unknown_audit_says_that_events_are_missing(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])
    first, second, third, *_ = text(audit.answer(report(audit_paths([path])))).splitlines()

    assert f"unknown {EXAMINED}" == first
    assert second.startswith("1 request, 0 violations, 1 request unknown")
    assert "Events are missing, so no figure below includes 1 request." == third


def test_rows_without_a_difference_and_empty_tables_are_not_printed(tmp_path: Path) -> None:
    stream = events(100, "A64+0 s36 o+ F")
    shown = text(audit.answer(report(audit_paths([journals.write(tmp_path / "one", stream)])), verbose=True))

    assert "no difference" not in shown
    assert "Indented rows" not in shown
    assert "What the connector promised" not in shown
    assert "rejected drafts" not in shown


def test_a_waterfall_says_how_to_read_its_indented_rows(tmp_path: Path) -> None:
    shown = text(audit.answer(report(audit_paths([journals.violated(tmp_path / "one")]))))

    assert "Indented rows lead from the line above to the line below." in " ".join(shown.split())


def test_verbose_adds_work_connector_and_journals(tmp_path: Path) -> None:
    result = report(audit_paths([journals.violated(tmp_path / "one")]))
    short, full = (text(audit.answer(result, verbose=verbose)) for verbose in (False, True))

    for heading in ("What the engine worked on", "What the connector promised", "Journals"):
        assert heading not in short
        assert heading in full


# --- tables and findings --------------------------------------------------------------------------------


def test_the_work_table_adds_up(tmp_path: Path) -> None:
    row = journals.titled("speculative: 3 drafts, 1 accepted")
    result = report(audit_paths([journals.write(tmp_path / "one", row.events())]))
    table = audit.work(result.work)
    assert table is not None
    shown = text(table)

    assert "rejected drafts          2" in shown
    assert "sum                     58" in shown
    assert "not the sum" not in shown


def test_a_path_is_not_read_as_markup(tmp_path: Path) -> None:
    folder = journals.write(tmp_path / "[red]", [RequestAdded(1, 0, "x", 5)])

    assert "[red]" in text(audit.answer(report(audit_paths([folder])), verbose=True))


def test_findings_are_grouped_by_invariant() -> None:
    group = audit.findings([finding("a"), finding("b", id="tokens/balance"), finding("c", repeats=2)])
    assert group is not None

    assert text(group).splitlines() == [
        "Findings",
        "  violation  tokens/negative  in 2 requests",
        "    step 7: wrong for a.",
        "    step 7: wrong for c. Seen 3 times, last at step 9.",
        "  violation  tokens/balance",
        "    step 7: wrong for b.",
    ]


def test_many_findings_of_one_invariant_are_cut() -> None:
    group = audit.findings([finding(str(n)) for n in range(1_500)], most=3)
    assert group is not None
    shown = text(group)

    assert "and 1,497 more, in the JSON" in shown
    assert 6 == len(shown.splitlines())


def test_no_findings_print_nothing() -> None:
    assert "" == text(audit.findings([]))


@pytest.mark.parametrize("width", ["20", "60", "80"])
def test_no_figure_is_cut_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    result = report(audit_paths([journals.violated(tmp_path / "one")]))
    monkeypatch.setenv("COLUMNS", width)

    terminal.show(terminal.rendered(audit.answer(result, verbose=True)))

    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert " ".join(out.split()).startswith(f"violated {EXAMINED} 1 request, ")
    for column in ("unattained", "requests", "share"):
        assert column in out
