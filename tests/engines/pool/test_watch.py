"""Calls of a pool besides allocating and freeing, and changes that no call shows; on real managers."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.conftest import Recorded
from tests.engines.hiding import hidden
from tests.engines.observed import audited, each, observe
from tests.scenarios.driving import start

import kvledger
from kvledger.audit import events as ev
from kvledger.audit.analysis.block_states import STATES, BlockStates
from kvledger.audit.engines import blocks_out_of_reach, host_version
from kvledger.audit.engines.pool.pool_census import SWEEP_BLOCKS, SWEEP_TABLES
from kvledger.audit.engines.pool.pool_watch import ManagerObserver
from kvledger.audit.engines.pool.requirements import BLOCK_ATTRIBUTES, MANAGER_ATTRIBUTES, POOL_ATTRIBUTES
from kvledger.audit.engines.steps import AT_REST_STEPS
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.events import Admitted, BlockStatesReported, TablesReported
from kvledger.audit.hooks import EngineMismatch
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.planted.fault import Change, PlantedFault, planted
from kvledger.audit.traffic.driver import Driver
from kvledger.audit.traffic.engine_setup import build_request

# --- calls of a pool besides allocating and freeing: copies, moves, pins, resets; on real managers --------


FULL, MAMBA = 0, 1
HASHED_TOKENS = 2
"""Tokens a hash, and a block of the full group; a Mamba state stands for two of these."""


class Watched:
    """A KV cache manager of a full and a Mamba group, and what was seen of it."""

    def __init__(self) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
        )

        start()  # which begins the hashes
        full = FullAttentionSpec(HASHED_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        mamba = MambaSpec(
            block_size=2 * HASHED_TOKENS,
            shapes=((1, 1),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["mamba"], mamba)]
        config = KVCacheConfig(num_blocks=24, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager: Any = KVCacheManager(
            config, 1024, 2 * HASHED_TOKENS, HASHED_TOKENS, enable_caching=True, log_stats=False
        )
        self.pool = self.manager.block_pool
        self.hasher = get_request_block_hasher(HASHED_TOKENS, sha256)
        self.sink = MemoryRecorder()
        self.observer = ManagerObserver(self.manager, self.sink, version=host_version())
        self.observer.start()

    def begin(self, request_id: str, prompt: list[int]) -> Any:
        """A request whose prompt is scheduled up to its last hash, in a step of its own."""
        self.manager.new_step_starts()
        request = build_request(request_id, prompt, hasher=self.hasher, max_tokens=9)
        blocks, hits, *_ = self.manager.get_computed_blocks(request)
        end = len(prompt) // HASHED_TOKENS * HASHED_TOKENS
        assert self.manager.allocate_slots(request, end - hits, hits, blocks) is not None
        request.num_computed_tokens = end
        return request

    def go_on(self, request: Any) -> None:
        """One token more."""
        self.manager.new_step_starts()
        request.append_output_token_ids([7])
        assert self.manager.allocate_slots(request, 1) is not None

    def copies_are_made(self) -> None:
        _, retained = self.manager.take_kv_cache_block_copies()
        self.pool.free_blocks(retained)

    def seen(self, kind: type[ev.Event]) -> list[Any]:
        """Events of a kind; and nothing was found in all of them."""
        self.observer.stop("detached")
        events = self.sink.take()
        assert [] == audited(events).violations
        return [event for event in each(events) if isinstance(event, kind)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_writing_over_a_cached_part_of_the_own_block_moves_its_hashes_to_a_copy(watched: Watched) -> None:
    request = watched.begin("a", [0, 0, 1, 1, 2, 2, 3])
    watched.go_on(request)
    watched.copies_are_made()
    watched.manager.free(request)

    (copied,) = watched.seen(ev.BlockCopied)

    assert copied.moved
    assert MAMBA == copied.group


def test_a_hit_of_a_part_of_a_block_puts_a_copy_in_its_place(watched: Watched) -> None:
    first = watched.begin("a", [0, 0, 1, 1, 2, 2, 3])
    watched.manager.free(first)
    second = watched.begin("b", [0, 0, 1, 1, 2, 2, 3, 3])
    table = watched.manager.get_block_ids("b")
    watched.copies_are_made()
    watched.manager.free(second)

    copied = watched.seen(ev.BlockCopied)

    assert [False] == [event.moved for event in copied]
    assert copied[0].blocks[1] in table[MAMBA]


def test_a_block_pinned_from_outside_is_held_by_no_request(watched: Watched) -> None:
    request = watched.begin("a", [0, 0, 1, 1, 2, 2])
    block = watched.pool.blocks[watched.manager.get_block_ids("a")[FULL][0]]
    watched.pool.touch([block])
    watched.manager.free(request)
    watched.pool.free_blocks([block])

    (pinned,) = [event for event in watched.seen(ev.BlocksTouched) if event.request < 0]

    assert [block.block_id] == pinned.blocks
    assert [2] == pinned.references


def test_a_pin_outlives_its_request_until_it_is_unpinned(watched: Watched) -> None:
    request = watched.begin("a", [0, 0, 1, 1, 2, 2])
    block = watched.pool.blocks[watched.manager.get_block_ids("a")[FULL][0]]
    watched.pool.touch([block])
    watched.manager.free(request)
    watched.pool.unpin_blocks([block], lambda *_: None)

    freed = [event for event in watched.seen(ev.BlocksFreed) if event.by == "unpin_blocks"]

    assert [([block.block_id], [0])] == [(event.blocks, event.references) for event in freed]


def test_a_reset_is_recorded_with_its_success(watched: Watched) -> None:
    request = watched.begin("a", [0, 0, 1, 1, 2, 2])
    watched.pool.reset_prefix_cache()
    watched.manager.free(request)
    watched.pool.reset_prefix_cache()

    assert [False, True] == [event.succeeded for event in watched.seen(ev.PoolReset)]


def test_an_eviction_by_a_connector_is_recorded(watched: Watched) -> None:
    request = watched.begin("a", [0, 0, 1, 1, 2, 2])
    evicted = watched.manager.get_block_ids("a")[FULL][0]
    watched.pool.evict_blocks({evicted})
    watched.manager.free(request)

    assert [[evicted]] == [event.blocks for event in watched.seen(ev.BlocksEvicted)]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *(("block", name) for name in BLOCK_ATTRIBUTES),
        *(("pool", name) for name in POOL_ATTRIBUTES),
        *(("manager", name) for name in MANAGER_ATTRIBUTES),
    ],
)
def test_an_engine_that_lacks_an_attribute_is_refused_in_one_sentence(owner: str, name: str) -> None:
    manager = start().scheduler.kv_cache_manager
    single = manager.coordinator.single_type_managers[0]
    owners = {"block": single.block_pool.blocks[0], "pool": single.block_pool, "manager": single}
    class_ = type(owners[owner])
    with hidden(name, [class_]), pytest.raises(EngineMismatch, match=f"a {class_.__name__} has no {name}"):
        ManagerObserver(manager, MemoryRecorder(), version=host_version()).start()


def test_an_engine_whose_blocks_lack_an_attribute_is_out_of_reach_at_level_blocks() -> None:
    scheduler = start().scheduler
    block = scheduler.kv_cache_manager.block_pool.blocks[0]
    with hidden("_block_hash", [type(block)]):
        assert "a KVCacheBlock has no _block_hash" == blocks_out_of_reach(scheduler)
    assert "" == blocks_out_of_reach(scheduler)


def test_a_pool_with_an_unknown_method_that_changes_hashes_is_refused_in_one_sentence() -> None:
    manager = start().scheduler.kv_cache_manager
    pool = manager.coordinator.single_type_managers[0].block_pool

    def roll_back(self: Any, block: Any) -> None:
        block.reset_hash()

    pool.__class__ = type("NewPool", (type(pool),), {"roll_back": roll_back})
    with pytest.raises(EngineMismatch, match=r"NewPool\.roll_back changes block hashes and is not known"):
        ManagerObserver(manager, MemoryRecorder(), version=host_version()).start()


def test_a_pool_with_an_unknown_method_that_only_reads_hashes_is_observed() -> None:
    manager = start().scheduler.kv_cache_manager
    pool = manager.coordinator.single_type_managers[0].block_pool

    def show(self: Any, block: Any) -> Any:
        return block.block_hash

    pool.__class__ = type("NewPool", (type(pool),), {"show": show})
    observer = ManagerObserver(manager, MemoryRecorder(), version=host_version())
    observer.start()
    observer.stop("detached")


@pytest.mark.parametrize("name", ["_block_hash", "block_id", "ref_cnt", "cached_block_hashes_by_block"])
def test_a_pool_whose_attribute_is_missing_serves_every_call_and_the_loss_is_reported(
    watched: Watched, name: str
) -> None:
    """Also the calls that few engines make: partial hashes, moves, evictions."""
    pool = watched.pool
    with hidden(name, [type(pool), type(pool.blocks[0])]) as reads:
        request = watched.begin("a", [0, 0, 1, 1, 2, 2, 3])
        watched.go_on(request)
        watched.copies_are_made()
        pool.evict_blocks({watched.manager.get_block_ids("a")[FULL][0]})
        watched.manager.free(request)
    watched.observer.stop("detached")

    failed = [event for event in watched.sink.take() if isinstance(event, ev.HookFailed)]
    assert reads
    assert [True] == [event.removed for event in failed]
    assert pool.num_gpu_blocks - 1 == pool.get_num_free_blocks()


# --- references that the engine takes for no request: who takes them, and that they are given back --------


def leaky(blocks: int, *, gives_back: bool = False) -> tuple[Any, Any]:
    """A driver, and an audit of its scheduler, which touches a request's first block when it frees it."""
    audits: list[Any] = []

    def observe(scheduler: Any) -> None:
        free, manager = scheduler._free_blocks, scheduler.kv_cache_manager

        def free_and_touch(request: Any) -> None:
            table = manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
            if table:
                manager.block_pool.touch(table[:1])
            free(request)
            if table and gives_back:
                manager.block_pool.free_blocks(table[:1])

        scheduler._free_blocks = free_and_touch
        audits.append(kvledger.attach(scheduler, level="blocks"))

    driver = start(observe, blocks=blocks)
    return driver, audits[0]


@pytest.mark.parametrize("at_once", [False, True])
def test_references_that_nobody_gives_back_are_a_leak_of_the_operation(at_once: bool) -> None:
    driver, audit = leaky(24)
    for number in range(4):
        driver.add(f"r{number}", 40, 2)
        if not at_once:
            driver.run()
    driver.run()
    audit.detach()

    (found,) = audit.violations
    assert ("blocks/leak", None) == (found.id, found.request)
    assert "free_and_touch took references to " in found.message
    assert any("touched, outside the block tables, by free_and_touch" in line for line in found.story)


def test_a_request_that_was_looked_up_and_not_admitted_is_not_blamed() -> None:
    """It waits with hits while others end, and the references are taken meanwhile."""
    driver, audit = leaky(12)
    driver.add("first", 60, 2)
    driver.run()
    for number in range(3):
        driver.add(f"r{number}", 75, 6, shares=("first", 48))
    for _ in range(40):
        driver.step()
    audit.detach()

    assert {"blocks/leak"} == {each.id for each in audit.violations}
    assert {None} == {each.request for each in audit.violations}


def test_references_that_are_given_back_are_no_leak() -> None:
    driver, audit = leaky(24, gives_back=True)
    for number in range(4):
        driver.add(f"r{number}", 40, 2)
    driver.run()
    audit.detach()

    assert "clean" == audit.verdict


# --- how late a change that no call shows is found: the bounds in docs/blocks.md --------------------------


POOL_BLOCKS = 300
REQUESTS = 6


def running(before: int) -> tuple[Driver, LiveAudit, Any]:
    """Some requests that decode since ``before`` steps, the audit and the pool."""
    audits: list[LiveAudit] = []
    driver = start(lambda engine: audits.append(kvledger.attach(engine, level="blocks")), blocks=POOL_BLOCKS)
    for name in range(REQUESTS):
        driver.add(f"r{name}", 20, 200)
    for _ in range(before):
        driver.step()
    return driver, audits[0], driver.scheduler.kv_cache_manager.block_pool


def steps_until_found(driver: Driver, audit: LiveAudit, id: str, at_most: int) -> int:
    for steps in range(at_most + 1):
        if id in {violation.id for violation in audit.violations}:
            return steps
        driver.step()
    raise AssertionError(f"{id} is not found in {at_most} steps")


@pytest.mark.parametrize("before", [2, 9, 20])
@pytest.mark.parametrize("block", [60, 130, POOL_BLOCKS - 1])
def test_a_wrong_block_is_found_within_one_turn_of_the_pool(block: int, before: int) -> None:
    driver, audit, pool = running(before)
    assert [] == audit.violations
    pool.blocks[block].ref_cnt += 1

    bound = 2 * AT_REST_STEPS * math.ceil(POOL_BLOCKS / SWEEP_BLOCKS)

    assert 0 < steps_until_found(driver, audit, "blocks/references", bound)


@pytest.mark.parametrize("before", [2, 9, 20])
def test_a_wrong_length_of_the_free_queue_is_found_within_two_rests(before: int) -> None:
    driver, audit, pool = running(before)
    pool.free_block_queue.num_free_blocks -= 1

    assert 0 < steps_until_found(driver, audit, "blocks/free-iff-unreferenced", 2 * AT_REST_STEPS)


@pytest.mark.parametrize("request_id", ["r0", f"r{REQUESTS - 1}"])
def test_a_wrong_table_is_found_within_one_turn_of_the_running_requests(request_id: str) -> None:
    driver, audit, _ = running(3)
    tables = driver.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    tables[request_id].append(tables["r2"][0])

    bound = 2 * AT_REST_STEPS * math.ceil(REQUESTS / SWEEP_TABLES)

    assert 0 < steps_until_found(driver, audit, "blocks/double-allocation", bound)


def test_a_sweep_of_a_larger_pool_reports_as_many_blocks() -> None:
    def stated(blocks: int) -> set[int]:
        def scenario(attach: Any) -> Driver:
            driver = start(attach, blocks=blocks)
            driver.add("r", 20, 30)
            driver.run()
            return driver

        _, events = observe(scenario, level="blocks")
        return {len(event.states) for event in events if isinstance(event, BlockStatesReported)}

    assert {SWEEP_BLOCKS} == stated(2_048) == stated(4_096)


def test_long_tables_are_reported_one_at_a_time_and_all_in_turn() -> None:
    blocks = SWEEP_BLOCKS // 2 + 1

    def scenario(attach: Any) -> Driver:
        driver = start(attach, blocks=4 * blocks)
        for name in "abc":
            driver.add(name, 16 * blocks - 15, 60)
        driver.run()
        return driver

    _, events = observe(scenario, level="blocks")
    admitted = max(event.step for event in events if isinstance(event, Admitted))
    stated = [event for event in each(events) if isinstance(event, TablesReported) and event.step > admitted]

    assert [len(event.rows) for event in stated] == [4 + event.rows[3] for event in stated]
    assert 3 == len({event.rows[0] for event in stated[:3]})


# --- the states of blocks that the analysis follows are those of the real scheduler's pool ----------------


@pytest.mark.parametrize(
    "scenario", ["preempt_prefill_async", "window_leaves_blocks_two_groups", "plain_sync"]
)
def test_states_are_the_engines_own(recorded: Recorded, scenario: str) -> None:
    events = recorded(scenario, "blocks")
    states, contents = BlockStates(), Contents()
    compared = 0
    for event in events:
        if isinstance(event, ev.BlockStatesReported) and event.free_blocks >= 0 and states.now is not None:
            assert event.free_blocks == sum(states.now[state] for state in STATES if state != "running")
            compared += 1
        now = states.feed(event, contents.read(event))
        assert now is None or all(getattr(now, state) >= 0 for state in STATES)

    assert compared
    assert states.now is not None and 0 == states.now["running"]


def test_blocks_of_an_ended_request_that_are_never_freed_are_a_leak_once_nothing_runs() -> None:
    """Nobody calls the free, so no call tells of it; the engine says itself that the request has ended."""
    forgets = PlantedFault(
        name="end-forgets-to-free",
        kind="leak",
        says="a request that ended keeps its blocks",
        code=(Change("Scheduler._free_request", "self._free_blocks(request)", "pass"),),
    )
    audits: list[Any] = []
    with planted(forgets):
        driver = start(lambda scheduler: audits.append(kvledger.attach(scheduler, level="blocks")))
        driver.add("r0", 40, 2)
        driver.add("r1", 40, 9)
        for _ in range(12):
            driver.step()
        assert audits[0].verdict == "clean"  # r0 has ended, and r1 runs
        for _ in range(12):
            driver.step()
        audits[0].detach()

    (found,) = audits[0].violations
    assert ("blocks/leak", 1) == (found.id, found.repeats)  # the other request's leak
    assert found.message.startswith("Request r0 has ended and still holds 3 blocks")
