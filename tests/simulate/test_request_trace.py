"""A request trace on the real scheduler: what it hits, and what is said of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.command_line import runner
from tests.simulate.timed import Arrival, recorded

from kvledger.audit.simulate.request_trace import traced
from kvledger.audit.simulate.settings import Variant
from kvledger.audit.simulate.study import Outcome, Study, recording

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
    steps = recording(recorded(arrivals, blocks=64, block_size=16)).steps
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
