"""Owners of allocated blocks on a real scheduler: from outputs, tables and the stack, all the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from tests.engines.conftest import Recorded
from tests.engines.observed import audited, each, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start

from kvledger.audit import events as ev
from kvledger.audit.engines import choose
from kvledger.audit.engines.pool import pool_watch
from kvledger.audit.engines.pool.allocations import Allocations
from kvledger.audit.engines.pool.attribution import BlockRun
from kvledger.audit.engines.pool.call_buffer import CallBuffer
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.pool import calls
from kvledger.audit.traffic.driver import Driver

Allocation = tuple[int, int, int, str, list[int]]
"""Step, request, group, operation and blocks."""


def allocations(events: list[ev.Event]) -> list[Allocation]:
    rows_of: list[Allocation] = []
    for call in each(events):
        rows = call.rows if isinstance(call, ev.BlocksAllocated) else []
        while rows:
            end = 3 + rows[2]
            rows_of.append((call.step, rows[0], rows[1], call.by, rows[3:end]))
            rows = rows[end:]
    return rows_of


def counted(events: list[ev.Event]) -> list[tuple[Any, ...]]:
    """Step, request, group, blocks and their counts of what was touched and what was freed, in order."""
    calls = [event for event in each(events) if isinstance(event, ev.BlocksTouched | ev.BlocksFreed)]
    return [(type(call), call.step, call.request, call.group, call.blocks, call.references) for call in calls]


def by_the_stack(scenario: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> list[ev.Event]:
    """The events of a scenario in which every call is wrapped, and its caller is read off the stack."""
    begin_step = Allocations.begin_step

    def reads_the_stack(self: Allocations, nobody_waits: bool) -> None:
        begin_step(self, nobody_waits)
        self.named_later = False

    with monkeypatch.context() as patched:
        patched.setattr(Allocations, "begin_step", reads_the_stack)
        return wrapped(scenario, patched)


def wrapped(scenario: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> list[ev.Event]:
    """The events of a scenario in which every call is wrapped."""
    with monkeypatch.context() as patched:
        patched.setattr(pool_watch, "can_track", lambda *_: False)
        return observe(scenario, level="blocks")[1]


def cached(events: list[ev.Event]) -> list[tuple[int, ...]]:
    """Group, block, the position up to which its hash reaches, and the step, block by block."""
    calls = [event for event in each(events) if isinstance(event, ev.BlocksCached)]
    rows = [
        (call.rows[1], call.rows[at], call.rows[at + 2], call.step)
        for call in calls
        for at in range(4, len(call.rows), 3)
    ]
    return sorted(rows, key=lambda row: row[:2])


def cached_alike(read: list[tuple[int, ...]], called: list[tuple[int, ...]]) -> bool:
    """Whether the same blocks were cached, and are emitted when the engine is at rest, if not before."""
    same = [one[:-1] for one in read] == [one[:-1] for one in called]
    return same and all(0 <= one[-1] - other[-1] <= 8 for one, other in zip(read, called, strict=True))


def preempted_after_allocating(attach: Any = id) -> Driver:
    """In one step, low is allocated the last block, and then preempted for high."""
    driver = start(attach, policy="priority", blocks=10, max_running=2)
    driver.add("low", 63, 60, priority=9)
    driver.step()
    driver.add("high", 64, 60, priority=0)
    driver.run()
    return driver


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_reading_the_pool_state_gives_the_same_events_as_wrapping_its_calls(
    name: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_stack, read = by_the_stack(SCENARIOS[name], monkeypatch), recorded(name, "blocks")

    assert allocations(by_stack) == allocations(read)
    assert counted(by_stack) == counted(read)
    assert cached_alike(cached(read), cached(by_stack))
    assert not [event for event in read if isinstance(event, ev.HookFailed)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "crowd" in name else pytest.mark.fuzz) for name in SCENARIOS],
)
def test_owners_in_an_output_are_those_on_the_stack(
    name: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_output, read = wrapped(SCENARIOS[name], monkeypatch), recorded(name, "blocks")

    assert allocations(by_output) == allocations(read)
    assert counted(by_output) == counted(read)
    assert cached_alike(cached(read), cached(by_output))


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
    "aborted, tables are removed later": {
        "seed": 352332,
        "requests": 20,
        "asynchronous": True,
        "max_running": 8,
    },
    "allocated, freed, allocated": {
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
    "synchronous": {"seed": 5, "blocks": 24, "max_batched_tokens": 64, "max_running": 8},
}


@pytest.mark.parametrize("name", list(CROWDS))
def test_reading_the_pool_state_of_a_crowd_gives_the_same_events_as_wrapping(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = functools.partial(crowd, **CROWDS[name])
    by_output, read = wrapped(scenario, monkeypatch), observe(scenario, level="blocks")[1]

    assert allocations(by_output) == allocations(read)
    assert counted(by_output) == counted(read)
    assert cached_alike(cached(read), cached(by_output))
    assert "clean" == audited(read).verdict


def test_the_owner_of_blocks_that_were_freed_in_the_same_step_is_found_by_the_freed_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    freed_tables = CallBuffer.freed_tables

    def counts(self: CallBuffer) -> list[BlockRun]:
        freed = freed_tables(self)
        left.append(len({block for run in freed for block in run.blocks}.intersection(self.allocated_ids())))
        return freed

    with monkeypatch.context() as patched:
        patched.setattr(CallBuffer, "freed_tables", counts)
        _, read = observe(preempted_after_allocating, level="blocks")
        by_output = wrapped(preempted_after_allocating, patched)

    assert 2 == left.count(1)
    assert "clean" == audited(read).verdict
    assert (
        allocations(by_the_stack(preempted_after_allocating, monkeypatch))
        == allocations(by_output)
        == allocations(read)
    )


def test_blocks_allocated_between_steps_have_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start(attach)
        driver.add("r", 20, 100)
        for _ in range(4):
            driver.step()
        driver.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
        return driver

    assert (-1, -1, "") == allocations(observe(scenario, level="blocks")[1])[-1][1:4]
    assert (-1, -1, "scenario") == allocations(wrapped(scenario, monkeypatch))[-1][1:4]


def test_blocks_touched_by_hand_are_pinned_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert 2 == sum(what is ev.BlocksTouched and request < 0 for what, _, request, *_ in counted(read))
    assert "clean" == audited(read).verdict


def test_a_request_id_that_is_used_again_at_once_is_another_request() -> None:
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

    assert [0, 1, 2, 3, 4] == [call.requests[0] for call in each(read) if isinstance(call, ev.TablesRemoved)]
    assert "clean" == audited(read).verdict


def two_decoding(attach: Any = id, *, names_no_blocks: bool = False) -> Driver:
    driver = start()
    schedule = driver.scheduler.schedule

    @functools.wraps(schedule)
    def without_names(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        running = output.scheduled_cached_reqs
        running.new_block_ids = [None] * len(running.req_ids)
        return output

    if names_no_blocks:
        driver.scheduler.schedule = without_names
    attach(driver.scheduler)
    driver.add("r", 20, 100)
    driver.add("s", 30, 100)
    driver.run()
    return driver


def test_an_output_that_names_no_blocks_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, events = observe(two_decoding, level="blocks", names_no_blocks=True)

    assert "clean" == audited(events).verdict
    assert allocations(by_the_stack(two_decoding, monkeypatch)) == allocations(events)


@pytest.mark.parametrize("names_no_blocks", [False, True])
def test_deferred_steps_are_emitted_together_each_with_its_number(
    names_no_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their outputs named no blocks, so that owners are found from the tables."""
    monkeypatch.setattr("kvledger.audit.engines.steps.AT_REST_STEPS", 10**9)
    _, read = observe(two_decoding, level="blocks", names_no_blocks=names_no_blocks)
    told = [event for event in read if isinstance(event, ev.PoolCalls)]
    steps = {call.step for event in told for call in calls(event) if isinstance(call, ev.BlocksAllocated)}

    assert len(steps) > len([event for event in told if ev.IN_STEP in event.rows[::5]]) > 0
    assert "clean" == audited(read).verdict
    if not names_no_blocks:
        assert allocations(by_the_stack(two_decoding, monkeypatch)) == allocations(read)


def test_tables_that_do_not_follow_from_the_calls_are_reported_also_after_deferred_steps() -> None:
    def scenario(attach: Any = id) -> Driver:
        driver = start()
        schedule = driver.scheduler.schedule

        @functools.wraps(schedule)
        def names_another_order(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for new in output.scheduled_new_reqs:
                if new.req_id == "s":
                    new.block_ids = (new.block_ids[0][::-1],)
            return output

        driver.scheduler.schedule = names_another_order
        attach(driver.scheduler)
        driver.add("r", 30, 100)  # it gets a block in the third step, which is deferred
        for _ in range(4):
            driver.step()
        driver.add("s", 40, 100)
        driver.step()
        return driver

    _, read = observe(scenario, level="blocks")
    stated = [event for event in each(read) if isinstance(event, ev.TablesReported) and event.step == 5]

    assert [1] == [event.rows[0] for event in stated]


def test_the_pool_has_no_metrics_collector_after_the_watch() -> None:
    driver, _ = observe(two_decoding, level="blocks")

    assert driver.scheduler.kv_cache_manager.block_pool.metrics_collector is None


def test_a_pool_with_a_metrics_collector_keeps_it_and_is_wrapped() -> None:
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
    assert len(allocations(events)) == 7


def test_a_watch_whose_metrics_collector_is_replaced_fails_and_ends() -> None:
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


def test_a_block_is_cached_for_the_request_in_whose_table_it_stands() -> None:
    """A hash for more tokens than the sequence has is a violation."""
    _, events = observe(two_decoding, level="blocks")
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


def test_with_stacks_each_operation_is_recorded_at_the_call_that_made_it() -> None:
    sink = MemoryRecorder()

    def attach(scheduler: Any) -> None:
        choose(scheduler)(scheduler, sink, version="", level="blocks", stacks=True).start()

    driver = start(attach)
    driver.add("r", 20, 100)
    driver.run()
    told = [event for event in each(sink.take()) if isinstance(event, ev.BlocksAllocated | ev.BlocksCached)]
    innermost = {(type(event).__name__, (event.stack or [""])[-1].rpartition(" ")[2]) for event in told}

    assert 8 < len(told)
    assert {("BlocksAllocated", "allocate_new_blocks"), ("BlocksCached", "cache_blocks")} == innermost
