"""The ledger agrees with an oracle on random histories of the real scheduler; the oracle with hand counts."""

from __future__ import annotations

import importlib
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.importorskip("vllm")

from tests.columns import columns, row_columns
from tests.differential import vllm_engine
from tests.differential.compare import report
from tests.differential.content import Device
from tests.differential.oracle import Oracle
from tests.differential.player import play
from tests.differential.random_histories import Add, History, Output, Preempt, Step, draw
from tests.differential.tape import Allocated, Scheduled, Tape
from tests.engines.observed import audited
from tests.histories import GOLDEN
from tests.releases import built
from tests.scenarios.corpus import HISTORIES
from tests.time_limits import RUN_HANGS

from kvledger.audit.events import Preempted

ROOT = Path(__file__).parents[2]
COMPARED = 2_000
"""Histories that a thorough run compares."""
FAST_SHARE = 0.05
"""The share of them that `make test` compares; `make differential` compares others each day."""
PARTS = 20
GOLDEN_BLOCK = 16
ROWS = {row.title: row for row in GOLDEN}


@pytest.mark.parametrize("part", range(PARTS))
def test_ledger_and_oracle_agree_on_random_histories(part: int) -> None:
    """A failure prints the seed and the shortened history; draw(seed) makes the history again."""
    share = 1.0 if settings().max_examples >= 100 else FAST_SHARE
    number = round(COMPARED * share) // PARTS
    first = part * COMPARED // PARTS
    result = vllm_engine.compare(range(first, first + number))

    assert not result.kinds, "\n\n".join([str(result), *result.reports])


@pytest.mark.parametrize("seed", [803, 1456, 1_795_449_383, 1_795_456_232, 1_795_466_240, 1_795_470_802])
def test_ledger_and_oracle_agree_on_histories_that_once_differed(seed: int) -> None:
    result = vllm_engine.compare([seed])

    assert not result.kinds, "\n\n".join([str(result), *result.reports])


@pytest.mark.releases
@pytest.mark.parametrize(
    ("release", "histories", "first"),
    [("0.33.0", 500, 0), ("sglang-0.5.23", 100, 6215), ("sglang-0.5.5.post3", 20, 0)],
)
def test_ledger_and_oracle_agree_in_another_release(release: str, histories: int, first: int) -> None:
    """Those of SGLang 0.5.23 have the host cache, priorities, and sessions in which requests get stuck."""
    command = [built(release).BIN / "python", ROOT / "scripts" / "differential.py", str(histories)]
    command += ["--first", str(first), release]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_HANGS)

    assert 0 == completed.returncode, completed.stdout + completed.stderr[-2000:]


def test_every_release_with_a_v1_scheduler_has_its_turn_within_a_month() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "scripts")
        differential: Any = importlib.import_module("differential")

    assert set(differential.WITH_V1) == {name for day in range(31) for name in differential.turn(day)}


@pytest.mark.parametrize("title", HISTORIES)
def test_the_oracle_gives_the_figures_of_a_golden_history(title: str) -> None:
    recorded = Tape()
    HISTORIES[title](recorded.attach)
    figures = Oracle(GOLDEN_BLOCK).read(recorded.facts).accounts["r"].figures()

    assert row_columns(ROWS[title]) == columns(figures)


def test_a_history_follows_from_its_seed() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


PREEMPTED = History(
    0,
    {"block_size": 4, "blocks": 32, "max_batched_tokens": 16, "asynchronous": False},
    1,
    (
        Add("r1", prompt=24, max_tokens=8, family=0, shared=24),
        Add("r2", prompt=24, max_tokens=8, family=0, shared=12),
        Step(),
        Step(),
        Preempt(0, False),
        Step(),
    ),
)


def test_a_ledger_that_misses_an_event_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(events: list[Any]) -> Any:
        return audited([event for event in events if not isinstance(event, Preempted)])

    assert [] == vllm_engine.judge(PREEMPTED).found
    monkeypatch.setattr(vllm_engine, "audited", forgetful)

    text = report(PREEMPTED, vllm_engine.judge, vllm_engine.judge(PREEMPTED).found)
    assert "level tokens: unknown: r1: a life began while another lasted" in text
    assert 1 == text.count("Add(name=")  # the shortened history needs only one of the requests


FAILED_LOAD = Output(failure=1)
LOST = History(
    0,
    {"block_size": 4, "blocks": 32, "asynchronous": False, "connector": "scripted"},
    1,
    (
        Add("r1", prompt=9, max_tokens=4, family=0, shared=9, stored=8),
        Step(FAILED_LOAD),
        Preempt(0, False),
    ),
)
"""vLLM leaves the blocks of a failed load in the prefix cache until they are computed again."""


def device(history: History) -> Device:
    recorded = Tape()
    play(history, recorded.attach)
    return Device().read(recorded)


def test_a_block_of_a_failed_load_that_stays_cached_is_a_fault_of_the_engine() -> None:
    assert device(LOST).went_wrong


def test_a_failed_load_that_is_computed_again_is_no_fault_of_the_engine() -> None:
    recomputed = History(LOST.seed, LOST.setup, LOST.depth, LOST.operations[:2])

    assert not device(recomputed).went_wrong
    assert not device(PREEMPTED).went_wrong


def whole_load(prompt: int) -> History:
    """Local attention in chunks of 4 tokens, and an external cache that holds whole blocks of the prompt."""
    groups = {"groups": ("full", "chunked"), "sliding_window": 4}
    setup = {"block_size": 4, "blocks": 40, "asynchronous": True, "connector": "scripted", **groups}
    return History(0, setup, 2, (Add("r1", prompt, 1, family=0, shared=0, stored=32, asynchronous=True),))


def test_the_last_token_of_a_whole_load_reads_a_chunk_that_was_skipped() -> None:
    assert {"r1"} == device(whole_load(32)).bad_reads


def test_a_token_behind_a_load_reads_its_own_chunk() -> None:
    assert set() == device(whole_load(34)).bad_reads


STATES = History(
    0,
    {
        "block_size": 4,
        "blocks": 64,
        "max_batched_tokens": 16,
        "asynchronous": False,
        "groups": ("full", "mamba"),
    },
    1,
    (Add("r1", 24, 6, family=0, shared=24), *[Step()] * 4, Add("r2", 24, 6, family=0, shared=16)),
)


def test_a_state_that_a_request_hits_is_the_checkpoint_of_its_prefix() -> None:
    recorded = Tape()
    play(STATES, recorded.attach)

    assert [0, 16] == [fact.local for fact in recorded.facts if isinstance(fact, Allocated)]
    assert set() == Device().read(recorded).bad_reads


def test_a_state_that_holds_another_checkpoint_is_a_bad_read() -> None:
    recorded = Tape()
    play(STATES, recorded.attach)
    second = [fact for fact in recorded.facts if isinstance(fact, Allocated)][1]
    place = recorded.facts.index(second)
    before = [fact for fact in recorded.facts[:place] if isinstance(fact, Scheduled)][-1]
    later = before.tables["r1"][1][-1]
    full, states = second.tables
    swapped = full, tuple(later if number == 3 else block for number, block in enumerate(states))
    recorded.facts[place] = replace(second, tables=swapped)
    step = recorded.facts[place + 1]
    assert isinstance(step, Scheduled)
    recorded.facts[place + 1] = replace(step, tables={**step.tables, "r2": swapped})

    assert "r2" in Device().read(recorded).bad_reads
