"""Crowds: each has the finding of its fault, and is otherwise an ordinary workload."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.repro.crowds import record
from tests.repro.faults import FAULTS

ROOT = Path(__file__).parents[2]
HERE = ("placeholder-leak", "failed-load-counted", "failed-load-stays-cached")
"""Faults that the installed vLLM has."""


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("releases")


@pytest.mark.parametrize("name", HERE)
def test_a_crowd_has_the_finding_of_its_fault(tmp_path: Path, name: str):
    recorded = record(FAULTS[name], tmp_path / "journal", requests=30)

    assert recorded["found"]
    assert recorded["requests"] >= 30
    assert not recorded["doubts"]
    assert not recorded["others"]


def test_the_same_seed_records_the_same_crowd(tmp_path: Path):
    first, second = (record(FAULTS["placeholder-leak"], tmp_path / name, requests=15) for name in "ab")

    assert first == second


def test_faults_name_releases_of_the_matrix(releases: Any):
    names = list(releases.MATRIX)

    for fault in FAULTS.values():
        assert fault.release in names
        assert not fault.fixed or names.index(fault.release) < names.index(fault.fixed)


@pytest.mark.releases
@pytest.mark.parametrize("name", FAULTS)
def test_a_crowd_has_the_finding_of_its_fault_in_its_release(tmp_path: Path, releases: Any, name: str):
    release = FAULTS[name].release
    if not releases.is_built(release):
        pytest.skip(f"not here: python3 scripts/releases.py build {release}")
    completed = subprocess.run(
        [releases.BIN / "python", "-m", "tests.repro.crowds", name, tmp_path / "journal", "--requests", "60"],
        env=releases.environ(release),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert 0 == completed.returncode, completed.stderr[-2000:]
    assert not json.loads(completed.stdout)["doubts"]
