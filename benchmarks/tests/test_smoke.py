"""The benchmarks run and print their table. No test checks the figures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="measures a real vLLM"),
]


def test_quick_run_prints_a_row_for_every_part() -> None:
    """Only the parts that need no whole engine; `make bench` runs all of them."""
    parts = ["steady-256", "replay", "sidecar"]
    done = subprocess.run(
        [sys.executable, "benchmarks/run.py", "--quick", *parts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert 0 == done.returncode, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert set(parts) == {row.split("ARGS=")[1].split()[0] for row in rows}
