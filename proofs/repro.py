"""Proves `kvledger repro` on the faults of released engines.

Usage: make proof NAME=repro ARGS="[--write] [--requests N] [--folder FOLDER] [FAULT...]"

For each fault of tests/repro/faults.py: records it amid about N unrelated requests on the release that has
it, runs the command line `kvledger repro` there on the journal alone, and runs the resulting file, without
kvledger, on that release and on the first one without the fault. The file must fail on the former and pass on
the latter, with at most 3 requests and 30 steps. Prints one row for each fault, and exits with 1 if one is
wrong.

`--folder` keeps journals, files and results there, and takes what an earlier run left there: delete a fault's
folder to have it recorded again, its result.json to have it reproduced again. `--write` writes
docs/reference/repro-proof.md after a run of all faults.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "repro-proof.md"
MOST_REQUESTS, MOST_STEPS = 3, 30
SHOWN = ("placeholder-leak", "negative-local-hit", "promise-not-loaded")
"""The faults whose files are on the page, whole."""
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

    fault: Any
    result: dict[str, Any]
    fails_on: str
    passes_on: str
    figures: str
    """What the file prints on the release with the fault."""
    wrong: str

    def row(self) -> tuple[str, ...]:
        """The fault's row in the table."""
        before, after = self.result.get("before", ["", ""]), self.result.get("after", ["", ""])
        sizes = (str(before[0]), str(after[0]), str(before[1]), str(after[1]))
        seconds = (f"{self.result.get(name, 0):.0f}" for name in ("first_seconds", "seconds"))
        return (self.fault.name, f"`{self.fault.finding}`", *sizes, *seconds, self.fails_on, self.passes_on)


def in_release(release: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of .venv in a release."""
    from releases import BIN, environ

    variables = environ(release)
    variables["PYTHONPATH"] = ":".join((variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT))).lstrip(":")
    variables |= {"VLLM_LOGGING_LEVEL": "ERROR", "KVLEDGER_DISABLE": "1"}
    program = [str(BIN / "python"), *command]
    return subprocess.run(program, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


def reproduce(faults: Sequence[Any], folder: Path, requests: int) -> None:
    """Record and reproduce the faults, those of one release in one process."""
    for release in dict.fromkeys(fault.release for fault in faults):
        names = [fault.name for fault in faults if fault.release == release]
        todo = [name for name in names if not (folder / name / "result.json").exists()]
        if todo:
            print(f"{release}: {', '.join(todo)}", file=sys.stderr, flush=True)
            options = ("--requests", str(requests))
            done = in_release(release, "-m", "tests.repro.prove", str(folder), *todo, *options)
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)


def run_files(faults: Sequence[Any], folder: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """The exit code and output of each file, by release and fault."""
    wanted: dict[str, list[str]] = {}
    for fault in faults:
        for release in filter(None, (fault.release, fault.fixed)):
            if (folder / fault.name / "test_repro.py").exists():
                wanted.setdefault(release, []).append(fault.name)
    found: dict[str, dict[str, tuple[int, str]]] = {}
    (folder / "runs").mkdir(exist_ok=True)
    for release, names in wanted.items():
        output = folder / "runs" / f"{release}.json"
        if not output.exists():
            files = [f"{name}={folder / name / 'test_repro.py'}" for name in names]
            done = in_release(release, str(ROOT / "tests/repro/run_files.py"), str(output), *files)
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
        found[release] = json.loads(output.read_text()) if output.exists() else {}
    return found


def judge(fault: Any, folder: Path, runs: dict[str, dict[str, tuple[int, str]]]) -> Proof:
    """Where the file of a fault fails, where it passes, and what is wrong with it."""
    stored = folder / fault.name / "result.json"
    result: dict[str, Any] = {"wrong": "it was not recorded"}
    if stored.exists():
        result = json.loads(stored.read_text())
    missing = (-1, "it did not run")
    bad = runs.get(fault.release, {}).get(fault.name, missing)
    good = runs.get(fault.fixed, {}).get(fault.name, missing)
    wrong = [result["wrong"]] if result["wrong"] else []
    if not wrong:
        if result["after"][0] > MOST_REQUESTS or result["after"][1] > MOST_STEPS:
            wrong.append("it is too large")
        if bad[0] != 1:
            wrong.append(f"exit {bad[0]} on {fault.release}: {_last(bad[1])}")
        if fault.fixed and good[0] != 0:
            wrong.append(f"exit {good[0]} on {fault.fixed}: {_last(good[1])}")
    fails_on = fault.release if bad[0] == 1 else ""
    passes_on = "not fixed yet" if not fault.fixed else fault.fixed if good[0] == 0 else ""
    return Proof(fault, result, fails_on, passes_on, bad[1], "; ".join(wrong))


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def table(proofs: Iterable[Proof]) -> list[str]:
    """The table of all faults, in Markdown."""
    rows = [HEAD, tuple("---" for _ in HEAD), *(proof.row() for proof in proofs)]
    return [f"| {' | '.join(row)} |" for row in rows]


def page(proofs: Sequence[Proof], folder: Path) -> str:
    """docs/reference/repro-proof.md."""
    lines = [
        "# Proof of `kvledger repro`",
        "",
        "Generated by `make proof NAME=repro ARGS=--write`; do not edit. Each fault of a released engine was",
        "recorded amid unrelated requests on the release that has it, then reproduced there from the journal",
        "alone. The resulting file ran without kvledger, on the release with the fault, where it fails, and",
        "on the first release of the matrix without the fault, where it passes.",
        "",
        "*requests* and *steps*: in the journal up to the finding, then *after* shrinking. *first, s*:",
        "seconds until the first reproduction. *seconds*: until nothing more could be left out, or 120",
        "seconds after the import of vLLM were over. The command line measures both from when it has found",
        "the finding, so they include the import. They are longer where other work shares the cores.",
        "",
        *table(proofs),
        "",
        "- `0.9.1-v0` is vLLM 0.9.1 with its v0 scheduler, which is observed at level `tokens`.",
        "- `lmcache-...` is a release of LMCache under vLLM 0.32.0. The scheduler side of its adapter is",
        "  real, and a table takes the place of its store.",
        "- *not fixed yet*: no release of the matrix is without the fault.",
        "",
    ]
    for proof in proofs:
        file = folder / proof.fault.name / "test_repro.py"
        if proof.fault.name in SHOWN and file.exists():
            lines += [f"## {proof.fault.name}, whole", "", "```python", file.read_text().rstrip(), "```", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove all faults, or these."""
    from releases import build
    from tests.repro.faults import FAULTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"among {', '.join(FAULTS)}")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="keep journals, files and results in this folder")
    parser.add_argument("--write", action="store_true", help="write docs/reference/repro-proof.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.faults) - set(FAULTS):
        sys.exit(f"kvledger: {', '.join(sorted(unknown))}: not among {' '.join(FAULTS)}")
    chosen = [FAULTS[name] for name in options.faults or FAULTS]
    build(sorted({release for fault in chosen for release in (fault.release, fault.fixed) if release}))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        reproduce(chosen, folder, options.requests)
        runs = run_files(chosen, folder)
        proofs = [judge(fault, folder, runs) for fault in chosen]
        if options.write and not options.faults:
            PAGE.write_text(page(proofs, folder))
    print("\n".join(table(proofs)))
    wrong = [proof for proof in proofs if proof.wrong]
    for proof in wrong:
        print(f"{proof.fault.name}: {proof.wrong}")
    print(f"{len(proofs)} faults, {len(wrong)} not proved")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
