"""Engines with several KV cache groups, in the order in which real engines have them, by step."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.own_process import python
from tests.simulate.recordings import arguments, traffic_of
from tests.simulate.timed import Arrival, conversations, recorded

from kvledger.audit import events as ev
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.find import journals_at
from kvledger.audit.simulate.engine import by_step
from kvledger.audit.simulate.rows import Counting, Difference, differences

GROUPS: dict[str, dict[str, Any]] = {
    "windows first": {"groups": ("sliding", "sliding", "full"), "sliding_window": 64},
    "states first": {"groups": ("mamba", "full"), "blocks": 110},
}


def differing(events: Iterable[ev.Event]) -> tuple[int, int, list[Difference]]:
    """The tokens hit, the preemptions, and what differs from the recording by step."""
    events = list(events)
    counting = Counting()
    counting.feed(events)
    recording, traffic = counting.run(), traffic_of(events)
    run = by_step(traffic, arguments(traffic), lambda share: None)
    assert ("", recording.steps) == (run.error, run.steps)
    return recording.totals.local, recording.totals.preemptions, differences(recording, run)


@pytest.mark.parametrize("name", GROUPS)
def test_conversations_come_out_to_the_token(name: str) -> None:
    setup = {"blocks": 150, "block_size": 16, "max_batched_tokens": 128, "max_model_len": 1024}
    for retention in (None, 0):
        events = recorded(
            conversations(60, 40.0, 3), prefix_cache_retention_interval=retention, **(setup | GROUPS[name])
        )
        hits, preemptions, found = differing(events)
        assert [] == found
        assert preemptions and hits


@pytest.mark.parametrize("order", [1, -1], ids=["full attention first", "windows first"])
def test_prompts_that_part_between_blocks_come_out_with_shorter_blocks_of_a_window(order: int) -> None:
    dice = random.Random(4)
    shared = [[dice.randrange(10, 30_000) for _ in range(256)] for _ in range(3)]
    arrivals = [
        Arrival(
            0.2 * place,
            shared[place % 3][: 64 * dice.randrange(1, 5)] + [dice.randrange(10, 30_000) for _ in range(70)],
            8,
        )
        for place in range(40)
    ]
    setup = {"groups": ("full", "sliding")[::order], "group_tokens": (64, 16)[::order], "block_size": 16}
    hits, _, found = differing(recorded(arrivals, blocks=90, max_batched_tokens=64, **setup))
    assert [] == found
    assert hits


def test_contents_of_states_alone_are_not_known_and_the_calibration_says_so() -> None:
    arrivals = conversations(60, 40.0, 3)
    _, _, found = differing(recorded(arrivals, groups=("mamba", "mamba"), blocks=150, max_batched_tokens=128))
    assert {"local", "computed"} < {each.figure for each in found}


@pytest.mark.whole_engine
@pytest.mark.parametrize("situation", ["sliding window", "states"])
def test_a_real_engine_comes_out_to_the_token(situation: str, tmp_path: Path) -> None:
    python(
        *("-m", "tests.engines.content_run", "--outputs", situation, tmp_path / "outputs.json"),
        KVLEDGER_DIR=str(tmp_path / "journal"),
        KVLEDGER_LEVEL="blocks",
    )
    assert json.loads((tmp_path / "outputs.json").read_text())
    [journal] = journals_at([tmp_path / "journal"])
    with Reader(journal) as reader:
        hits, _, found = differing(event for batch in reader.poll() for event in batch.events)
    assert [] == found
    assert hits > 1000
