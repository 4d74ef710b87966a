"""Crowds: each has the finding of its fault, and is otherwise an ordinary workload.

`make proof NAME=repro` records those of other releases.
"""

from __future__ import annotations

import importlib
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
