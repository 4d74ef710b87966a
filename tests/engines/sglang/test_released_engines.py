"""The real engine of released SGLang: findings where a release has the fault, none where it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scripts.sglang_matrix import CORE_SGLANG, LOADS, ROOT, Cell, build, cells

pytestmark = pytest.mark.releases


@pytest.fixture(scope="module", params=CORE_SGLANG)
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    build([request.param])
    return cells(request.param, LOADS[request.param], tmp_path_factory.mktemp(request.param))


def test_each_load_shows_what_its_release_has_and_nothing_else(driven: list[Cell]) -> None:
    assert not {(cell.release, cell.load): cell.wrong for cell in driven if cell.wrong}


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
