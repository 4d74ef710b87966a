"""How blocks are used: states, stays, evictions and reuse, by hand and on the real scheduler."""

from __future__ import annotations

import pytest
from tests.audit.analysis.test_prefixes import A, B, C, Recording

from kvledger.audit import events as ev
from kvledger.audit import pool_calls
from kvledger.audit.analysis.block_states import BlockStates, BlockUse, Occupancy, Quantiles, Stay
from kvledger.audit.ledger.blocks.contents import Contents


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

    allocated = pool_calls.BlocksAllocated(1, 1, 0, "allocate", [0, 0, 1, 4])
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
