"""References that the engine takes for no request: who takes them, and that they are given back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

import kvledger


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
