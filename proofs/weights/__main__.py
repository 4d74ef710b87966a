"""Compares the output tokens that kvledger calls suspect with those that differ from a fresh engine.

Usage: make proof NAME=weights ARGS="[SCENARIO...]"    these scenarios, or all
       make proof NAME=weights ARGS="--random N"       a random workload of at least N output tokens
       make proof NAME=weights ARGS="--server N"       a server whose endpoints change the weights N times
       make proof NAME=weights ARGS="--workers [CASE...]"    two workers in processes of their own

The weights of a real engine on this CPU change in each way that vLLM has. A token is wrong if its
log-probabilities differ by more than 1e-4 from those of a fresh engine with the weights that were current
when it was sampled; it is suspect by `audit.weights`. Exits with 1 if a wrong token is not suspect, or if a
suspect one is right although the KV that it read was made by other weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvledger.audit.demo.engine import output_to

from . import random_run, server, workers
from .engine import prepare, same_kv
from .judge import HEAD, compare, wrong_tokens
from .scenarios import scenarios
from .subject import Result, Subject

Returned = TypeVar("Returned")
LIMIT_SECONDS = 900
"""A process that takes longer is killed, also one that does not end after its work."""


def main() -> int:
    """Print a row for each scenario, or one for the random workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--random", type=int, metavar="N")
    parser.add_argument("--server", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", action="store_true")
    options = parser.parse_args()
    if options.workers:
        return of_workers(options.names)
    print("| scenario | " + " | ".join(HEAD) + " | findings |")
    print("|---" * (len(HEAD) + 2) + "|", flush=True)
    with output_to(Path(os.devnull)):
        prepare()
    with tempfile.TemporaryDirectory() as place:
        folder, results, printed = Path(place), dict[str, Result](), list[str]()
        known = dict(scenarios(folder / "store"))
        if options.random:
            results["random"], counts = apart(random_run.serve, folder, options.random, options.seed)
            printed = [", ".join(f"{count:,} {what}" for what, count in counts.items())]
        elif options.server:
            results["server"], printed = server.serve(folder, options.server)
        else:
            for name in [each for each in known if each in options.names or not options.names]:
                before = known[name].before
                if before is not None:
                    apart(before, folder)
                results[name] = apart(serve, folder, name)
        every = {(name, id): one for name, result in results.items() for id, one in result.served.items()}
        wrong = apart(wrong_tokens, every)
        same = lru_cache(None)(same_kv)
        agree = {name: show(name, result, wrong, same) for name, result in results.items()}
    print("\n".join(printed), end="\n" if printed else "")
    return int(
        any(not agrees and not (name in known and known[name].unseen) for name, agrees in agree.items())
    )


def of_workers(names: list[str]) -> int:
    """Print what is found of these cases of two workers, or all; 1 if that is not what one has."""
    with output_to(Path(os.devnull)):
        prepare()
    wrong = False
    with tempfile.TemporaryDirectory() as place:
        for name in names or workers.CASES:
            changes, *found = apart(workers.serve, Path(place), name)
            wrong |= bool(found) != workers.CASES[name].differ
            print(f"{name}: {changes}", *found, sep="\n  ", flush=True)
    return int(wrong)


def serve(folder: Path, name: str) -> Result:
    """Run one scenario."""
    scenario = dict(scenarios(folder / "store"))[name]
    subject = Subject(folder, scenario.level, **scenario.options)
    scenario.run(subject)
    return subject.result()


def show(
    name: str,
    result: Result,
    wrong: Mapping[tuple[str, str], list[bool]],
    same: Callable[[Path, Path], bool],
) -> bool:
    """Print the row of what was served; returns whether the two judges agree."""
    row, disagreements = compare(result, {id: wrong[name, id] for id in result.served}, same)
    print("| " + " | ".join([name, *row.cells(), ", ".join(result.findings) or "none"]) + " |")
    print("".join(f"  {each}\n" for each in disagreements), end="", flush=True)
    return bool(row)


def apart(function: Callable[..., Returned], *arguments: Any) -> Returned:
    """Call a function in a fork of this process, without what vLLM prints: an engine leaves traces behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_quietly, function, *arguments).result()


def _quietly(function: Callable[..., Returned], *arguments: Any) -> Returned:
    signal.alarm(LIMIT_SECONDS)
    with output_to(Path(os.devnull)):
        return function(*arguments)


if __name__ == "__main__":
    sys.exit(main())
