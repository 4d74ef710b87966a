"""The driver puts a real scheduler into each state that scenarios need, by the engine's own figures."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start
from vllm.v1.engine import FinishReason
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


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_leaves_the_engine_idle(name: str) -> None:
    driver = SCENARIOS[name]()

    pool = driver.scheduler.kv_cache_manager.block_pool
    assert not driver.scheduler.requests
    assert not driver.in_flight
    assert not driver.runner.loading
    assert driver.setup.blocks - 1 == pool.get_num_free_blocks()  # one is the null block


def test_a_longer_prompt_of_a_family_continues_the_shorter() -> None:
    assert tokens(40, "a") == tokens(100, "a")[:40]
    assert tokens(40, "a") != tokens(40, "b")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_computes_its_whole_prompt_and_stops_at_its_length(asynchronous: bool) -> None:
    driver = start(asynchronous=asynchronous)
    r = driver.add("r", 100, 5)
    driver.run()

    assert prefill_split(driver, "r") == (0, 0, 100)
    assert r.num_output_tokens == 5
    assert r.num_computed_tokens == 104
    assert finish_reason(driver, "r") is FinishReason.LENGTH


def test_a_request_stops_at_its_stop_token() -> None:
    driver = start()
    r = driver.add("r", 10, 50, stop_at=3)
    driver.run()

    assert r.num_output_tokens == 3
    assert finish_reason(driver, "r") is FinishReason.STOP


def test_the_same_seed_gives_the_same_run() -> None:
    def output_lengths() -> list[int]:
        driver = start(drafts=3)
        driver.add("r", 40, 30)
        driver.run()
        return [len(output.new_token_ids) for output in driver.delivered["r"]]

    assert output_lengths() == output_lengths()


def test_a_shared_prefix_hits_in_whole_blocks() -> None:
    driver = start()
    driver.add("a", 100, 1)
    driver.run()
    driver.add("b", 100, 1, shares=("a", 70))
    driver.run()

    assert prefill_split(driver, "b") == (64, 0, 36)


def test_only_the_last_prefill_chunk_samples() -> None:
    driver = start(max_batched_tokens=64)
    r = driver.add("r", 150, 2)

    for computed, sampled in ((64, 0), (128, 0), (150, 1)):
        driver.step()
        assert (r.num_computed_tokens, r.num_output_tokens) == (computed, sampled)


def test_a_request_is_preempted_in_prefill_when_blocks_run_out() -> None:
    driver = start(blocks=12, max_batched_tokens=64)
    driver.add("early", 96, 30)
    late = driver.add("late", 96, 4)
    while not late.num_preemptions:
        before = late.num_computed_tokens
        driver.step()
    assert 0 < before < late.num_prompt_tokens
    assert late.num_output_tokens == 0
    driver.run()

    assert prefill_split(driver, "late") == (0, 0, 96)
    assert finish_reason(driver, "late") is FinishReason.LENGTH


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_is_preempted_in_decode_when_blocks_run_out(asynchronous: bool) -> None:
    driver = start(blocks=13, asynchronous=asynchronous)
    driver.add("early", 64, 60)
    late = driver.add("late", 64, 60)
    while not late.num_preemptions:
        driver.step()
    assert late.num_output_tokens > 0
    driver.run()

    assert late.num_preemptions == 1
    assert late.num_output_tokens == 60


@pytest.mark.parametrize(("drop", "tokens_out"), [(False, 2), (True, 1)])
def test_a_forced_preemption_delivers_or_drops_the_output_in_flight(drop: bool, tokens_out: int) -> None:
    driver = start(asynchronous=True)
    r = driver.add("r", 40, 8)
    driver.schedule()
    driver.output()
    driver.schedule()
    driver.preempt("r", drop=drop)

    assert r.status == RequestStatus.PREEMPTED
    assert r.num_stale_output_tokens == 1
    driver.output()
    assert r.num_output_tokens == tokens_out
    driver.run()
    assert r.num_output_tokens == 8


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer"])
def test_only_a_producer_drops_the_output_in_flight_on_preemption(kv_role: str) -> None:
    driver = start(asynchronous=True, connector="scripted", kv_role=kv_role)
    r = driver.add("r", 40, 8)
    driver.schedule()
    driver.preempt("r")

    assert r.drop_stale_output == (kv_role == "kv_both")


def test_a_request_aborted_while_waiting_computes_nothing() -> None:
    driver = start()
    r = driver.add("r", 40)
    driver.abort("r")

    assert r.status == RequestStatus.FINISHED_ABORTED
    assert r.num_computed_tokens == 0


def test_a_request_aborted_in_prefill_has_no_output() -> None:
    driver = start(max_batched_tokens=64)
    r = driver.add("r", 100)
    driver.step()
    driver.abort("r")

    assert (r.num_computed_tokens, r.num_output_tokens) == (64, 0)


def test_output_in_flight_at_an_abort_is_discarded() -> None:
    driver = start(asynchronous=True)
    r = driver.add("r", 40)
    driver.step()
    driver.step()
    driver.abort("r")
    driver.run()

    assert r.num_output_tokens == 1


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


def test_async_scheduling_runs_one_step_ahead() -> None:
    driver = start(asynchronous=True)
    r = driver.add("r", 40, 4)

    assert driver.step() == {}
    assert (r.num_computed_tokens, r.num_output_placeholders) == (40, 1)
    driver.step()
    assert len(driver.in_flight) == 1
    assert (r.num_computed_tokens, r.num_output_placeholders, r.num_output_tokens) == (41, 1, 1)


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_rejected_drafts_are_rolled_back(drafter: str) -> None:
    driver = start(drafts=3, drafter=drafter)
    r = driver.add("r", 50, 40)
    driver.step()
    for accepted, computed in ((1, 52), (0, 53), (3, 57)):
        driver.step(accepted=accepted)
        assert r.num_computed_tokens == computed


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_rejected_drafts_are_rolled_back_under_async_scheduling(drafter: str) -> None:
    driver = start(drafts=3, drafter=drafter, asynchronous=True)
    r = driver.add("r", 50, 40)
    driver.step()
    driver.step()
    assert (r.num_computed_tokens, r.num_output_placeholders) == (54, 4)
    driver.step(accepted=1)

    # Two steps of four tokens each. Of the first step, two tokens are confirmed and two rejected.
    assert (r.num_computed_tokens, r.num_output_placeholders, r.num_output_tokens) == (56, 4, 3)


def test_a_synchronous_external_hit_covers_whole_blocks() -> None:
    driver = start(connector="scripted")
    driver.connector.store("r", 170)
    driver.add("r", 200, 1)
    driver.run()

    assert prefill_split(driver, "r") == (0, 160, 40)
    (metadata,) = connector_calls(driver, "PlannedLoads")
    assert [(load.request_id, load.external_tokens) for load in metadata.loads] == [("r", 160)]


def test_an_asynchronous_external_hit_waits_for_remote_kv() -> None:
    driver = start(connector="scripted")
    driver.connector.answer_lookups("r", (160, True))
    r = driver.add("r", 200, 2)
    for _ in range(3):
        driver.step()
        assert r.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert r.num_computed_tokens == 160
    driver.step(finished_recving=["r"])
    driver.step()

    assert r.status == RequestStatus.RUNNING
    assert r.num_computed_tokens == 200


def test_the_runner_rejects_a_finished_load_that_no_step_ordered() -> None:
    driver = start(connector="scripted")
    driver.add("r", 50)
    driver.schedule()

    with pytest.raises(AssertionError, match="no step ordered a load"):
        driver.output(finished_recving=["r"])


def test_a_deferred_lookup_is_repeated() -> None:
    driver = start(connector="scripted")
    driver.connector.answer_lookups("r", None, None, 32)
    driver.add("r", 50, 1)
    driver.run()

    assert [None, None, 32] == [lookup.answer[0] for lookup in connector_calls(driver, "LookupCall")]


def test_a_full_external_hit_recomputes_the_last_token() -> None:
    driver = start(connector="scripted")
    driver.connector.store("r", 96, asynchronous=True)
    driver.add("r", 96, 1)
    driver.step(finished_recving=["r"])

    assert {"r": 1} == driver.schedule().num_scheduled_tokens


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_of_a_failed_synchronous_load_are_recomputed(asynchronous: bool) -> None:
    driver = start(connector="scripted", asynchronous=asynchronous)
    driver.connector.answer_lookups("r", 160)
    r = driver.add("r", 200, 2)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:10])

    assert r.num_computed_tokens == 64
    assert r.num_output_tokens == 0
    # In 0.32 and 0.33 the async scheduler keeps the failed step's output placeholder.
    leaked = r.num_output_placeholders
    assert {"r": 136 + leaked} == driver.schedule().num_scheduled_tokens


@pytest.mark.parametrize(("first_bad", "scheduled"), [(4, 136), (0, 200)])
def test_tokens_of_a_failed_asynchronous_load_are_recomputed(first_bad: int, scheduled: int) -> None:
    driver = start(connector="scripted")
    driver.connector.answer_lookups("r", (160, True))
    driver.add("r", 200, 2)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[first_bad:], finished_recving=["r"])

    assert {"r": scheduled} == driver.schedule().num_scheduled_tokens


@pytest.mark.parametrize("load", [160, (160, True)], ids=["synchronous", "asynchronous"])
def test_a_failed_load_fails_the_request_under_the_fail_policy(load: Any) -> None:
    driver = start(connector="scripted", load_failure_policy="fail")
    driver.connector.answer_lookups("r", load)
    r = driver.add("r", 200, 2)
    driver.schedule()
    received = ["r"] if isinstance(load, tuple) else []
    driver.output(invalid_blocks=driver.blocks("r")[4:10], finished_recving=received)

    assert r.status == RequestStatus.FINISHED_ERROR


def test_a_load_that_fails_as_a_whole_is_recomputed() -> None:
    driver = start(connector="scripted", groups=("full", "sliding"), blocks=128)
    driver.connector.answer_lookups("r", (160, True))
    driver.add("r", 200, 2)
    driver.schedule()
    driver.output(failed_recving=["r"])

    assert {"r": 200} == driver.schedule().num_scheduled_tokens


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prefix_cache_reset_preempts_a_running_request(asynchronous: bool) -> None:
    driver = start(asynchronous=asynchronous)
    r = driver.add("r", 50, 8)
    for _ in range(3):
        driver.step()
    assert driver.reset_prefix_cache(running=True)

    assert r.num_preemptions == 1
    assert {"r": r.num_tokens} == driver.schedule().num_scheduled_tokens
    driver.run()
    assert r.num_output_tokens == 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_session_keeps_its_kv_between_chunks(asynchronous: bool) -> None:
    driver = start(asynchronous=asynchronous)
    s = driver.add("s", 40, 4, resumable=True)
    driver.run()
    assert s.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert s.num_computed_tokens == 43

    driver.add("s", 30, 4, resumable=True)
    assert s.num_prompt_tokens == 73  # the last output token is discarded
    assert {"s": 30} == driver.schedule().num_scheduled_tokens
    driver.drain()
    driver.run()
    driver.close("s")
    assert s.is_finished()


def test_a_pooling_request_computes_its_prompt_and_samples_nothing() -> None:
    driver = start(pooling=True, max_batched_tokens=64)
    r = driver.add("r", 100)
    driver.run()

    assert r.num_output_tokens == 0
    assert r.num_computed_tokens == 100
    assert driver.delivered["r"][-1].pooling_output is not None


def test_the_request_of_lowest_priority_is_preempted() -> None:
    driver = start(policy="priority", blocks=13)
    low = driver.add("low", 64, 60, priority=9)
    driver.step()
    high = driver.add("high", 64, 60, priority=0)
    driver.run()

    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_blocks_outside_the_sliding_window_are_freed() -> None:
    driver = start(groups=("full", "sliding"), blocks=64, sliding_window=32, max_batched_tokens=64)
    driver.add("r", 200, 2)
    for _ in range(4):
        driver.step()

    full, sliding = driver.blocks("r", 0), driver.blocks("r", 1)
    assert len(full) == len(sliding) == 13
    assert 0 not in full
    assert sliding.count(0) >= 8  # the null block replaces each freed block


def test_blocks_of_a_finished_request_stay_allocated_until_sent() -> None:
    driver = start(connector="scripted")
    driver.connector.script.delay_free.add("r")
    driver.add("r", 40, 1)
    driver.step()
    assert driver.connector.held == {"r"}
    driver.run()

    assert not driver.connector.held
    assert not driver.scheduler.requests


def test_a_request_without_drafts_gets_padding_drafts() -> None:
    """A request whose first step computes one token gets drafts of -1, and none is accepted."""
    driver = start(drafts=3, connector="scripted")
    driver.connector.store("r", 96, asynchronous=True)
    r = driver.add("r", 96, 5)
    driver.step(finished_recving="all")

    assert driver.schedule().scheduled_spec_decode_tokens == {"r": [-1, -1, -1]}
    driver.output()
    assert (r.num_computed_tokens, r.num_output_tokens) == (96, 1)


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
