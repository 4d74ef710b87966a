"""The real engine's answers are the same to the byte: bare, observed, badly observed, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.forked import VARIANTS

from kvledger.audit.journal.folder import is_workers
from kvledger.audit.replay.journals import audit_paths

pytestmark = pytest.mark.whole_engine

ROOT = Path(__file__).parents[2]


def python(*arguments: str | Path, **environment: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=inherited | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In-process runs of every variant, and one with EngineCore in its own process."""
    made = tmp_path_factory.mktemp("engines")
    python("-m", "tests.engines.forked", made, *VARIANTS)
    python(
        *("-m", "kvledger.audit.demo.engine", "--output", made / "own-process.json"),
        KVLEDGER_DIR=str(made / "own-process.journal"),
    )
    return made


def answers(folder: Path, name: str) -> dict[str, Any]:
    told = json.loads((folder / f"{name}.json").read_text())
    return {request["id"]: request["digest"] for request in told["requests"]}


@pytest.mark.parametrize("name", ["observed", "broken", "mismatched", "own-process"])
def test_the_answers_are_those_of_a_bare_engine(folder: Path, name: str) -> None:
    assert answers(folder, "bare") == answers(folder, name)


@pytest.mark.parametrize("name", ["observed", "own-process"])
def test_an_observed_engine_is_clean(folder: Path, name: str) -> None:
    audit = audit_paths([folder / f"{name}.journal"])

    assert "clean" == audit.verdict
    assert audit.totals.requests >= 24


def test_a_failing_hook_makes_the_verdict_unknown(folder: Path) -> None:
    assert "unknown" == audit_paths([folder / "broken.journal"]).verdict


def test_a_refused_or_unobserved_engine_writes_no_journal(folder: Path) -> None:
    """A worker is made before its scheduler, which is refused then."""
    assert not [path for path in (folder / "mismatched.journal").iterdir() if not is_workers(path)]
    assert not (folder / "bare.journal").exists()
