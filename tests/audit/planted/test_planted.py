"""The table of planted faults: each fits the installed vLLM, and leaves it as it was."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("vllm")

from kvledger.audit.checks.registry import catalogue as invariants
from kvledger.audit.demo.sglang.run import DEFECT
from kvledger.audit.demo.workload import LEADING_TO
from kvledger.audit.faults.catalogue import catalogue
from kvledger.audit.planted.fault import Change, NotFound, PlantedFault, planted
from kvledger.audit.planted.table import BY_NAME, CONTENT, PLANTED

SCHEDULE = "Scheduler.schedule"


def fault(*code: Change) -> PlantedFault:
    return PlantedFault(name="fault", kind="none", says="nothing", code=code)


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.release == "0.32.0"])
def test_a_fault_fits_the_installed_release(name: str) -> None:
    with planted(BY_NAME[name]):
        pass


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(PLANTED) >= 150


def test_what_finds_a_fault_is_an_invariant() -> None:
    assert set() == {id for each in PLANTED for id in each.finds} - invariants().keys()


def test_a_fault_that_is_known_stands_in_the_catalogue() -> None:
    assert set() == {each.known for each in PLANTED if each.known} - catalogue().keys()


def test_the_demos_inject_faults_that_something_finds() -> None:
    assert [] == [name for name in (*LEADING_TO, DEFECT) if not BY_NAME[name].finds]


def test_wrong_bytes_need_level_content_and_wrong_blocks_level_blocks() -> None:
    assert {"content"} == {each.level for each in PLANTED if each.kind == CONTENT}
    assert "blocks" == BY_NAME["double-allocation"].level
    assert "tokens" == BY_NAME["promise-not-loaded"].level


def test_a_fault_whose_text_is_missing_is_not_planted() -> None:
    nothing = fault(Change("BlockPool.touch", "no such text", "pass"))

    with pytest.raises(NotFound, match=r"fault: 0 times 'no such text' in BlockPool.touch"), planted(nothing):
        pass


def test_text_that_stands_there_twice_needs_its_place() -> None:
    with pytest.raises(NotFound, match="2 times"):
        Change("a.b", "x", "y").changed("x x")
    assert "x y" == Change("a.b", "x", "y", 2).changed("x x")


def test_further_lines_are_indented_as_the_first() -> None:
    change = Change("a.b", "one()", "if two:\n    one()")

    assert "def f():\n    if two:\n        one()\n" == change.changed("def f():\n    one()\n")


def test_several_changes_of_one_function_are_all_made_and_taken_back() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    sound = inspect.getattr_static(Scheduler, "schedule")
    first = Change(SCHEDULE, "self.current_step += 1", "self.current_step += 2")
    second = Change(SCHEDULE, "self.current_step += 2", "self.current_step += 3")
    with planted(fault(first, second)):
        assert sound is not Scheduler.schedule
    assert sound is Scheduler.schedule


def test_a_fault_is_taken_back_if_a_later_change_does_not_fit() -> None:
    from vllm.v1.core.block_pool import BlockPool

    sound = BlockPool.touch
    fits = Change("BlockPool.touch", "block.ref_cnt += 1", "block.ref_cnt += 2")
    with pytest.raises(NotFound), planted(fault(fits, Change(SCHEDULE, "no such text", "pass"))):
        pass
    assert sound is BlockPool.touch
