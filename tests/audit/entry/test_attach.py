"""The accounts of an engine in this process, asked for by name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

import kvledger
from kvledger.audit.entry.attach import attach
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


def test_an_attached_engine_answers_what_the_commands_answer(tmp_path: Path) -> None:
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
    assert tmp_path / "trace" == audit.save(tmp_path / "trace")
    assert ended == kvledger.Audit(tmp_path / "trace").summary().data[-1]
    with pytest.raises(LedgerError, match="can't be written"):
        audit.save(tmp_path / "trace")


def test_several_threads_read_an_audit_while_the_engine_runs() -> None:
    driver = start()
    failed: list[BaseException] = []
    with attach(driver.scheduler) as audit:
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    assert "clean" == audit.verdict
                    assert audit.totals.requests <= 40 and "clean" in repr(audit)
            except BaseException as error:
                failed.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for number in range(40):
            driver.add(f"{number}-4e5f6a7b", 50, 4)
            driver.run()
        done.set()
        for reader in readers:
            reader.join()

    assert [] == failed
    assert 40 == audit.totals.requests
