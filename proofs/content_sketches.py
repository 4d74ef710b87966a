"""Measures how much two computations of a block differ, and how much the faults that a sketch should find.

Usage: make proof NAME=content_sketches ARGS="[--write] [NAME...]"     all situations, or these

Each situation of `proofs/sketch_run.py` runs the real engine in a process of its own, and computes
the same prompts in several waves. Prints two tables, and exits with 1 if rounding exceeds the threshold or a
whole-block fault does not. `--write` replaces the section of docs/content.md after a run of all situations.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import put

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "content.md"
HEADING = "### How much two computations differ"
NEXT = "## Runs of the real engine"
TIMEOUT_SECONDS = 900

NOT_SEEN = ("one token of one layer is zero", "lowest exponent bit of one number flipped")
"""Faults that may be too small to be seen."""


def run(name: str) -> dict[str, Any]:
    """What one situation gave; `raised` if it did not come to its end."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVLEDGER", "VLLM"))}
        command = [sys.executable, "-m", "proofs.sketch_run", name, str(file)]
        done = subprocess.run(
            command,
            env=inherited | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},  # equal block hashes in all runs
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if not file.exists():
            return {"raised": (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]}
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def row(name: str, numbers: Sequence[float]) -> str:
    """Number of blocks, and smallest, median, 99th percentile and largest distance."""
    if not numbers:
        return f"| {name} | 0 | | | | |"
    ordered = sorted(numbers)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    shown = (ordered[0], statistics.median(ordered), p99, ordered[-1])
    return f"| {name} | {len(ordered):,} | {' | '.join(f'{number:.2g}' for number in shown)} |"


def table(first: str, rows: Sequence[str]) -> list[str]:
    return [f"| {first} | blocks | smallest | median | p99 | largest |", "|" + "---|" * 6, *rows]


def section(rows: Sequence[str], faults: Sequence[str], every: dict[str, Any], threshold: float) -> str:
    """The section of docs/content.md."""
    return "\n".join(
        [
            HEADING,
            "",
            "Distances of blocks of 32 tokens from their computation before: the largest of the parts, which",
            "are the keys and the values of each layer. vLLM 0.32.0 on a CPU runs 40 prompts in three waves,",
            f"with 96, 40 and 160 tokens a step. The threshold is {threshold}. Models have 2 or 16 layers,",
            "hidden size 128 or 256 and random weights. Larger models, mixtures of experts and GPUs are not",
            "measured. `make proof NAME=content_sketches ARGS=--write` writes this section.",
            "",
            *table("rounding", rows),
            "",
            *(f"- **{name}**: {each.says}." for name, each in every.items() if not each.fault),
            "",
            *table("fault", faults),
            "",
            "",
        ]
    )


def against(exact: dict[str, str], rounded: dict[str, str]) -> list[float]:
    """The distances of the blocks of a bf16 engine from those of an fp32 engine."""
    from kvledger.audit.engines.content.sketches import PROJECTIONS
    from kvledger.audit.ledger.content_postings import distances

    return [max(distances(exact[key], rounded[key], PROJECTIONS)) for key in exact if key in rounded]


def main(arguments: Sequence[str]) -> int:
    from proofs.sketch_run import SITUATIONS

    from kvledger.audit.ledger.content_postings import APART, THRESHOLD

    names = [word for word in arguments if word != "--write"]
    rounding: dict[str, list[float]] = {}
    faults: dict[str, list[float]] = {}
    sketches: dict[str, dict[str, str]] = {}
    failed = False
    for name in names or SITUATIONS:
        situation, found = SITUATIONS[name], run(name)
        if "raised" in found:
            print(f"{name}: {found['raised']}", flush=True)
            failed = True
            continue
        sketches[name] = found["sketches"]
        if situation.fault:
            faults[situation.says] = found["distances"]
        else:
            rounding[name] = found["distances"]
        faults |= found["faults"]
        failed |= bool(found["violations"])
        print(row(name, found["distances"]), flush=True)
    for depth in ("", ", deep"):
        exact, rounded = sketches.get(f"fp32{depth}"), sketches.get(f"bf16{depth}")
        if exact and rounded:
            rounding[f"bf16 against fp32{depth}"] = against(exact, rounded)
    rows = [row(*each) for each in rounding.items()]
    fault_rows = [row(*each) for each in faults.items()]
    print("\n".join([*table("rounding", rows), *table("fault", fault_rows)]))
    failed |= any(max(numbers, default=APART) > THRESHOLD for numbers in rounding.values())
    failed |= any(min(faults[name], default=0) <= THRESHOLD for name in faults if name not in NOT_SEEN)
    if "--write" in arguments and not names:
        put(section(rows, fault_rows, SITUATIONS, THRESHOLD), PAGE, before=NEXT)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
