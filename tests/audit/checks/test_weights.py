"""``weights/*`` on the real scheduler: weights change while requests run, and KV of before is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.audit.checks.watched import Watched
from tests.scenarios.driving import Driver, lora

import kvledger
from kvledger.audit.conformance.engine_setup import EngineSetup
from kvledger.audit.conformance.worker import DriverWithWorker
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.events import POSSIBLE

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"asynchronous": True},
    "drafts": {"drafts": 3},
    "two groups": {"groups": ("full", "sliding")},
    "chunked prefill": {"max_batched_tokens": 32},
}

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
