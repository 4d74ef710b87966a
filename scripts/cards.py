"""The score cards of docs/connectors.md, made anew.

Usage: python3 scripts/cards.py [FOLDER...]

Runs `kvledger conformance` for every connector that can be had here and writes what it prints below the
heading "Score cards". FOLDERs go on PYTHONPATH and have LMCache in them, with what it needs: its server
is then started on the loopback, and its card made too. Without them that card stays as it is. Exits with
1 where a card could not be made.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
LMCACHE = "LMCacheMPConnector"
SAYS = """
Made by `python3 scripts/cards.py`; do not edit below. MultiConnector has two ExampleConnectors for
children, OffloadingConnector a spec that copies between tensors (`tests/conformance/cpu_offloading.py`),
for vLLM's own refuses the CPU. DecodeBenchConnector makes KV up, which is what it is for.
LMCacheMPConnector is that of lmcache 0.5.6, against its real server on the loopback. LMCacheConnectorV1
has no card, for its worker's side wants a GPU; its scheduler's side is driven by the courses of
[detection](detection.md).
"""


def environ(folders: list[str]) -> dict[str, str]:
    """Quiet, and with more on the path."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join([str(ROOT), *folders])}


@contextlib.contextmanager
def lmcache_server(folders: list[str]) -> Iterator[tuple[int, int]]:
    """A real LMCache server on the loopback: its process id and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--chunk-size", "32", "--l1-size-gb", "1"]
    words += ["--l1-init-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    command = [str(ROOT / ".venv/bin/python"), "-m", "lmcache.v1.multiprocess.server", *words]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environ(folders), stdout=log, stderr=log)
        try:
            for _ in range(120):
                log.seek(0)
                if "cache server is running" in log.read():
                    break
                time.sleep(0.5)
            yield server.pid, port
        finally:
            server.terminate()
            server.wait(30)


def card(name: str, options: list[str], folders: list[str]) -> str:
    """One connector's card, as markdown."""
    done = subprocess.run(
        [ROOT / ".venv/bin/kvledger", "conformance", name, "--format", "markdown", *options],
        cwd=ROOT,
        env=environ(folders),
        timeout=600,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1, 3) or not done.stdout:
        sys.exit(f"{name}: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}")
    return done.stdout


def main() -> None:
    """Write the page."""
    folders = [str(Path(word).resolve()) for word in sys.argv[1:]]
    kept, _, old = PAGE.read_text().partition(HEADING)
    cards = [card(name, options, []) for name, options in CONNECTORS.items()]
    if folders:
        with lmcache_server(folders) as (_, port):
            options = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            cards.append(card(LMCACHE, ["--options", json.dumps(options)], folders))
    elif f"### {LMCACHE}\n" in old:
        cards.append(f"### {LMCACHE}\n" + old.partition(f"### {LMCACHE}\n")[2].rstrip("\n") + "\n")
    PAGE.write_text("\n".join([kept + HEADING.rstrip() + "\n" + SAYS, *cards]))


if __name__ == "__main__":
    main()
