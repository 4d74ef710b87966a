"""Who took a block: read off a step's output where that can tell, and the same as the stack says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, each, observe

from kvledger.audit import events as ev
from kvledger.audit.conformance.courses import COURSES
from kvledger.audit.conformance.driver import Driver, start
from kvledger.audit.engines import choose
from kvledger.audit.engines.untold import Untold
from kvledger.audit.recorder import MemoryRecorder

Taken = tuple[int, int, int, str, list[int]]
"""Step, request, group, operation and blocks."""


def taken(events: list[ev.Event]) -> list[Taken]:
    calls = [event for event in each(events) if isinstance(event, ev.BlocksTaken)]
    return [(call.step, *call.rows[:2], call.by, call.rows[3:]) for call in calls]


def asked(course: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """What a course takes, each call asked for its caller."""
    step_begins = Untold.step_begins

    def asks(self: Untold, nobody_waits: bool) -> None:
        step_begins(self, nobody_waits)
        self.outputs_tell = False

    with monkeypatch.context() as patched:
        patched.setattr(Untold, "step_begins", asks)
        return taken(observe(course, level="blocks")[1])


def preempts_who_has_taken(attach: Any = id) -> Driver:
    """Low's turn comes first in a step: it takes the last block, and high takes everything from it."""
    driver = start(attach, policy="priority", blocks=10, max_running=2)
    driver.add("low", 63, 60, priority=9)
    driver.step()
    driver.add("high", 64, 60, priority=0)
    driver.run()
    return driver


@pytest.mark.parametrize("name", list(COURSES))
def test_outputs_tell_what_the_stack_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    course = COURSES[name]

    assert asked(course, monkeypatch) == taken(observe(course, level="blocks")[1])


def test_who_takes_and_is_preempted_in_one_step_is_found_by_what_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    ask_tables = Untold._ask_tables

    def asks(self: Untold, *leaving: Any) -> Any:
        calls = each([ev.PoolCalls(0, 0, [""] * 9, self.rows)])
        given_back = {block for call in calls if isinstance(call, ev.BlocksFreed) for block in call.blocks}
        left.append(len({self.rows[place + 5] for place in self.unasked} & given_back))
        return ask_tables(self, *leaving)

    monkeypatch.setattr(Untold, "_ask_tables", asks)
    _, events = observe(preempts_who_has_taken, level="blocks")

    assert 1 in left
    assert "clean" == audited(events).verdict
    assert asked(preempts_who_has_taken, monkeypatch) == taken(events)


def test_who_takes_between_two_steps_is_asked() -> None:
    def course(attach: Any = id) -> Driver:
        driver = start(attach)
        driver.add("r", 20, 100)
        for _ in range(4):
            driver.step()
        driver.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
        return driver

    _, events = observe(course, level="blocks")

    assert (-1, -1, "course") == taken(events)[-1][1:4]


def two_that_decode(attach: Any = id, *, names_nobody: bool = False) -> Driver:
    driver = start()
    schedule = driver.scheduler.schedule

    @functools.wraps(schedule)
    def without_names(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        running = output.scheduled_cached_reqs
        running.new_block_ids = [None] * len(running.req_ids)
        return output

    if names_nobody:
        driver.scheduler.schedule = without_names
    attach(driver.scheduler)
    driver.add("r", 20, 100)
    driver.add("s", 30, 100)
    driver.run()
    return driver


def test_an_output_that_names_other_blocks_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, events = observe(two_that_decode, level="blocks", names_nobody=True)

    assert "clean" == audited(events).verdict
    assert asked(two_that_decode, monkeypatch) == taken(events)


def test_with_stacks_each_operation_is_told_by_the_call_that_made_it() -> None:
    sink = MemoryRecorder()

    def attach(scheduler: Any) -> None:
        choose(scheduler)(scheduler, sink, version="", level="blocks", stacks=True).start()

    driver = start(attach)
    driver.add("r", 20, 100)
    driver.run()
    told = [event for event in each(sink.take()) if isinstance(event, ev.BlocksTaken | ev.BlocksHashed)]
    innermost = {(type(event).__name__, (event.stack or [""])[-1].rpartition(" ")[2]) for event in told}

    assert 8 < len(told)
    assert {("BlocksTaken", "allocate_new_blocks"), ("BlocksHashed", "cache_blocks")} == innermost
