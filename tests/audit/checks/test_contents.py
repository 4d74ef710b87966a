"""The checks on block contents, on the real scheduler, with KV caches that the tests can change."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from tests.scenarios import driving
from tests.scenarios.kv_runner import DriverWithCaches, attach_content

from kvledger.audit.entry.attach import LiveAudit

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

PROMPT, OUTPUT = 64, 8


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)


def start(**setup: Any) -> tuple[Any, LiveAudit]:
    audits: list[LiveAudit] = []
    driver = driving.start(lambda scheduler: audits.append(attach_content(scheduler)), **setup)
    return driver, audits[0]


def two_requests(driver: Any) -> list[int]:
    """Run a request and add a second one with the same prompt; returns the blocks of the first."""
    driver.add("first", PROMPT, OUTPUT)
    driver.step()
    blocks = driver.blocks("first")
    driver.run()
    driver.add("second", PROMPT + 20, OUTPUT, shares=("first", PROMPT))
    return blocks


def flip_bit(driver: Any, block: int, layer: int = 1) -> None:
    import torch

    driver.scheduler.kv_runner.caches[0][layer][block].view(torch.int32)[1, 3, 2] ^= 1 << 7


def found(audit: LiveAudit) -> list[Any]:
    audit.detach()
    return [violation for violation in audit.violations if violation.id.startswith("content/")]


@violates("content/changed")
def test_a_flipped_bit_is_found_at_the_next_hit_with_both_requests() -> None:
    driver, audit = start()
    blocks = two_requests(driver)
    flip_bit(driver, blocks[2])
    driver.run()

    (finding,) = [each for each in found(audit) if each.request == "second"]
    assert ("content/changed", [blocks[2]]) == (finding.id, finding.figures["blocks"])
    assert "first" == finding.figures["writer"]
    assert "other bytes in step" in finding.story[-1] and "read by request second" in finding.story[-1]
    assert 1 == audit.ledger.sums.contents["differed"]


@violates("content/changed")
def test_a_changed_block_is_reported_at_every_hit() -> None:
    driver, audit = start()
    blocks = two_requests(driver)
    flip_bit(driver, blocks[0])
    driver.run()
    driver.add("third", PROMPT + 30, OUTPUT, shares=("first", PROMPT))
    driver.run()

    assert {"second", "third"} <= {finding.request for finding in found(audit)}


@violates("content/changed")
def test_a_scrub_finds_a_change_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, audit = start()
    driver.add("first", PROMPT, 60)
    driver.step()
    flip_bit(driver, driver.blocks("first")[1])
    driver.run()

    (finding,) = found(audit)
    assert finding.request is None and "A scrub found it" in finding.message


@violates("content/unsealed-hit")
def test_a_hit_on_a_block_that_was_cached_before_it_was_filled() -> None:
    """The pool is told that a block holds the second request's prompt while nobody has computed it."""
    driver, audit = start()
    first = driver.add("first", PROMPT, OUTPUT)
    driver.schedule()
    blocks = driver.blocks("first")
    step = driver.in_flight[-1].scheduled
    step.num_scheduled_tokens["first"] = 16  # the worker executes one block; the scheduler counts four
    driver.output()
    driver.add("second", PROMPT + 20, OUTPUT, shares=("first", PROMPT))
    driver.step()

    (finding,) = found(audit)
    assert ("content/unsealed-hit", "second") == (finding.id, finding.request)
    assert blocks[1:4] == finding.figures["blocks"]
    assert first.request_id == finding.figures["allocated_for"]


@near_miss("content/changed")
@near_miss("content/unsealed-hit")
def test_hits_hold_what_was_sealed() -> None:
    driver, audit = start()
    two_requests(driver)
    driver.run()

    assert [] == found(audit)
    assert 4 == audit.ledger.sums.contents["verified"]
    assert PROMPT == audit.ledger.sums.contents["tokens"]


@near_miss("content/unsealed-hit")
def test_a_block_that_another_request_of_the_same_step_computes() -> None:
    driver, audit = start()
    driver.add("first", PROMPT, OUTPUT)
    driver.add("second", PROMPT + 20, OUTPUT, shares=("first", PROMPT))
    driver.run()

    assert [] == found(audit)
    assert 4 == audit.ledger.sums.contents["same_step"]


@near_miss("content/unsealed-hit")
def test_a_block_that_was_filled_before_the_observation() -> None:
    audits: list[LiveAudit] = []
    driver = driving.start()
    two_requests(driver)
    audits.append(attach_content(driver.scheduler))
    driver.run()

    assert [] == found(audits[0])


@near_miss("content/changed")
def test_blocks_that_are_allocated_again_get_other_content() -> None:
    driver, audit = start(blocks=12)
    for name in ("a", "b", "c", "d"):
        driver.add(name, PROMPT, OUTPUT)
        driver.run()
        driver.add(f"{name} again", PROMPT, OUTPUT, shares=(name, PROMPT))
        driver.run()

    assert [] == found(audit)
    assert not audit.ledger.sums.contents.get("differed")


@near_miss("content/changed")
@near_miss("content/unsealed-hit")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rejected_drafts_are_written_again(asynchronous: bool) -> None:
    driver, audit = start(drafts=3, asynchronous=asynchronous)
    driver.add("first", PROMPT, 60)
    driver.run()
    driver.add("second", PROMPT + 50, OUTPUT, shares=("first", PROMPT))
    driver.run()

    assert [] == found(audit)
    assert audit.ledger.sums.contents["verified"] >= 3


def test_an_unknown_layout_is_refused_with_one_sentence() -> None:
    driver = driving.start()
    audits: list[LiveAudit] = []

    def attach(scheduler: Any) -> None:
        audits.append(attach_content(scheduler, stride=7))

    attach(driver.scheduler)
    driver.add("first", PROMPT, OUTPUT)
    driver.run()

    (sentence,) = audits[0].ledger.contents.excluded
    assert "The contents of blocks are not checked: the cache of layer layers.0.group.0" in sentence
    assert not audits[0].ledger.contents.watches


# --- states -----------------------------------------------------------------------------------------


def with_states(**setup: Any) -> tuple[Any, LiveAudit, int]:
    """A request has left a state at position 64, which the next request is to hit: its block."""
    driver, audit = start(groups=("full", "mamba"), blocks=128, **setup)
    driver.add("first", PROMPT + 6, OUTPUT)
    driver.step()
    (block,) = [block for block in driver.blocks("first", 1) if block]
    driver.run()
    driver.add("second", PROMPT + 20, OUTPUT, shares=("first", PROMPT))
    return driver, audit, block


@violates("content/changed")
@pytest.mark.parametrize("state", range(4))
def test_a_state_that_changed_at_rest_is_found_when_it_is_hit(state: int) -> None:
    """Each of the two layers has two states, as a Mamba layer: of its convolution and of its recurrence."""
    driver, audit, block = with_states()
    states = driver.scheduler.kv_runner.caches[1]
    states[state % len(states)][block] += 1
    driver.run()

    (finding,) = [each for each in found(audit) if each.request == "second"]
    assert ("content/changed", [block]) == (finding.id, finding.figures["blocks"])
    assert "first" == finding.figures["writer"]


@violates("content/unsealed-hit")
def test_a_state_that_no_step_left_is_found_when_it_is_hit() -> None:
    """The worker executes fewer tokens than the scheduler counts, so no state is at the end of the block."""
    driver, audit = start(groups=("full", "mamba"), blocks=128)
    driver.add("first", PROMPT + 6, OUTPUT)
    driver.schedule()
    driver.in_flight[-1].scheduled.num_scheduled_tokens["first"] = 60
    driver.output()
    driver.add("second", PROMPT + 20, OUTPUT, shares=("first", PROMPT))
    driver.run()

    assert {("content/unsealed-hit", "second")} == {(each.id, each.request) for each in found(audit)}
    assert 2 == audit.ledger.sums.contents["unsealed"]  # the state, and the last block with attention


@near_miss("content/changed")
@near_miss("content/unsealed-hit")
@pytest.mark.parametrize("mode", [{}, {"asynchronous": True}])
def test_a_state_is_sealed_when_its_step_has_ended_and_verified_when_it_is_hit(mode: dict[str, bool]) -> None:
    driver, audit, _ = with_states(**mode)
    driver.run()

    assert [] == found(audit)
    assert 4 + 1 == audit.ledger.sums.contents["verified"]  # four blocks with attention and one state
    assert [] == audit.ledger.contents.excluded


@near_miss("content/changed")
def test_steps_that_write_their_state_over_the_one_before_seal_none() -> None:
    """States within a block are not cached."""
    driver, audit = start(groups=("full", "mamba"), blocks=128)
    driver.add("first", 20, 40)
    driver.run()

    assert [] == found(audit)
    assert 3 + 3 == audit.ledger.sums.contents["sealed"]  # of 59 positions: three blocks in each group
