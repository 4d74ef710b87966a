"""Score card rows of released connectors, from the environments that scripts/releases.py builds.

A test is skipped where its environment is not built. Each connector runs in its own process: NIXL keeps one
core busy, and a process can import only one release of LMCache.
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
results = [[row.situation, row.outcome, row.problems] for row in card.rows]
print(json.dumps([card.engine, results]), flush=True)
os._exit(0)  # the connector may have left threads
"""


class ReleasedCard(NamedTuple):
    """The engine of a score card; situation, outcome and problems of each row, sync and async."""

    engine: str
    rows: list[tuple[str, str, list[str]]]

    def situation(self, title: str) -> list[tuple[str, list[str]]]:
        return [(outcome, problems) for situation, outcome, problems in self.rows if situation == title]


def run_card(release: str, titles: list[str], name: str, module: str = "", **options: Any) -> ReleasedCard:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "scripts")
        cards, releases = importlib.import_module("proofs.cards"), importlib.import_module("releases")
    if not releases.is_built(release):
        pytest.skip(f"not here: python3 scripts/releases.py build {release}")
    completed = subprocess.run(
        [releases.BIN / "python", "-c", ROWS, json.dumps([titles, name, module, options])],
        env=cards.within(release) | cards.EVERYWHERE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == completed.returncode, completed.stderr[-2000:]
    engine, rows = json.loads(completed.stdout.splitlines()[-1])
    return ReleasedCard(engine, [tuple(row) for row in rows])


def bundled(*titles: str, mended: bool) -> ReleasedCard:
    options = {"use_native": True, "mended": mended}
    module = "audit/conformance/cpu_lmcache.py"
    return run_card("lmcache-0.3.9", list(titles), "LMCacheConnectorV1", module, **options)


@pytest.fixture(scope="module")
def mended_card() -> ReleasedCard:
    return bundled("hit on part of the prompt", "preempted after its load", mended=True)


def test_nixl_reads_what_the_other_engine_prefilled() -> None:
    title = "hit beyond the local hit"
    card = run_card("nixl-1.5.1", [title], "NixlConnector")

    assert card.engine.endswith("nixl 1.5.1")
    assert [("clean", [])] * 2 == card.situation(title)


def test_the_bundled_adapter_raises_in_every_step_with_the_lmcache_that_it_imports() -> None:
    card = bundled("nothing in the store", mended=False)

    assert card.engine.endswith("lmcache 0.3.9.post2")
    for outcome, (problem, raised) in card.situation("nothing in the store"):
        assert "inherited" == outcome
        assert "TypeError in lookup_unpin" in problem
        assert raised.endswith("the engine raised TypeError in connector.wait_for_save")


def test_the_bundled_adapter_loads_what_it_promised_to_a_new_request(mended_card: ReleasedCard) -> None:
    assert [("clean", [])] * 2 == mended_card.situation("hit on part of the prompt")


def test_the_bundled_adapter_never_loads_what_it_promised_to_a_resumed_request(
    mended_card: ReleasedCard,
) -> None:
    """LMCache#1969: the connector metadata lacks the load, and the request runs over KV of other tokens."""
    for outcome, (missing_load, wrong_kv) in mended_card.situation("preempted after its load"):
        assert "inherited" == outcome
        assert (
            "connector/promise-not-loaded: The connector promised 96 external tokens to request r"
            in missing_load
        )
        assert "it ran over 96 tokens of KV that is not its own" in wrong_kv
