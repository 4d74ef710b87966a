"""The accounts of an engine in this process, asked for by name."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

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
