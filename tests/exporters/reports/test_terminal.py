"""What a person reads: tables that fit, names that are no markup, folds that lose nothing."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.events import RequestAdded
from kvledger.audit.replay.journals import audit_paths, statement
from kvledger.exporters.reports import terminal
from kvledger.exporters.reports.audit import FindingData, report
from kvledger.exporters.reports.statement import statement as drawn


def text(part: RenderableType, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


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


def test_every_difference_stands_between_its_rows(tmp_path: Path) -> None:
    shown = text(terminal.audit(report(audit_paths([journals.violated(tmp_path / "one")]))))

    assert (
        """\
tokens                                     local  external  computed  unattained  total  requests
Ledger, settled                                0       104        96           0    200         1
  preempted in prefill, resumed with hits              -72       +72                            1
Plan, at first admission                       0        32       168           0    200         1
  reported from two admissions              -128      +128                                      1
Reported by the engine                      -128       160       168           0    200         1"""
        in shown
    )
    assert "violated: 1 request, " in shown


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_cut_off(tmp_path: Path, width: int) -> None:
    """At any width every figure is there whole, and no line is longer."""
    for number, row in enumerate(GOLDEN):
        journals.write(tmp_path / f"engine-{number}", row.events())
    found = report(audit_paths([tmp_path]))
    shown = text(terminal.audit(found), width)

    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for tokens in (found.totals.computed, found.plan.external, found.work.scheduled):
        assert f"{tokens:,}" in shown


def test_the_work_table_adds_up(tmp_path: Path) -> None:
    row = journals.titled("speculative: 3 drafts, 1 accepted")
    found = report(audit_paths([journals.write(tmp_path / "one", row.events())]))
    shown = text(terminal.work(found.work))

    assert "rejected drafts                2" in shown
    assert "sum                           58" in shown
    assert "not the sum" not in shown


def test_the_statement_reads_like_a_bank_statement(tmp_path: Path) -> None:
    row = journals.titled("LMCache#1969")
    found = statement([journals.write(tmp_path / "one", row.events())], "request-0")

    shown = text(drawn(found))

    assert (
        """\
entry  seconds  step  life  text                                         debit  credit  balance
    4    0.000     1     1  admitted, no local hit                                            0
    5    0.000     1     1  scheduled                                               34       34
    6    0.000     1     1  prompt settled: 34 computed                                      34
    7    0.000     2     1  scheduled, 14 times to step 15                          14       48
   35    0.000    16     1  discarded: preempted, no free blocks            48                0

   38    0.000    16     2  local hit (repeat hit: 16)                              16       16
   38    0.000    16     2  external tokens promised                                18       34
   39    0.000    16     2  loaded 18 external tokens (repeat load: 18)                      34
   40    0.000    16     2  scheduled                                               15       49
   42    0.000    16     2  discarded: request ended                        49                0"""
        in shown
    )
    assert "63 tokens scheduled = 34 first prompt + 15 first output + 14 rework" in shown


def test_every_entry_on_demand(tmp_path: Path) -> None:
    row = journals.titled("LMCache#1969")
    found = statement([journals.write(tmp_path / "one", row.events())], "request-0")
    lines = text(drawn(found, every_entry=True)).splitlines()

    assert 16 == sum("  scheduled  " in line for line in lines)


def test_ids_are_no_markup(tmp_path: Path) -> None:
    """A request may be called anything by a client."""
    stream = [RequestAdded(1, 0, "[bold]x[/red]", 5)]
    folder = journals.write(tmp_path / "[red]", stream)

    assert "[bold]x[/red]" in text(drawn(statement([folder], "[bold]")))
    assert "[red]" in text(terminal.audit(report(audit_paths([folder]))))


def test_findings_are_told_by_invariant() -> None:
    group = terminal.findings([finding("a"), finding("b", id="tokens/balance"), finding("c", repeats=2)])
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
    group = terminal.findings([finding(str(n)) for n in range(1_500)], most=3)
    assert group is not None
    shown = text(group)

    assert "and 1,497 more, in the JSON" in shown
    assert 6 == len(shown.splitlines())


def test_no_findings_no_block() -> None:
    assert terminal.findings([]) is None


def test_an_unknown_account_says_so(tmp_path: Path) -> None:
    stream = [event for event in events(10, "A0+0 s10 o+ F") if not isinstance(event, RequestAdded)]
    found = statement([journals.write(tmp_path / "one", stream)], "#0")

    assert "Unknown: its arrival was not seen." in text(drawn(found))


@pytest.mark.parametrize("width", ["20", "60", "80"])
def test_figures_are_whole_however_narrow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    found = report(audit_paths([journals.violated(tmp_path / "one")]))
    monkeypatch.setenv("COLUMNS", width)

    terminal.show(terminal.audit(found))

    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert " ".join(out.split()).startswith("vllm 0.32.0 pid 4000")
    for column in ("unattained", "requests", "share"):
        assert column in out
