"""The score cards of docs/connectors.md, made anew.

Usage: python3 scripts/cards.py

Runs `kvledger conformance` for every connector that can be had on this CPU and writes what it prints below
the heading "Score cards". LMCache's is made against its own server on the loopback; scripts/releases.py
puts it beside .venv. Exits with 1 where a card could not be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stores import environ, store

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
PLAIN = os.environ | {"PYTHONPATH": str(ROOT)}
LMCACHE = "LMCacheMPConnector"
ADAPTER = "LMCacheConnectorV1"
COPYING = {"lmcache.chunk_size": 16, "lmcache.max_local_cpu_size": 0.1, "lmcache.save_unfull_chunk": False}
SAYS = """
Made by `python3 scripts/cards.py`; do not edit below. MultiConnector has two ExampleConnectors for
children, OffloadingConnector a spec that copies between tensors (`tests/conformance/cpu_offloading.py`),
for vLLM's own refuses the CPU. DecodeBenchConnector makes KV up, which is what it is for.
LMCacheMPConnector is that of lmcache 0.5.6, against its real server on the loopback. LMCacheConnectorV1 is
the adapter of the same release with the store in its own process; LMCache has no copy between its memory
and a cache on the CPU (`CreateGPUConnector` of `lmcache/v1/gpu_connector/__init__.py`: "No supported cpu
connector found"), so one stands in for it (`tests/conformance/cpu_lmcache.py`).

Two have no card yet. NixlConnector's worker side wants the package `nixl` and a tensor parallel group, and a
second engine to read from. The adapter for LMCache that vLLM bundles (`use_native`) works with LMCache before
0.4 only; its scheduler side is driven by the courses of [detection](detection.md), *the same, bundled*.
"""


def card(name: str, options: list[str], variables: Mapping[str, str] = PLAIN) -> str:
    """One connector's card, as markdown."""
    done = subprocess.run(
        [ROOT / ".venv/bin/kvledger", "conformance", name, "--format", "markdown", *options],
        cwd=ROOT,
        env={**variables, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        timeout=600,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 3) or not done.stdout:
        sys.exit(f"{name}: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}")
    return done.stdout


def main() -> None:
    """Write the page."""
    kept, _, _ = PAGE.read_text().partition(HEADING)
    cards = [card(name, options) for name, options in CONNECTORS.items()]
    with store("multiprocess") as server:
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        cards.append(card(LMCACHE, ["--options", json.dumps(where)], environ(str(ROOT))))
    options = ["--module", "tests/conformance/cpu_lmcache.py", "--options", json.dumps(COPYING)]
    cards.append(card(ADAPTER, options, environ(str(ROOT))))
    PAGE.write_text("\n".join([kept + HEADING.rstrip() + "\n" + SAYS, *cards]))


if __name__ == "__main__":
    main()
