"""Runs Python with only the variables of kvledger and vLLM that a test names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.time_limits import RUN_HANGS

ROOT = Path(__file__).parents[2]


def python(*arguments: str | Path, **environment: str) -> None:
    """Run it to its end; fails with the end of its standard error."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=inherited | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=RUN_HANGS,
    )
    assert process.returncode == 0, process.stderr[-4000:]
