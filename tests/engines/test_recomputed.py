"""Blocks that are computed more than once: equal but for rounding, or a drift."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from collections.abc import Callable
from typing import Any

from tests.engines.test_contents import NAMES, NEVER_WRITTEN
from tests.scenarios import driving
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.prefix_runner import DriverWithPrefixes, attach_sketches

from kvledger.audit.engines.content.options import SKETCH
from kvledger.audit.entry.attach import LiveAudit


@pytest.fixture(autouse=True)
def prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "Driver", DriverWithPrefixes)
    monkeypatch.setenv(SKETCH, "1")


def audited(scenario: Callable[..., Any]) -> tuple[list[Any], Any]:
    """The findings about contents, and what the first engine computed again."""
    audits: list[LiveAudit] = []
    scenario(lambda scheduler: audits.append(attach_sketches(scheduler)))
    found = []
    for audit in audits:
        audit.detach()
        found += [each for each in (*audit.violations, *audit.drifts) if each.id.startswith("content/")]
    return found, audits[0].ledger.sums.recomputed if audits else None


UNSEALED = {
    f"load_failure_after_a_preemption_{mode}": [("content/unsealed-hit", "r", 80)]
    for mode in ("sync", "async")
} | {name: [("content/unsealed-hit", victim, 16)] for name, victim in NEVER_WRITTEN.items()}
"""The scheduler ignores a failed load or withdraws a step, and a request hits blocks that nothing filled."""


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_has_no_blocks_that_were_computed_differently(name: str) -> None:
    found, recomputed = audited(SCENARIOS[name])
    assert UNSEALED.get(name, []) == [(each.id, each.request, each.tokens) for each in found]
    if name == "crowd_async_speculative":
        assert recomputed.compared > 50
