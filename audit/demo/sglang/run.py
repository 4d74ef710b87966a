"""Runs SGLang's real engine on a CPU in a process of its own, observed, and audits its journal.

SGLang's wheel declares some 70 packages, among them CUDA builds. A scheduler on a CPU needs what vLLM brings,
and ``orjson``. So only these two wheels are fetched, into a folder of the user's cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ... import temporary
from ...errors import LedgerError
from ...planted.table import BY_NAME
from ...replay.journals import Audit, audit_paths
from ..model import write_model
from ..run import EngineFailed

RELEASE = "0.5.23"
"""The release that is fetched if none is installed."""

WHEEL = f"sglang=={RELEASE}"
BESIDE = "orjson==3.13.0"

LOAD = "pressure"
"""The load of the demo: eight requests share a prefix in a pool in which five are retracted."""

DEFECT = "cached-tokens-counted-again"
"""The planted fault that can be put back."""

ENVIRON = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a process that runs SGLang's engine on a CPU."""


class Served(NamedTuple):
    """What the demo did. ``told_cached``: the cached tokens that the engine reported to clients, in all."""

    release: str
    audit: Audit
    journal: Path
    injected: bool
    told_cached: int

    @property
    def found(self) -> list[str]:
        """Which of the invariants that the defect breaks were violated."""
        return [id for id in BY_NAME[DEFECT].finds if any(each.id == id for each in self.audit.violations)]


def run(inject: str | None, keep: Path | None, say: Callable[[str], None]) -> Served:
    """Serve the load, and audit it. ``say`` gets a sentence before anything is fetched.

    Raises :class:`~kvledger.audit.errors.LedgerError` if there is no such defect or no environment for
    SGLang, and :class:`EngineFailed` if the engine left no journal.
    """
    if inject not in (None, DEFECT):
        raise LedgerError(f"There is no defect {inject!r} for SGLang; there is {DEFECT}.")
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise LedgerError(f"SGLang's engine needs {package}: pip install vllm brings it.")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise LedgerError(f"{keep} is not empty.")
    folder = keep or temporary.kept("kvledger-sglang-")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    write_endless_model(model)
    path = [str(fetched(say)), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {**ENVIRON, "KVLEDGER_DIR": str(folder), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "kvledger.audit.demo.sglang", LOAD, "--model", str(model)]
    command += ["--inject"] if inject else []
    log = folder / "engine.log"
    with log.open("w") as errors:
        done = subprocess.run(
            command,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"load"')]
    if not lines:
        raise EngineFailed(f"SGLang's engine failed; {log} has what it printed.")
    row: dict[str, Any] = json.loads(lines[0])
    journal = folder / row["journal"]
    told = sum(each["cached_tokens"] or 0 for each in row["told"].values())
    return Served(row["release"], audit_paths([journal]), journal, inject is not None, told)


def write_endless_model(folder: Path) -> None:
    """Write the demo's model without an end token, so that a request has all the outputs that it asks for."""
    write_model(folder, 1)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": None}))


def fetched(say: Callable[[str], None]) -> Path:
    """The folder with SGLang's wheel and what it needs beside vLLM's packages; fetched once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "kvledger" / f"sglang-{RELEASE}"
    if place.is_dir():
        return place
    say(
        f"Fetching the wheels of {WHEEL} and {BESIDE}, some 40 MB, into {place}, without what they depend on."
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    with temporary.folder(within=place.parent) as made:
        wheels, unpacked = Path(made, "wheels"), Path(made, "unpacked")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        fetch = [*pip, "--only-binary=:all:", "--dest", str(wheels), WHEEL, BESIDE]
        done = subprocess.run(fetch, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise LedgerError(f"The wheels could not be fetched: {why}")
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(unpacked)
        unpacked.rename(place)
    return place
