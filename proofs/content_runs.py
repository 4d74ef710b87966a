"""Runs the real engine at level `content` with many features, and compares its outputs with a bare engine's.

Usage: make proof NAME=content_runs ARGS="[--write] [NAME...]"     all situations, or these

Each situation of `tests/engines/content_run.py` runs twice the same 40 requests, observed, and then bare, in
a process of its own. Prints one table, and exits with 1 if there is a finding, if a hit block was not
verified, or if an output differs. `--write` replaces the section of docs/content.md after a run of all
situations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import put

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "content.md"
HEADING = "## Runs of the real engine"
NEXT = "## What is not compared"
TIMEOUT_SECONDS = 900

NOT_VERIFIED = ("differed", "scrub_differed", "unsealed", "loaded", "unseen", "unmatched", "unsampled")
"""Counts that are zero in a clean run in which every hit block is verified."""

COLUMNS = (
    *("situation", "requests", "preemptions", "blocks sealed", "hit blocks verified"),
    *("computed in the same step", "verified at rest", "findings", "outputs"),
)


def situations() -> dict[str, Any]:
    """The situations by name."""
    from tests.engines.content_run import SITUATIONS

    return dict(SITUATIONS)


def run(name: str) -> dict[str, Any]:
    """What was found in one situation; `raised` if it did not come to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
        command = [sys.executable, "-m", "tests.engines.content_run", name, str(file)]
        try:
            done = subprocess.run(
                command,
                env=inherited | {"PYTHONPATH": path},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"raised": f"it was not done after {TIMEOUT_SECONDS} s"}
        if not file.exists():
            return {"raised": (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]}
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def wrong(situation: Any, found: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    if "raised" in found:
        return [found["raised"]]
    counts = found["counts"]
    problems = [finding[0] for finding in found["findings"]]
    loads = "kv_transfer_config" in situation.engine
    problems += [
        f"{counts[name]} blocks {name}"
        for name in NOT_VERIFIED
        if counts.get(name) and not (loads and name == "loaded")
    ]
    if found["verdict"] != "clean":
        problems.append(f"the verdict is {found['verdict']}")
    if not counts.get("verified") or counts["verified"] != counts["compared"]:
        problems.append(f"{counts.get('verified', 0)} of {counts['compared']} blocks verified")
    if len(found["excluded"]) != situation.groups_left_out:
        problems += found["excluded"]
    if found["workers"] != situation.workers:
        problems.append(f"{found['workers']} workers")
    return problems if found["equal"] else [*problems, "other outputs than without kvledger"]


def row(name: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    if "raised" in found:
        return f"| {name} | {found['raised']} |"
    counts = found["counts"]
    cells = [found["requests"], found["preemptions"]]
    cells += [counts.get(key, 0) for key in ("sealed", "verified", "same_step", "scrubbed")]
    cells.append(len(found["findings"]))
    outputs = "random" if found.get("sampled") else "equal" if found["equal"] else "differ"
    return f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} | {outputs} |"


def section(rows: Sequence[str], every: dict[str, Any]) -> str:
    """The section of docs/content.md."""
    lines = [
        HEADING,
        "",
        "vLLM 0.32.0 on a CPU, with a tiny model and 24 blocks of 32 tokens unless the situation says",
        "otherwise. Each situation runs the same 40 requests twice, which share prefixes, with prompts in",
        "chunks; then it runs them without kvledger. *Outputs* compares the tokens of both.",
        "`make proof NAME=content_runs ARGS=--write` writes this section.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
        *rows,
        "",
        *(f"- **{name}**: {situation.says}." for name, situation in every.items()),
        "",
        "A model with Mamba-2 layers does not run here: with prefix caching and prompts in chunks, vLLM's",
        "`MambaMixer2.conv_ssm_forward` raises an IndexError on a CPU (Falcon-H1).",
        "",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    every = situations()
    names = [word for word in arguments if word != "--write"]
    rows, failed = [], False
    for name in names or every:
        found = run(name)
        rows.append(row(name, found))
        print(rows[-1], flush=True)
        for problem in wrong(every[name], found):
            failed = True
            print(f"not as expected: {name}: {problem}", flush=True)
    if "--write" in arguments and not names:
        put(section(rows, every), PAGE, before=NEXT)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
