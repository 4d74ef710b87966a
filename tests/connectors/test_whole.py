"""Whole engines with real connectors: the ledger's external tokens equal the tokens that the store served."""

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
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of each run."""
    folder: Path = tmp_path_factory.mktemp("connectors")
    python("-m", "tests.connectors.whole", folder, *RUNS, "process")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in (*RUNS, "process")}


@pytest.mark.parametrize("name", RUNS)
def test_an_engine_with_a_connector_is_clean_after_resets_and_preemption(results: dict[str, Any], name: str):
    assert ("clean", 0) == (results[name]["verdict"], results[name]["totals"]["unknown_requests"])
    assert results[name]["totals"]["preemptions"] >= 1


@pytest.mark.parametrize("name", RUNS)
def test_every_promise_is_loaded_failed_or_cancelled(results: dict[str, Any], name: str):
    totals = results[name]["totals"]

    assert totals["promised"] == totals["loaded"] + sum(totals["voided"].values())
    assert totals["promised"] > 0


def test_external_tokens_equal_the_tokens_that_the_store_served(results: dict[str, Any]):
    assert 0 < results["offloading"]["totals"]["loaded"] == results["offloading"]["given"]


def test_offloaded_tokens_of_first_admissions_come_from_the_host(results: dict[str, Any]):
    totals = results["offloading"]["totals"]

    assert {"host"} == totals["promised_by_tier"].keys()
    assert 0 < totals["loaded_by_tier"]["host"] <= totals["loaded"]


def test_a_multi_connector_reports_what_its_child_reports(results: dict[str, Any]):
    assert {"external_unspecified"} == results["multi"]["totals"]["promised_by_tier"].keys()


def test_a_new_engine_loads_what_the_first_engine_saved(results: dict[str, Any]):
    assert results["multi-again"]["totals"]["external"] > results["multi"]["totals"]["external"]


def test_promises_fail_in_an_outage_and_every_request_finishes(results: dict[str, Any]):
    totals = results["outage"]["totals"]

    assert totals["voided"]["failed"] > 0
    assert (10, 0) == (totals["requests"], totals["unattained"])


@pytest.mark.parametrize("name", ["example", "multi", "multi-again"])
def test_an_in_process_worker_reports_in_the_step_that_ordered_the_load(results: dict[str, Any], name: str):
    assert [True] == results[name]["heard"]


def test_a_worker_process_has_a_journal_that_is_audited_with_the_engines(results: dict[str, Any]):
    run = results["process"]

    assert ["engine", "worker"] == run["journals"]
    assert 2 == len(set(run["processes"]))
    assert ("clean", [True]) == (run["verdict"], run["heard"])
    assert 0 < run["totals"]["promised"] == run["totals"]["loaded"]


@pytest.mark.parametrize("name", ["example", "offloading"])
def test_every_loaded_block_holds_the_bytes_that_were_stored(results: dict[str, Any], name: str):
    moved = results[name]["moved"]

    assert {"stored", "moved"} == set(moved)
    assert moved["moved"] > 0
