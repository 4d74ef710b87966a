"""Who took a block: read off a step's output where that can tell, and the same as the stack says."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from tests.engines.observed import audited, each, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start

from kvledger.audit import events as ev
from kvledger.audit import old_events
from kvledger.audit.conformance.driver import Driver
from kvledger.audit.engines import choose
from kvledger.audit.engines.pool import watch
from kvledger.audit.engines.pool.allocations import Allocations
from kvledger.audit.engines.pool.attribution import Run
from kvledger.audit.engines.pool.call_buffer import CallBuffer
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.decode import calls

Taken = tuple[int, int, int, str, list[int]]
"""Step, request, group, operation and blocks."""


def taken(events: list[ev.Event]) -> list[Taken]:
    found: list[Taken] = []
    for call in each(events):
        rows = call.rows if isinstance(call, old_events.BlocksAllocated) else []
        while rows:
            end = 3 + rows[2]
            found.append((call.step, rows[0], rows[1], call.by, rows[3:end]))
            rows = rows[end:]
    return found


def counted(events: list[ev.Event]) -> list[tuple[Any, ...]]:
    """Step, request, group, blocks and their counts of what was touched and what was freed, in order."""
    calls = [
        event
        for event in each(events)
        if isinstance(event, old_events.BlocksTouched | old_events.BlocksFreed)
    ]
    return [(type(call), call.step, call.request, call.group, call.blocks, call.references) for call in calls]


def asked(scenario: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> list[ev.Event]:
    """What a scenario is told as where every call is wrapped, and asked for its caller."""
    begin_step = Allocations.begin_step

    def reads_the_stack(self: Allocations, nobody_waits: bool) -> None:
        begin_step(self, nobody_waits)
        self.named_later = False

    with monkeypatch.context() as patched:
        patched.setattr(Allocations, "begin_step", reads_the_stack)
        return wrapped(scenario, patched)


def wrapped(scenario: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> list[ev.Event]:
    """What a scenario is told as where every call is wrapped."""
    with monkeypatch.context() as patched:
        patched.setattr(watch, "can_track", lambda *_: False)
        return observe(scenario, level="blocks")[1]


def hashed(events: list[ev.Event]) -> list[tuple[int, ...]]:
    """Group, block, up to which token it is hashed, and in which step, block by block."""
    calls = [event for event in each(events) if isinstance(event, ev.BlocksCached)]
    found = [
        (call.rows[1], call.rows[at], call.rows[at + 2], call.step)
        for call in calls
        for at in range(4, len(call.rows), 3)
    ]
    return sorted(found, key=lambda row: row[:2])


def soon(found: list[tuple[int, ...]], called: list[tuple[int, ...]]) -> bool:
    """Whether the same was hashed, and is told when the engine is at rest, if not before."""
    same = [one[:-1] for one in found] == [one[:-1] for one in called]
    return same and all(0 <= one[-1] - other[-1] <= 8 for one, other in zip(found, called, strict=True))


def preempts_who_has_taken(attach: Any = id) -> Driver:
    """Low's turn comes first in a step: it takes the last block, and high takes everything from it."""
    driver = start(attach, policy="priority", blocks=10, max_running=2)
    driver.add("low", 63, 60, priority=9)
    driver.step()
    driver.add("high", 64, 60, priority=0)
    driver.run()
    return driver


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_what_is_read_afterwards_is_what_the_calls_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS[name]
    by_stack, by_output = asked(scenario, monkeypatch), wrapped(scenario, monkeypatch)
    _, read = observe(scenario, level="blocks")

    assert taken(by_stack) == taken(by_output) == taken(read)
    assert counted(by_output) == counted(read)
    assert hashed(by_stack) == hashed(by_output)
    assert soon(hashed(read), hashed(by_output))
    assert not [event for event in read if isinstance(event, ev.HookFailed)]


def crowd(attach: Any = id, *, seed: int, requests: int = 60, **setup: Any) -> Driver:
    """Requests that share prefixes, wait, are preempted for want of blocks, and are aborted."""
    dice, driver = random.Random(seed), start(attach, **setup)
    urgent = setup.get("policy") == "priority"
    for number in range(requests):
        length = dice.randint(1, 250)
        options = {"shares": (f"family {dice.randrange(4)}", dice.randint(0, length))}
        priority = {"priority": dice.randrange(3)} if urgent else {}
        driver.add(f"r{number}", length, dice.randint(1, 60), **options, **priority)
        for _ in range(dice.randint(0, 4)):
            driver.step()
        if dice.random() < 0.1:
            driver.abort(f"r{dice.randint(0, number)}")
    driver.run()
    return driver


CROWDS: dict[str, dict[str, Any]] = {
    "aborted, tables stay a while": {"seed": 352332, "requests": 20, "asynchronous": True, "max_running": 8},
    "taken, given back, taken": {
        "seed": 879871,
        "asynchronous": True,
        "policy": "priority",
        "blocks": 40,
        "max_batched_tokens": 48,
        "max_running": 8,
    },
    "preempted in chunks": {
        "seed": 205253,
        "asynchronous": True,
        "policy": "priority",
        "blocks": 80,
        "max_batched_tokens": 48,
        "max_running": 16,
    },
    "in step": {"seed": 5, "blocks": 24, "max_batched_tokens": 64, "max_running": 8},
}


@pytest.mark.parametrize("name", list(CROWDS))
def test_a_crowd_is_read_as_its_calls_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = functools.partial(crowd, **CROWDS[name])
    by_output, read = wrapped(scenario, monkeypatch), observe(scenario, level="blocks")[1]

    assert taken(by_output) == taken(read)
    assert counted(by_output) == counted(read)
    assert soon(hashed(read), hashed(by_output))
    assert "clean" == audited(read).verdict


def test_who_takes_and_is_preempted_in_one_step_is_found_by_what_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    freed_tables = CallBuffer.freed_tables

    def counts(self: CallBuffer) -> list[Run]:
        freed = freed_tables(self)
        left.append(len({block for run in freed for block in run.blocks}.intersection(self.allocated_ids())))
        return freed

    with monkeypatch.context() as patched:
        patched.setattr(CallBuffer, "freed_tables", counts)
        _, read = observe(preempts_who_has_taken, level="blocks")
        by_output = wrapped(preempts_who_has_taken, patched)

    assert 2 == left.count(1)
    assert "clean" == audited(read).verdict
    assert taken(asked(preempts_who_has_taken, monkeypatch)) == taken(by_output) == taken(read)


def test_who_takes_between_two_steps_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start(attach)
        driver.add("r", 20, 100)
        for _ in range(4):
            driver.step()
        driver.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
        return driver

    assert (-1, -1, "") == taken(observe(scenario, level="blocks")[1])[-1][1:4]
    assert (-1, -1, "scenario") == taken(wrapped(scenario, monkeypatch))[-1][1:4]


def test_what_is_touched_by_hand_is_a_pin_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start(attach)
        pool = driver.scheduler.kv_cache_manager.block_pool
        driver.add("r", 60, 100)
        for _ in range(4):
            driver.step()
        pinned = [block for block in pool.blocks if block.ref_cnt == 1 and not block.is_null][:2]
        pool.touch(pinned)
        driver.add("s", 60, 100, shares=("r", 60))
        driver.add("t", 60, 100, shares=("r", 60))
        driver.step()
        pool.touch(pinned[:1])
        pool.free_blocks(pinned)
        driver.step()
        pool.free_blocks(pinned[:1])
        driver.run()
        return driver

    read = observe(scenario, level="blocks")[1]

    assert counted(wrapped(scenario, monkeypatch)) == counted(read)
    assert 2 == sum(
        what is old_events.BlocksTouched and request < 0 for what, _, request, *_ in counted(read)
    )
    assert "clean" == audited(read).verdict


def test_a_name_that_comes_again_at_once_is_another_request() -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start(attach)
        for _ in range(3):
            driver.add("r", 60, 100)
            driver.step()
            driver.abort("r")
        driver.add("r", 60, 100)
        driver.abort("r")  # it has never run
        driver.add("r", 60, 4)
        driver.run()
        return driver

    read = observe(scenario, level="blocks")[1]

    assert [0, 1, 2, 3, 4] == [
        call.requests[0] for call in each(read) if isinstance(call, old_events.TablesRemoved)
    ]
    assert "clean" == audited(read).verdict


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
    assert taken(asked(two_that_decode, monkeypatch)) == taken(events)


@pytest.mark.parametrize("names_nobody", [False, True])
def test_steps_that_are_put_aside_are_told_together_each_as_its_own(
    names_nobody: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their outputs named other blocks, so that tables are asked when they are told."""
    monkeypatch.setattr("kvledger.audit.engines.steps.AT_REST_STEPS", 10**9)
    _, read = observe(two_that_decode, level="blocks", names_nobody=names_nobody)
    told = [event for event in read if isinstance(event, ev.PoolCalls)]
    steps = {
        call.step for event in told for call in calls(event) if isinstance(call, old_events.BlocksAllocated)
    }

    assert len(steps) > len([event for event in told if ev.IN_STEP in event.rows[::5]]) > 0
    assert "clean" == audited(read).verdict
    if not names_nobody:
        assert taken(asked(two_that_decode, monkeypatch)) == taken(read)


def test_tables_that_do_not_add_up_are_stated_also_after_steps_that_were_put_aside() -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start()
        schedule = driver.scheduler.schedule

        @functools.wraps(schedule)
        def names_another_table(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                if new.req_id == "s":
                    new.block_ids = (new.block_ids[0][::-1],)
            return output

        driver.scheduler.schedule = names_another_table
        attach(driver.scheduler)
        driver.add("r", 30, 100)  # it takes a block in the third step, which is put aside
        for _ in range(4):
            driver.step()
        driver.add("s", 40, 100)
        driver.step()
        return driver

    _, read = observe(scenario, level="blocks")
    stated = [
        event for event in each(read) if isinstance(event, old_events.TablesReported) and event.step == 5
    ]

    assert [1] == [event.rows[0] for event in stated]


def test_the_pool_has_no_collector_again_when_the_watch_has_ended() -> None:
    driver, _ = observe(two_that_decode, level="blocks")

    assert driver.scheduler.kv_cache_manager.block_pool.metrics_collector is None


def test_a_pool_with_a_collector_of_its_own_keeps_it_and_is_wrapped() -> None:
    class Collector:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    collector = Collector()

    def scenario(attach: Any = id) -> Driver:
        driver = start()
        driver.scheduler.kv_cache_manager.block_pool.metrics_collector = collector
        attach(driver.scheduler)
        driver.add("r", 20, 100)
        driver.run()
        return driver

    driver, events = observe(scenario, level="blocks")

    assert driver.scheduler.kv_cache_manager.block_pool.metrics_collector is collector
    assert len(taken(events)) == 7


def test_a_watch_whose_collector_is_replaced_says_so_and_ends() -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start(attach)
        driver.add("r", 20, 100)
        driver.step()
        driver.scheduler.kv_cache_manager.block_pool.metrics_collector = None
        driver.run()
        return driver

    _, events = observe(scenario, level="blocks")
    (failed,) = [event for event in events if isinstance(event, ev.HookFailed)]

    assert failed.removed
    assert not audited(events).violations


def test_who_is_hashed_for_is_whose_table_it_is() -> None:
    """And a hash for more than the sequence has is found by its account."""
    _, events = observe(two_that_decode, level="blocks")
    auditor = audited(events)
    blocks = auditor.ledger.blocks
    assert "clean" == auditor.verdict
    assert {record.cached_for for record in blocks.pools[0].records.values() if record.hash_ids} == {0, 1}

    early = [
        replace(event, rows=[n + 10**6 if at == 6 else n for at, n in enumerate(event.rows)])
        if isinstance(event, ev.BlocksCached)
        else event
        for event in each(events)
    ]
    assert "blocks/hash-content" in {violation.id for violation in audited(early).violations}


def test_with_stacks_each_operation_is_told_by_the_call_that_made_it() -> None:
    sink = MemoryRecorder()

    def attach(scheduler: Any) -> None:
        choose(scheduler)(scheduler, sink, version="", level="blocks", stacks=True).start()

    driver = start(attach)
    driver.add("r", 20, 100)
    driver.run()
    told = [
        event
        for event in each(sink.take())
        if isinstance(event, old_events.BlocksAllocated | ev.BlocksCached)
    ]
    innermost = {(type(event).__name__, (event.stack or [""])[-1].rpartition(" ")[2]) for event in told}

    assert 8 < len(told)
    assert {("BlocksAllocated", "allocate_new_blocks"), ("BlocksCached", "cache_blocks")} == innermost
