"""Plants faults in vLLM's scheduler and block pool, one at a time, and shows which of them are found.

Usage: make proof NAME=mutants ARGS="[--write] [NAME...]"

Judges the mutants of the table of planted faults, or those named; `--write` writes docs/reference/mutants.md
and needs all; `--from=FILE` takes what `proofs.mutants.judge` printed. Exits with 1 if a mutant could not be
judged, or if none of the invariants that should find it does. `ARGS="drawn 400 [--write]"` draws mutants that
nobody chose: see drawn.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from kvledger.audit.planted.table import BY_NAME

from .drawn import RELEASE
from .drives import LEVELS
from .judge import MUTANTS, Judgement, judge_all, summary
from .page import PAGE, ROOT, page


def main(arguments: Sequence[str]) -> int:
    """Judge the mutants and print the totals."""
    if arguments[:1] == ["drawn"]:
        return _draw(arguments[1:])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    names = [word for word in arguments if not word.startswith("--")]
    kept = next((word[7:] for word in arguments if word.startswith("--from=")), "")
    if kept:
        with open(kept) as file:
            judged = [Judgement(**row) for row in json.load(file)]
    else:
        judged = judge_all([mutant for mutant in MUTANTS if not names or mutant.name in names])
    for judgement in judged:
        print(f"{judgement.name}: {summary(judgement)}")
    if "--write" in arguments:
        PAGE.write_text(page(MUTANTS, judged))
    missed = [judgement.name for judgement in judged if not _found(judgement)]
    if missed:
        print(f"Not found by the invariants that should find them: {', '.join(missed)}.")
    return int(bool(missed) or any(judgement.error for judgement in judged))


def _draw(arguments: Sequence[str]) -> int:
    """Draw mutants in the environment of the release that they are drawn of."""
    from releases import BIN, build, environ

    build([RELEASE])
    command = [str(BIN / "python"), "-m", "proofs.mutants.drawn", *arguments]
    variables = environ(RELEASE)
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


def _found(judgement: Judgement) -> bool:
    """Whether an invariant that should find a mutant does; there may be none."""
    should = BY_NAME[judgement.name].finds
    return not should or any(id in should for level in LEVELS for _, id, _ in judgement.found.get(level, ()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
