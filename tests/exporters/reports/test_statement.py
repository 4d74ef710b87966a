"""The text of an account statement: the answer first, entries folded without losing figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.exporters.reports.printed import text
from tests.exporters.sidecar.test_paired_engines import journal
from tests.histories import events

from kvledger.audit.events import RequestAdded
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import RequestStatement, statement
from kvledger.audit.replay.observers import KeptAccounts
from kvledger.exporters.reports.statement import answer


def test_a_statement_starts_with_sources_and_findings(tmp_path: Path) -> None:
    account = statement([journals.violated(tmp_path / "one")], "request-0")

    head, findings, times, *_ = text(answer(account), width=200).splitlines()

    assert "Account of request-0: 200 prompt tokens: 104 external, 96 computed." == head
    assert findings.startswith("Findings: tokens/negative, tokens/")
    assert times.startswith("Opened 2023-11-14 22:13:20.000 UTC on vllm 0.32.0 pid 4000, closed ")
    assert times.endswith("2 lives, 1 preemption.")


def test_entries_of_one_day_have_the_time_in_utc_and_the_date_stands_above(tmp_path: Path) -> None:
    folder = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ F"), wall_seconds=1_767_225_600.25)

    shown = text(answer(statement([folder], "request-0")))

    assert "Times are of 2026-01-01." in " ".join(shown.split())
    assert 1 <= sum(" 00:00:00.250 " in line for line in shown.splitlines())
    assert "2026-01-01 00:00:00.250  " not in shown


def test_entries_of_several_days_have_the_date_each(tmp_path: Path) -> None:
    stream = [
        replace(event, at=number * 1_000_000) for number, event in enumerate(events(10, "A0+0 s10 o+ F"))
    ]
    folder = journals.write(tmp_path / "one", stream, wall_seconds=1_767_225_600 - 3.5)

    shown = text(answer(statement([folder], "request-0"), every_entry=True), width=200)

    assert "Times are of" not in shown
    assert " 2025-12-31 23:59:" in shown
    assert " 2026-01-01 00:00:00" in shown


def test_entries_have_seconds_where_no_engine_was_seen_to_start(tmp_path: Path) -> None:
    audit = EngineAudit(tmp_path, [KeptAccounts], watch=lambda _: True)
    for number, event in enumerate(events(10, "A0+0 s10 o+ F")):
        audit.feed(number, event)
    shown = text(answer(RequestStatement(audit, audit.of(KeptAccounts).sums[0])))

    assert "no.  seconds  step" in shown
    assert "UTC" not in shown


def test_a_request_id_is_not_read_as_markup(tmp_path: Path) -> None:
    """Clients choose request ids."""
    folder = journals.write(tmp_path / "one", [RequestAdded(1, 0, "[bold]x[/red]", 5)])

    assert "[bold]x[/red]" in text(answer(statement([folder], "[bold]x[/red]")))


def test_entries_are_printed_like_a_bank_statement(tmp_path: Path) -> None:
    row = journals.titled("LMCache#1969")
    account = statement([journals.write(tmp_path / "one", row.events())], "request-0")

    shown = text(answer(account))

    assert (
        """\
no.           UTC  step  life  text                                         debit  credit  balance
  4  22:13:20.000     1     1  admitted, no local hit                                            0
  5  22:13:20.000     1     1  scheduled                                               34       34
  6  22:13:20.000     1     1  prompt settled: 34 computed                                      34
  7  22:13:20.000     2     1  scheduled, 14 times to step 15                          14       48
 35  22:13:20.000    16     1  discarded: preempted, no free blocks            48                0

 38  22:13:20.000    16     2  local hit (repeat hit: 16)                              16       16
 38  22:13:20.000    16     2  external tokens promised                                18       34
 39  22:13:20.000    16     2  loaded 18 external tokens (repeat load: 18)                      34
 40  22:13:20.000    16     2  scheduled                                               15       49
 42  22:13:20.000    16     2  discarded: request ended                        49                0"""
        in shown
    )
    assert "63 tokens scheduled = 34 first prompt + 15 first output + 14 rework" in shown


def test_every_entry_is_printed_on_demand(tmp_path: Path) -> None:
    row = journals.titled("LMCache#1969")
    account = statement([journals.write(tmp_path / "one", row.events())], "request-0")
    lines = text(answer(account, every_entry=True)).splitlines()

    assert 16 == sum("  scheduled  " in line for line in lines)


def test_an_unknown_account_says_so(tmp_path: Path) -> None:
    stream = [event for event in events(10, "A0+0 s10 o+ F") if not isinstance(event, RequestAdded)]
    account = statement([journals.write(tmp_path / "one", stream)], "#0")

    assert "Unknown: its arrival was not observed." in text(answer(account))


def test_a_transfer_between_two_engines_has_its_time_by_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no journal records is unknown."""
    began = journals.STARTED.wall_seconds
    sides = (
        ("0.32.0", "A32+0 s68 o+ F", {"remote_decode": True, "request_id": "cmpl-one-0-0a1b2c3d"}),
        ("0.33.0", "A0+96a L s4 o+ s1 o+ F", {"transferred": True, "request_id": "cmpl-one-0-1a2b3c4d"}),
    )
    for number, (version, words, marks) in enumerate(sides):
        stream = [
            replace(each, **marks) if isinstance(each, RequestAdded) else each for each in events(100, words)
        ]
        folder, at = tmp_path / f"engine-{number}", began + number / 2
        journals.write(folder, stream, version=version, wall_seconds=at)

    assert 0 == exit_code("show", tmp_path, "cmpl-one")
    out = capsys.readouterr().out
    assert "Transfer of the KV to cmpl-one" in out
    told = [line for line in out.splitlines() if ": " in line and "  " in line.strip()]
    phases = {line.split(":")[0].strip(): line.rsplit("  ", 1)[1] for line in told}
    assert "0.500 s" == phases["registered"]
    assert {"notified": "unknown", "lease left": "unknown"}.items() <= phases.items()
    assert phases["transferred"].endswith("s")


def test_a_call_of_one_engine_has_no_transfer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sample in range(2):
        journal(tmp_path / f"engine-{sample}", "A32+0 s68 o+ F", request_id=f"{sample}_cmpl-one-0-0a1b2c3d")

    assert 0 == exit_code("show", tmp_path, "cmpl-one")
    assert "Transfer" not in capsys.readouterr().out
