"""One journal always gives the same file, however many workers drive the workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.repro.crowds import record
from tests.repro.faults import FAULTS

from kvledger.audit.repro.reproduction import reproduce
from kvledger.exporters.repro.pytest_file import render

pytestmark = pytest.mark.releases
HERE = ("placeholder-leak", "failed-load-counted", "failed-load-stays-cached")
"""Faults that the installed vLLM has."""


def file_of(journal: Path, finding: str, workers: int) -> str:
    """The file, shrunk until nothing more can go: the budget is never over."""
    made = reproduce(journal, finding=finding, budget=1800, workers=workers)
    assert made.workload is not None and made.check is not None, made.reason
    return render(made.workload, made.check, assumed=made.assumed)


@pytest.mark.parametrize("name", HERE)
def test_a_journal_gives_the_same_file_with_and_without_workers(tmp_path: Path, name: str):
    fault = FAULTS[name]
    record(fault, tmp_path / "journal", requests=30)

    here, again, in_workers = (file_of(tmp_path / "journal", fault.finding, n) for n in (0, 0, 2))

    assert here == again
    assert here == in_workers
