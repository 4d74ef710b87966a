"""Findings that no test of the scheduler can show."""

from __future__ import annotations

import pytest

from kvledger.audit.checks.registry import catalogue
from kvledger.audit.repro.assertions import refusal


@pytest.mark.parametrize("finding", [each for each in catalogue() if each.startswith("weights/")])
def test_a_finding_about_weights_is_refused_and_names_what_shows_it(finding: str):
    sentence = refusal(finding)
    assert sentence.startswith(f"{finding} depends on the weights")
    assert "kvledger show JOURNAL REQUEST" in sentence
