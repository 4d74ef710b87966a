"""Whole engines with the real LMCache and its real servers on the loopback interface.

scripts/releases.py installs LMCache in .releases, and downloads it the first time.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.test_real_engine import python

pytestmark = pytest.mark.releases

ROOT = Path(__file__).parents[2]
SERVERS = {"lmcache": "multiprocess", "lmcache-v1": "server"}
ENGINES = ("", "-again", "-outage")
RUNS = [name + engine for name in SERVERS for engine in ENGINES]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all runs.

    The engines of one connector run one after another against one server; the outage run kills the server.
    """
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(ROOT / "scripts")
    stores = importlib.import_module("stores")
    monkeypatch.undo()
    folder: Path = tmp_path_factory.mktemp("lmcache")
    for name, kind in SERVERS.items():
        with stores.store(kind) as server:
            environment = stores.environ(os.pathsep.join([str(ROOT / "src"), str(ROOT)])) | {
                "LMCACHE_SERVER": str(server.process_id),
                "LMCACHE_SERVER_PORT": str(server.port),
                "LMCACHE_SERVER_LOG": str(server.log),
            }
            runs = [name + engine for engine in ENGINES]
            python("-m", "tests.connectors.whole", folder, *runs, **environment)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_an_engine_with_lmcache_is_clean(results: dict[str, Any], name: str):
    assert [] == results[name]["violations"]
    assert ("clean", 0) == (results[name]["verdict"], results[name]["totals"]["unknown_requests"])


@pytest.mark.parametrize("name", RUNS)
def test_external_tokens_equal_the_tokens_that_the_store_served(results: dict[str, Any], name: str):
    totals = results[name]["totals"]

    assert 0 < totals["loaded"] == results[name]["given"] == totals["external"] + totals["loaded_again"]


@pytest.mark.parametrize("name", SERVERS)
def test_a_new_engine_loads_what_the_first_engine_saved(results: dict[str, Any], name: str):
    """Only the first two requests of each engine count, in either order: how much later requests load
    depends on how quickly LMCache saves. The longer prompt has 128 tokens in whole chunks, and the shorter
    prompt's chunks are among them."""
    first, second = (
        sum(settled["external"] for settled in results[name + engine]["settled"][:2])
        for engine in ("", "-again")
    )

    assert 0 == first
    assert 128 <= second


@pytest.mark.parametrize("name", SERVERS)
def test_a_preempted_request_loads_from_the_store_again(results: dict[str, Any], name: str):
    lives = [life for account in results[name]["preempted"] for life in account["lives"][1:]]

    assert any(life["loaded"] > 0 for life in lives)


@pytest.mark.parametrize("name", SERVERS)
def test_promises_fail_in_an_outage_and_every_request_finishes(results: dict[str, Any], name: str):
    totals = results[f"{name}-outage"]["totals"]

    assert totals["voided"]["failed"] > 0
    assert (10, 0) == (totals["requests"], totals["unattained"])


def test_failed_loads_that_the_engine_counts_are_found_with_lmcache_v1_only(results: dict[str, Any]):
    """LMCacheMPConnector loads asynchronously: the scheduler repeats the lookup of a load that fails
    wholly."""
    reported = {"connector/failed-load-counted", "metrics/recomputed-prompt-missing"}

    assert set() == reported & set(results["lmcache-outage"]["drifts"])
    assert reported <= set(results["lmcache-v1-outage"]["drifts"])


@pytest.mark.parametrize("name", RUNS)
def test_accounts_of_preempted_requests_balance(results: dict[str, Any], name: str):
    assert results[name]["preempted"]
    for account in results[name]["preempted"]:
        work = account["first_prompt"] + account["first_output"] + sum(account["rework"].values())
        assert account["scheduled"] == work + account["rejected"] + account["overrun"]
        assert account["promised"] == account["loaded"] + sum(account["voided"].values())


@pytest.mark.parametrize("name", SERVERS)
def test_every_block_that_lmcache_loads_holds_the_bytes_that_were_stored(results: dict[str, Any], name: str):
    moved = results[name]["moved"]

    assert {"stored", "moved"} == set(moved)
    assert moved["moved"] > 0
