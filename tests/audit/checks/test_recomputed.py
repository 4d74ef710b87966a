"""The check on blocks that are computed more than once, where the KV follows from the tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from tests.scenarios import driving
from tests.scenarios.prefix_runner import DriverWithPrefixes, attach_sketches

from kvledger.audit.engines.content.options import SKETCH
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.ledger.content_postings import APART, THRESHOLD, distance
from kvledger.audit.ledger.ledger_state import DIGITS_KEPT, Computation, SketchState

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

PROMPT, OUTPUT = 64, 8
BLOCKS = 12
"""So few that the blocks of one request are evicted by the next one's."""


@pytest.fixture(autouse=True)
def sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "Driver", DriverWithPrefixes)
    monkeypatch.setenv(SKETCH, "1")


def start(**setup: Any) -> tuple[Any, LiveAudit]:
    audits: list[LiveAudit] = []
    driver = driving.start(lambda scheduler: audits.append(attach_sketches(scheduler)), **setup)
    return driver, audits[0]


def compute_again(driver: Any, *, wrong: bool = False) -> None:
    """Compute a prompt, evict its blocks, and compute it again for another request."""
    driver.add("first", PROMPT, OUTPUT)
    driver.run()
    driver.add("between", 160, OUTPUT)
    driver.run()
    if wrong:
        driver.scheduler.kv_runner.wrong.add("second")
    driver.add("second", PROMPT, OUTPUT, shares=("first", PROMPT))
    driver.run()


def found(audit: LiveAudit) -> list[Any]:
    audit.detach()
    return [each for each in (*audit.violations, *audit.drifts) if each.id.startswith("content/")]


@violates("content/recomputed")
def test_a_wrong_computation_is_a_drift_that_names_both_computations() -> None:
    driver, audit = start(blocks=BLOCKS)
    compute_again(driver, wrong=True)

    (drift,) = found(audit)
    assert ("content/recomputed", "drift", "second") == (drift.id, drift.severity, drift.request)
    assert drift.message.startswith("Request second computed 4 blocks in step ")
    assert "request first had filled block" in drift.message
    assert float(drift.figures["distance"]) > 0.5
    assert "computed before in step 1: block" in drift.story[-1]
    assert "clean" == audit.verdict
    assert (4, 4) == (audit.ledger.sums.recomputed.compared, audit.ledger.sums.recomputed.differed)


@near_miss("content/recomputed")
def test_a_computation_in_other_chunks_differs_by_rounding() -> None:
    driver, audit = start(blocks=BLOCKS, max_batched_tokens=48)
    compute_again(driver)

    assert [] == found(audit)
    assert 4 == audit.ledger.sums.recomputed.compared
    assert 0 < audit.ledger.sums.recomputed.largest < 0.02


@near_miss("content/recomputed")
def test_two_requests_compute_one_prompt_in_the_same_step() -> None:
    driver, audit = start()
    driver.add("first", PROMPT, OUTPUT)
    driver.step()
    for name in ("second", "third"):  # a request that may not read the cache
        driver.add(name, PROMPT, OUTPUT, shares=("first", PROMPT), prompt_logprobs=True)
    driver.run()

    assert [] == found(audit)
    assert audit.ledger.sums.recomputed.compared >= 8


def with_failed_load(asynchronous: bool) -> tuple[Any, LiveAudit]:
    """A load fails for a prompt that was computed before: the step computes 2 blocks over garbage."""
    driver, audit = start(connector="scripted", blocks=16, asynchronous=asynchronous)
    driver.add("first", 200, 3)
    driver.run()
    driver.add("between", 230, 3)
    driver.run()
    driver.connector.answer_lookups("second", 160)
    driver.add("second", 200, 3, shares=("first", 200))
    driver.schedule()
    if asynchronous:
        driver.schedule()
    driver.output(invalid_blocks=driver.blocks("second")[4:10])
    driver.run()
    return driver, audit


@near_miss("content/recomputed")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_computation_over_a_failed_load_is_not_compared(asynchronous: bool) -> None:
    _, audit = with_failed_load(asynchronous)

    assert [] == found(audit)


@near_miss("content/recomputed")
def test_a_loaded_block_is_not_compared() -> None:
    driver, audit = start(connector="scripted", blocks=BLOCKS)
    driver.connector.answer_lookups("second", PROMPT - 16)
    compute_again(driver)

    assert [] == found(audit)
    assert 1 == audit.ledger.sums.recomputed.compared


@near_miss("content/recomputed")
def test_nothing_is_compared_across_a_reset_of_the_prefix_cache() -> None:
    driver, audit = start()
    driver.add("first", PROMPT, OUTPUT)
    driver.run()
    driver.reset_prefix_cache()
    driver.scheduler.kv_runner.wrong.add("second")  # as with other weights
    driver.add("second", PROMPT, OUTPUT, shares=("first", PROMPT))
    driver.run()

    assert [] == found(audit)
    assert 0 == audit.ledger.sums.recomputed.compared


@near_miss("content/recomputed")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rejected_drafts_are_computed_again(asynchronous: bool) -> None:
    driver, audit = start(drafts=3, asynchronous=asynchronous, blocks=BLOCKS)
    for name in ("first", "second"):  # one of them is preempted, and computes its outputs again
        driver.add(name, 40, 80)
    driver.run()

    assert [] == found(audit)
    assert audit.ledger.sums.recomputed.compared >= 2


def test_without_the_variable_no_sketch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SKETCH)
    driver, audit = start(blocks=BLOCKS)
    compute_again(driver, wrong=True)

    assert [] == found(audit)
    assert "" == audit.ledger.sketches.key_name


def test_a_distance_is_a_share_of_the_larger_sketch() -> None:
    assert 0.0 == distance([0.0, 0.0], [0.0, 0.0])
    assert 1.0 == distance([3.0, 4.0], [0.0, 0.0])
    assert 2.0 == distance([3.0, 4.0], [-3.0, -4.0])
    assert APART == distance([float("nan"), 0.0], [1.0, 0.0]) > THRESHOLD
    assert distance([1e38, 1e38], [1.0, 1.0]) == pytest.approx(1.0)


def test_the_oldest_sketches_are_dropped_when_there_is_no_room() -> None:
    state, half = SketchState(), "0" * (DIGITS_KEPT // 2)
    for hash_id in (1, 2, 1, 3):
        state.keep((hash_id, 0, 0), Computation(1, 5, 1, "r", half))
    assert [1, 3] == [hash_id for hash_id, _, _ in state.kept]
    assert DIGITS_KEPT == state.digits
