"""Fuzz the reading of journals: ``python -m tests.fuzz.run 100000``; ``make fuzz`` runs it.

Prints how many journals got which verdict, by the level of their changes, and every journal that was read
wrongly with its seed. ``python -m tests.fuzz.run 1 SEED`` reads one again.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.fuzz.judge import Reading, Result, result
from tests.fuzz.traces import originals

SHOWN = 20


def results(seeds: Iterable[int]) -> list[tuple[int, Result]]:
    """The results of some seeds, in this process."""
    traces = originals()
    readings: dict[str, Reading | None] = {}
    return [(seed, result(seed, traces, readings)) for seed in seeds]


def summary(done: list[tuple[int, Result]]) -> str:
    """A line for each level of changes, then every journal that was read wrongly."""
    counts = Counter((one.level, one.verdict) for _, one in done)
    lines = []
    for level in sorted({level for level, _ in counts}):
        verdicts = {verdict: number for (which, verdict), number in sorted(counts.items()) if which == level}
        told = ", ".join(f"{number:,} {verdict or 'crashed'}" for verdict, number in verdicts.items())
        lines.append(f"{level}: {sum(verdicts.values()):,} journals: {told}")
    wrong = [(seed, one) for seed, one in done if one.wrong]
    lines.append(f"{len(done):,} journals, {len(wrong):,} read wrongly")
    for seed, one in wrong[:SHOWN]:
        lines.append(f"  seed {seed}: {one.original}: {one.level} ({one.changes}): {one.wrong}")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 if a journal was read wrongly."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    workers = min(len(os.sched_getaffinity(0)), max(1, number // 100))
    shards = [range(first + shard, first + number, workers) for shard in range(workers)]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done = [one for shard in pool.map(results, shards) for one in shard]
    print(summary(sorted(done)))
    print(f"{time.monotonic() - began:.0f} seconds")
    return any(one.wrong for _, one in done)


if __name__ == "__main__":
    sys.exit(main())
