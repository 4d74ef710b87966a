"""Two observers of one engine: each counts what it would count alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

pytest.importorskip("vllm")

from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start

import kvledger
from kvledger.audit.entry import plugin
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.sidecar.follower import Follower

NAMES = ("crowd_async_external", "external_preempted_async")
Observe = Callable[[Any], object]


def figures(audit: Any) -> Any:
    """What an audit says of an engine, without times, which each observer takes for itself."""
    totals = {name: value for name, value in asdict(audit.totals).items() if "microseconds" not in name}
    return audit.verdict, totals, sorted((one.id, one.findings, one.tokens) for one in audit.found)


def by_plugin(scheduler: Any) -> object:
    observer = plugin.observe(scheduler)
    assert observer is not None
    return observer


@pytest.fixture(autouse=True)
def journals_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))


@pytest.mark.parametrize("level", ["tokens", "blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_two_attached_audits_count_as_one_alone(name: str, level: str) -> None:
    alone: list[Any] = []
    SCENARIOS[name](lambda scheduler: alone.append(kvledger.attach(scheduler, level=level)))
    two: list[Any] = []
    SCENARIOS[name](lambda scheduler: two.extend(kvledger.attach(scheduler, level=level) for _ in range(2)))
    for audit in (*two, *alone):
        audit.detach()

    assert figures(alone[0]) == figures(two[0]) == figures(two[1])


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("level", ["tokens", "blocks"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plugins_journal_and_an_attached_audit_count_alike(
    name: str, level: str, attached_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEDGER_LEVEL", level)
    made: dict[str, Any] = {}

    def observe(scheduler: Any) -> None:
        both = {"attached": lambda it: kvledger.attach(it, level=level), "recorded": by_plugin}
        for kind in sorted(both, reverse=not attached_first):
            made[kind] = both[kind](scheduler)

    SCENARIOS[name](observe)
    for kind in sorted(made, reverse=attached_first):
        made[kind].detach() if kind == "attached" else made[kind].shutting_down()

    assert figures(made["attached"]) == figures(audit_paths([tmp_path]))


@pytest.mark.parametrize("first_leaves", [False, True])
def test_an_observer_goes_on_when_the_other_leaves(first_leaves: bool) -> None:
    driver = start()
    before = {name: getattr(driver.scheduler, name) for name in ("schedule", "update_from_output")}
    two = [kvledger.attach(driver.scheduler) for _ in range(2)]
    driver.add("one", 50, 2)
    driver.run()
    leaves, stays = two if first_leaves else two[::-1]
    leaves.detach()
    driver.add("two", 50, 2)
    driver.run()
    stays.detach()

    assert (1, 2) == (leaves.totals.requests, stays.totals.requests)
    assert "clean" == leaves.verdict == stays.verdict
    assert before == {name: getattr(driver.scheduler, name) for name in before}


def followed(folder: Path) -> int:
    """How many requests a sidecar counts."""
    follower = Follower(folder)
    follower.catch_up()
    counted = sum(each.totals().requests for each in follower.audits)
    follower.close()
    return counted


def test_the_requests_of_each_journal_of_one_engine_count(tmp_path: Path) -> None:
    """Two observers that record into one folder, then a copy of a journal: the requests of each count."""
    driver = start()
    two = [plugin.observe(driver.scheduler) for _ in range(2)]
    driver.add("one", 50, 2)
    driver.run()
    for observer in two:
        assert observer is not None
        observer.shutting_down()
    first, second = journals_at([tmp_path])

    assert 2 == audit_paths([tmp_path]).totals.requests
    assert figures(audit_paths([first])) == figures(audit_paths([second]))
    assert 2 == followed(tmp_path)

    shutil.copytree(first, tmp_path / "copy")
    assert 3 == audit_paths([tmp_path]).totals.requests
    assert 3 == followed(tmp_path)
