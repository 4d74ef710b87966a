"""Whole engines with real LMCache, and its real servers on the loopback.

LMCache stands in .releases, where scripts/releases.py puts it; the first time it is downloaded.
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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines, one after the other, have left; those of a connector ask one server, which is killed."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(ROOT / "scripts")
    stores = importlib.import_module("stores")
    monkeypatch.undo()
    made: Path = tmp_path_factory.mktemp("lmcache")
    for name, kind in SERVERS.items():
        with stores.store(kind) as server:
            how = stores.environ(os.pathsep.join([str(ROOT / "src"), str(ROOT)])) | {
                "LMCACHE_SERVER": str(server.process_id),
                "LMCACHE_SERVER_PORT": str(server.port),
                "LMCACHE_SERVER_LOG": str(server.log),
            }
            python("-m", "tests.connectors.whole", made, *(name + engine for engine in ENGINES), **how)
    return {name: json.loads((made / f"{name}.json").read_text()) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_an_engine_with_lmcache_is_clean(told: dict[str, Any], name: str):
    assert ("clean", 0) == (told[name]["verdict"], told[name]["totals"]["unknown_requests"])


@pytest.mark.parametrize("name", RUNS)
def test_external_tokens_are_those_that_the_store_served(told: dict[str, Any], name: str):
    totals = told[name]["totals"]

    assert 0 < totals["loaded"] == told[name]["given"] == totals["external"] + totals["loaded_again"]


@pytest.mark.parametrize("name", SERVERS)
def test_a_new_engine_loads_what_the_server_has_of_the_first(told: dict[str, Any], name: str):
    """Of each engine's first two, in either order: how much the later ones load depends on how quickly
    LMCache saves. The longer one has 128 tokens in whole chunks, of which the shorter one's are a part."""
    first, again = (
        sum(settled["external"] for settled in told[name + engine]["settled"][:2])
        for engine in ("", "-again")
    )

    assert 0 == first
    assert 128 <= again


@pytest.mark.parametrize("name", SERVERS)
def test_a_preempted_request_is_loaded_again_from_the_store(told: dict[str, Any], name: str):
    lives = [life for account in told[name]["preempted"] for life in account["lives"][1:]]

    assert any(life["loaded"] > 0 for life in lives)


@pytest.mark.parametrize("name", SERVERS)
def test_an_outage_voids_promises_and_ends_no_request(told: dict[str, Any], name: str):
    totals = told[f"{name}-outage"]["totals"]

    assert totals["voided"]["failed"] > 0
    assert (10, 0) == (totals["requests"], totals["unattained"])


def test_the_audit_says_what_the_engine_counted_of_the_outage(told: dict[str, Any]):
    """LMCacheMPConnector's loads are not waited for in a step: what fails wholly is looked up anew."""
    assert [] == told["lmcache-outage"]["violations"]
    (found,) = told["lmcache-v1-outage"]["violations"]
    assert "promised failed to load" in found


@pytest.mark.parametrize("name", RUNS)
def test_accounts_of_preempted_requests_balance(told: dict[str, Any], name: str):
    assert told[name]["preempted"]
    for account in told[name]["preempted"]:
        work = account["first_prompt"] + account["first_output"] + sum(account["rework"].values())
        assert account["scheduled"] == work + account["rejected"] + account["overrun"]
        assert account["promised"] == account["loaded"] + sum(account["voided"].values())
