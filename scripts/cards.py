"""The score cards of docs/connectors.md, made anew: `python3 scripts/cards.py`.

Runs `kvledger conformance` for every connector that can be had here and writes what it prints below the
heading "Score cards". Exits with 1 where a card could not be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "connectors.md"
HEADING = "## Score cards\n"
OFFLOADING = {
    "spec_name": "CopyingSpec",
    "spec_module_path": "tests.conformance.cpu_offloading",
    "cpu_bytes_to_use": 1 << 24,
}
CONNECTORS: dict[str, list[str]] = {
    "ExampleConnector": [],
    "MultiConnector": [],
    "OffloadingConnector": ["--options", json.dumps(OFFLOADING)],
    "DecodeBenchConnector": [],
}
SAYS = """
Made by `python3 scripts/cards.py`; do not edit below. MultiConnector has two ExampleConnectors for
children, OffloadingConnector a spec that copies between tensors (`tests/conformance/cpu_offloading.py`),
for vLLM's own refuses the CPU. DecodeBenchConnector makes KV up, which is what it is for.
"""


def card(name: str, options: list[str]) -> str:
    """One connector's card, as markdown."""
    done = subprocess.run(
        [ROOT / ".venv/bin/kvledger", "conformance", name, "--format", "markdown", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 3) or not done.stdout:
        sys.exit(f"{name}: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}")
    return done.stdout


def main() -> None:
    """Write the page."""
    kept = PAGE.read_text().partition(HEADING)[0]
    cards = [card(name, options) for name, options in CONNECTORS.items()]
    PAGE.write_text("\n".join([kept + HEADING.rstrip() + "\n" + SAYS, *cards]))


if __name__ == "__main__":
    main()
