"""Simulations by time: recorded requests, several KV cache groups, and request traces."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.command_line import runner
from tests.engines.own_process import python
from tests.simulate.recordings import arguments, recording, traffic_of
from tests.simulate.timed import Arrival, conversations, recorded

from kvledger.audit import events as ev
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.find import journals_at
from kvledger.audit.simulate.engine import Timing, by_step, by_time
from kvledger.audit.simulate.request_trace import traced
from kvledger.audit.simulate.rows import Counting, Difference, Run, differences
from kvledger.audit.simulate.study import Outcome, Study, Variant
from kvledger.audit.simulate.study import recording as recording_of
from kvledger.audit.traffic.reader import RecordedRequest, Traffic

# --- recorded crowds on the real scheduler in simulated time ----------------------------------------------


SLOW = [10_000.0, 10.0, 100.0, 0.0, 0.0, 0.0]
"""A step takes 10 milliseconds, and 10 microseconds for each prefill token."""


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return traffic_of(recording(requests=40))


def simulated(traffic: Traffic, *, closed: bool = False, rate: float = 1.0, **changes: int) -> Run:
    run = by_time(traffic, arguments(traffic, **changes), Timing(SLOW, rate, closed), lambda share: None)
    assert "" == run.error
    return run


def apart(traffic: Traffic, microseconds: int) -> Traffic:
    """The same requests, each so long after the one before."""
    for place, request in enumerate(traffic.requests):
        request.at = request.came_after = place * microseconds
        request.outcome, request.parent = "length_capped", -1
    return traffic


def test_every_request_ends_as_recorded(traffic: Traffic) -> None:
    run = simulated(traffic)

    recorded = {request.number: request.outcome for request in traffic.requests}
    assert recorded.keys() == {row.number for row in run.rows}
    assert all(row.outcome == recorded[row.number] for row in run.rows if row.outcome != "aborted")


def test_a_simulation_is_the_same_each_time(traffic: Traffic) -> None:
    assert simulated(traffic).rows == simulated(traffic).rows


def test_a_request_alone_takes_its_steps() -> None:
    alone = apart(traffic_of(recording(requests=6)), 10_000_000)

    run = simulated(alone, num_gpu_blocks=400)

    prompts = {request.number: request.prompt for request in alone.requests}
    assert all(row.queued_us == 0 for row in run.rows)
    for row in run.rows:
        steps = -(-prompts[row.number] // 96)
        assert row.first_token_us <= steps * 10_000 + 10 * prompts[row.number] + 100 * steps


def test_requests_that_come_faster_wait_longer() -> None:
    crowd = apart(traffic_of(recording(requests=60)), 150_000)

    waited = [sum(row.queued_us for row in simulated(crowd, rate=rate).rows) for rate in (1.0, 4.0)]

    assert waited[0] < waited[1]


def test_fewer_blocks_hit_less_and_preempt_more(traffic: Traffic) -> None:
    small, large = simulated(traffic, num_gpu_blocks=20), simulated(traffic, num_gpu_blocks=400)

    assert small.totals.local < large.totals.local
    assert small.totals.preemptions > large.totals.preemptions == 0


def test_a_prompt_that_the_pool_cannot_hold_ends_the_simulation(traffic: Traffic) -> None:
    made = arguments(traffic, num_gpu_blocks=8)

    run = by_time(traffic, made, Timing(SLOW), lambda share: None)

    assert "too few blocks" in run.error


def test_in_a_closed_loop_a_request_comes_after_the_answer_that_it_continues() -> None:
    first = RecordedRequest(0, "a", 0, 0, 64, 16, outcome="length_capped", outputs=16, ended_at=50_000)
    second = RecordedRequest(
        1, "b", 1_050_000, 1_050_000, 96, 4, outcome="length_capped", outputs=4, parent=0
    )
    few = traffic_of(recording(requests=2))
    few.requests = [first, second]

    for closed, came in ((False, 1_050_000), (True, 1_000_000)):
        rows = simulated(few, closed=closed).rows
        ended = rows[0].first_token_us + rows[0].output_us
        assert came == rows[1].added_at - (ended if closed else 0)


# --- engines with several KV cache groups, in the order in which real engines have them, by step ----------


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


# --- A request trace on the real scheduler: what it hits, and what is said of it --------------------------


SIZE = 32


def trace(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({"block_size": SIZE, **line}) + "\n" for line in lines))
    return path


def conversation(*turns: int) -> list[dict[str, Any]]:
    """Prompts of so many whole blocks and half a block, each of which begins with the one before."""
    return [
        {
            "hash_ids": [*range(blocks), f"end {blocks}"],
            "input_length": blocks * SIZE + SIZE // 2,
            "output_length": 3,
            "timestamp": 1000 * place,
        }
        for place, blocks in enumerate(turns)
    ]


def outcome(path: Path, blocks: int, steps: Any = None, **more: int) -> Outcome:
    settings = (("num_gpu_blocks", blocks), *more.items())
    source = traced(path, block_tokens=0, version="", settings=settings, steps=steps)
    with Study(source, commands=lambda _: (sys.executable,)) as study:
        [found] = study.variants([Variant("", settings)])
        return found


def test_each_turn_hits_the_whole_blocks_of_the_turn_before(tmp_path: Path) -> None:
    found = outcome(trace(tmp_path, *conversation(2, 4, 7)), 100)
    assert ("", 3, 0) == (found.error, found.requests, found.preemptions)
    assert (2 + 4) * SIZE == found.totals.local
    assert (2 + 4 + 7) * SIZE + 3 * SIZE // 2 == found.prompt_tokens
    assert (None, None) == (found.seconds, found.first_token_p50)


def test_requests_of_one_time_do_not_overlap_without_step_times(tmp_path: Path) -> None:
    lines = conversation(2, 4, 7)
    for line in lines:
        line["timestamp"] = 5000
    assert (2 + 4) * SIZE == outcome(trace(tmp_path, *lines), 9).totals.local


def test_with_the_step_times_of_a_journal_requests_wait_and_seconds_are_known(tmp_path: Path) -> None:
    arrivals = [Arrival(0.05 * place, list(range(3, 40 + 9 * (place % 7))), 8) for place in range(80)]
    steps = recording_of(recorded(arrivals, blocks=64, block_size=16)).steps
    lines = conversation(*[4] * 8)
    for place, line in enumerate(lines):
        line["timestamp"] = place  # a millisecond apart, which is less than a step takes
    found = outcome(trace(tmp_path, *lines), 100, steps, max_num_seqs=1)
    assert found.seconds
    assert found.queued_p95 > found.first_token_p50 / 2 > 0.002  # each waits for those before it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "A request trace has no pool: give it one with --set num_gpu_blocks=N"),
        (["--set", "num_gpu_blocks=9", "--since", "1h"], "A request trace has no times for --since"),
        (["--set", "num_gpu_blocks=9", "--rate", "2"], "--closed-loop without --steps-of"),
    ],
)
def test_what_a_trace_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    result = runner(capsys)("simulate", trace(tmp_path, *conversation(2)), *words)
    assert (2, True) == (result.code, said in result.sentence)


def test_the_command_says_what_it_assumed_and_that_seconds_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace(tmp_path, *conversation(2, 4))
    result = runner(capsys)("simulate", path, "--set", "num_gpu_blocks=9", "--set", "num_gpu_blocks=90")
    said = " ".join(result.out.split())
    assert 0 == result.code
    assert "num_gpu_blocks=9 " in said and "num_gpu_blocks=90 " in said
    assert "max_num_batched_tokens=8192" in said
    assert "Seconds are unknown: no step was timed. Each request ends before the next one comes" in said
