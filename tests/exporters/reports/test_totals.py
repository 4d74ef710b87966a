"""One law: a total is exact, and a list that is cut says so. More findings than any cap, in every output."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.command_line import exit_code
from tests.exporters.reports.printed import lines, text
from tests.histories import events

from kvledger.audit.checks.auditor import FINDINGS_KEPT
from kvledger.audit.events import Event, Reported, RequestAdded, RequestLabels, Stepped
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.windows import window
from kvledger.exporters.metrics import values
from kvledger.exporters.reports import audit, page, query
from kvledger.exporters.reports.audit import AuditReport, report
from kvledger.exporters.reports.diff import compare
from kvledger.exporters.reports.tail import LiveTail, line
from kvledger.exporters.sidecar import pages

REQUESTS = 1_230
ID = "tokens/negative"
TOTAL = f"{2 * REQUESTS:,} violations"
CAPS = (
    FINDINGS_KEPT,
    pages.FINDINGS_SHOWN,
    audit.SHOWN_FINDINGS,
    page.SHOWN_FINDINGS,
)


def wrong(requests: int) -> list[Event]:
    """Each request breaks two invariants."""
    stream: list[Event] = []
    for number in range(requests):
        one = events(200, journals.CLEAN, request=number)
        one = journals.reported(one, local=-128, external=160, computed=168)
        step = next(place for place, event in enumerate(one) if isinstance(event, Stepped))
        one[step] = replace(one[step], dropped=[number - 1] if number else [])
        stream += [replace(event, request=number) if isinstance(event, Reported) else event for event in one]
    return stream


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert max(CAPS) < REQUESTS
    return journals.write(tmp_path_factory.mktemp("totals") / "engine", wrong(REQUESTS))


@pytest.fixture(scope="module")
def audited(journal: Path) -> AuditReport:
    return report(audit_paths([journal]))


def test_the_audit_counts_every_finding(audited: AuditReport):
    assert {REQUESTS} == {row.findings for row in audited.found}
    assert {FINDINGS_KEPT} == {row.listed for row in audited.found}


@pytest.mark.parametrize("verbose", [False, True])
def test_the_text_has_the_total_and_says_that_the_list_is_cut(audited: AuditReport, verbose: bool):
    shown = text(audit.answer(audited, verbose=verbose))

    assert TOTAL in shown
    assert f"{ID}  in 1,230 requests" in shown
    assert "of 1,230 shown" in shown
    assert "1,000 requests" not in shown and "2,000 violations" not in shown


def test_the_json_has_the_total_beside_the_list(journal: Path, capsys: pytest.CaptureFixture[str]):
    exit_code("audit", journal, "--format", "json")
    data = json.loads(capsys.readouterr().out)

    assert {(ID, REQUESTS, FINDINGS_KEPT), ("tokens/set-once", REQUESTS, FINDINGS_KEPT)} == {
        (row["id"], row["findings"], row["listed"]) for row in data["found"]
    }
    assert f"1,000 of 1,230 shown of the findings of {ID}" in data["notes"]


def test_a_csv_that_is_cut_says_so_beside_the_table(journal: Path, capsys: pytest.CaptureFixture[str]):
    exit_code("audit", journal, "--format", "csv")
    out, err = capsys.readouterr()

    assert 1 + 2 * FINDINGS_KEPT == len(out.splitlines())
    assert f"1,000 of 1,230 shown of the findings of {ID}" in err


def test_annotations_have_the_total(audited: AuditReport):
    (row,) = [row for row in audit.github(audited).splitlines() if f"title={ID}" in row]
    assert "(1,230 findings)" in row


def test_the_page_has_the_total(journal: Path):
    shown = page.html(page.gather([journal]))

    assert "<strong>2,460</strong>violations" in shown
    assert "in 1,230 requests" in shown
    assert "5 of 1,230 shown" in shown


def test_the_comparison_of_two_runs_has_the_total(journal: Path):
    assert (REQUESTS, REQUESTS) == compare([journal], [journal]).findings[ID]


def test_the_sidecar_has_the_total_on_its_pages_and_in_its_metrics(journal: Path):
    audits = journals.followed_audits(journal)
    page = pages.findings(audits)

    assert pages.FINDINGS_SHOWN == len(page["findings"])
    assert 2 * REQUESTS == page["left_out"] + len(page["findings"])
    assert TOTAL in pages._row(audits[0])
    (of_id,) = [s.value for s in values.violations(audits) if s.labels[-2:] == (ID, "violation")]
    assert REQUESTS == of_id


def test_what_follows_a_journal_has_the_total(journal: Path):
    tail = LiveTail(journal)
    tail.poll()

    assert TOTAL in line(tail.now())


def test_the_total_of_a_window_is_never_less_than_it_says(journal: Path):
    """Which of the findings that are not listed are in a window is not known."""
    result = report(audit_paths([journal], window=window("2023-01-01", "2024-01-01")))

    assert all(row.at_least for row in result.found)
    assert "at least 2,000 violations" in text(audit.answer(result))


@pytest.mark.parametrize("outputs", [audit.answer, page.html, audit.github])
def test_what_stops_the_harm_follows_a_finding_about_blocks(tmp_path: Path, outputs: Any):
    data = page.gather([journals.violated(tmp_path / "one")])
    rows = [replace(row, id="blocks/isolation", stop_now="Reset it.") for row in data.report.violations]
    found = [replace(row, id="blocks/isolation") for row in data.report.found[:1]]
    changed = replace(data.report, violations=rows, found=found)
    shown = outputs(replace(data, report=changed) if outputs is page.html else changed)

    words = shown if isinstance(shown, str) else " ".join(text(shown).split())
    assert "What stops the harm now:" in words


def test_a_csv_of_findings_has_the_victims_by_tenant_session_and_time(tmp_path: Path):
    stream = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    (added,) = [event for event in stream if isinstance(event, RequestAdded)]
    labelled = replace(added, resumable=True, labels=RequestLabels(group="acme"))
    path = journals.write(tmp_path / "one", [labelled if each is added else each for each in stream])

    rows = list(csv.DictReader(lines(audit.answer(report(audit_paths([path])))).splitlines()))

    assert {("acme", "request-0", "2023-11-14 22:13:20.000 UTC")} == {
        (row["tenant"], row["session"], row["when"]) for row in rows
    }


def test_a_query_counts_the_victims_of_each_tenant_and_a_clean_trace_has_none(tmp_path: Path):
    for tenant, local in (("acme", -128), ("best", -64)):
        stream = journals.reported(events(200, journals.CLEAN), local=local, external=160, computed=168)
        labels = RequestLabels(group=tenant)
        write = [replace(each, labels=labels) if isinstance(each, RequestAdded) else each for each in stream]
        journals.write(tmp_path / "bad" / tenant, write)
    clean = journals.clean(tmp_path / "clean")
    victims = "select tenant, count(distinct request_id) as requests from findings group by all order by 1"

    found = lines(query.answer(query.ask([tmp_path / "bad"], victims)))
    assert ["tenant,requests", "acme,1", "best,1"] == found.splitlines()
    assert ["tenant,requests"] == lines(query.answer(query.ask([clean], victims))).splitlines()
