"""Checkpoints within a real scheduler's journal, for every scenario of the corpus."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.audit.replay.test_serialize import assert_restored_audit_continues
from tests.engines.conftest import Recorded
from tests.scenarios.corpus import SCENARIOS


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "crowd" in name or "allocation" in name])
def test_a_journal_at_level_blocks_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name, "blocks")
    for cut in range(0, len(events) + 1, max(1, len(events) // 8)):
        assert_restored_audit_continues(events, cut)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_real_schedulers_journal_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name)
    for cut in range(0, len(events) + 1, max(1, len(events) // 8)):
        assert_restored_audit_continues(events, cut)
