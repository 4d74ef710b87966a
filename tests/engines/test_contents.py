"""Every scenario with KV caches that are written: every hit is verified, and there is no false alarm."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from typing import Any

from tests.scenarios import driving
from tests.scenarios.content_faults import FAULTS, outcome
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.kv_runner import DriverWithCaches, attach_content

from kvledger.audit.entry.attach import LiveAudit

FAST = (
    "crowd_async_external",
    "crowd_async_speculative",
    "double_allocation_three_groups",
    "load_failure_async_partial_async",
    "load_failure_sync_sync",
    "replayed_window_async",
    "session_async_speculative",
)
"""Scenarios that the fast suite runs; the others take half a minute."""

NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.fuzz) for name in SCENARIOS]


def test_the_fast_scenarios_exist() -> None:
    assert set(FAST) <= set(SCENARIOS)


def test_a_worker_says_how_the_caches_of_each_group_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[LiveAudit] = []
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)
    SCENARIOS["double_allocation_three_groups"](lambda each: audits.append(attach_content(each)))

    watched = audits[0]._observer.content.watch.began()
    assert ["kernel blocks of 16 tokens, float32"] * 3 == [
        layout.removeprefix("layout LBHNC, ") for layout in watched.layouts
    ]


UNCHECKED = {
    "withdrawn_state_": "drafts write its states in several blocks",
    "encoder_decoder": "its blocks are of kind CrossAttentionSpec",
}
"""Why level ``content`` does not check a group, by how the names of the scenarios begin."""

NEVER_WRITTEN = {
    "withdrawn_step_sync": "low",
    "withdrawn_step_async": "low",
    "withdrawn_step_then_abort_sync": "retry",
    "withdrawn_step_then_abort_async": "retry",
}
"""Scenarios in which the engine itself lets a request hit a block that no step wrote.

In ``withdrawn_state_sync`` rejected drafts fill the block, which a worker can't tell from KV.
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_has_no_finding_about_contents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[LiveAudit] = []
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)

    SCENARIOS[name](lambda scheduler: audits.append(attach_content(scheduler)))

    for audit in audits:
        audit.detach()
        found: list[Any] = [(v.id, v.request) for v in audit.violations if v.id.startswith("content/")]
        victim = NEVER_WRITTEN.get(name)
        assert ([("content/unsealed-hit", victim)] if victim else []) == found
        why = next((why for beginning, why in UNCHECKED.items() if name.startswith(beginning)), "")
        excluded = [f"Group 1 is not checked: {why}."] if why else []
        assert excluded == audit.ledger.contents.excluded


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_that_this_release_has_is_found_and_its_near_miss_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scripts/content_grid.py`` runs them on other releases."""
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)
    found = {id for id, _ in outcome(FAULTS[name])["findings"]}
    assert ({"content/unsealed-hit"} if name == "failed-load-stays-cached" else set()) == found
