"""``weights/*`` on the real scheduler: weights change while requests run, and KV of before is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.checks.false_reports import index_of
from tests.audit.checks.watched import Watched
from tests.histories import events
from tests.scenarios.driving import Driver, lora

import kvledger
from kvledger.audit.conformance.worker import DriverWithWorker
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.events import (
    ADDS_ADAPTER,
    DECLARED,
    DETECTED,
    LABELLED,
    LOOK,
    MODEL_LOADS,
    POSSIBLE,
    Delivered,
    RequestAdded,
    RequestLabels,
    WeightsChanged,
    WorkerWeights,
)
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.traffic.engine_setup import EngineSetup

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "drafts": {"drafts": 3},
    "two groups": {"groups": ("full", "sliding")},
    "chunked prefill": {"max_batched_tokens": 32},
}


def has_output_labels() -> bool:
    from vllm.v1.engine import EngineCoreOutputs

    return "weight_version" in EngineCoreOutputs.__struct_fields__


every_engine = pytest.mark.parametrize("setup", ENGINES.values(), ids=ENGINES)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def ask(driver: Driver, name: str, **options: Any) -> None:
    """A request of 100 tokens, 64 of which it shares with all others, and 6 output tokens."""
    driver.add(name, 100, 6, shares=("family", 64), **options)


def changed(driver: Driver, adapter: str = "") -> None:
    """The weights change between two steps, once nothing is in flight."""
    kvledger.mark_weights(adapter=adapter)


def used(watched: Watched, name: str) -> Any:
    return watched.audits[-1].weights(name)


def totals(watched: Watched) -> dict[str, Any]:
    audit: LiveAudit = watched.audits[-1]
    return {
        name: getattr(audit.totals, name)
        for name in ("output_tokens", "suspect_outputs", "hits", "older_hits")
    }


# --- hits -------------------------------------------------------------------------------------------------


@violates("weights/stale-hit")
@every_engine
def test_a_hit_on_blocks_of_before_the_change_is_found(watched, setup):
    driver = watched.start(**setup)
    ask(driver, "first")
    driver.run()
    changed(driver)
    ask(driver, "second")
    driver.run()

    finding = watched.finding("weights/stale-hit")

    hit = finding.tokens
    assert ("second", 0, 1, "first") == (
        finding.request,
        finding.figures["oldest"],
        finding.figures["version"],
        finding.figures["writer"],
    )
    assert 48 <= hit <= 64
    assert [(0, hit, 0, 0), (hit, 100, 1, 0)] == used(watched, "second").prompt
    assert [(0, 6)] == used(watched, "second").suspect
    assert [] == used(watched, "first").suspect
    assert {"one_version": hit} == totals(watched)["older_hits"]
    assert {"one_version": 6} == totals(watched)["suspect_outputs"]
    assert 12 == totals(watched)["output_tokens"]


@near_miss("weights/stale-hit")
@every_engine
def test_a_reset_between_the_change_and_the_hit_is_clean(watched, setup):
    driver = watched.start(**setup)
    ask(driver, "first")
    driver.run()
    changed(driver)
    assert driver.reset_prefix_cache()
    ask(driver, "second")
    driver.run()
    ask(driver, "third")
    driver.run()

    assert [] == watched.violation_ids()
    assert [] == used(watched, "third").suspect == used(watched, "third").unknown
    assert {} == totals(watched)["suspect_outputs"] == totals(watched)["older_hits"]
    assert [(0, 6, 1, 1)] == used(watched, "third").output


@violates("weights/stale-hit")
def test_blocks_computed_after_the_change_from_older_kv_are_of_older_weights(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    changed(driver)
    longer = driver.prompt("longer", 160, ("family", 64))
    driver.add("longer", longer, 2)
    driver.run()
    driver.add("again", [*longer, *range(1, 20)], 2)
    driver.run()

    watched.finding("weights/stale-hit")
    assert {"longer": 64, "again": 160} == {v.request: v.tokens for v in watched.audits[0].violations}
    assert [(0, 64, 0, 0), (64, 179, 1, 0)] == used(watched, "again").prompt


@near_miss("weights/stale-hit")
def test_a_change_of_another_adapter_is_clean(watched):
    driver = watched.start()
    ask(driver, "first", of_request=lora("sql", 1))
    driver.run()
    changed(driver, adapter="law")
    ask(driver, "second", of_request=lora("sql", 1))
    driver.run()

    assert [] == watched.violation_ids()
    assert [] == used(watched, "second").suspect


@violates("weights/stale-hit")
def test_a_change_of_the_adapter_is_found(watched):
    driver = watched.start()
    ask(driver, "first", of_request=lora("sql", 1))
    ask(driver, "plain")
    driver.run()
    changed(driver, adapter="sql")
    ask(driver, "second", of_request=lora("sql", 1))
    ask(driver, "plain again")
    driver.run()

    assert "second" == watched.finding("weights/stale-hit").request
    assert 1 == len(watched.audits[0].violations)


@violates("weights/stale-hit")
def test_a_preempted_request_that_resumes_on_its_own_blocks_is_found(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.step()
    driver.drain()
    driver.preempt("first")
    changed(driver)
    driver.run()

    finding = watched.finding("weights/stale-hit")

    assert "first" == finding.request
    assert [(1, 6)] == used(watched, "first").suspect


# --- requests that run ------------------------------------------------------------------------------------


@violates("weights/own-older-kv")
@every_engine
def test_a_request_that_goes_on_over_its_own_kv_is_found(watched, setup):
    driver = watched.start(**setup)
    driver.add("runs", 100, 40)
    for _ in range(8):
        driver.step()
    changed(driver)
    driver.run()

    assert [] == watched.violation_ids()
    drift = next(each for each in watched.audits[0].drifts if each.id == "weights/own-older-kv")
    use = used(watched, "runs")
    assert 40 == use.output_tokens
    ((start, end),) = use.suspect
    assert (0 < start < 40 or setup.get("max_batched_tokens")) and end == 40
    assert drift.tokens == end - start
    assert use.suspect_mask().sum() == end - start


@near_miss("weights/own-older-kv")
def test_a_request_that_computes_all_of_its_kv_again_is_clean(watched):
    driver = watched.start()
    driver.add("runs", 100, 40)
    for _ in range(8):
        driver.step()
    changed(driver)
    assert driver.reset_prefix_cache(running=True)
    driver.run()

    assert [] == watched.violation_ids()
    assert [] == [each for each in watched.audits[0].drifts if each.id.startswith("weights/")]
    assert [] == used(watched, "runs").suspect


@near_miss("weights/own-older-kv")
def test_a_request_that_ended_before_the_change_is_clean(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    changed(driver)
    ask(driver, "second")

    assert [] == used(watched, "first").suspect
    assert [(0, 6, 0, 0)] == used(watched, "first").output


def test_a_step_in_flight_keeps_the_weights_that_it_was_scheduled_under(watched):
    driver = watched.start(asynchronous=True)
    driver.add("runs", 100, 20)
    for _ in range(5):
        driver.step()
    in_flight = len(driver.in_flight)
    changed(driver)
    before = len(driver.delivered["runs"])
    driver.run()

    assert [(before + in_flight, 20)] == used(watched, "runs").suspect


# --- resets -----------------------------------------------------------------------------------------------


@violates("weights/reset-refused")
def test_a_refused_reset_before_a_hit_is_found(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.step()
    changed(driver)
    assert not driver.reset_prefix_cache()
    ask(driver, "second")
    driver.run()

    assert "second" == watched.finding("weights/reset-refused").request


@near_miss("weights/reset-refused")
def test_a_refused_reset_that_is_repeated_in_time_is_clean(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.step()
    changed(driver)
    assert not driver.reset_prefix_cache()
    driver.run()
    assert driver.reset_prefix_cache()
    ask(driver, "second")
    driver.run()

    assert [] == watched.violation_ids()


@near_miss("weights/reset-refused")
def test_a_refused_reset_without_a_change_is_clean(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.step()
    assert not driver.reset_prefix_cache()
    ask(driver, "second")
    driver.run()

    assert [] == watched.violation_ids()


# --- stores -----------------------------------------------------------------------------------------------


def stored(watched: Watched, folder: Path) -> DriverWithWorker:
    """An engine with a connector whose store has 96 tokens of "first", and an empty prefix cache."""
    options = (("shared_storage_path", str(folder)),)
    driver = DriverWithWorker(EngineSetup(connector="ExampleConnector", connector_options=options))
    watched.attach(driver.scheduler)
    driver.add("first", 99, 1)
    driver.run()
    return driver


@violates("weights/stale-load")
def test_a_load_of_kv_that_was_saved_before_the_change_is_found(watched, tmp_path):
    driver = stored(watched, tmp_path)
    changed(driver)
    assert driver.reset_prefix_cache()
    driver.add("again", 99, 2, shares=("first", 99))
    driver.run()

    finding = watched.finding("weights/stale-load")
    assert ("again", 96, 0, 1) == (
        finding.request,
        finding.tokens,
        finding.figures["oldest"],
        finding.figures["version"],
    )
    assert [(0, 2)] == used(watched, "again").suspect


@near_miss("weights/stale-load")
def test_a_load_of_kv_that_was_saved_after_the_change_is_clean(watched, tmp_path):
    driver = stored(watched, tmp_path)
    changed(driver)
    assert driver.reset_prefix_cache()
    driver.add("second", 99, 1)
    driver.run()
    assert driver.reset_prefix_cache()
    driver.add("again", 99, 2, shares=("second", 99))
    driver.run()

    assert [] == watched.violation_ids()
    assert [(0, 99, 1, 1)] == used(watched, "again").prompt


@pytest.mark.parametrize("handed_over", [True, False])
def test_kv_that_a_prefill_engine_handed_over_is_of_unknown_weights(watched, tmp_path, handed_over):
    """This engine's weights never changed. Those of the other one may have; its own store is as it was."""
    driver = stored(watched, tmp_path)
    assert driver.reset_prefix_cache()
    transfer = {"do_remote_prefill": True} if handed_over else None
    driver.add("loads", 99, 2, shares=("first", 99), transfer=transfer)
    driver.run()
    driver.add("hits", 99, 2, shares=("first", 99))
    driver.add("neither", 40, 2)
    driver.run()

    rows = [(0, 96, -1, -1), (96, 99, 0, -1)] if handed_over else [(0, 99, 0, 0)]
    for name in ("loads", "hits"):
        assert (rows, [(0, 2)] if handed_over else []) == (
            used(watched, name).prompt,
            used(watched, name).unknown,
        )
        assert [(0, 2, 0, -1 if handed_over else 0)] == used(watched, name).output
    assert [(0, 40, 0, 0)] == used(watched, "neither").prompt and [] == used(watched, "neither").unknown
    assert [] == watched.violation_ids()


@near_miss("weights/stale-load")
def test_a_load_of_kv_that_another_engine_saved_is_not_known(watched, tmp_path):
    stored(watched, tmp_path)
    driver = stored(watched, tmp_path)
    changed(driver)
    driver.add("second", 99, 1, shares=("first", 99))
    driver.reset_prefix_cache()
    watched.audits[-1].ledger.blocks.saved_weights.clear()
    driver.run()

    assert [] == watched.violation_ids()
    assert [(0, 1)] == used(watched, "second").unknown


# --- what is not known ------------------------------------------------------------------------------------


@near_miss("weights/stale-hit")
def test_at_level_tokens_a_hit_after_a_change_is_not_known(watched):
    watched.attach = lambda scheduler: watched.audits.append(kvledger.attach(scheduler))  # type: ignore
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    changed(driver)
    ask(driver, "second")
    driver.run()

    assert [] == watched.violation_ids()
    assert [(0, 6)] == used(watched, "second").unknown
    assert {"age_not_known": 64} == totals(watched)["older_hits"]


@near_miss("weights/stale-hit")
def test_after_a_call_that_may_have_changed_weights_nothing_is_known_of_older_kv(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    call = watched.audits[0]._observer.weights.changed
    call("scale", POSSIBLE)
    ask(driver, "second")
    driver.run()
    call("check", POSSIBLE, equal=True)
    driver.reset_prefix_cache()
    ask(driver, "third")
    driver.run()

    assert [] == watched.violation_ids()
    assert [(0, 6)] == used(watched, "second").unknown
    assert [] == used(watched, "third").unknown == used(watched, "third").suspect


@violates("weights/stale-hit")
def test_a_call_that_may_have_changed_weights_hides_no_change_before_it(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    changed(driver)
    ask(driver, "other", of_request=lora("sql", 1))
    driver.run()
    watched.audits[0]._observer.weights.changed("scale", POSSIBLE)
    ask(driver, "second")
    driver.run()

    assert "second" == watched.finding("weights/stale-hit").request
    assert {"one_version": 64} == totals(watched)["older_hits"]


def look(watched: Watched, *, equal: bool) -> None:
    """Look at samples of the weights, as level content does between two steps."""
    watched.audits[0]._observer.weights.changed(LOOK, DETECTED, equal=equal)


@violates("weights/stale-hit")
@every_engine
def test_a_change_that_a_look_finds_took_place_at_an_unknown_time_since_the_last_look(watched, setup):
    driver = watched.start(**setup)
    look(watched, equal=True)
    ask(driver, "before")
    driver.run()
    look(watched, equal=True)
    ask(driver, "between")
    driver.run()
    assert [] == used(watched, "between").unknown
    ask(driver, "running")
    driver.step()
    look(watched, equal=False)
    driver.run()
    ask(driver, "after")
    driver.run()

    hit = watched.finding("weights/stale-hit")

    assert ("after", 0, 1) == (hit.request, hit.figures["oldest"], hit.figures["version"])
    assert [] == used(watched, "before").unknown == used(watched, "before").suspect
    assert [(0, 6)] == used(watched, "between").unknown
    assert [(0, 6, -1, 0)] == used(watched, "between").output
    running = used(watched, "running")
    assert (running.suspect_mask() | running.unknown_mask()).all()
    assert [(0, 6)] == used(watched, "after").suspect
    hits = totals(watched)["older_hits"]
    assert {"one_version": hit.tokens, "age_not_known": 2 * hit.tokens} == hits
    assert 18 == sum(totals(watched)["suspect_outputs"].values())


@near_miss("weights/stale-hit")
@every_engine
def test_looks_that_find_no_change_are_clean(watched, setup):
    driver = watched.start(**setup)
    for name in ("first", "second"):
        look(watched, equal=True)
        ask(driver, name)
        for _ in range(3):
            driver.step()
            look(watched, equal=True)
        driver.run()

    assert [] == watched.violation_ids()
    assert [(0, 100, 0, 0)] == used(watched, "second").prompt
    assert [(0, 6, 0, 0)] == used(watched, "second").output
    assert {} == totals(watched)["suspect_outputs"] == totals(watched)["older_hits"]
    assert 0 == watched.audits[0].ledger.weights.version


def test_kv_that_is_not_known_is_old_for_certain_after_the_next_change(watched):
    driver = watched.start()
    look(watched, equal=True)
    ask(driver, "between")
    driver.run()
    look(watched, equal=False)
    changed(driver)
    driver.add("other", 100, 2)
    driver.run()
    changed(driver)
    ask(driver, "after")
    driver.run()

    assert -1 == watched.finding("weights/stale-hit").figures["oldest"]
    assert [(0, 6)] == used(watched, "after").suspect


def test_changes_without_a_step_between_are_one_version(watched):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    for _ in range(3):
        changed(driver)
    ask(driver, "second")
    driver.run()

    assert 1 == watched.finding("weights/stale-hit").figures["version"]
    assert {"one_version": 6} == totals(watched)["suspect_outputs"]


# --- what the engine's output says ------------------------------------------------------------------------


def labelled(watched: Watched, label: str) -> None:
    """The caller names the present weights, as `finish_weight_update` does."""
    watched.audits[0]._observer.weights.changed("set_weight_version", LABELLED, label=label)


def spans_found(watched: Watched) -> list[Any]:
    watched.violation_ids()
    return [each for each in watched.audits[0].drifts if each.id == "weights/span"]


@violates("weights/span")
@pytest.mark.skipif(not has_output_labels(), reason="this release labels no output")
@every_engine
def test_a_span_of_new_weights_over_older_kv_is_found(watched, setup):
    driver = watched.start(**setup)
    ask(driver, "first")
    driver.run()
    changed(driver)
    labelled(watched, "step 2")
    ask(driver, "second")
    driver.run()

    (drift,) = spans_found(watched)
    assert ("second", "step 2", 0, 6, 6) == (
        drift.request,
        *(drift.figures[name] for name in ("label", "start", "end", "tokens")),
    )


@violates("weights/span")
@pytest.mark.skipif(not has_output_labels(), reason="this release labels no output")
def test_the_span_that_begins_in_a_running_request_is_found(watched):
    driver = watched.start()
    driver.add("runs", 100, 20)
    for _ in range(8):
        driver.step()
    labelled(watched, "step 1")
    for _ in range(4):
        driver.step()
    driver.drain()
    before = len(driver.delivered["runs"])
    changed(driver)
    labelled(watched, "step 2")
    driver.run()

    (drift,) = spans_found(watched)
    figures = [drift.figures[name] for name in ("label", "start", "end", "tokens")]
    assert ["step 2", before, 20, 20 - before] == figures


@near_miss("weights/span")
@pytest.mark.parametrize("label", ["step 2", ""])
def test_a_span_over_kv_of_the_same_weights_or_without_a_label_is_clean(watched, label):
    driver = watched.start()
    ask(driver, "first")
    driver.run()
    changed(driver)
    if label:
        labelled(watched, label)
        driver.reset_prefix_cache()
    ask(driver, "second")
    driver.run()

    assert [] == spans_found(watched)


# --- workers ----------------------------------------------------------------------------------------------

Outcome = tuple[bool, bool | None]
"""Whether a worker's call raised, and whether its weights are equal by a digest."""


def with_calls(folder: Path, kind: str, by: str, calls: int, used: str = "", changed: str = "") -> int:
    """Write the journal of an engine that asks its workers so often between two steps. Returns the time.

    ``used``: the adapter of its request. ``changed``: the adapter that the calls change.
    """
    stream = [
        replace(each, labels=RequestLabels(lora=used)) if isinstance(each, RequestAdded) else each
        for each in events(200, "A0+0 s200 o+ (s1 o+)x3 F")
    ]
    place = index_of(stream, Delivered, 1) + 1
    at = stream[place - 1].at
    asked = [WeightsChanged(at, 2, 1, by, kind, adapter=changed, call=n + 1) for n in range(calls)]
    recorded = [*stream[:place], *asked, *stream[place:]]
    journals.write(folder / "engine-1-7-0", recorded, configuration={"engine_key": "k"})
    return at


def of_worker(folder: Path, rank: int, *recorded: WorkerWeights) -> None:
    """Write the journal of one of its workers."""
    configuration = {"engine_key": "k", "rank": rank}
    journals.write(folder / f"worker-1-{8 + rank}-0", recorded, configuration=configuration)


def two_workers(
    folder: Path, *calls: tuple[Outcome | None, Outcome | None], by: str = "reload_weights", **adapters: str
) -> list[Any]:
    """The findings about an engine that asks two workers for calls, which have these outcomes on each."""
    at = with_calls(folder, DECLARED, by, len(calls), **adapters)
    for rank in (0, 1):
        made = [(number, outcomes[rank]) for number, outcomes in enumerate(calls, 1)]
        recorded = [WorkerWeights(at, rank, by, number, *of) for number, of in made if of]
        of_worker(folder, rank, *recorded)
    return [each for each in audit_paths([folder]).violations if each.id == "weights/workers-differ"]


@violates("weights/workers-differ")
@pytest.mark.parametrize(
    ("first", "second", "why"),
    [((False, None), (True, None), "raised"), ((False, False), (False, True), "left theirs")],
    ids=["it raises on one", "it changes nothing on one"],
)
def test_a_call_that_one_worker_did_not_carry_out_is_found(tmp_path, first, second, why):
    (finding,) = two_workers(tmp_path, (first, second))

    assert ([0], [1]) == (finding.figures["with_new"], finding.figures["without"])
    assert why in finding.message


@near_miss("weights/workers-differ")
@pytest.mark.parametrize(
    "calls",
    [
        [((False, None), (True, None)), ((False, None), (False, None))],
        [((True, None), (True, None))],
        [((False, False), (False, False))],
        [((False, True), (False, True))],
        [((False, False), (False, None))],
        [((True, None), None)],
    ],
    ids=["repeated", "raised on both", "changed on both", "equal on both", "no digest", "one has no journal"],
)
def test_workers_that_hold_the_weights_of_the_same_calls_are_clean(tmp_path, calls):
    assert [] == two_workers(tmp_path, *calls)


FAILED_ON_ONE = (False, None), (True, None)


@violates("weights/workers-differ")
def test_an_adapter_that_one_worker_could_not_replace_is_found(tmp_path):
    (finding,) = two_workers(tmp_path, FAILED_ON_ONE, by=ADDS_ADAPTER, used="sql", changed="sql")

    assert ([0], [1]) == (finding.figures["with_new"], finding.figures["without"])


@near_miss("weights/workers-differ")
@pytest.mark.parametrize("used", ["", "law"])
def test_an_adapter_that_workers_differ_in_harms_no_request_without_it(tmp_path, used):
    assert [] == two_workers(tmp_path, FAILED_ON_ONE, by=ADDS_ADAPTER, used=used, changed="sql")


def test_a_function_in_which_a_workers_model_loads_weights_changes_them(tmp_path):
    at = with_calls(tmp_path, POSSIBLE, "sync", 1)
    assert {POSSIBLE: 1} == audit_paths([tmp_path]).engines[0].auditor.ledger.sums.weights_changes
    of_worker(tmp_path, 1, WorkerWeights(at, 1, MODEL_LOADS, 1, False))
    assert {DECLARED: 1} == audit_paths([tmp_path]).engines[0].auditor.ledger.sums.weights_changes
