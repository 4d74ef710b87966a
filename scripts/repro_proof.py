"""Proves `kvledger repro` on the faults of released engines.

Usage: .venv/bin/python scripts/repro_proof.py [--write] [--requests N] [--level LEVEL] [FAULT...]

For each fault of tests/repro/faults.py: records it amid N unrelated requests on the release that has it, runs
`kvledger repro` there, and runs the resulting file, without kvledger, on that release and on the first one
without the fault. The file must fail on the former and pass on the latter. Prints one row for each fault, and
exits with 1 if one is wrong. `--write` writes docs/repro-proof.md after a run of all faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "repro-proof.md"
SHOWN = ("placeholder-leak", "negative-local-hit", "double-allocation")
"""The faults whose files are on the page, whole."""
MOST_REQUESTS, MOST_STEPS = 3, 30
BUDGET = "120s"
WITHOUT_KVLEDGER = """
import runpy, sys
sys.modules["kvledger"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HEAD = (
    "fault",
    "finding",
    "requests",
    "after",
    "steps",
    "after",
    "first, s",
    "seconds",
    "fails on",
    "passes on",
)


@dataclass(frozen=True)
class Proof:
    """What became of one fault. ``wrong``: why the proof failed, "" if it did not."""

    name: str
    finding: str
    requests: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (0, 0)
    first_seconds: float = 0.0
    seconds: float = 0.0
    fails_on: str = ""
    passes_on: str = ""
    file: str = ""
    wrong: str = ""

    def row(self) -> tuple[str, ...]:
        """The fault's row in the table."""
        before_after = [str(number) for pair in (self.requests, self.steps) for number in pair]
        seconds = [f"{self.first_seconds:.0f}", f"{self.seconds:.0f}"]
        return (self.name, f"`{self.finding}`", *before_after, *seconds, self.fails_on, self.passes_on)


def in_release(release: str, *command: str, seconds: float = 540) -> subprocess.CompletedProcess[str]:
    """Run a command of .venv in a release."""
    from releases import BIN, environ

    variables = environ(release)
    variables["PYTHONPATH"] = ":".join((variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT))).lstrip(":")
    program = [str(BIN / "python"), *command]
    return subprocess.run(
        program, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )


def prove(fault: Any, folder: Path, requests: int, level: str) -> Proof:
    """Record a fault, reproduce it, and run the file on both releases."""
    journal, file = folder / "journal", folder / "test_repro.py"
    ask = ("--requests", str(requests), "--level", level)
    recorded = in_release(fault.release, "-m", "tests.repro.crowds", fault.name, str(journal), *ask)
    if recorded.returncode:
        return Proof(fault.name, fault.finding, wrong=f"not recorded: {_last(recorded)}")
    began = time.monotonic()
    found = in_release(
        *(fault.release, "-m", "kvledger", "repro", str(journal), "--finding", fault.finding),
        *("--output", str(file), "--json", "--budget", BUDGET),
    )
    took = time.monotonic() - began
    if found.returncode:
        return Proof(fault.name, fault.finding, seconds=took, wrong=f"not reproduced: {_last(found)}")
    result = json.loads(found.stdout)
    fails_on, passes_on, wrong = _judged(fault, file, result)
    return Proof(
        fault.name,
        fault.finding,
        (result["requests_before"], result["requests_after"]),
        (result["steps_before"], result["steps_after"]),
        result["first_seconds"],
        took,
        fails_on,
        passes_on,
        file.read_text(),
        wrong,
    )


def _judged(fault: Any, file: Path, result: dict[str, Any]) -> tuple[str, str, str]:
    """Where the file fails, where it passes, and what is wrong with it."""
    wrong = []
    if result["requests_after"] > MOST_REQUESTS or result["steps_after"] > MOST_STEPS:
        wrong.append("too large")
    bad = run_file(fault.release, file)
    if bad.returncode != 1:
        wrong.append(f"exit {bad.returncode} on {fault.release}: {_last(bad)}")
    if not fault.fixed:
        return fault.release if bad.returncode == 1 else "", "not fixed yet", "; ".join(wrong)
    good = run_file(fault.fixed, file)
    if good.returncode:
        wrong.append(f"exit {good.returncode} on {fault.fixed}: {_last(good)}")
    return (
        fault.release if bad.returncode == 1 else "",
        "" if good.returncode else fault.fixed,
        "; ".join(wrong),
    )


def run_file(release: str, file: Path) -> subprocess.CompletedProcess[str]:
    """Run a reproduction's file in a release, where kvledger can't be imported."""
    return in_release(release, "-c", WITHOUT_KVLEDGER, str(file))


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit {done.returncode} and no output"


def table(proofs: Sequence[Proof]) -> list[str]:
    """The table of all faults, in Markdown."""
    rows = [HEAD, tuple("---" for _ in HEAD), *(proof.row() for proof in proofs)]
    return [f"| {' | '.join(row)} |" for row in rows]


def page(proofs: Sequence[Proof], requests: int, level: str) -> str:
    """docs/repro-proof.md."""
    lines = [
        "# Proof of `kvledger repro`",
        "",
        "Generated by `make repro-proof ARGS=--write`; do not edit. Each fault of a released engine was",
        f"recorded amid about {requests} unrelated requests, at level `{level}` where the release allows it.",
        "`kvledger repro` turned each journal into one file. The file was run, without kvledger, on the",
        "release with the fault, where it fails, and on the first release of the matrix without it, where it",
        "passes. *first, s* is the time until the first reproduction, *seconds* the time of the whole",
        "command, on two cores.",
        "",
        *table(proofs),
        "",
    ]
    for proof in proofs:
        if proof.name in SHOWN and proof.file:
            lines += [f"## {proof.name}, whole", "", "```python", proof.file.rstrip(), "```", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove all faults, or these."""
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "src")]
    from releases import build
    from tests.repro.faults import FAULTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"among {', '.join(FAULTS)}")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--level", choices=("blocks", "tokens"), default="blocks")
    parser.add_argument("--keep", type=Path, help="keep the journals and files in this folder")
    parser.add_argument("--write", action="store_true", help="write docs/repro-proof.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.faults) - set(FAULTS):
        sys.exit(f"kvledger: {', '.join(sorted(unknown))}: not among {' '.join(FAULTS)}")
    chosen = [FAULTS[name] for name in options.faults or FAULTS]
    build(sorted({release for fault in chosen for release in (fault.release, fault.fixed) if release}))
    proofs = []
    with tempfile.TemporaryDirectory() as temporary:
        for fault in chosen:
            folder = (options.keep or Path(temporary)) / fault.name
            folder.mkdir(parents=True, exist_ok=True)
            proof = prove(fault, folder, options.requests, options.level)
            print(" | ".join(proof.row()), f"WRONG: {proof.wrong}" if proof.wrong else "", flush=True)
            proofs.append(proof)
    if options.write and not options.faults:
        PAGE.write_text(page(proofs, options.requests, options.level))
    wrong = [proof.name for proof in proofs if proof.wrong]
    print(f"{len(proofs)} faults, not proved: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
