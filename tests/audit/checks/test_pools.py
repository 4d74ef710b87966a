"""The invariants of blocks in engines with more than one block pool.

The tests use vLLM's scheduler, managers and pools, and give the second group a pool of its own, as vLLM does
for a host pool. kvledger refuses the one layout for which vLLM itself builds two pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.audit.checks.watched import Watched, manager, running, table
from tests.engines.observed import observe
from tests.scenarios.driving import engine_setup
from tests.scenarios.registry import HYBRID

from kvledger.audit.engines import host_version
from kvledger.audit.engines.pool.pool_watch import ManagerObserver
from kvledger.audit.events import BlocksDeferred, PoolSeen
from kvledger.audit.hooks import EngineMismatch
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.traffic.driver import Driver

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

FULL, WINDOW = 0, 1
"""Group numbers, which are also the numbers of the groups' pools."""

BLOCK_TOKENS = 16


def two_pools(scheduler: Any) -> Any:
    """Give the scheduler's second group a pool of its own."""
    from vllm.v1.core.block_pool import BlockPool

    first, second = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = first.block_pool
    second.block_pool = BlockPool(pool.num_gpu_blocks, pool.enable_caching, pool.hash_block_size)
    second._null_block = second.block_pool.null_block
    return scheduler


class WatchedPools(Watched):
    """Engines with two groups and a pool for each group."""

    def attach(self, scheduler: Any) -> None:
        super().attach(two_pools(scheduler))


@pytest.fixture
def pools() -> Watched:
    return WatchedPools()


def in_two_pools(attach: Callable[[Any], None]) -> Driver:
    """Run a request that is aborted while a step is in flight, so that its frees are deferred."""
    driver = Driver(engine_setup(groups=HYBRID, connector="scripted", asynchronous=True))
    attach(two_pools(driver.scheduler))
    driver.add("a", 40, 30)
    for _ in range(2):
        driver.step()
    driver.abort("a")
    driver.run()
    return driver


def test_each_pool_is_emitted_with_the_groups_that_allocate_from_it() -> None:
    _, events = observe(in_two_pools, level="blocks")
    seen = [event for event in events if isinstance(event, PoolSeen)]

    assert {(0, FULL), (1, WINDOW)} == {(event.pool, event.groups[0]) for event in seen}


def test_each_pool_defers_its_own_blocks() -> None:
    _, events = observe(in_two_pools, level="blocks")
    deferred = [event for event in events if isinstance(event, BlocksDeferred)]

    assert [(0, 3), (1, 3)] == [(event.pool, len(event.blocks)) for event in deferred]


@violates("blocks/references")
def test_a_wrong_reference_count_names_its_pool(pools: Watched) -> None:
    """Both pools have a block with this number; the count in the other pool is right."""
    driver = running(pools, "a", groups=HYBRID)
    block = table(driver, "a", WINDOW)[0]
    block.ref_cnt += 1

    finding = pools.finding("blocks/references")

    assert (1, block.block_id) == (finding.figures["pool"], finding.figures["block"])
    assert "request a, life 1, group 1" in finding.message


@violates("blocks/double-allocation")
def test_a_block_twice_in_a_table_of_the_second_pool_is_found(pools: Watched) -> None:
    driver = running(pools, "a", groups=HYBRID)
    blocks = table(driver, "a", WINDOW)
    blocks.append(blocks[0])
    manager(driver, WINDOW).block_pool.touch(blocks[:1])

    assert 1 == pools.finding("blocks/double-allocation").figures["pool"]


@violates("blocks/double-free")
def test_a_table_of_the_second_pool_freed_twice_is_a_double_free(pools: Watched) -> None:
    driver = running(pools, "a", "b", groups=HYBRID)
    blocks = list(table(driver, "a", WINDOW))
    for _ in range(2):
        manager(driver, WINDOW).req_to_blocks["a"] = list(blocks)
        manager(driver, WINDOW).free("a")

    finding = pools.finding("blocks/double-free")

    assert 1 == finding.figures["pool"]
    assert "for request a, life 1, group 1, which does not hold it" in finding.message


@near_miss("blocks/double-allocation")
def test_blocks_with_the_same_number_in_two_pools_are_clean(pools: Watched) -> None:
    driver = running(pools, "a", groups=HYBRID)

    assert set(driver.blocks("a", FULL)) & set(driver.blocks("a", WINDOW))
    assert [] == pools.violation_ids()


@near_miss("blocks/double-free")
def test_deferred_frees_that_one_pool_passes_to_the_other_are_clean(pools: Watched) -> None:
    """The scheduler passes the blocks of both pools to the first pool; each pool frees its own."""
    driver = running(pools, "a", "b", groups=HYBRID, connector="scripted", asynchronous=True)
    driver.step()
    driver.abort("a")
    ((_, blocks),) = driver.scheduler.deferred_frees
    driver.run()

    assert 2 == len({id(block.pool) for block in blocks})
    assert [] == pools.violation_ids()


@near_miss("blocks/references")
def test_shared_prefixes_preemptions_and_evictions_in_two_pools_are_clean(pools: Watched) -> None:
    driver = pools.start(groups=HYBRID, blocks=32)
    for name in range(6):
        driver.add(f"r{name}", 120, 12, shares=("family", 64 + BLOCK_TOKENS * (name % 2)))
    for _ in range(4):
        driver.step()
    driver.preempt(driver.scheduler.running[-1].request_id)
    driver.run()
    assert driver.reset_prefix_cache()

    assert [] == pools.violation_ids()


def test_the_layout_for_which_vllm_builds_two_pools_is_refused() -> None:
    """Its blocks move between tables without a call of a pool."""
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
