"""Rows of connectors whose packages scripts/releases.py puts beside .venv; skipped where it has not.

Each connector runs in a process of its own: NIXL takes a core for itself, and of LMCache a process has one
release.
"""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.releases

ROOT = Path(__file__).parents[2]
ROWS = """
import json, os, sys
from pathlib import Path
from kvledger.audit.conformance import scorecard
titles, name, module, options = json.loads(sys.argv[1])
scorecard.SITUATIONS = [each for each in scorecard.SITUATIONS if each.title in titles]
card = scorecard.score(name, Path(module) if module else None, options)
said = [[row.situation, row.outcome, row.problems] for row in card.rows]
print(json.dumps([card.engine, said]), flush=True)
os._exit(0)  # whatever threads the connector has left
"""


class Told(NamedTuple):
    """What a card is of, and of each of its rows, sync and async, the outcome and its words."""

    engine: str
    rows: list[tuple[str, str, list[str]]]

    def of(self, title: str) -> list[tuple[str, list[str]]]:
        return [(outcome, broke) for situation, outcome, broke in self.rows if situation == title]


def told(release: str, titles: list[str], name: str, module: str = "", **options: Any) -> Told:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "scripts")
        cards, releases = importlib.import_module("cards"), importlib.import_module("releases")
    if not releases.is_built(release):
        pytest.skip(f"not here: python3 scripts/releases.py build {release}")
    done = subprocess.run(
        [releases.BIN / "python", "-c", ROWS, json.dumps([titles, name, module, options])],
        env=cards.within(release) | cards.EVERYWHERE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    engine, rows = json.loads(done.stdout.splitlines()[-1])
    return Told(engine, [tuple(row) for row in rows])


def bundled(*titles: str, mended: bool) -> Told:
    options = {"use_native": True, "mended": mended}
    module = "tests/conformance/cpu_lmcache.py"
    return told("lmcache-0.3.9", list(titles), "LMCacheConnectorV1", module, **options)


@pytest.fixture(scope="module")
def mended() -> Told:
    return bundled("hit on part of the prompt", "preempted after its load", mended=True)


def test_nixl_reads_what_the_other_engine_prefilled():
    title = "hit beyond the local hit"
    card = told("nixl-1.5.1", [title], "NixlConnector")

    assert card.engine.endswith("nixl 1.5.1")
    assert [("clean", [])] * 2 == card.of(title)


def test_the_bundled_adapter_ends_no_step_with_the_lmcache_that_it_imports():
    card = bundled("nothing in the store", mended=False)

    assert card.engine.endswith("lmcache 0.3.9.post2")
    for outcome, (said,) in card.of("nothing in the store"):
        assert "broke" == outcome
        assert said.startswith("TypeError in lookup_unpin")


def test_the_bundled_adapter_loads_what_it_promised_to_whoever_is_new(mended: Told):
    assert [("clean", [])] * 2 == mended.of("hit on part of the prompt")


def test_the_bundled_adapter_never_loads_what_it_promised_to_whoever_resumes(mended: Told):
    """LMCache#1969: the ledger says so of its plans, and the cache of what the request ran over."""
    for outcome, (planned, ran) in mended.of("preempted after its load"):
        assert "violated" == outcome
        assert planned.startswith("connector/promise-not-loaded: 96 external tokens")
        assert ran.startswith("Request r ran over 96 tokens of KV that is not its own")
