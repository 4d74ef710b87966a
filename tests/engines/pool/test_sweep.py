"""How late a change that no call shows is found: the bounds in docs/blocks.md."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import each, observe
from tests.scenarios.driving import start

import kvledger
from kvledger.audit.engines.pool.pool_census import SWEEP_BLOCKS, SWEEP_TABLES
from kvledger.audit.engines.steps import AT_REST_STEPS
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.events import Admitted, BlockStatesReported
from kvledger.audit.pool_calls import TablesReported
from kvledger.audit.traffic.driver import Driver

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
