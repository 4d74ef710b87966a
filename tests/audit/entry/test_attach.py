"""The accounts of an engine in this process, asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

import kvledger
from kvledger.audit.entry.attach import LiveAudit, attach
from kvledger.audit.errors import LedgerError


def test_an_account_is_found_by_its_clients_id() -> None:
    """vLLM runs a client's 1 as 1-4e5f6a7b; the rule is that of ``kvledger show``."""
    driver = start()
    with attach(driver.scheduler) as audit:
        driver.add("10-0a1b2c3d", 50, 2)
        driver.add("1-4e5f6a7b", 50, 2)
        driver.run()

    assert "1-4e5f6a7b" == audit.account("1").request_id == audit.account("1-4e5f6a7b").request_id
    assert "10-0a1b2c3d" == audit.account("10-0").request_id
    with pytest.raises(LedgerError, match=r"this audit is called '2'; there are 10-0a1b2c3d, 1-4e5f6a7b"):
        audit.account("2")


def test_an_attached_engine_answers_what_the_commands_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    with kvledger.attach(driver.scheduler) as audit:
        driver.add("one", 50, 2)
        driver.add("two", 50, 2, shares=("one", 50))
        driver.step()
        running = audit.summary().data[-1]
        driver.run()

    assert (2, 0) == (running.requests, running.unknown)
    ended = audit.summary().data[-1]
    assert audit.totals.prompt_tokens == ended.prompt_tokens == audit.why().data.prompt_tokens
    assert "clean" in audit._repr_html_()
    assert "<html" in audit.report(tmp_path / "page.html").html
    audit.save(tmp_path / "trace")
    assert ended == kvledger.Audit(tmp_path / "trace").summary().data[-1]
    with pytest.raises(LedgerError, match="can't be written"):
        audit.save(tmp_path / "trace")


def test_reports_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()
    with attach(driver.scheduler) as audit:
        monkeypatch.setattr(LiveAudit, "open_journal", None)
        with pytest.raises(LedgerError, match=r"kvledger\.attach"):
            audit.why()
