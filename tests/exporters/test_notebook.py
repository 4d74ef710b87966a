"""Journals in a notebook: the answers of the commands, displayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.audit.analysis.test_blocks import A, B, Recording
from tests.exporters.labels import labelled

import kvledger
from kvledger.audit.analysis.whatif import Options
from kvledger.audit.errors import LedgerError
from kvledger.exporters.notebook import Answer
from kvledger.exporters.reports.block_use import block_use, prefixes
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.whatif import study
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

    assert 3 == len(audit.frames("requests"))
    assert {"requests", "steps"} == audit.frames("requests", "steps").keys()
    assert {"requests", "lives", "steps"} <= audit.frames().keys()
    with pytest.raises(LedgerError, match="'nobody' is no table"):
        audit.frames("nobody")


def test_a_window_holds_for_every_answer(trace: Path) -> None:
    pytest.importorskip("pandas")
    audit = kvledger.Audit(trace, until="2001-01-01")

    assert 0 == audit.data.requests == audit.summary().data[-1].requests == audit.why().data.requests
    assert 0 == len(audit.frames("requests"))


def test_a_path_without_a_journal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="There is no"):
        kvledger.Audit(tmp_path / "none").why()
    with pytest.raises(LedgerError, match="at least one path"):
        kvledger.Audit()


def test_a_notebook_displays_each_answer_once(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Jupyter, a console of rich displays what it prints; the notebook displays the answer."""
    displayed: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *printed: displayed.append(printed))
    audit = kvledger.Audit(trace)
    for answer in (audit, audit.summary()):
        assert "request" in answer._repr_html_()
        assert "level tokens" in repr(answer) or "request" in repr(answer)

    assert [] == displayed


def test_an_account_is_shown_by_any_id(trace: Path) -> None:
    audit = kvledger.Audit(trace)
    request = str(audit.frames("requests")["request_id"][0])

    assert request == audit.show(request).data.account.request_id
    assert request in repr(audit.show(request, every=True))
    with pytest.raises(LedgerError, match="is called 'nobody'"):
        audit.show("nobody")


def test_usage_is_compared_with_a_log(trace: Path, tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    log.write_text('{"id": "nobody", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n')

    assert "1 call" in repr(kvledger.Audit(trace).usage(log))


def test_blocks_are_those_of_the_commands(tmp_path: Path) -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(1, B), (2, A)])
    folder = journals.write(tmp_path / "blocks", recording.events, level="blocks")
    audit = kvledger.Audit(folder)

    assert prefixes([folder]) == audit.prefixes().data
    assert block_use([folder]) == audit.blocks().data
    options = Options(blocks=[9])
    assert study([folder], options) == audit.whatif("9").data
    assert "blocks" in repr(audit.whatif("9"))
    with pytest.raises(LedgerError, match="reads whole journals"):
        kvledger.Audit(folder, since="1h").prefixes()


def test_a_recorded_audit_has_what_a_live_one_has(tmp_path: Path) -> None:
    violated = kvledger.Audit(journals.violated(tmp_path / "violated"))

    assert "violated" == violated.verdict and "violated at level tokens" in repr(violated)
    assert violated.violations and {"violation"} == {each.severity for each in violated.violations}
    assert sum(row.findings for row in violated.found) >= len(violated.violations + violated.drifts)
    assert (1, 200) == (violated.totals.requests, violated.totals.prompt_tokens)
    request = violated.violations[0].request
    assert request is not None and request == violated.account(request).request_id
    assert "tokens" in violated.coverage.words


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(kvledger.__all__) == dir(kvledger)
    for name in kvledger.__all__:
        assert getattr(kvledger, name)
    with pytest.raises(AttributeError, match="no attribute 'Error'"):
        kvledger.Error  # type: ignore[attr-defined]  # noqa: B018
