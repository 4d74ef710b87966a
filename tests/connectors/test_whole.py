"""Whole engines with real connectors: what the ledger holds as external is what the store gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.test_real_engine import python

pytestmark = pytest.mark.whole_engine

RUNS = ("example", "multi", "multi-again", "offloading", "outage")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has left."""
    made: Path = tmp_path_factory.mktemp("connectors")
    python("-m", "tests.connectors.whole", made, *RUNS, "process")
    return {name: json.loads((made / f"{name}.json").read_text()) for name in (*RUNS, "process")}


@pytest.mark.parametrize("name", RUNS)
def test_an_engine_with_a_connector_is_clean_over_resets_and_a_preemption(told: dict[str, Any], name: str):
    assert ("clean", 0) == (told[name]["verdict"], told[name]["totals"]["unknown_requests"])
    assert told[name]["totals"]["preemptions"] >= 1


@pytest.mark.parametrize("name", RUNS)
def test_every_promise_is_loaded_or_void(told: dict[str, Any], name: str):
    totals = told[name]["totals"]

    assert totals["promised"] == totals["loaded"] + sum(totals["voided"].values())
    assert totals["promised"] > 0


def test_external_tokens_are_those_that_the_store_gave(told: dict[str, Any]):
    assert 0 < told["offloading"]["totals"]["loaded"] == told["offloading"]["given"]


def test_a_new_engine_finds_what_the_first_has_saved(told: dict[str, Any]):
    assert told["multi-again"]["totals"]["external"] > told["multi"]["totals"]["external"]


def test_an_outage_voids_promises_and_ends_no_request(told: dict[str, Any]):
    totals = told["outage"]["totals"]

    assert totals["voided"]["failed"] > 0
    assert (10, 0) == (totals["requests"], totals["unattained"])


@pytest.mark.parametrize("name", ["example", "multi", "multi-again"])
def test_a_worker_in_the_same_process_is_heard_in_the_step_that_it_takes(told: dict[str, Any], name: str):
    assert [True] == told[name]["heard"]


def test_a_worker_in_a_process_of_its_own_has_a_journal_that_is_read_along(told: dict[str, Any]):
    run = told["process"]

    assert ["engine", "worker"] == run["journals"]
    assert 2 == len(set(run["processes"]))
    assert ("clean", [True]) == (run["verdict"], run["heard"])
    assert 0 < run["totals"]["promised"] == run["totals"]["loaded"]
