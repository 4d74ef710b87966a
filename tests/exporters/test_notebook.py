"""Journals in a notebook: the answers of the commands, displayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.exporters.labels import labelled

import kvledger
from kvledger.audit.errors import LedgerError
from kvledger.exporters.notebook import Answer
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return labelled(tmp_path / "trace")


def test_answers_are_those_of_the_commands(trace: Path) -> None:
    audit = kvledger.Audit(trace)

    assert "clean" == audit.verdict
    rows = summarize([trace], "lora", with_costs=True)
    assert [row.requests for row in rows] == [row.requests for row in audit.summary("lora").data]
    assert why([trace]).causes == audit.why().data.causes
    assert why([trace], by="group").groups == audit.why(by="group").data.groups


def test_a_notebook_displays_every_answer(trace: Path) -> None:
    audit = kvledger.Audit(str(trace))

    assert "clean" in audit._repr_html_() and "clean" in repr(audit)
    for answer in (audit.summary(), audit.why("lora")):
        assert isinstance(answer, Answer)
        assert answer._repr_html_().startswith("<pre") and "request" in repr(answer)
    assert "<iframe srcdoc=" in audit.report()._repr_html_()


def test_names_in_an_answer_are_no_html(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "<b>", [], configuration={"model": "<script>"})

    assert "<script>" not in kvledger.Audit(path).summary("model")._repr_html_()
    assert "<script>" not in kvledger.Audit(path)._repr_html_()


def test_the_report_is_written_to_a_file(trace: Path, tmp_path: Path) -> None:
    page = kvledger.Audit(trace).report(tmp_path / "page.html", by="lora")

    assert page.html == (tmp_path / "page.html").read_text()
    assert "Requests by lora" in page.html


def test_frames_are_the_tables(trace: Path) -> None:
    pytest.importorskip("pandas")
    audit = kvledger.Audit(trace)

    assert [3] == [len(frame) for frame in audit.frames("requests").values()]
    assert {"requests", "lives", "steps"} <= audit.frames().keys()
    with pytest.raises(LedgerError, match="'nobody' is no table"):
        audit.frames("nobody")


def test_a_window_holds_for_every_answer(trace: Path) -> None:
    pytest.importorskip("pandas")
    audit = kvledger.Audit(trace, until="2001-01-01")

    assert 0 == audit.data.requests == audit.summary().data[-1].requests == audit.why().data.requests
    assert 0 == len(audit.frames("requests")["requests"])


def test_a_path_without_a_journal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no"):
        kvledger.Audit(tmp_path / "none").why()
    with pytest.raises(LedgerError, match="at least one path"):
        kvledger.Audit()
