"""``blocks/same-prefix`` on the real scheduler: a hit block was computed for the reader's own tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched
from tests.scenarios.driving import Driver
from tests.scenarios.workloads import session_token_replaced

from kvledger.audit.checks.coverage import SAME_PREFIX, ledger_coverage
from kvledger.audit.planted.fault import planted
from kvledger.audit.planted.table import BY_NAME

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

SETUPS: dict[str, dict[str, Any]] = {
    "calls not wrapped": {},
    "calls wrapped": {"connector": "scripted"},
    "asynchronous": {"asynchronous": True},
    "drafts": {"drafts": 3},
    "window": {"groups": ("full", "sliding")},
}
"""Engines whose cached blocks the observer learns of in different ways."""


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(params=list(SETUPS))
def setup(request) -> dict[str, Any]:
    return SETUPS[request.param]


def compared(watched: Watched) -> dict[str, int]:
    watched.violation_ids()
    return watched.audits[0].ledger.sums.prefixes


def with_the_wrong_parent(driver: Driver) -> None:
    """Request w has other first tokens than r, and from its third block on the block hashes of r."""
    victim = driver.add("r", 80, 3)
    driver.run()
    driver.reset_prefix_cache()
    writer = driver.add("w", driver.prompt("x", 32, None) + list(victim.all_token_ids)[32:80], 3)
    assert writer.block_hashes[0] != victim.block_hashes[0]
    writer.block_hashes[:] = victim.block_hashes[: len(writer.block_hashes)]


@violates("blocks/same-prefix")
@pytest.mark.parametrize("ends", ["run", "step"])
def test_a_hash_with_the_wrong_parent_is_found_at_the_hit(watched, setup, ends):
    """The reader's own first blocks are other ones; the writer has ended, or still runs."""
    driver = watched.start(**setup)
    with_the_wrong_parent(driver)
    getattr(driver, ends)()
    driver.add("reader", 100, 3, shares=("r", 80))
    driver.run()
    finding = watched.finding("blocks/same-prefix")

    assert ("reader", "w", 80) == (finding.request, finding.figures["writer"], finding.figures["tokens"])
    assert 16 == finding.figures["end"]


@violates("blocks/same-prefix")
def test_one_finding_names_each_reader(watched, setup):
    driver = watched.start(**setup)
    with_the_wrong_parent(driver)
    driver.run()
    for name in ("b", "c"):
        driver.add(name, 100, 3, shares=("r", 80))
        driver.run()
    watched.violation_ids()

    found = watched.audits[0].violations
    assert {("blocks/same-prefix", "b"), ("blocks/same-prefix", "c")} == {(v.id, v.request) for v in found}


@violates("blocks/same-prefix")
def test_a_session_that_keeps_the_hash_of_a_discarded_token(watched):
    with planted(BY_NAME["session-keeps-its-hashes"]):
        session_token_replaced(watched.attach)
    finding = watched.finding("blocks/same-prefix")

    assert ("reader", "s", 16) == (finding.request, finding.figures["writer"], finding.figures["tokens"])


@near_miss("blocks/same-prefix")
def test_a_session_whose_hashes_follow_its_tokens(watched, setup):
    if "drafts" in setup:
        pytest.skip("the turn ends elsewhere")
    session_token_replaced(watched.attach, **setup)

    assert [] == watched.violation_ids()


@near_miss("blocks/same-prefix")
def test_prompts_that_share_their_first_blocks(watched, setup):
    driver = watched.start(**setup)
    driver.add("a", 100, 3)
    driver.step()
    for name, shared in (("b", 64), ("c", 80), ("d", 96)):
        driver.add(name, 100, 3, shares=("a", shared))
    driver.run()

    assert 12 <= compared(watched)["equal"]
    assert [] == watched.violation_ids()


@near_miss("blocks/same-prefix")
def test_blocks_that_are_cached_again_for_other_tokens(watched, setup):
    """The pool has room for two of the requests, so that each evicts the blocks of an earlier one."""
    driver = watched.start(blocks=64 if "groups" in setup else 24, **setup)
    for turn in range(4):
        for name in "abc":
            driver.add(f"{name}{turn}", 150, 20, shares=(name, 140))
        driver.run()
    sums = compared(watched)

    assert sums["equal"] and set(sums) <= {"equal", "unknown"}
    assert [] == watched.violation_ids()


@near_miss("blocks/same-prefix")
def test_preempted_requests_that_hit_their_own_blocks(watched, setup):
    driver = watched.start(**setup)
    driver.add("a", 100, 8)
    driver.step()
    driver.preempt("a")
    driver.run()

    assert 6 <= compared(watched)["equal"]
    assert [] == watched.violation_ids()


@near_miss("blocks/same-prefix")
def test_blocks_that_were_cached_before_are_not_known():
    watched, driver = Watched(), Driver()
    driver.add("a", 100, 3)
    driver.run()
    watched.attach(driver.scheduler)
    driver.add("b", 100, 3, shares=("a", 64))
    driver.run()

    assert {"unknown": 4} == compared(watched)
    examined = ledger_coverage(watched.audits[0].ledger)
    assert {SAME_PREFIX: "the prefix of 4 hit blocks is not known"} == examined.in_part
