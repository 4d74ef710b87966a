"""Starts LMCache's servers on the loopback, from the release that scripts/releases.py builds.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from releases import BIN, LMCACHE, build, folder

READY_SECONDS = 90
WORDS = {
    "multiprocess": "--host 127.0.0.1 --port {port} --chunk-size 32 --l1-size-gb 1 --l1-init-size-gb 1 "
    "--eviction-policy LRU --supported-transfer-mode auto",
    "server": "127.0.0.1 {port}",
}
MODULES = {"multiprocess": "lmcache.v1.multiprocess.server", "server": "lmcache.v1.server"}
READY = {"multiprocess": "cache server is running", "server": "Server started at"}


@dataclass(frozen=True)
class Store:
    """A running server: its process, its port and its log file."""

    process_id: int
    port: int
    log: Path


def environ(more: str = "") -> dict[str, str]:
    """Environment variables for a process that uses LMCache; ``more`` comes first on its path."""
    path = [*filter(None, [more]), str(folder(LMCACHE))]
    settings = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
    return os.environ | settings | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(path)}


@contextlib.contextmanager
def store(kind: str) -> Iterator[Store]:
    """A server of LMCache: ``multiprocess`` for LMCacheMPConnector, ``server`` for LMCacheConnectorV1.

    Builds LMCache's release first if it is missing. Exits with one sentence if that fails.
    """
    build([LMCACHE])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(BIN / "python"), "-m", MODULES[kind], *WORDS[kind].format(port=port).split()]
    with tempfile.TemporaryDirectory() as folder_name:
        log = Path(folder_name, "log")
        with log.open("w") as written:
            process = subprocess.Popen(command, env=environ(), stdout=written, stderr=written)
        try:
            _wait(process, log, READY[kind])
            yield Store(process.pid, port, log)
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], log: Path, ready: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while ready not in log.read_text():
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"kvledger: LMCache's server did not start: {log.read_text().strip()[-300:]}")
        time.sleep(0.2)
