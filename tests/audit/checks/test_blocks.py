"""The invariants of blocks, each broken and nearly broken on the real BlockPool and KVCacheManager.

What breaks one is done to a live engine by hand, where a defect of the engine would do it.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched, manager, pool, running, table
from tests.engines.observed import audited
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start
from tests.scenarios.registry import HYBRID

from kvledger.audit.engines import host_version
from kvledger.audit.engines.pool.manager_observer import ManagerObserver
from kvledger.audit.journal.memory_recorder import MemoryRecorder

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- blocks/double-allocation ---------------------------------------------------------------------


@violates("blocks/double-allocation")
def test_a_second_group_allocates_a_block_of_the_first(watched):
    """vLLM#44409: both sides are named, with group and life, and what was done to the block."""
    driver = running(watched, "a", groups=HYBRID)
    blocks = list(table(driver, "a", 0))[:1]
    for group in (0, 1):
        manager(driver, group).add_local_computed_blocks("b", blocks, 16, 0)

    finding = watched.finding("blocks/double-allocation")

    assert "is twice in the block tables of one request" in finding.message
    assert "    step 1: allocated, request a, life 1, group 0, by allocate_new_blocks" in finding.story


@violates("blocks/double-allocation")
def test_a_hit_on_a_block_that_has_no_hash(watched):
    driver = running(watched, "a")
    manager(driver).add_local_computed_blocks("b", table(driver, "a")[-1:], 16, 0)

    assert "has no hash: request a, life 1, group 0 allocated it before" in (
        watched.finding("blocks/double-allocation").message
    )


@violates("blocks/double-allocation")
def test_a_held_block_is_allocated_as_free(watched):
    driver = running(watched, "a")
    held = table(driver, "a")[0]
    held.ref_cnt = 0
    pool(driver).free_block_queue.prepend_n([held])
    pool(driver)._maybe_evict_cached_block(held)
    driver.add("b", 20, 2)
    driver.step()

    finding = watched.finding("blocks/double-allocation")

    assert (
        f"Block {held.block_id} was allocated to request b, life 1, group 0 as a free block while request a, "
        "life 1, group 0 held it." in finding.message
    )
    assert "  held by request a, life 1, group 0" in finding.story
    assert "  now also held by request b, life 1, group 0" in finding.story


@near_miss("blocks/double-allocation")
@pytest.mark.parametrize(
    "scenario",
    [
        "shared_prefix_sync",
        "shared_while_running_async",
        "double_allocation_two_groups",
        "double_allocation_three_groups",
        "hybrid_external",
        "crowd_hybrid",
        "delayed_free_sync",
    ],
)
def test_shared_prefixes_null_blocks_and_two_phases(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


@near_miss("blocks/double-allocation")
def test_a_scheduler_that_raised_and_left_a_request_twice_among_the_running(watched):
    """Up to 0.30 a session with drafts does: it has one table all the same."""
    driver = running(watched, "a")
    driver.scheduler.running *= 2

    assert [] == watched.found()


# --- blocks/double-free ---------------------------------------------------------------------------


@violates("blocks/double-free")
def test_a_table_is_freed_twice(watched):
    """The count falls to -1 and vLLM says nothing; who freed it first is named."""
    driver = running(watched, "a", "b")
    blocks = list(table(driver, "a"))
    manager(driver).free("a")
    manager(driver).req_to_blocks["a"] = blocks
    manager(driver).free("a")

    finding = watched.finding("blocks/double-free")

    assert "was freed at step 1 for request a, life 1, group 0, which does not hold it" in finding.message
    assert "request a, life 1 freed it before, at step 1. It now has -1 references" in finding.message


@near_miss("blocks/double-free")
@pytest.mark.parametrize(
    "scenario", ["preempt_decode_async", "external_async_consumer", "delayed_free_async"]
)
def test_deferred_and_delayed_frees(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


@near_miss("blocks/double-free")
def test_a_manager_whose_user_frees_for_it(watched):
    """Without a scheduler: what is popped from the tables comes back by a call of the pool."""
    driver = start()
    request = driver.add("a", 40, 4)
    manager, sink = driver.scheduler.kv_cache_manager, MemoryRecorder()
    observer = ManagerObserver(manager, sink, version=host_version())
    observer.start()
    manager.allocate_slots(request, 40)
    manager.block_pool.free_blocks(manager.pop_blocks_for_free(request))
    observer.stop("detached")

    assert [] == audited(sink.take()).violations


# --- blocks/references ----------------------------------------------------------------------------


@violates("blocks/references")
def test_a_count_that_is_changed_by_hand_is_found_by_the_sweep(watched):
    driver = running(watched, "a")
    table(driver, "a")[0].ref_cnt += 1
    for _ in range(5):
        driver.step()

    finding = watched.finding("blocks/references")

    assert "has 2 references, but 1 known holders: request a, life 1, group 0" in finding.message


@violates("blocks/references")
def test_a_count_that_is_wrong_when_the_block_is_freed(watched):
    driver = running(watched, "a")
    table(driver, "a")[0].ref_cnt += 1
    driver.abort("a")

    assert "blocks/references" in watched.found()


@near_miss("blocks/references")
def test_blocks_that_were_held_before_the_trace_began(watched):
    driver = start(blocks=32)
    for name in ("a", "b"):
        driver.add(name, 60, 10, shares=("family", 48))
    driver.step()
    watched.attach(driver.scheduler)
    driver.add("c", 60, 10, shares=("family", 48))
    driver.run()
    for audit in watched.audits:
        audit.detach()

    assert [] == [violation.id for audit in watched.audits for violation in audit.violations]


# --- blocks/free-iff-unreferenced -----------------------------------------------------------------


@violates("blocks/free-iff-unreferenced")
def test_a_free_block_that_the_queue_has_lost(watched):
    driver = running(watched, "a")
    pool(driver).free_block_queue.remove(pool(driver).blocks[40])

    assert "blocks/free-iff-unreferenced" in watched.found()


@violates("blocks/free-iff-unreferenced")
def test_a_queue_that_miscounts_itself(watched):
    driver = running(watched, "a")
    pool(driver).free_block_queue.num_free_blocks += 1

    message = watched.finding("blocks/free-iff-unreferenced").message

    assert (
        "The engine's counter says that pool 0 has 61 free blocks, "
        "but by the blocks allocated and freed it has 60" in message
    )


@near_miss("blocks/free-iff-unreferenced")
def test_cached_blocks_that_nobody_holds_are_free(watched):
    driver = watched.start()
    driver.add("a", 100, 2)
    driver.run()

    assert [] == watched.found()


# --- blocks/hash-map ------------------------------------------------------------------------------


@violates("blocks/hash-map")
def test_a_hash_that_the_map_has_lost(watched):
    driver = running(watched, "a")
    pool(driver).cached_block_hash_to_block._cache.popitem()

    assert {"blocks/hash-map"} == set(watched.found())


@violates("blocks/hash-map")
def test_a_hash_removed_without_an_eviction(watched):
    driver = running(watched, "a")
    assert [] == watched.audits[0].violations  # by now its hash has been told
    table(driver, "a")[0].reset_hash()

    finding = watched.finding("blocks/hash-map")

    assert "has no hash, but no call of the pool removed it" in finding.message


@near_miss("blocks/hash-map")
@pytest.mark.parametrize(
    "scenario", ["crowd_sync", "reset_running_async", "load_failure_sync_policy_fail_sync"]
)
def test_duplicates_resets_and_evictions(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


# --- blocks/hash-content --------------------------------------------------------------------------


@violates("blocks/hash-content")
def test_cached_before_its_load_has_finished(watched):
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", (96, True))
    request = driver.add("r", 200, 2)
    driver.step()
    driver.scheduler.kv_cache_manager.cache_blocks(request, 96)
    driver.add("other", 20, 2)
    driver.step()

    finding = watched.finding("blocks/hash-content")

    assert "which has KV only up to position 0, because its load has not finished" in finding.message


@violates("blocks/hash-content")
def test_preempted_before_a_failed_load_was_computed_again(watched):
    """The real scheduler of 0.32: the blocks stay hashed, and whoever comes next finds them."""
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 160, 0)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:10])
    driver.preempt("r")
    driver.run()

    finding = watched.finding("blocks/hash-content")

    assert "which has no KV from" in finding.message


@violates("blocks/hash-content")
def test_aborted_before_a_failed_load_was_computed_again(watched):
    """Whose it was is said, though the request is gone by then."""
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:10])
    driver.abort("r")

    finding = watched.finding("blocks/hash-content")

    assert "of request r, which has no KV from position 64 on, because its load failed" in finding.message


@near_miss("blocks/hash-content")
@pytest.mark.parametrize(
    "scenario",
    ["load_failure_sync_sync", "load_failure_async_total_sync", "full_external_hit", "speculative_eagle"],
)
def test_failed_loads_that_are_computed_again(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


# --- blocks/write-shared --------------------------------------------------------------------------


@violates("blocks/write-shared")
def test_a_hit_that_is_counted_shorter_than_its_blocks(watched, monkeypatch):
    driver = running(watched, "a", tokens=64)
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    find = coordinator.find_longest_cache_hit

    def shorter(*args: Any, **kwargs: Any) -> Any:
        blocks, tokens, *rest = find(*args, **kwargs)
        return (blocks, max(0, tokens - 16), *rest)

    monkeypatch.setattr(coordinator, "find_longest_cache_hit", shorter)
    driver.add("b", 100, 2, shares=("a", 64))
    driver.step()

    finding = watched.finding("blocks/write-shared")

    assert "is filled by request b, life 1, group 0 at place 3 of its block table" in finding.message
    assert "request a, life 1, group 0 held it before" in finding.message


@near_miss("blocks/write-shared")
@pytest.mark.parametrize(
    "scenario", ["shared_while_running_sync", "full_external_hit", "shared_prefix_eagle"]
)
def test_hits_in_the_step_that_fills_them(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


# --- blocks/coverage ------------------------------------------------------------------------------


@violates("blocks/coverage")
def test_a_request_that_gets_no_block_for_its_tokens(watched, monkeypatch):
    driver = running(watched, "a")
    monkeypatch.setattr(manager(driver), "allocate_new_blocks", lambda *_: [])
    for _ in range(16):
        driver.step()

    finding = watched.finding("blocks/coverage")

    assert "its block table in group 0 has 3 blocks of 16 tokens" in finding.message


@near_miss("blocks/coverage")
@pytest.mark.parametrize("scenario", ["window_leaves_blocks_two_groups", "speculative_async", "session_sync"])
def test_windows_drafts_and_sessions(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.found()


# --- blocks/leak ----------------------------------------------------------------------------------


@violates("blocks/leak")
def test_a_block_that_is_in_no_table_when_its_request_goes(watched):
    driver = running(watched, "a")
    lost = table(driver, "a").pop()
    driver.abort("a")

    finding = watched.finding("blocks/leak")

    assert [lost.block_id] == finding.figures["blocks"]
    assert "Request a has ended and still holds 1 blocks" in finding.message


@near_miss("blocks/leak")
def test_a_connector_that_gives_the_blocks_up_later(watched):
    SCENARIOS["delayed_free_sync"](watched.attach)

    assert [] == watched.found()
