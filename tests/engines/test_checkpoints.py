"""A checkpoint at any event of a real scheduler's journal, every scenario of the corpus."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.audit.replay.test_serialize import assert_carries_on
from tests.engines.conftest import Recorded
from tests.scenarios.corpus import SCENARIOS


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "crowd" in name or "allocation" in name])
def test_a_journal_of_blocks_carries_on(name: str, recorded: Recorded) -> None:
    events = recorded(name, "blocks")
    for cut in range(0, len(events) + 1, max(1, len(events) // 8)):
        assert_carries_on(events, cut)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_real_schedulers_journal_carries_on(name: str, recorded: Recorded) -> None:
    events = recorded(name)
    for cut in range(0, len(events) + 1, max(1, len(events) // 8)):
        assert_carries_on(events, cut)
