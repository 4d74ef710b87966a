"""The driver puts a real scheduler into each state that scenarios need, by the engine's own figures."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start
from vllm.v1.request import RequestStatus

from kvledger.audit.traffic.driver import Driver, tokens
from kvledger.audit.traffic.script import Op


def connector_calls(driver: Driver, kind: str) -> list[Any]:
    return [call for call in driver.connector.script.calls if type(call).__name__ == kind]


def prefill_split(driver: Driver, request_id: str) -> tuple[int, int, int]:
    """The engine-reported split of a prompt: local, external and computed tokens."""
    stats = driver.prefill_stats(request_id)
    return (stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens)


def finish_reason(driver: Driver, request_id: str) -> Any:
    return driver.delivered[request_id][-1].finish_reason


def test_a_longer_prompt_of_a_family_continues_the_shorter() -> None:
    assert tokens(40, "a") == tokens(100, "a")[:40]
    assert tokens(40, "a") != tokens(40, "b")


def test_the_same_seed_gives_the_same_run() -> None:
    def output_lengths() -> list[int]:
        driver = start(drafts=3)
        driver.add("r", 40, 30)
        driver.run()
        return [len(output.new_token_ids) for output in driver.delivered["r"]]

    assert output_lengths() == output_lengths()


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer"])
def test_only_a_producer_drops_the_output_in_flight_on_preemption(kv_role: str) -> None:
    driver = start(asynchronous=True, connector="scripted", kv_role=kv_role)
    r = driver.add("r", 40, 8)
    driver.schedule()
    driver.preempt("r")

    assert r.drop_stale_output == (kv_role == "kv_both")


def test_blocks_of_an_aborted_request_stay_allocated_until_its_load_ends() -> None:
    driver = start(connector="scripted")
    pool = driver.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    driver.connector.answer_lookups("r", (96, True))
    driver.add("r", 150)
    driver.step()
    driver.abort("r")

    assert free - 6 == pool.get_num_free_blocks()
    driver.schedule()
    driver.output(finished_recving=["r"])
    assert free == pool.get_num_free_blocks()


def test_a_synchronous_external_hit_covers_whole_blocks() -> None:
    driver = start(connector="scripted")
    driver.connector.store("r", 170)
    driver.add("r", 200, 1)
    driver.run()

    assert prefill_split(driver, "r") == (0, 160, 40)
    (metadata,) = connector_calls(driver, "PlannedLoads")
    assert [(load.request_id, load.external_tokens) for load in metadata.loads] == [("r", 160)]


def test_the_runner_rejects_a_finished_load_that_no_step_ordered() -> None:
    driver = start(connector="scripted")
    driver.add("r", 50)
    driver.schedule()

    with pytest.raises(AssertionError, match="no step ordered a load"):
        driver.output(finished_recving=["r"])


@pytest.mark.parametrize("load", [160, (160, True)], ids=["synchronous", "asynchronous"])
def test_a_failed_load_fails_the_request_under_the_fail_policy(load: Any) -> None:
    driver = start(connector="scripted", load_failure_policy="fail")
    driver.connector.answer_lookups("r", load)
    r = driver.add("r", 200, 2)
    driver.schedule()
    received = ["r"] if isinstance(load, tuple) else []
    driver.output(invalid_blocks=driver.blocks("r")[4:10], finished_recving=received)

    assert r.status == RequestStatus.FINISHED_ERROR


def test_blocks_of_a_finished_request_stay_allocated_until_sent() -> None:
    driver = start(connector="scripted")
    driver.connector.script.delay_free.add("r")
    driver.add("r", 40, 1)
    driver.step()
    assert driver.connector.held == {"r"}
    driver.run()

    assert not driver.connector.held
    assert not driver.scheduler.requests


# --- scripts --------------------------------------------------------------------------------------------


class OfNames(Driver):
    """A driver of scripts whose requests have 40 tokens and generate 3."""

    def come(self, name: str) -> None:
        self.add(name, 40, 3)


def carried_out(driver: Driver, *ops: Op) -> Driver:
    for op in ops:
        driver.carry_out(op)
    return driver


STEP = (Op("schedule"), Op("output"))


def test_a_script_is_carried_out_operation_by_operation() -> None:
    driver = carried_out(OfNames(), Op("add", "a"), *STEP, Op("reset"), *STEP, *STEP)

    assert 3 == len(driver.delivered["a"])
    assert not driver.scheduler.requests


def test_what_makes_no_sense_in_a_script_is_skipped() -> None:
    """An abort, a chunk and a close of a request that is not open, an output and a schedule of nothing."""
    nothing = (Op("abort", "a"), Op("chunk", "a"), Op("close", "a"), Op("preempt", "a"), Op("output"))
    driver = carried_out(OfNames(), *nothing, Op("schedule"))

    assert not driver.in_flight
    carried_out(driver, Op("add", "a"), Op("abort", "a"), *nothing)
    assert not driver.scheduler.requests


def test_a_repeat_is_so_many_steps() -> None:
    driver = carried_out(OfNames(), Op("add", "a"), Op("repeat", count=2))

    assert 2 == len(driver.delivered["a"])


@pytest.mark.parametrize(("recorded", "empty"), [(False, 1), (True, 0)])
def test_only_a_recording_has_empty_steps_of_which_it_does_not_tell(recorded: bool, empty: int) -> None:
    """`a` waits for its load in an empty step."""
    driver = start(connector="scripted")
    driver.recorded = recorded
    driver.connector.answer_lookups("a", (32, True))
    driver.add("a", 40, 1)
    carried_out(driver, Op("schedule"))
    assert not driver.in_flight[0].scheduled.total_num_scheduled_tokens
    carried_out(driver, Op("reset"))

    assert empty == len(driver.in_flight)


def test_a_recording_is_told_of_the_output_of_an_empty_step() -> None:
    driver = start(connector="scripted")
    driver.recorded = True
    driver.connector.answer_lookups("a", (32, True))
    driver.add("a", 40, 1)
    carried_out(driver, Op("schedule", count=1), Op("reset"))

    assert 1 == len(driver.in_flight)
    carried_out(driver, Op("output", loaded=("a",), count=1), Op("schedule"), Op("output"))
    assert 1 == len(driver.delivered["a"])
