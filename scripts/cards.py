"""Writes the score cards of docs/connectors.md.

Usage: python3 scripts/cards.py

Runs `kvledger conformance` for every connector that runs on this CPU, and writes its output below the
heading "Score cards". LMCache's connector uses its own server on the loopback, NIXL's connects two engines;
scripts/releases.py builds both. Exits with 1 if a card can't be made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import releases
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
OURS = os.pathsep.join([str(ROOT), str(ROOT / "src")])
PLAIN = os.environ | {"PYTHONPATH": OURS}
LMCACHE = "LMCacheMPConnector"
ADAPTER = "LMCacheConnectorV1"
COPYING = {"lmcache.chunk_size": 16, "lmcache.max_local_cpu_size": 0.1, "lmcache.save_unfull_chunk": False}
COPIED = ["--module", "tests/conformance/cpu_lmcache.py", "--options"]
OLD_LMCACHE = "lmcache-0.3.9"
EVERYWHERE = {key.upper().replace(".", "_"): json.dumps(value) for key, value in COPYING.items()}
EVERYWHERE |= {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
"""The bundled adapter's lookups ignore its options, so LMCache is configured by variables."""
BUNDLED = {
    f"{ADAPTER}, bundled, as released": {"use_native": True},
    f"{ADAPTER}, bundled, mended": {"use_native": True, "mended": True},
}
SAYS = """
Made by `make cards`; do not edit below. MultiConnector has two ExampleConnectors for children,
OffloadingConnector a spec that copies between tensors (`tests/conformance/cpu_offloading.py`), for vLLM's own
refuses the CPU. DecodeBenchConnector makes KV up, which is what it is for.

NixlConnector is driven between two engines in one process with nixl 1.5.1: real handshakes over the loopback,
real reads and notifications through UCX, and the KV that came is looked at as in any other row. A request has
all of its prompt prefilled, so it is never promised a part of one, and once preempted it is promised nothing.

LMCacheMPConnector is that of lmcache 0.5.6, against its real server on the loopback. LMCacheConnectorV1 is
the adapter of the same release with the store in its own process; LMCache has no copy between its memory
and a cache on the CPU (`CreateGPUConnector` of `lmcache/v1/gpu_connector/__init__.py`: "No supported cpu
connector found"), so one stands in for it (`tests/conformance/cpu_lmcache.py`).

The adapter that vLLM bundles (`use_native`) fits no release of LMCache as a whole. vLLM 0.32.0 imports it
together with `lmcache.v1.multiprocess`, which LMCache has since 0.3.9; its worker ends each step by handing
`lookup_unpin` a list, which LMCache takes up to 0.3.7; and since 0.3.10.post2 its scheduler side can't be
begun (`create_lookup_client` wants one argument more). So there are two cards, on lmcache 0.3.9.post2: one
*as released*, which breaks in the first step of every row, and one *mended*, with the look-ups of that list
handed over one by one, which shows what comes after: whoever resumes runs over KV that was promised and never
loaded (LMCache#1969, which that adapter never had the fix for). In both the copy is the same stand-in, and
LMCache is configured by variables, for the adapter's look-ups know nothing of its options.
"""


def card(name: str, options: list[str], variables: Mapping[str, str] = PLAIN, title: str = "") -> str:
    """One connector's card in Markdown."""
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
    return done.stdout.replace(f"### {name}\n", f"### {title or name}\n", 1)


def within(release: str) -> dict[str, str]:
    """Environment variables for a command in a release, which is built first if it is missing."""
    releases.build([release])
    variables = releases.environ(release)
    return variables | {"PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], OURS])}


def main() -> None:
    """Write the cards into the page."""
    kept, _, _ = PAGE.read_text().partition(HEADING)
    cards = [card(name, options) for name, options in CONNECTORS.items()]
    cards.append(card("NixlConnector", [], within(releases.NIXL)))
    with store("multiprocess") as server:
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        cards.append(card(LMCACHE, ["--options", json.dumps(where)], environ(OURS)))
    cards.append(card(ADAPTER, [*COPIED, json.dumps(COPYING)], environ(OURS)))
    old = within(OLD_LMCACHE) | EVERYWHERE
    cards += [card(ADAPTER, [*COPIED, json.dumps(how)], old, title) for title, how in BUNDLED.items()]
    PAGE.write_text("\n".join([kept + HEADING.rstrip() + "\n" + SAYS, *cards]))


if __name__ == "__main__":
    main()
