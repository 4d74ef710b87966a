"""A journal that is cut gives exactly the result of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests import simulated_trace as traces
from tests.simulated import Mix

from kvledger.audit.checks import findings
from kvledger.audit.events import Event, Reported
from kvledger.audit.journal.format import segments
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.replay import journals as split_journals
from kvledger.audit.replay import spans
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import Audit, _piece, _replay, audit_paths
from kvledger.audit.replay.observers import KeptAccounts, Lost, Reconciled, Steps
from kvledger.audit.replay.parallel import here
from kvledger.exporters.facts import dataset
from kvledger.exporters.reports import html_data
from kvledger.exporters.reports.audit_data import as_json, report
from kvledger.exporters.reports.costs import costs_of
from kvledger.exporters.reports.diff import compare
from kvledger.exporters.reports.html_page import html
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why

SEGMENT = 60_000
OBSERVERS = (Reconciled, Lost, Steps)
MIX = Mix(running=24, waiting=6, median_output=40)


def cut_trace(folder: Path, mix: Mix = MIX, requests: int = 4_000, segment: int = SEGMENT) -> Path:
    """A simulated engine's journal in many small segments."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "EVERYTHING", Limits(folder_bytes=1 << 40, segment_bytes=segment))
        traces.write_journal(folder, requests, 5, mix=mix)
    assert 6 < len(segments(folder))
    return folder


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_trace(tmp_path_factory.mktemp("trace") / "engine-0")


def whole(journal: Path) -> EngineAudit:
    return _replay(journal, observers=OBSERVERS)


def in_parts(journal: Path, parts: int) -> EngineAudit | None:
    cut = spans.spans(journal, parts, worth_bytes=0)
    assert parts == len(cut)
    return spans.joined([_piece(span, observers=OBSERVERS) for span in cut])


def as_report(audit: EngineAudit) -> str:
    return as_json(report(Audit([audit]), costs_of([audit])))


@pytest.mark.parametrize("parts", [2, 3])
def test_the_spans_of_a_journal_add_up_to_the_report_of_one_replay(journal: Path, parts: int) -> None:
    joined = in_parts(journal, parts)

    assert joined is not None
    assert as_report(whole(journal)) == as_report(joined)


@pytest.mark.parametrize("by", ["", "hour", "outcome", "^([a-z]+)"])
def test_a_summary_by_two_processes_is_that_of_one(
    journal: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "WORTH_BYTES", 0)
    one = summarize([journal], by, with_costs=True, run=here)
    monkeypatch.setattr(spans.Processes, "each", lambda _, work, items, sizes: map(work, items))

    assert one == summarize([journal], by, with_costs=True, run=spans.Processes(2))


@pytest.mark.parametrize("by", ["", "outcome"])
def test_why_and_diff_by_two_processes_are_those_of_one(
    journal: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "WORTH_BYTES", 0)
    one = why([journal], by=by), compare([journal], [journal], by=by)
    monkeypatch.setattr(spans.Processes, "each", lambda _, work, items, sizes: map(work, items))
    for module, name in ((dataset, "replayed"), (split_journals, "_replay")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("read by one process"))

    two = spans.Processes(2)
    assert one == (why([journal], by=by, run=two), compare([journal], [journal], by=by, run=two))


@pytest.mark.parametrize(("parts", "by"), [(2, "outcome"), (3, "")])
def test_a_page_by_several_processes_is_that_of_one(
    journal: Path, parts: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "WORTH_BYTES", 0)
    one = html_data.gather([journal], by=by)
    monkeypatch.setattr(spans.Processes, "each", lambda _, work, items, sizes: map(work, items))
    monkeypatch.setattr(dataset, "replayed", lambda *_, **__: pytest.fail("read by one process"))

    several = html_data.gather([journal], by=by, run=spans.Processes(parts))

    assert one.preempted and one.series.counts and one.series.levels
    assert one == several
    assert html(one) == html(several)


def test_an_audit_that_checks_nothing_has_the_totals_and_costs_of_a_full_one_and_judges_nothing(
    journal: Path,
) -> None:
    full = whole(journal)
    fast = EngineAudit(journal, [Lost], invariants=())
    with Reader(journal) as reader:
        fast.read(reader)

    assert full.totals() == fast.totals()
    assert full.of(Lost).sums == fast.of(Lost).sums
    assert full.violations
    assert not fast.violations


def test_an_audit_that_times_no_steps_has_the_same_lost_tokens_and_no_engine_time(journal: Path) -> None:
    timed = whole(journal)
    (untimed,) = audit_paths([journal], (Lost,)).engines

    assert timed.of(Lost).sums == untimed.of(Lost).sums
    assert timed.violations == untimed.violations
    assert untimed.observer(Steps) is None
    assert 0 < timed.of(Steps).sums.busy_us


def test_each_request_belongs_to_one_span(journal: Path) -> None:
    def ids(span: spans.Span) -> list[str]:
        audit = EngineAudit(span.path, (KeptAccounts,))
        return [one.request_id for some in spans.SpanAudit(audit, span).accounts() for one in some]

    found = [name for span in spans.spans(journal, 3, worth_bytes=0) for name in ids(span)]

    assert 4_000 == len(found) == len(set(found))


def test_another_state_at_the_hand_over_is_noticed(journal: Path) -> None:
    first, second = (_piece(span, observers=OBSERVERS) for span in spans.spans(journal, 2, worth_bytes=0))

    assert spans.joined([first, spans.Piece(second.audit, b"other", second.end)]) is None
    assert spans.joined([spans.Piece(first.audit, first.begin, b""), second]) is None


def test_without_a_hand_over_the_journal_is_not_joined(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "SETTLED_EVENTS", 1 << 40)

    assert in_parts(journal, 2) is None


def test_findings_are_those_of_one_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Violations in every span, one of an invariant that keeps only the first few."""
    reports = 0

    def write(writer: JournalWriter, stream: Sequence[Event]) -> None:
        nonlocal reports
        changed: list[Event] = []
        for event in stream:
            reports += isinstance(event, Reported)
            wrong = isinstance(event, Reported) and not reports % 50
            changed.append(replace(event, local_tokens=event.local_tokens - 7) if wrong else event)
        real_write(writer, changed)

    real_write = JournalWriter.write
    monkeypatch.setattr(JournalWriter, "write", write)
    monkeypatch.setattr(findings, "FINDINGS_KEPT", 30)
    journal = cut_trace(tmp_path / "engine-0")

    one, joined = whole(journal), in_parts(journal, 3)

    assert joined is not None
    assert "violated" == one.verdict and any(row.is_cut for row in one.found)
    assert one.found == joined.found
    assert one.sums == joined.sums
    assert as_report(one) == as_report(joined)
    monkeypatch.setattr(spans, "WORTH_BYTES", 0)
    monkeypatch.setattr(spans.Processes, "each", lambda _, work, items, sizes: map(work, items))
    for table in ("requests", "causes", "chunks", "differences", "findings"):
        asked = f"select * from {table} order by all"
        rows = ask([journal], asked, run=here)
        assert rows.rows and rows == ask([journal], asked, run=spans.Processes(3))
    assert [words for words in rows.notes if "30 of" in words]


def test_small_journals_those_of_blocks_and_those_with_workers_are_not_cut(
    journal: Path, tmp_path: Path
) -> None:
    assert 1 == len(spans.spans(journal, 2))
    blocks = journals.write(tmp_path / "engine-1", [], level="blocks")
    assert 1 == len(spans.spans(blocks, 2, worth_bytes=0))
    cuttable = partial(spans.spans, journal, 2, worth_bytes=0)
    assert 2 == len(cuttable())
    (journal.parent / "worker-1").mkdir()
    assert 1 == len(cuttable())
