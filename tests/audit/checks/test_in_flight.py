"""``blocks/in-flight`` on the real scheduler: no load into blocks that a step in flight may write."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched
from tests.scenarios.external import load_after_an_abort

from kvledger.audit.planted.fault import planted
from kvledger.audit.planted.table import BY_NAME

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


@pytest.fixture
def watched() -> Watched:
    return Watched()


def drive(watched: Watched, **how: Any) -> None:
    load_after_an_abort(watched.attach, asynchronous=True, **how)


@violates("blocks/in-flight")
@pytest.mark.parametrize("ends", ["abort", "preempt"])
@pytest.mark.parametrize("fault", ["fix-45357", "deferred-too-early"])
def test_a_block_that_a_step_in_flight_writes_is_loaded_into(watched, ends, fault):
    """The six blocks that were cached before are final: the step in flight does not write them."""
    with planted(BY_NAME[fault]):
        drive(watched, ends=ends)
    finding = watched.finding("blocks/in-flight")

    assert ("r", "w", 16) == (finding.request, finding.figures["writer"], finding.figures["tokens"])


@near_miss("blocks/in-flight")
@pytest.mark.parametrize("ends", ["abort", "preempt"])
def test_frees_that_wait_for_the_step_in_flight(watched, ends):
    drive(watched, ends=ends)

    assert [] == watched.violation_ids()


@near_miss("blocks/in-flight")
def test_a_step_may_have_the_blocks_at_once(watched):
    with planted(BY_NAME["fix-45357"]):
        drive(watched, loads=False)

    assert [] == watched.violation_ids()
