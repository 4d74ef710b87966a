"""Compares the output tokens that kvledger calls suspect with those that differ from a fresh engine.

Usage: make proof NAME=weights ARGS="[SCENARIO...]"    these scenarios, or all
       make proof NAME=weights ARGS="--random N"       a random workload of at least N output tokens
       make proof NAME=weights ARGS="--server N"       a server whose endpoints change the weights N times

The weights of a real engine on this CPU change in each way that vLLM has. A token is wrong if its
log-probabilities differ by more than 1e-4 from those of a fresh engine with the weights that were current
when it was sampled; it is suspect by `audit.weights`. Exits with 1 if a wrong token is not suspect, or if a
suspect one is right although the KV that it read was made by other weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvledger.audit.demo.process import output_to

from . import random_run, server
from .engine import prepare, same_kv
from .judge import HEAD, compare, wrong_tokens
from .scenarios import scenarios
from .subject import Result, Subject

Returned = TypeVar("Returned")


def main() -> int:
    """Print a row for each scenario, or one for the random workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--random", type=int, metavar="N")
    parser.add_argument("--server", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| scenario | " + " | ".join(HEAD) + " | findings |")
    print("|---" * (len(HEAD) + 2) + "|", flush=True)
    with output_to(Path(os.devnull)):
        prepare()
    with tempfile.TemporaryDirectory() as place:
        if options.random:
            result, counts = apart(random_run.serve, Path(place), options.random, options.seed)
            failed = show("random", result)
            print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
            return failed
        if options.server:
            result, printed = server.serve(Path(place), options.server)
            failed = show("server", result)
            print("\n".join(printed))
            return failed
        failed = 0
        for name, _ in scenarios(Path()):
            if not options.names or name in options.names:
                folder = Path(place, str(len(os.listdir(place))))
                failed |= show(name, apart(serve, folder, name))
    return failed


def serve(folder: Path, name: str) -> Result:
    """Run one scenario."""
    folder.mkdir()
    scenario = dict(scenarios(folder / "store"))[name]
    subject = Subject(folder, scenario.level, **scenario.options)
    scenario.run(subject)
    return subject.result()


def show(name: str, result: Result) -> int:
    """Judge what was served and print a row; returns 1 if the two judges disagree."""
    row, disagreements = compare(result, apart(wrong_tokens, result.served), lru_cache(None)(same_kv))
    print("| " + " | ".join([name, *row.cells(), ", ".join(result.findings) or "none"]) + " |", flush=True)
    for each in disagreements:
        print(f"  {each}", flush=True)
    return int(not row)


def apart(function: Callable[..., Returned], *arguments: Any) -> Returned:
    """Call a function in a fork of this process, without what vLLM prints: an engine leaves traces behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_quietly, function, *arguments).result()


def _quietly(function: Callable[..., Returned], *arguments: Any) -> Returned:
    with output_to(Path(os.devnull)):
        return function(*arguments)


if __name__ == "__main__":
    sys.exit(main())
