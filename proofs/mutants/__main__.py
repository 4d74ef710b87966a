"""Puts faults into vLLM's scheduler and block pool, one at a time, and shows which of them are found.

Usage: make proof NAME=mutants ARGS="[--write] [NAME...]"

Judges all mutants of the table, or those named; `--write` writes docs/reference/mutants.md and needs all.
Exits with 1 if a mutant could not be judged.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from .judge import Judgement, judge_all, summary
from .page import PAGE, page
from .table import MUTANTS


def main(arguments: Sequence[str]) -> int:
    """Judge the mutants and print the totals."""
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
    return int(any(judgement.error for judgement in judged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
