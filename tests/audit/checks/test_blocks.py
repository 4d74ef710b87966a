"""The invariants of blocks, each violated and nearly violated on the real BlockPool and KVCacheManager.

Each test alters a live engine by hand, in the place where a defect of the engine would.
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
from kvledger.audit.engines.pool.pool_watch import ManagerObserver
from kvledger.audit.journal.recorder import MemoryRecorder

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- blocks/double-allocation ---------------------------------------------------------------------


@violates("blocks/double-allocation")
def test_a_block_in_the_tables_of_two_groups_is_a_double_allocation(watched):
    """vLLM#44409: the finding names both holders with group and life, and the calls on the block."""
    driver = running(watched, "a", groups=HYBRID)
    blocks = list(table(driver, "a", 0))[:1]
    for group in (0, 1):
        manager(driver, group).add_local_computed_blocks("b", blocks, 16, 0)

    finding = watched.finding("blocks/double-allocation")

    assert "is twice in the block tables of one request" in finding.message
    assert "    step 1: allocated, request a, life 1, group 0, by allocate_new_blocks" in finding.story


@violates("blocks/double-allocation")
def test_a_hit_on_a_block_without_a_hash_is_a_double_allocation(watched):
    driver = running(watched, "a")
    manager(driver).add_local_computed_blocks("b", table(driver, "a")[-1:], 16, 0)

    assert "has no hash: request a, life 1, group 0 allocated it before" in (
        watched.finding("blocks/double-allocation").message
    )


@violates("blocks/double-allocation")
def test_a_held_block_allocated_as_free_is_a_double_allocation(watched):
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
def test_a_request_twice_in_the_running_list_is_no_double_allocation(watched):
    """Up to 0.30 the scheduler raises for a session with drafts and leaves the request in the list twice."""
    driver = running(watched, "a")
    driver.scheduler.running *= 2

    assert ["requests/queued-once"] == watched.violation_ids()


# --- blocks/double-free ---------------------------------------------------------------------------


@violates("blocks/double-free")
def test_a_block_table_freed_twice_is_a_double_free(watched):
    """The reference count falls to -1 without an error in vLLM; the finding names the first free."""
    driver = running(watched, "a", "b")
    blocks = list(table(driver, "a"))
    manager(driver).free("a")
    manager(driver).req_to_blocks["a"] = blocks
    manager(driver).free("a")

    finding = watched.finding("blocks/double-free")

    assert "was freed at step 1 for request a, life 1, group 0, which does not hold it" in finding.message
    assert "request a, life 1 freed it before, at step 1. It now has -1 references" in finding.message


@near_miss("blocks/double-free")
def test_blocks_that_the_caller_pops_and_frees_are_no_double_free(watched):
    """Without a scheduler: the caller pops the blocks from the tables and frees them in the pool."""
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
def test_the_sweep_finds_a_wrong_reference_count(watched):
    driver = running(watched, "a")
    table(driver, "a")[0].ref_cnt += 1
    for _ in range(5):
        driver.step()

    finding = watched.finding("blocks/references")

    assert "has 2 references, but 1 known holders: request a, life 1, group 0" in finding.message


@violates("blocks/references")
def test_a_free_finds_a_wrong_reference_count(watched):
    driver = running(watched, "a")
    table(driver, "a")[0].ref_cnt += 1
    driver.abort("a")

    assert "blocks/references" in watched.violation_ids()


@near_miss("blocks/references")
def test_blocks_held_before_the_trace_began_are_clean(watched):
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
def test_a_free_block_missing_from_the_free_queue_is_found(watched):
    driver = running(watched, "a")
    pool(driver).free_block_queue.remove(pool(driver).blocks[40])

    assert "blocks/free-iff-unreferenced" in watched.violation_ids()


@violates("blocks/free-iff-unreferenced")
def test_a_wrong_free_block_counter_is_found(watched):
    driver = running(watched, "a")
    pool(driver).free_block_queue.num_free_blocks += 1

    message = watched.finding("blocks/free-iff-unreferenced").message

    assert (
        "The engine's counter says that pool 0 has 61 free blocks, "
        "but by the blocks allocated and freed it has 60" in message
    )


@near_miss("blocks/free-iff-unreferenced")
def test_cached_blocks_without_a_holder_are_free(watched):
    driver = watched.start()
    driver.add("a", 100, 2)
    driver.run()

    assert [] == watched.violation_ids()


# --- blocks/hash-map ------------------------------------------------------------------------------


@violates("blocks/hash-map")
def test_a_hash_missing_from_the_hash_map_is_found(watched):
    driver = running(watched, "a")
    pool(driver).cached_block_hash_to_block._cache.popitem()

    assert {"blocks/hash-map"} == set(watched.violation_ids())


@violates("blocks/hash-map")
def test_a_hash_removed_without_an_eviction_is_found(watched):
    driver = running(watched, "a")
    assert [] == watched.audits[0].violations  # the hash has been emitted by now
    table(driver, "a")[0].reset_hash()

    finding = watched.finding("blocks/hash-map")

    assert "has no hash, but no call of the pool removed it" in finding.message


# --- blocks/hash-content --------------------------------------------------------------------------


@violates("blocks/hash-content")
def test_a_block_cached_before_its_load_has_finished_is_found(watched):
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
def test_a_preemption_after_a_failed_load_leaves_cached_blocks_without_kv(watched):
    """In vLLM 0.32 the blocks stay in the prefix cache, and the next request hits them."""
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
def test_an_abort_after_a_failed_load_leaves_cached_blocks_without_kv(watched):
    """The finding names the request, although the request has ended by then."""
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:10])
    driver.abort("r")

    finding = watched.finding("blocks/hash-content")

    assert "of request r, which has no KV from position 64 on, because its load failed" in finding.message


def failed_load_in_chunks(watched: Any) -> Any:
    """The load of `r` failed from position 32 on, and one chunk of 32 tokens has been computed again."""
    driver = watched.start(connector="scripted", max_batched_tokens=32)
    driver.connector.answer_lookups("r", 112)
    driver.add("r", 160, 1)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[2:7])
    driver.step()
    for config in (driver.scheduler, driver.scheduler.scheduler_config):
        config.max_num_scheduled_tokens = config.max_num_batched_tokens = 128
    return driver


@violates("blocks/hash-content")
def test_a_block_cached_under_the_hash_of_the_block_before_is_found(watched):
    driver = watched.start()
    cache = driver.scheduler.kv_cache_manager.block_pool.cache_full_blocks

    def under_the_hash_before(request: Any, *args: Any, **kwargs: Any) -> None:
        request.block_hashes[2] = request.block_hashes[1]
        cache(request, *args, **kwargs)

    driver.scheduler.kv_cache_manager.block_pool.cache_full_blocks = under_the_hash_before
    driver.add("a", 80, 4)
    driver.run()

    finding = watched.finding("blocks/hash-content")

    assert "of request a, under a hash that a block has for positions up to" in finding.message


@near_miss("blocks/hash-content")
def test_equal_blocks_of_two_requests_have_one_hash(watched):
    driver = watched.start()
    driver.add("a", 80, 4)
    driver.add("b", 80, 4, shares=("a", 80))
    driver.run()

    assert [] == watched.violation_ids()


@violates("blocks/hash-content")
def test_an_abort_between_two_recomputed_chunks_leaves_the_other_blocks_without_kv(watched):
    driver = failed_load_in_chunks(watched)
    driver.abort("r")

    finding = watched.finding("blocks/hash-content")

    assert "of request r, which has no KV from position 64 on, because its load failed" in finding.message
    assert 4 == finding.repeats  # of the blocks 5 to 9


@violates("blocks/read-invalid")
def test_a_hit_on_a_failed_block_before_its_chunk_is_recomputed_is_found(watched):
    driver = failed_load_in_chunks(watched)
    driver.scheduler.scheduler_config.long_prefill_token_threshold = 64
    driver.connector.answer_lookups("other", 0)
    driver.add("other", 150, 1, shares=("r", 144))
    driver.run()

    finding = watched.finding("blocks/read-invalid")

    assert ("other", 128, 16) == (finding.request, finding.figures["start"], finding.figures["tokens"])
    assert "the load of request r failed, and the tokens were not computed again" in finding.message


@near_miss("blocks/read-invalid")
def test_a_hit_in_the_step_that_recomputes_the_last_failed_block_is_clean(watched):
    driver = failed_load_in_chunks(watched)
    driver.connector.answer_lookups("other", 0)
    driver.add("other", 150, 1, shares=("r", 144))
    driver.run()

    assert [] == watched.violation_ids()


# --- blocks/write-shared --------------------------------------------------------------------------


@violates("blocks/write-shared")
def test_a_hit_counted_shorter_than_its_blocks_writes_to_a_shared_block(watched, monkeypatch):
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


# --- blocks/coverage ------------------------------------------------------------------------------


@violates("blocks/coverage")
def test_a_block_table_too_short_for_its_tokens_is_found(watched, monkeypatch):
    driver = running(watched, "a")
    monkeypatch.setattr(manager(driver), "allocate_new_blocks", lambda *_: [])
    for _ in range(16):
        driver.step()

    finding = watched.finding("blocks/coverage")

    assert "its block table in group 0 has 3 blocks of 16 tokens" in finding.message


@violates("blocks/coverage")
def test_a_cached_block_at_the_place_of_other_positions_is_found(watched):
    driver = running(watched, "a")
    blocks = table(driver, "a")
    blocks[0], blocks[1] = blocks[1], blocks[0]
    for _ in range(16):
        driver.step()

    finding = watched.finding("blocks/coverage")

    assert "of request a in group 0, for positions from 0 up. Its hash stands for positions from 16 up" in (
        finding.message
    )


# --- blocks/leak ----------------------------------------------------------------------------------


@violates("blocks/leak")
def test_a_block_missing_from_its_table_leaks_when_the_request_ends(watched):
    driver = running(watched, "a")
    lost = table(driver, "a").pop()
    driver.abort("a")

    finding = watched.finding("blocks/leak")

    assert [lost.block_id] == finding.figures["blocks"]
    assert "Request a has ended and still holds 1 blocks" in finding.message


@violates("blocks/leak")
def test_a_deferred_free_that_never_comes_leaks(watched):
    driver = running(watched, "a")
    manager = driver.scheduler.kv_cache_manager
    manager.free = manager.pop_blocks_for_free
    driver.preempt("a")

    finding = watched.finding("blocks/leak")

    assert "Request a gave up" in finding.message
    assert "they are not free: the pool lacks them until a restart" in finding.message


# --- what only looks wrong ------------------------------------------------------------------------


@near_miss("blocks/hash-map")
@near_miss("blocks/write-shared")
@near_miss("blocks/coverage")
@near_miss("blocks/leak")
@pytest.mark.parametrize(
    "scenario",
    ["crowd_sync", "reset_running_async", "shared_prefix_eagle", "window_leaves_blocks_two_groups",
     "session_sync", "abort_everywhere_async", "delayed_free_sync"],
)  # fmt: skip
def test_evictions_resets_windows_sessions_and_deferred_frees_are_clean(watched, scenario):
    """``test_scenarios.py`` and ``test_observer.py`` have every finding of every scenario."""
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.violation_ids()
