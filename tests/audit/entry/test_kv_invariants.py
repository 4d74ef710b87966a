"""The checks that ``kvledger repro checks`` writes: each states an invariant, and finds it broken."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import Driver, start

import kvledger.audit.checks.auditor  # noqa: F401
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.entry import kv_invariants
from kvledger.audit.entry.kv_invariants import CHECKS, METHODS, assert_kv_invariants, checked
from kvledger.cli import main


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_a_check_has_the_words_of_its_invariant(check: Any) -> None:
    id, _, words = " ".join(str(check.__doc__).split()).partition(": ")

    assert words == " ".join(catalogue()[id].must_hold.split())


def test_the_file_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(kv_invariants.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    assert ["functools", "collections", "collections.abc", "typing", "unittest.mock"] == [
        getattr(node, "module", "") or node.names[0].name for node in imports
    ]


def running() -> Driver:
    """An engine with two running requests that share a prefix, and nothing in flight."""
    driver = start(blocks=40)
    driver.add("a", 100, 9)
    driver.step()
    driver.add("b", 100, 9, shares=("a", 64))
    driver.step()
    return driver


def table(driver: Driver) -> list[Any]:
    blocks: list[Any] = driver.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[
        "a"
    ]
    return blocks


def keep_reference(driver: Driver) -> None:
    table(driver)[0].ref_cnt += 1


def free_held(driver: Driver) -> None:
    driver.scheduler.kv_cache_manager.block_pool.free_block_queue.append(table(driver)[-1])


def forget_hash(driver: Driver) -> None:
    table(driver)[0].reset_hash()


def lose_block(driver: Driver) -> None:
    driver.scheduler.kv_cache_manager.block_pool.free_blocks([table(driver).pop()])


def end_without_freeing(driver: Driver) -> None:
    driver.scheduler.running.remove(driver.scheduler.requests.pop("a"))


def preempt_only_in_name(driver: Driver) -> None:
    from vllm.v1.request import RequestStatus

    driver.scheduler.requests["a"].status = RequestStatus.PREEMPTED


def below_zero(driver: Driver) -> None:
    driver.scheduler.requests["a"].num_output_placeholders = -1


def lose_request(driver: Driver) -> None:
    driver.scheduler.running.pop()


@pytest.mark.parametrize(
    ("damage", "id"),
    [
        (keep_reference, "blocks/references"),
        (free_held, "blocks/free-iff-unreferenced"),
        (forget_hash, "blocks/hash-map"),
        (lose_block, "blocks/coverage"),
        (end_without_freeing, "blocks/leak"),
        (preempt_only_in_name, "tokens/reset-on-preemption"),
        (below_zero, "tokens/in-flight"),
        (lose_request, "requests/queued-once"),
    ],
)
def test_a_broken_invariant_is_found(damage: Callable[[Driver], None], id: str) -> None:
    driver = running()
    assert_kv_invariants(driver.scheduler)
    damage(driver)

    with pytest.raises(AssertionError, match=f"{id}: "):
        assert_kv_invariants(driver.scheduler)


def follow(driver: Driver) -> None:
    for name in METHODS:
        method = checked(getattr(type(driver.scheduler), name))
        setattr(driver.scheduler, name, functools.partial(method, driver.scheduler))


def test_a_call_that_breaks_an_invariant_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = running()
    monkeypatch.setattr(driver.scheduler.kv_cache_manager, "free", lambda request: None)
    follow(driver)

    with pytest.raises(AssertionError, match="blocks/leak: a has ended and holds 7 blocks"):
        driver.abort("a")


@pytest.mark.parametrize("damage", [keep_reference, end_without_freeing, lose_request])
def test_a_call_is_not_judged_by_what_was_broken_before_it(damage: Callable[[Driver], None]) -> None:
    driver = running()
    follow(driver)
    damage(driver)
    driver.scheduler.schedule()

    with pytest.raises(AssertionError):
        assert_kv_invariants(driver.scheduler)


def test_what_was_mended_may_not_break_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = running()
    follow(driver)
    monkeypatch.setattr(driver.scheduler.kv_cache_manager, "free", lambda request: None)
    pool = driver.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(2)
    driver.step()
    pool.free_blocks(blocks)

    with pytest.raises(AssertionError, match="blocks/leak"):
        driver.abort("a")


def test_a_mock_is_not_judged() -> None:
    driver = running()
    manager = driver.scheduler.kv_cache_manager
    driver.scheduler.kv_cache_manager = Mock()
    lose_request(driver)

    assert_kv_invariants(driver.scheduler)

    driver.scheduler.kv_cache_manager = manager
    with pytest.raises(AssertionError, match="requests/queued-once"):
        assert_kv_invariants(driver.scheduler)


def test_the_command_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "kv_invariants.py"
    monkeypatch.setattr(sys, "argv", ["kvledger", "repro", "checks", "-o", str(output)])
    with pytest.raises(SystemExit) as ended:
        main()

    assert 0 == ended.value.code
    assert Path(kv_invariants.__file__).read_text() == output.read_text()
