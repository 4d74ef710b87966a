"""The place of blocks in KV caches that vLLM's own code makes, in releases with different layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.time_limits import RUN_HANGS

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
RELEASES = ("0.24.0", "0.27.1", "0.33.0")


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_a_changed_block_changes_its_own_fingerprint_alone(release: str) -> None:
    if not (ROOT / ".releases" / release).is_dir():
        pytest.skip(f"{release} is not built")
    command = [sys.executable, "scripts/releases.py", "run", release, "--", "python", "-m"]
    output = subprocess.run(
        [*command, "tests.engines.release_layouts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_HANGS,
    )
    rows = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]

    assert any(row["backend"] == "CPUAttentionBackend" and row.get("kernel") == 16 for row in rows)
    for row in rows:
        assert "missing" in row or (row.get("alone") and row["written"]), row
