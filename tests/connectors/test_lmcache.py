"""Whole engines with real LMCache, against its real server on the loopback; where lmcache is installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
if importlib.util.find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed", allow_module_level=True)

from tests.engines.test_real_engine import python

ROOT = Path(__file__).parents[2]
RUNS = ("lmcache", "lmcache-again", "lmcache-outage")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines, one after the other, have left; all ask one server, and the last sees it killed."""
    spec = importlib.util.spec_from_file_location("cards", ROOT / "scripts/cards.py")
    assert spec and spec.loader
    cards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cards)
    made: Path = tmp_path_factory.mktemp("lmcache")
    more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *more])
    how = {"LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": paths}
    with cards.lmcache_server(more) as (process, port):
        how |= {"LMCACHE_SERVER": str(process), "LMCACHE_SERVER_PORT": str(port)}
        python("-m", "tests.connectors.whole", made, *RUNS, **how)
    return {name: json.loads((made / f"{name}.json").read_text()) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_an_engine_with_lmcache_is_clean(told: dict[str, Any], name: str):
    assert ("clean", 0) == (told[name]["verdict"], told[name]["totals"]["unknown_requests"])


def test_a_new_engine_loads_what_the_server_has_of_the_first(told: dict[str, Any]):
    first, again, _ = (told[name]["totals"] for name in RUNS)

    assert 0 == first["loaded"]
    assert 224 == again["promised"] == again["loaded"] == again["external"]


def test_an_engine_outlives_its_server(told: dict[str, Any]):
    totals = told["lmcache-outage"]["totals"]

    assert (8, 0) == (totals["requests"], totals["unattained"])
    assert 0 < totals["promised"] == totals["loaded"] + sum(totals["voided"].values())


def test_a_preempted_requests_account_balances(told: dict[str, Any]):
    (account,) = told["lmcache-again"]["preempted"]
    work = account["first_prompt"] + account["first_output"] + sum(account["rework"].values())

    assert account["scheduled"] == work + account["rejected"] + account["overrun"]
    assert account["promised"] == account["loaded"] + sum(account["voided"].values())
