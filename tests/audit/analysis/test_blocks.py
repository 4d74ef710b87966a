"""Prefixes, the use of blocks, and pools of other sizes: small histories, and real schedulers."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvledger.audit import events as ev
from kvledger.audit.analysis.block_states import BlockStates, BlockUse, Occupancy, Quantiles, Stay
from kvledger.audit.analysis.cache_misses import CHUNKED, SLIDING, STATE, WHOLE, Group, lacking
from kvledger.audit.analysis.prefixes import Prefix
from kvledger.audit.analysis.trace_reader import (
    ADMIT,
    CACHED,
    DROP,
    GROW,
    RELEASE,
    RESET,
    BlockTrace,
    Operation,
    TraceLife,
    TraceReader,
    TraceRequest,
)
from kvledger.audit.analysis.whatif import SimulatedPool
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.replay.request_traces import RecordedBlocks, block_prefixes, block_trace

# --- prefixes by what the cache saved and lost: small histories of block events ---------------------------


SIZE = 16
SECOND = 1_000_000
STARTED = ev.EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "blocks", 4000, {})
BEGAN = STARTED.began_seconds


class Recording:
    """Block events of requests that run one after the other, a second each."""

    def __init__(self, blocks: int = 9) -> None:
        self.events: list[ev.Event] = [ev.PoolSeen(0, 0, 0, blocks, 0, blocks - 1, 0, [0, SIZE, 2])]
        self.requests = 0

    def request(self, hit: Sequence[int], computed: Sequence[tuple[int, int]]) -> None:
        """A request hits these blocks, and computes hash ids into other blocks."""
        number, at = self.requests, self.requests * SECOND
        self.requests += 1
        whole = len(hit) + len(computed)
        self.events.append(ev.RequestAdded(at, number, f"r{number}", whole * SIZE + 1))
        if hit:
            touched = ev.BlocksTouched(at, 1, 0, number, 0, "touch", list(hit), [1] * len(hit))
            self.events.append(touched)
        ids = [block for block, _ in computed]
        rows = [number, 0, len(ids), *ids]
        self.events.append(ev.BlocksAllocated(at + 1, 1, 0, "allocate", rows))
        cached = [number, 0, -1, len(ids)]
        for place, (block, hash_id) in enumerate(computed):
            cached += [block, hash_id, (len(hit) + place + 1) * SIZE]
        self.events.append(ev.BlocksCached(at + 1, 1, 0, cached))
        self.events.append(ev.Admitted(at, number, 1, False, len(hit) * SIZE, 0, False, len(hit) * SIZE))
        freed = [*hit, *ids]
        self.events.append(ev.BlocksFreed(at + 2, 1, 0, number, 0, "free", freed[::-1], [0] * len(freed)))

    def prefixes(self) -> dict[str, Prefix]:
        recorded = RecordedBlocks(Path("engine"))
        recorded.feed([STARTED, *self.events])
        return {prefix.label: prefix for prefix in block_prefixes(recorded)[0]}


def label(hash_id: int) -> str:
    return f"{hash_id:016x}"[:8]


A, B, C, D = (number << 40 for number in (1, 2, 3, 4))


def test_prefixes_part_where_requests_part() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B), (3, C)])
    recording.request([1, 2], [(4, D)])
    found = recording.prefixes()

    assert {label(B), label(C), label(D)} == set(found)
    shared = found[label(B)]
    assert (0, 32, 2, 32, 0, "") == (
        shared.start,
        shared.end,
        shared.requests,
        shared.saved_tokens,
        shared.lost_tokens,
        shared.parent,
    )
    assert (32, 48, label(B), 0) == (
        found[label(D)].start,
        found[label(D)].end,
        found[label(D)].parent,
        found[label(D)].saved_tokens,
    )


def test_evicted_content_that_is_computed_again_is_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(2, C)])
    recording.request([1], [(3, B)])
    [prefix] = [each for each in recording.prefixes().values() if each.start == 0 and each.end == 32]

    assert (16, 16, 1) == (prefix.saved_tokens, prefix.lost_tokens, prefix.losses)
    [loss] = prefix.last_losses
    assert ("r1", "r2", 16) == (loss.evicted_for, loss.needed_by, loss.tokens)
    assert BEGAN + 1.0 <= loss.evicted_seconds < loss.needed_seconds == BEGAN + 2.0
    assert prefix.wait_seconds is not None and 0.9 < prefix.wait_seconds < 1.1


def test_evicted_content_that_nobody_needs_is_not_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(2, C)])
    recording.request([1], [(3, D)])
    assert 0 == sum(prefix.lost_tokens for prefix in recording.prefixes().values())


def test_content_computed_twice_without_an_eviction_is_not_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(3, A), (4, B)])
    assert 0 == sum(prefix.lost_tokens for prefix in recording.prefixes().values())


def test_blocks_that_are_emitted_last_block_first_make_one_prefix() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    cached = next(event for event in recording.events if isinstance(event, ev.BlocksCached))
    cached.rows[4:] = [2, B, 32, 1, A, 16]
    assert {label(B)} == set(recording.prefixes())


# --- how blocks are used: states, stays, evictions and reuse, by hand and on the real scheduler -----------


def followed(events: list[ev.Event]) -> tuple[BlockStates, list[Occupancy], list[Stay]]:
    stays: list[Stay] = []
    occupancies: list[Occupancy] = []
    states, contents = BlockStates(), Contents()
    for event in events:
        occupancy = states.feed(event, contents.read(event))
        if occupancy is not None:
            occupancies.append(occupancy)
            stays += states.ended
    return states, occupancies, stays


def test_a_block_is_running_then_cached_then_evicted() -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    states, occupancies, stays = followed(recording.events)

    by_state = [(o.running, o.cached, o.empty) for o in occupancies]
    assert [(0, 0, 4), (2, 0, 2), (2, 0, 2), (0, 2, 2)] == by_state[:4]
    assert (1, 1, 2) == by_state[4], "the second request holds block 1"
    assert (2, 0, 2) == by_state[5], "block 2 is allocated again"
    assert (0, 2, 2) == by_state[-1]
    [left] = stays
    assert (2, 0, 0, "evicted") == (left.block, left.request, left.hits, left.left_by)
    assert (1, 1, 3, 1) == (states.use.evicted, states.use.never_hit, states.use.allocated, states.use.hits)
    assert {1, 2} == {stay.block for stay in states.open_stays()}


def test_lifetime_idle_time_and_reuse_are_measured() -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    use = followed(recording.events)[0].use

    assert use.lifetimes.at(0.5) == pytest.approx(1.0, rel=0.05)
    assert use.idle.at(0.5) == pytest.approx(1.0, rel=0.05)
    assert use.reuse_seconds.at(0.5) == pytest.approx(1.0, rel=0.05)
    assert 0.0 == use.reuse_blocks.at(0.5), "no block was allocated between the release and the hit"


def test_a_reset_ends_every_stay_and_counts_no_eviction() -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.events.append(ev.PoolReset(9, 1, 0, True))
    states, occupancies, stays = followed(recording.events)

    assert (0, 0, 4) == (occupancies[-1].running, occupancies[-1].cached, occupancies[-1].empty)
    assert ({"reset"}, 0) == ({stay.left_by for stay in stays}, states.use.evicted)
    recording.events[-1] = ev.PoolReset(9, 1, 0, False)
    assert [] == followed(recording.events)[2], "a reset that failed drops nothing"


def test_free_blocks_of_a_trace_that_begins_in_the_middle_are_unknown_until_reported() -> None:
    seen = ev.PoolSeen(0, 0, 0, 5, 0, 3, 2, [0, 16, 2])
    _, [first], _ = followed([seen])
    assert (1, 0, 0, 3) == (first.running, first.cached, first.empty, first.unknown)

    reported = ev.BlockStatesReported(1, 1, 0, 1, [8, 1, 7, 7], 3, 2)
    _, occupancies, _ = followed([seen, reported])
    last = occupancies[-1]
    assert (1, 2, 1, 0) == (last.running, last.cached, last.empty, last.unknown)

    allocated = ev.BlocksAllocated(1, 1, 0, "allocate", [0, 0, 1, 4])
    _, occupancies, _ = followed([seen, allocated])
    assert (2, 0, 0, 2) == tuple(
        getattr(occupancies[-1], n) for n in ("running", "cached", "empty", "unknown")
    )


def test_quantiles_are_within_five_percent() -> None:
    numbers = Quantiles()
    assert numbers.at(0.5) is None
    for number in range(1, 1001):
        numbers.add(number)
    median, most = numbers.at(0.5), numbers.at(0.95)
    assert median == pytest.approx(500, rel=0.05) and most == pytest.approx(950, rel=0.05)


def test_the_use_of_two_engines_is_the_sum() -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    both = BlockUse()
    for _ in range(2):
        both.merge(followed(recording.events)[0].use)
    one = followed(recording.events)[0].use
    assert (2 * one.blocks, 2 * one.hits, 2 * one.evicted) == (both.blocks, both.hits, both.evicted)
    assert both.lifetimes.at(0.5) == one.lifetimes.at(0.5)


# --- replays of block traces: small ones by hand, and those of vLLM's real scheduler at other pool sizes --


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


def test_blocks_of_running_requests_are_not_evicted() -> None:
    trace = BlockTrace(block_tokens=SIZE, blocks=4)
    running = begin(trace, [1, 2, 3])
    trace.operations.append((RELEASE, begin(trace, [7, 8]), 0, 0))
    begin(trace, [1, 2, 3, 4])
    result = SimulatedPool(trace, 4).run()
    assert [0, 0, 3] == result.hits
    assert 1 == result.short, "the second request needed five blocks of four"
    assert running == 0


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


# --- what other groups need at a boundary, and pools that can't be read -----------------------------------


@pytest.mark.parametrize(
    ("group", "boundary", "ends"),
    [
        (Group(1, 16, STATE), 96, [96]),
        (Group(1, 16, SLIDING, 33), 96, [80, 96]),
        (Group(1, 16, SLIDING, 34), 96, [64, 80, 96]),
        (Group(1, 16, SLIDING, 64), 32, [16, 32]),
        (Group(1, 16, SLIDING, 1), 96, []),
        (Group(1, 16, CHUNKED, 64), 96, [80, 96]),
        (Group(1, 16, CHUNKED, 32), 96, []),
        (Group(1, 16, WHOLE), 96, [96]),
        (Group(1, 32, SLIDING, 64), 96, [64, 96]),
    ],
)
def test_a_group_needs_the_blocks_that_the_next_token_reads(
    group: Group, boundary: int, ends: list[int]
) -> None:
    assert ends == list(group.ends(boundary, 80))


def pool(groups: list[int], windows: list[int], number: int = 0) -> ev.PoolSeen:
    return ev.PoolSeen(0, 0, number, 100, 0, 99, 0, groups, windows)


@pytest.mark.parametrize(
    ("event", "others"),
    [
        (pool([0, 16, 2], []), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 64, 0]), [Group(1, 16, SLIDING, 64)]),
        (pool([0, 16, 0, 1, 32, 2], [0, 1, 2]), [Group(0, 16, STATE, 1)]),
        (pool([0, 16, 2, 1, 16, 2], []), [Group(1, 16, WHOLE)]),
        (pool([0, 16, 2, 1, 16, 0], []), []),
        (pool([0, 16, 1], [0, 64, 0]), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 0, 1]), []),
        (pool([0, 16, 2, 1, 16, 1], [1, 64, 7]), []),
        (pool([0, 16, 2, 1, 16, 1], []), []),
    ],
)
def test_groups_are_read_beside_the_first_of_full_attention(event: ev.PoolSeen, others: list[Group]) -> None:
    reader = TraceReader()
    reader.feed(event, ())

    assert others == reader.others
    assert bool(reader.problem) == (len(event.groups) > 3 or event.groups[2] != 2)
    assert reader.stopped == (bool(reader.problem) and not others)


def test_a_second_pool_can_not_be_read() -> None:
    reader = TraceReader()
    reader.feed(pool([0, 16, 2, 1, 16, 1], [1, 64, 0]), ())
    reader.feed(pool([2, 16, 2], [], 1), ())

    assert reader.stopped


# --- what a group of an engine's KV cache lacks at the boundaries behind a hit ----------------------------


TOKENS = 16
WINDOW = Group(1, TOKENS, SLIDING, 33)
STATES = Group(2, TOKENS, STATE)


def found(*groups: Group, lacks: dict[tuple[int, int], str], first: int = 0, end: int = 4) -> list[str]:
    """The causes, where each group has all blocks but those that it ``lacks``, by group and end."""

    def in_group(group: Group, block_end: int) -> str:
        how = lacks.get((group.number, block_end))
        return "" if how is None else group.lacks(how)

    return lacking(groups, TOKENS, first, end, in_group)


def test_a_boundary_that_every_group_has_lacks_nothing() -> None:
    assert ["", "", "", ""] == found(WINDOW, STATES, lacks={})


@pytest.mark.parametrize(
    ("how", "window", "state"),
    [("", "window", "state"), ("evicted", "window_evicted", "state_evicted"), ("cache_reset",) * 3],
)
def test_the_cause_names_the_kind_of_the_group_and_how_it_lost_its_part(
    how: str, window: str, state: str
) -> None:
    ends = (16, 32, 48, 64)

    assert [window] * 4 == found(WINDOW, lacks={(1, end): how for end in ends})
    assert [state] * 4 == found(STATES, lacks={(2, end): how for end in ends})


def test_a_window_needs_only_its_last_blocks() -> None:
    """A token reads the 32 before it, so a hit up to 64 needs the blocks that end at 48 and 64."""
    assert ["", "", "", ""] == found(WINDOW, lacks={(1, 16): "", (1, 32): ""})
    assert ["", "", "window", "window"] == found(WINDOW, lacks={(1, 48): ""})


def test_the_boundary_that_lacks_least_counts() -> None:
    """The state at 64 was evicted, those before it were never kept: more room would have helped."""
    never = {(2, end): "" for end in (16, 32, 48)}

    assert ["state_evicted"] * 4 == found(STATES, lacks={**never, (2, 64): "evicted"})
    assert ["state_evicted", "state_evicted", "state", "state"] == found(
        STATES, lacks={(2, 16): "", (2, 32): "evicted", (2, 48): "", (2, 64): ""}
    )


def test_blocks_of_another_length_end_together_at_few_boundaries() -> None:
    long = Group(3, 48, SLIDING, 48)

    assert ["window", "window", "window", "boundary"] == found(long, lacks={(3, 48): ""})
    assert ["", "", "", "boundary"] == found(long, lacks={})


def test_another_group_of_full_attention_needs_every_block_below() -> None:
    whole = Group(4, TOKENS, WHOLE)

    assert ["", "groups", "groups", "groups"] == found(whole, lacks={(4, 32): ""})
    assert ["evicted", "evicted"] == found(whole, lacks={(4, 48): "evicted"}, first=2)


def test_a_chunk_needs_what_it_has_before_the_boundary() -> None:
    chunks = Group(5, TOKENS, CHUNKED, 32)

    assert ["", "", "", ""] == found(chunks, lacks={(5, 16): ""})
    assert ["window"] == found(chunks, lacks={(5, 16): ""}, end=1)
