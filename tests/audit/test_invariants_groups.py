"""The invariants of blocks where an engine has other groups than full attention, or more than one pool.

All on the real scheduler, managers and pools of vLLM, to which two things are done on the CPU that it does
not do by itself there: a group gets a second pool, as vLLM binds a host's, and a request an encoder's
input, which wants the files of a model that listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.audit.watched import Watched, manager, running, table
from tests.engines.observed import observe

from kvledger.audit.conformance.driver import Driver
from kvledger.audit.conformance.host import Setup
from kvledger.audit.conformance.register import HYBRID
from kvledger.audit.engines import host_version
from kvledger.audit.engines.bare_manager import ManagerObserver
from kvledger.audit.events import BlocksDeferred, PoolSeen, TablesStated
from kvledger.audit.hooks import EngineMismatch
from kvledger.audit.recorder import MemoryRecorder

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

FULL, WINDOW, CROSS = 0, 1, 1
"""Groups, in engines of two."""

BLOCK_TOKENS = 16
ENCODER_TOKENS = 50


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- more than one pool ---------------------------------------------------------------------------


def two_pools(scheduler: Any) -> Any:
    """The scheduler, whose second group has a pool of its own from now on."""
    from vllm.v1.core.block_pool import BlockPool

    first, second = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = first.block_pool
    second.block_pool = BlockPool(pool.num_gpu_blocks, pool.enable_caching, pool.hash_block_size)
    second._null_block = second.block_pool.null_block
    return scheduler


class WatchedPools(Watched):
    """Engines of two groups in two pools."""

    def attach(self, scheduler: Any) -> None:
        super().attach(two_pools(scheduler))


@pytest.fixture
def pools() -> Watched:
    return WatchedPools()


def in_two_pools(attach: Callable[[Any], None]) -> Driver:
    """A request that ends while a step is in flight, and whose frees a connector has deferred."""
    driver = Driver(Setup(groups=HYBRID, connector="scripted", asynchronous=True))
    attach(two_pools(driver.scheduler))
    driver.add("a", 40, 30)
    for _ in range(2):
        driver.step()
    driver.abort("a")
    driver.run()
    return driver


def test_each_pool_is_told_with_the_groups_that_draw_from_it() -> None:
    _, events = observe(in_two_pools, level="blocks")
    seen = [event for event in events if isinstance(event, PoolSeen)]

    assert {(0, FULL), (1, WINDOW)} == {(event.pool, event.groups[0]) for event in seen}


def test_each_pool_defers_its_own_blocks() -> None:
    _, events = observe(in_two_pools, level="blocks")
    deferred = [event for event in events if isinstance(event, BlocksDeferred)]

    assert [(0, 3), (1, 3)] == [(event.pool, len(event.blocks)) for event in deferred]


@violates("blocks/references")
def test_a_wrong_count_is_of_its_pool(pools: Watched) -> None:
    """Both pools have a block of that number, and the other's is right."""
    driver = running(pools, "a", groups=HYBRID)
    block = table(driver, "a", WINDOW)[0]
    block.ref_cnt += 1

    finding = pools.finding("blocks/references")

    assert (1, block.block_id) == (finding.figures["pool"], finding.figures["block"])
    assert "request a, life 1, group 1" in finding.message


@violates("blocks/double-allocation")
def test_a_block_that_stands_twice_in_the_second_pool(pools: Watched) -> None:
    driver = running(pools, "a", groups=HYBRID)
    blocks = table(driver, "a", WINDOW)
    blocks.append(blocks[0])
    manager(driver, WINDOW).block_pool.touch(blocks[:1])

    assert 1 == pools.finding("blocks/double-allocation").figures["pool"]


@violates("blocks/double-free")
def test_a_table_of_the_second_pool_is_freed_twice(pools: Watched) -> None:
    driver = running(pools, "a", "b", groups=HYBRID)
    blocks = list(table(driver, "a", WINDOW))
    for _ in range(2):
        manager(driver, WINDOW).req_to_blocks["a"] = list(blocks)
        manager(driver, WINDOW).free("a")

    finding = pools.finding("blocks/double-free")

    assert 1 == finding.figures["pool"]
    assert "for request a, life 1, group 1, who does not hold it" in finding.message


@near_miss("blocks/double-allocation")
def test_blocks_of_one_number_in_two_pools(pools: Watched) -> None:
    driver = running(pools, "a", groups=HYBRID)

    assert set(driver.blocks("a", FULL)) & set(driver.blocks("a", WINDOW))
    assert [] == pools.found()


@near_miss("blocks/double-free")
def test_deferred_frees_that_one_pool_hands_on_to_the_other(pools: Watched) -> None:
    """The first pool is given the blocks of both, and each is freed by its own."""
    driver = running(pools, "a", "b", groups=HYBRID, connector="scripted", asynchronous=True)
    driver.step()
    driver.abort("a")
    ((_, blocks),) = driver.scheduler.deferred_frees
    driver.run()

    assert 2 == len({id(block.pool) for block in blocks})
    assert [] == pools.found()


@near_miss("blocks/references")
def test_shared_prefixes_preemptions_and_evictions_in_two_pools(pools: Watched) -> None:
    driver = pools.start(groups=HYBRID, blocks=32)
    for name in range(6):
        driver.add(f"r{name}", 120, 12, shares=("family", 64 + BLOCK_TOKENS * (name % 2)))
    for _ in range(4):
        driver.step()
    driver.preempt(driver.scheduler.running[-1].request_id)
    driver.run()
    assert driver.reset_prefix_cache()

    assert [] == pools.found()


def test_the_one_layout_with_two_pools_that_vllm_builds_itself_is_refused() -> None:
    """Its blocks wander between tables by ways that no call of a pool shows."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupRole,
        KVCacheGroupSpec,
    )

    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    host = KVCacheGroupSpec(["full"], spec, role=KVCacheGroupRole.HISPARSE_SOURCE)
    config = KVCacheConfig(num_blocks=24, kv_cache_tensors=[], kv_cache_groups=[host])
    manager = KVCacheManager(config, 1024, BLOCK_TOKENS, BLOCK_TOKENS, enable_caching=True, log_stats=False)

    with pytest.raises(EngineMismatch, match="the blocks of a HiSparseSourceManager can't be followed"):
        ManagerObserver(manager, MemoryRecorder(), version=host_version()).start()


# --- a sliding window -----------------------------------------------------------------------------


def beyond_its_window(watched: Watched, **setup: Any) -> Driver:
    """A request whose first blocks have left the window: null blocks stand in their places."""
    driver = running(watched, "a", tokens=150, groups=HYBRID, sliding_window=64, **setup)
    for _ in range(2):
        driver.step()
    assert table(driver, "a", WINDOW)[0].is_null
    assert not table(driver, "a", FULL)[0].is_null
    return driver


@violates("blocks/coverage")
def test_a_table_that_has_lost_its_null_blocks(watched: Watched) -> None:
    """They stand for positions: without them every later block is read for others."""
    driver = beyond_its_window(watched)
    blocks = table(driver, "a", WINDOW)
    blocks[:] = [block for block in blocks if not block.is_null]

    finding = watched.finding("blocks/coverage")

    assert f"its table in group 1 has {len(blocks)} blocks of 16 tokens" in finding.message


@violates("blocks/double-allocation")
def test_a_block_that_left_the_window_and_still_stands_in_the_table(watched: Watched) -> None:
    driver = running(watched, "a", tokens=150, groups=HYBRID, sliding_window=64)
    before = list(table(driver, "a", WINDOW))
    for _ in range(25):
        driver.step()
    blocks = table(driver, "a", WINDOW)
    left = next(place for place, block in enumerate(before) if blocks[place].is_null and not block.is_null)
    blocks[left] = before[left]

    finding = watched.finding("blocks/double-allocation")

    assert "stands in a table of request a, life 1, group 1, who holds no reference to it" in finding.message


@near_miss("blocks/double-allocation")
def test_the_null_block_in_many_places_of_many_tables(watched: Watched) -> None:
    driver = beyond_its_window(watched)
    driver.add("b", 150, 20)
    for _ in range(3):
        driver.step()
    nulls = [sum(block.is_null for block in table(driver, name, WINDOW)) for name in ("a", "b")]

    assert min(nulls) > 1
    assert [] == watched.found()


@near_miss("blocks/coverage")
def test_null_blocks_stand_for_positions() -> None:
    """As many places as the full group has, most of them the null block's."""

    def course(attach: Callable[[Any], None]) -> Driver:
        driver = Driver(Setup(groups=HYBRID, sliding_window=64))
        attach(driver.scheduler)
        driver.add("a", 150, 30)
        for _ in range(10):
            driver.step()
        return driver

    _, events = observe(course, level="blocks")
    rows = [event for event in events if isinstance(event, TablesStated)][-1].rows
    length = rows[3]
    full, window = rows[4 : 4 + length], rows[8 + length :]

    assert (length, FULL, WINDOW) == (len(window), rows[1], rows[5 + length])
    assert 0 == full.count(0)
    assert length - 64 // BLOCK_TOKENS - 2 <= window.count(0)


@near_miss("blocks/references")
def test_blocks_that_leave_the_window_while_others_share_them(watched: Watched) -> None:
    driver = watched.start(groups=HYBRID, sliding_window=64, blocks=48)
    for name in range(4):
        driver.add(f"r{name}", 130 + name, 40, shares=("family", 128))
        driver.step()
    driver.run()

    assert [] == watched.found()


# --- cross-attention ------------------------------------------------------------------------------


class WatchedEncoders(Watched):
    """Engines whose second group holds what an encoder has put out."""

    def attach(self, scheduler: Any) -> None:
        from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager

        scheduler.is_encoder_decoder = True
        scheduler.max_num_encoder_input_tokens = 1024
        scheduler.encoder_cache_manager = EncoderDecoderCacheManager(1024)
        super().attach(scheduler)

    @staticmethod
    def add(driver: Driver, name: str, prompt_tokens: int, max_tokens: int) -> None:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        request = driver.add(name, prompt_tokens, max_tokens)
        where = PlaceholderRange(offset=0, length=ENCODER_TOKENS)
        request.mm_features = [MultiModalFeatureSpec(None, "audio", f"of {name}", where)]


@pytest.fixture
def encoders() -> WatchedEncoders:
    return WatchedEncoders()


def listening(encoders: WatchedEncoders, *names: str, tokens: int = 100) -> Driver:
    """An engine in which these requests have had their first output."""
    driver = encoders.start(groups=("full", "cross"), prefix_caching=False)
    for name in names:
        encoders.add(driver, name, tokens, 30)
    driver.step()
    return driver


@near_miss("blocks/coverage")
def test_a_cross_attention_table_is_as_long_as_the_encoder_s_input(encoders: WatchedEncoders) -> None:
    """Its places are none of the request's positions."""
    driver = listening(encoders, "a")
    for _ in range(5):
        driver.step()

    assert (7, 4) == (len(driver.blocks("a", FULL)), len(driver.blocks("a", CROSS)))
    assert [] == encoders.found()


@near_miss("blocks/leak")
@pytest.mark.parametrize("how", ["to its end", "aborted", "preempted"])
def test_cross_attention_blocks_go_with_their_request(encoders: WatchedEncoders, how: str) -> None:
    driver = listening(encoders, "a", "b")
    if how == "aborted":
        driver.abort("a")
    if how == "preempted":
        driver.preempt("b")
    driver.run()

    assert [] == encoders.found()


@violates("blocks/leak")
def test_a_cross_attention_block_that_no_table_has_when_its_request_goes(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a")
    lost = table(driver, "a", CROSS).pop()
    driver.abort("a")

    assert [lost.block_id] == encoders.finding("blocks/leak").figures["blocks"]


@violates("blocks/double-allocation")
def test_a_cross_attention_group_that_takes_a_block_of_the_full_one(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a")
    table(driver, "a", CROSS)[0] = table(driver, "a", FULL)[0]

    finding = encoders.finding("blocks/double-allocation")

    assert "request a, life 1, group 0, and request a, life 1, group 1" in finding.message


@violates("blocks/double-free")
def test_a_cross_attention_table_is_freed_twice(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a", "b")
    blocks = list(table(driver, "a", CROSS))
    for _ in range(2):
        manager(driver, CROSS).req_to_blocks["a"] = list(blocks)
        manager(driver, CROSS).free("a")

    assert "request a, life 1, group 1, who does not hold it" in (
        encoders.finding("blocks/double-free").message
    )
