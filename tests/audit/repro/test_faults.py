"""The known faults: each is found by what a journal knows, and in its releases only."""

from __future__ import annotations

import pytest

from kvledger.audit.checks.registry import catalogue
from kvledger.audit.repro.faults import FAULTS, Fault, known, parsed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_known_in_its_releases_only(fault: Fault) -> None:
    for finding in fault.ids:
        assert finding in catalogue()
        assert known(finding, fault.first, fault.needs) is fault
        if fault.fixed and "lmcache" not in fault.needs:
            assert known(finding, fault.fixed, fault.needs) is not fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_described_in_whole_sentences(fault: Fault) -> None:
    assert fault.says.endswith(".")
    assert not fault.title.endswith(".")
    assert not fault.fixed or parsed(fault.last) < parsed(fault.fixed)


def test_a_finding_that_no_fault_explains_is_not_known() -> None:
    assert known("tokens/in-flight", "0.32.0", {"connector"}) is None
    assert known("blocks/leak", "0.32.0", {"async", "failed load"}) is None
