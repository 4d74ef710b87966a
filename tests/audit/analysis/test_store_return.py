"""What a connector's store returned, over short histories of one engine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.audit.checks.kv_histories import POOL
from tests.simulated_trace import started

from kvledger.audit import events
from kvledger.audit.analysis.costs import Loads
from kvledger.audit.analysis.step_model import Coefficient, StepModel
from kvledger.audit.analysis.store_return import (
    SEVERAL,
    TIER_UNREPORTED,
    LoadsByTier,
    StoreContents,
    StoreReturn,
    store_return,
    tier_of,
)
from kvledger.audit.events import (
    BlocksCached,
    BlocksPromised,
    BlocksSaved,
    Event,
    Finished,
    LoadFailed,
    PoolSeen,
    Stepped,
)
from kvledger.audit.ledger.account import Life
from kvledger.audit.ledger.blocks.contents import Contents

BLOCK = 16
A, B = 101, 102
"""Hash ids."""


def cached(at: int, request: int, block: int, hash_id: int) -> list[Event]:
    return [
        events.BlocksAllocated(at, 1, 0, "allocate_slots", [request, 0, 1, block]),
        BlocksCached(at, 1, 0, [request, 0, BLOCK, 1, block, hash_id, BLOCK]),
    ]


def step(at: int) -> Stepped:
    return Stepped(at, 1, [], [])


def saved(at: int, *blocks: int) -> BlocksSaved:
    return BlocksSaved(at, 1, list(blocks))


def promised(at: int, request: int, *blocks: int) -> BlocksPromised:
    return BlocksPromised(at, request, 1, 0, BLOCK * len(blocks), BLOCK, list(blocks))


def ends(at: int, request: int) -> Finished:
    return Finished(at, request, "stopped", BLOCK, 0, 0, BLOCK + 1, 1)


STORED = [*cached(1, 0, 5, A), saved(1, 5), step(1), ends(2, 0)]
"""Request 0 computes content A, which is stored."""


def followed(*events: Event, pool: PoolSeen = POOL) -> StoreContents:
    store, contents = StoreContents(), Contents()
    for event in (pool, *events):
        store.feed(event, contents.read(event))
    store.settle(9_000_000)
    return store


def returned(*events: Event, level: str = "blocks", **settings: int | str) -> StoreReturn:
    configuration = {"connector": "C", "plan": "read", "block_bytes": 4096, "workers": 2} | settings
    return store_return(
        engine="e",
        started=replace(started(0, 0), level=level, configuration=configuration),
        store=followed(*events),
        loads=LoadsByTier({"host": Loads(asynchronous=1, waited_us=500_000, asynchronous_tokens=100)}),
        model=StepModel(refused="", coefficients={"prefill_tokens": Coefficient(0.01, 0.0)}),
    )


def test_of_several_groups_the_first_of_full_attention_is_counted() -> None:
    pool = replace(POOL, groups=[0, BLOCK, 1, 1, BLOCK, 2], windows=[0, BLOCK, 0])
    both = [
        events.BlocksAllocated(1, 1, 0, "allocate_slots", [0, 0, 1, 5]),
        events.BlocksAllocated(1, 1, 0, "allocate_slots", [0, 1, 1, 6]),
        BlocksCached(1, 1, 0, [0, 0, BLOCK, 1, 5, B, BLOCK]),
        BlocksCached(1, 1, 0, [0, 1, BLOCK, 1, 6, A, BLOCK]),
    ]

    store = followed(*both, saved(2, 5, 6), step(2), ends(3, 0), pool=pool)

    assert (BLOCK, [A]) == (store.block_tokens, list(store.contents))


def test_content_that_no_load_brings_back_was_never_read() -> None:
    found = returned(*STORED)

    assert (BLOCK, 0, BLOCK) == (found.stored_tokens, found.read_tokens, found.never_read_tokens)
    assert found.first_read_seconds is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_content_that_a_load_fills_a_block_with_is_read(asynchronous: bool) -> None:
    """A synchronous load's block is cached before the promise, another one's after it."""
    load, filled = promised(3_000_000, 1, 7), cached(3_000_000, 1, 7, A)
    events = [load, step(4), *filled] if asynchronous else [*filled, load]
    found = returned(*STORED, *events, step(5), ends(4_000_001, 1))

    assert (BLOCK, 1, 0) == (found.read_tokens, found.reads, found.never_read_tokens)
    assert 0 == found.computed_again_tokens
    assert 4.0 == found.first_read_seconds == found.last_read_seconds


def test_content_that_is_computed_again_was_not_read() -> None:
    found = returned(*STORED, *cached(3, 1, 7, A), step(3), ends(4, 1))

    assert (0, BLOCK) == (found.read_tokens, found.computed_again_tokens)


def test_content_is_not_computed_again_in_the_step_that_stores_it() -> None:
    assert 0 == returned(*STORED).computed_again_tokens


def test_a_block_that_failed_to_load_was_not_read() -> None:
    loads = [*cached(3, 1, 7, A), *cached(3, 1, 8, B), promised(3, 1, 7, 8), step(3)]
    both = [*STORED, *cached(2, 0, 6, B), saved(2, 6), step(2), *loads]

    assert BLOCK == returned(*both, LoadFailed(4, 1, 32, 0, False, [7]), ends(5, 1)).read_tokens
    assert 0 == returned(*both, LoadFailed(4, 1, 32, 0, True), ends(5, 1)).read_tokens


def test_content_that_another_engine_stored_is_read_from_elsewhere() -> None:
    found = returned(*cached(3, 1, 7, B), promised(3, 1, 7), step(3), ends(4, 1))

    assert (0, BLOCK) == (found.read_tokens, found.read_elsewhere_tokens)


def test_what_is_stored_twice_counts_once() -> None:
    found = returned(*STORED, saved(3, 5))

    assert (BLOCK, BLOCK) == (found.stored_tokens, found.stored_again_tokens)


def test_bytes_are_those_of_all_workers_and_seconds_have_the_price_of_a_token() -> None:
    found = returned(*STORED)

    assert 512 == found.token_bytes
    assert (1.0, 0.5) == (found.saved_seconds, found.waited_seconds)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"level": "tokens"}, "the journal is of level tokens; KVLEDGER_LEVEL=blocks records what is stored"),
        ({"plan": "opaque"}, "the connector's metadata can't be read"),
    ],
)
def test_what_was_stored_may_be_unknown(settings: dict[str, str], why: str) -> None:
    assert why == returned(**settings).unknown


def test_the_tier_of_a_load_is_the_one_that_was_reported() -> None:
    life = Life(1, 0, 64, asynchronous=True)
    assert TIER_UNREPORTED == tier_of(life)
    life.tiers = {"host": 64, "disk": 0}
    assert "host" == tier_of(life)
    life.tiers = {"host": 32, "disk": 32}
    assert SEVERAL == tier_of(life)
