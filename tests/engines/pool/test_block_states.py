"""The states of blocks that the analysis follows are those of the real scheduler's pool."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.conftest import Recorded

from kvledger.audit import events as ev
from kvledger.audit.analysis.block_states import STATES, BlockStates
from kvledger.audit.ledger.blocks.contents import Contents


@pytest.mark.parametrize(
    "scenario", ["preempt_prefill_async", "window_leaves_blocks_two_groups", "plain_sync"]
)
def test_states_are_the_engines_own(recorded: Recorded, scenario: str) -> None:
    events = recorded(scenario, "blocks")
    states, contents = BlockStates(), Contents()
    compared = 0
    for event in events:
        if isinstance(event, ev.BlockStatesReported) and event.free_blocks >= 0 and states.now is not None:
            assert event.free_blocks == sum(states.now[state] for state in STATES if state != "running")
            compared += 1
        now = states.feed(event, contents.read(event))
        assert now is None or all(getattr(now, state) >= 0 for state in STATES)

    assert compared
    assert states.now is not None and 0 == states.now["running"]
