"""A recorded scenario, simulated by step on its own release, gives its recorded figures to the token."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.engines.conftest import Recorded
from tests.scenarios.corpus import SCENARIOS
from tests.simulate.recordings import traffic_of

from kvledger.audit.simulate.engine import by_step
from kvledger.audit.simulate.rows import Counting, differences
from kvledger.audit.simulate.settings import setup

UNEQUAL = {
    "replayed_window_sync": "the journal does not say that a group replays a window",
    "replayed_window_async": "the journal does not say that a group replays a window",
    "load_failure_after_a_preemption_sync": "no request is named that a load failed for",
    "load_failure_after_a_preemption_async": "no request is named that a load failed for",
    "image_twice_in_a_prompt_sync": "a request waits for space in the encoder cache, which is not simulated",
    "image_twice_in_a_prompt_async": "a request waits for space in the encoder cache, which is not simulated",
    "load_failure_read_by_a_neighbour": "two requests read one failed block",
}
"""Scenarios that differ, and why."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_simulated_by_step_is_the_recording(name: str, recorded: Recorded) -> None:
    if SCENARIOS[name].lacking():
        pytest.skip("; ".join(SCENARIOS[name].lacking()))
    events = recorded(name, "blocks")
    traffic = traffic_of(events)
    counting = Counting()
    counting.feed(events)
    recording = counting.run()

    run = by_step(traffic, setup(traffic, {}), lambda share: None)

    assert "" == run.error
    found = differences(recording, run)
    if name in UNEQUAL:
        assert found or recording.steps != run.steps
    else:
        assert ([], recording.steps) == (found, run.steps)
