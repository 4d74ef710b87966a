"""Checkpoints within a real scheduler's journal, for every scenario of the corpus."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.audit.replay.test_serialize import assert_continues
from tests.engines.conftest import Recorded
from tests.scenarios.corpus import SCENARIOS


def cuts(name: str, events: int) -> list[int]:
    """One place in each third of a scenario's events, always the same."""
    dice, third = random.Random(name), events // 3
    return [place * third + dice.randint(0, third) for place in range(3)]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "crowd" in name or "allocation" in name])
def test_a_journal_at_level_blocks_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name, "blocks")
    assert_continues(events, cuts(name, len(events)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_real_schedulers_journal_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name)
    assert_continues(events, cuts(name, len(events)))
