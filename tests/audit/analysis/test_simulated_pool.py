"""Replays of block traces: small ones by hand, and those of vLLM's real scheduler at other pool sizes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.analysis.block_trace import (
    ADMIT,
    CACHED,
    DROP,
    GROW,
    RELEASE,
    RESET,
    BlockTrace,
    Operation,
    TraceLife,
    TraceRequest,
)
from kvledger.audit.analysis.simulated_pool import SimulatedPool
from kvledger.audit.replay.block_traces import RecordedBlocks, block_trace

SIZE = 16


def trace_of(*requests: Sequence[int], blocks: int = 4) -> BlockTrace:
    """Requests one after the other, each with these blocks, the last of which can't be hit."""
    trace = BlockTrace(block_tokens=SIZE, blocks=blocks)
    for request in requests:
        life = begin(trace, request)
        trace.operations.append((RELEASE, life, 0, 0))
    return trace


def begin(trace: BlockTrace, hashes: Sequence[int], **fields: Any) -> int:
    """A request that computes and caches all its blocks, and keeps them. Returns its life."""
    life = len(trace.lives)
    trace.lives.append(TraceLife(len(trace.requests), len(hashes) * SIZE, **fields))
    trace.requests.append(TraceRequest(str(life), len(hashes) * SIZE, list(hashes)))
    trace.operations += [(ADMIT, life, 0, 0), (GROW, life, len(hashes), 0)]
    trace.operations += [(CACHED, life, index, hash_id) for index, hash_id in enumerate(hashes)]
    return life


def hits(trace: BlockTrace, blocks: int | None) -> list[int]:
    return SimulatedPool(trace, blocks).run().hits


def test_a_second_request_hits_all_but_its_last_block() -> None:
    assert [0, 2] == hits(trace_of([1, 2, 3], [1, 2, 3]), 3)


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    """The second request needs one block more than are empty, and the first loses its last block."""
    assert [0, 0, 2] == hits(trace_of([1, 2, 3], [7, 8], [1, 2, 3, 4]), 4)


def test_the_least_recently_released_prefix_is_evicted() -> None:
    longer = trace_of([1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8, 9], [1, 2, 3], [4, 5, 6])
    assert [0, 0, 2, 0, 2, 0] == hits(longer, 6)


def test_a_block_without_content_is_allocated_before_one_with_content() -> None:
    trace = trace_of([1, 2, 3])
    life = begin(trace, [7, 8])
    trace.operations = [
        operation for operation in trace.operations if operation[:2] != (CACHED, life)
    ]  # nothing of it is cached
    trace.operations.append((RELEASE, life, 0, 0))
    begin(trace, [9, 10])
    begin(trace, [1, 2, 3])
    assert [0, 0, 0, 2] == hits(trace, 5), "the third request gets the blocks of the second"
    assert [0, 0, 0, 1] == hits(trace, 3), "the second request gets two blocks of the first"


def test_blocks_of_running_requests_are_not_evicted() -> None:
    trace = BlockTrace(block_tokens=SIZE, blocks=4)
    running = begin(trace, [1, 2, 3])
    trace.operations.append((RELEASE, begin(trace, [7, 8]), 0, 0))
    begin(trace, [1, 2, 3, 4])
    result = SimulatedPool(trace, 4).run()
    assert [0, 0, 3] == result.hits
    assert 1 == result.short, "the second request needed five blocks of four"
    assert running == 0


def test_a_hit_block_that_is_held_again_is_not_evicted() -> None:
    trace = trace_of([1, 2, 3])
    begin(trace, [1, 2, 3])  # holds 1 and 2, which are also in the policy
    begin(trace, [7, 8])
    begin(trace, [1, 2, 3])
    assert [0, 2, 0, 2] == hits(trace, 5)


def test_equal_content_computed_at_the_same_time_takes_two_blocks() -> None:
    trace = BlockTrace(block_tokens=SIZE, blocks=9)
    for life in (0, 1):
        trace.lives.append(TraceLife(life, 2 * SIZE))
        trace.requests.append(TraceRequest(str(life), 2 * SIZE, [1, 2]))
        trace.operations += [(ADMIT, life, 0, 0), (GROW, life, 2, 0)]
    trace.operations += [(CACHED, life, index, index + 1) for life in (0, 1) for index in (0, 1)]
    assert [0, 0] == hits(trace, None)
    assert 1 == SimulatedPool(trace, 3).run().short, "each needs two blocks"


def test_a_reset_drops_everything_and_a_drop_one_block() -> None:
    def with_one(operation: Operation) -> list[int]:
        trace = trace_of([1, 2, 3])
        trace.operations.append(operation)
        trace.operations += trace_of([0], [1, 2, 3]).operations[4:5]
        begin(trace, [1, 2, 3])
        return hits(trace, 6)

    assert 0 == with_one((RESET, 0, 0, 0))[-1]
    assert 1 == with_one((DROP, 2, 0, 0))[-1]
    assert 2 == with_one((DROP, 3, 0, 0))[-1], "the last block is never hit"


def test_a_pool_that_misses_what_the_engine_hit_computes_and_caches_it() -> None:
    """The recorded engine hit two blocks, so the recording has no caching of these by the second request."""
    trace = trace_of([1, 2, 3], [7, 8, 9])
    life = begin(trace, [1, 2, 3], hit_blocks=2)
    trace.operations = [o for o in trace.operations if o[:2] != (CACHED, life) or o[2] == 2]
    trace.operations.append((RELEASE, life, 0, 0))
    begin(trace, [1, 2, 3])
    assert [0, 0, 0, 2] == hits(trace, 3)


def test_a_tier_gives_what_the_pool_evicted() -> None:
    trace = trace_of([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3])
    assert [0, 0, 0, 2] == SimulatedPool(trace, 3, tier_blocks=9).run().tier_hits
    assert [0, 0, 0, 0] == SimulatedPool(trace, 3, tier_blocks=4).run().tier_hits


# --- the real scheduler -----------------------------------------------------------------------------------


def conversations(attach: Any, *, blocks: int, outputs: int, requests: int = 160, **setup: Any) -> Any:
    """Conversations on a real scheduler, with a new request every eight steps."""
    from tests.scenarios.driving import start

    driver = start(attach, blocks=blocks, max_running=4, max_batched_tokens=256, **setup)
    rng = random.Random(7)
    talks: list[list[int]] = []
    systems = [driver.prompt(f"system {n}", 16 * rng.randrange(2, 7), None) for n in range(6)]
    for number in range(requests):
        if len(talks) < 12 or rng.random() < 0.3:
            talks.append(list(rng.choices(systems, [6, 5, 4, 3, 2, 1])[0]))
        if len(talks) > 12:
            talks.pop(rng.randrange(len(talks)))
        talk = rng.choice(talks)
        talk += driver.prompt(f"turn {number}", rng.randrange(10, 60), None)
        driver.add(str(number), list(talk), rng.randrange(4, outputs))
        if len(talk) > 320:
            talks.remove(talk)
        for _ in range(8):
            driver.step()
    driver.run()
    return driver


@functools.lru_cache
def recorded(blocks: int, outputs: int = 20) -> BlockTrace:
    from tests.engines.observed import observe

    _, events = observe(conversations, "blocks", blocks=blocks, outputs=outputs)
    found = RecordedBlocks(Path("engine"))
    found.feed(events)
    return block_trace(found)


def hit_share(trace: BlockTrace, hit_tokens: Sequence[int]) -> float:
    first = [number for number, life in enumerate(trace.lives) if not life.resumed]
    prompts = sum(trace.requests[trace.lives[number].request].prompt_tokens for number in first)
    return sum(hit_tokens[number] for number in first) / prompts


@pytest.mark.parametrize(("blocks", "outputs"), [(61, 20), (121, 20), (61, 80)])
def test_a_replay_of_the_real_scheduler_at_its_own_size_hits_the_same_blocks(
    blocks: int, outputs: int
) -> None:
    pytest.importorskip("vllm")
    trace = recorded(blocks, outputs)
    replayed = SimulatedPool(trace, trace.blocks).run()

    assert [life.hit_tokens for life in trace.lives] == [SIZE * hit for hit in replayed.hits]
    assert [] == trace.doubts
    assert any(life.preempted for life in trace.lives) == (outputs == 80)
    assert 16 * 2 * 4 == trace.block_bytes, "a head of one float32, keys and values"
    assert 0.2 < hit_share(trace, [life.hit_tokens for life in trace.lives]) < 0.9


@pytest.mark.parametrize("other", [61, 241])
def test_a_replay_predicts_the_real_scheduler_at_half_and_at_twice_the_size(other: int) -> None:
    pytest.importorskip("vllm")
    trace, run = recorded(121), recorded(other)
    replayed = SimulatedPool(trace, run.blocks).run()

    predicted = hit_share(trace, [SIZE * hit for hit in replayed.hits])
    happened = hit_share(run, [life.hit_tokens for life in run.lives])
    assert abs(predicted - happened) < 0.02
    assert abs(hit_share(trace, [life.hit_tokens for life in trace.lives]) - happened) > 0.02, "sizes matter"
