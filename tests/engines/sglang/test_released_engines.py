"""The real engine of released SGLang: findings where a release has the fault, none where it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scripts.sglang_matrix import CORE_SGLANG, COUNTED_AGAIN, LOADS, ROOT, Cell, build, cells

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module", params=CORE_SGLANG)
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    build([request.param])
    return cells(request.param, LOADS[request.param], tmp_path_factory.mktemp(request.param))


def test_each_load_shows_what_its_release_has_and_nothing_else(driven: list[Cell]) -> None:
    assert not {(cell.release, cell.load): cell.wrong for cell in driven if cell.wrong}


def test_the_ledger_has_what_clients_were_told(driven: list[Cell]) -> None:
    """Where no cached token is counted twice, and no request was aborted before its first output."""
    for cell in driven:
        if cell.found or cell.load in ("session", "turns"):
            continue
        told = [row for row in cell.told.values() if row["finish"] == "length"]
        cached = sum(row["cached_tokens"] or 0 for row in told)
        if len(told) == len(cell.told):
            assert cached == cell.totals["local"] + cell.totals["external"], (cell.release, cell.load)


def test_requests_whose_cached_tokens_were_counted_again_are_named(driven: list[Cell]) -> None:
    for cell in driven:
        if cell.load == "pressure" and cell.found == COUNTED_AGAIN:
            named = {request for id, request in cell.named if id == "tokens/negative"}
            told = cell.told
            assert named == {id for id, row in told.items() if row["cached_tokens"] > row["prompt_tokens"]}


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ((), 0, "clean: the KV-cache token figures of this run."),
        (
            ("--inject", "cached-tokens-counted-again"),
            0,
            "The injected defect cached-tokens-counted-again was found: tokens/negative, tokens/set-once.",
        ),
        (("--inject", "other"), 2, ""),
    ],
)
def test_the_demo_runs_the_engine_and_finds_the_defect(
    tmp_path_factory: pytest.TempPathFactory, more: tuple[str, ...], code: int, says: str
) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache"
    command = [sys.executable, "-m", "kvledger", "demo", "--engine", "sglang", *more]
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (code, says), done.stderr
