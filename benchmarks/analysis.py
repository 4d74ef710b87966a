"""How long it takes to analyse a trace of many requests: `python benchmarks/analysis.py [--requests N]`.

Writes the traces (``trace.py``), runs the command line on them as a user would, and prints one table with
wall times, the peak memory of a process, and ratios. Runs on a small and a large trace take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.analysis` adds this itself

from tests.simulated_trace import write_trace

FEW = 10_000
ENGINES = 4
SUMS = ("requests", "prompt_tokens", "local", "external", "computed", "scheduled", "preemptions")
SQL = (
    "select count(*) as requests, sum(preemptions)::bigint as preemptions, "
    + ", ".join(f"sum({name})::bigint as {name}" for name in SUMS[1:-1])
    + " from read_parquet('{}')"
)


class Timed(NamedTuple):
    """One run: wall and CPU seconds, the peak memory of a process, and the output."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    out: str


def kvledger(*words: str | Path) -> Timed:
    """Run the command line in its own process."""
    command = [sys.executable, "-m", "kvledger", *map(str, words)]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.monotonic() - began
        out.seek(0)
        assert os.waitstatus_to_exitcode(status) in (0, 1), command
        return Timed(took, usage.ru_utime + usage.ru_stime, _peak(usage), out.read())


def _peak(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * 1024


def startup(verb: str, nearly_none: Path, rounds: int) -> float:
    """CPU seconds of a command on an almost empty trace: mostly its imports."""
    return median(kvledger(verb, nearly_none, "--format", "json").cpu_seconds for _ in range(rounds))


def duckdb_totals(parquet: Path) -> tuple[float, dict[str, int]]:
    """The seconds that the same sums take in SQL, and the sums."""
    import duckdb

    began = time.monotonic()
    (sums,) = duckdb.sql(SQL.format(parquet)).fetchall()
    names = ("requests", "preemptions", *SUMS[1:-1])
    return time.monotonic() - began, dict(zip(names, sums, strict=True))


def rows(folder: Path, requests: int, rounds: int) -> Iterator[tuple[str, str, str]]:
    """Rows of the table: what was measured, the figure, and its target."""
    few, many, fleet = folder / "few", folder / "many", folder / "fleet"
    began = time.monotonic()
    write_trace(many, requests)
    yield f"writing {requests:,} requests", f"{time.monotonic() - began:.1f} s", ""
    write_trace(few, min(FEW, requests))
    write_trace(folder / "nearly-none", 10)
    write_trace(fleet, requests, engines=ENGINES, jobs=2)
    for verb in ("audit", "summary"):
        small: list[float] = []
        large: list[Timed] = []
        for _ in range(rounds):
            # Small traces run before and after, because the machine's speed drifts.
            small += (kvledger(verb, few, "--format", "json").cpu_seconds for _ in range(5))
            large.append(kvledger(verb, many, "--format", "json"))
            small += (kvledger(verb, few, "--format", "json").cpu_seconds for _ in range(5))
        start = startup(verb, folder / "nearly-none", 5)
        wall = median(run.wall_seconds for run in large)
        peak = max(run.peak_bytes for run in large)
        each = (median(run.cpu_seconds for run in large) - start) / requests
        each_few = (median(small) - start) / min(FEW, requests)
        yield f"{verb}, one journal", f"{wall:.1f} s", "below 60 s"
        yield f"{verb}, peak memory", f"{peak >> 20:,} MiB", "below 1,024 MiB"
        ratio = each / each_few
        yield f"{verb}, CPU a request, {requests:,} / {FEW:,} requests", f"{ratio:.3f}", "at most 1.1"
        shared = kvledger(verb, fleet, "--format", "json")
        yield f"{verb}, {ENGINES} journals, a process a core", f"{shared.wall_seconds:.1f} s", "below 60 s"
        alone = kvledger(verb, fleet, "--format", "json", "--jobs", "1")
        yield f"{verb}, the same by one process", _same(shared.out == alone.out), "the same"
    yield from _tables(folder, many, rounds)


def _tables(folder: Path, many: Path, rounds: int) -> Iterator[tuple[str, str, str]]:
    tables = folder / "tables"
    wrote = kvledger("export", many, "-o", tables, "--table", "requests", "--table", "lives")
    yield "export of requests and lives", f"{wrote.wall_seconds:.1f} s", ""
    runs = [kvledger("summary", tables, "--format", "json") for _ in range(rounds)]
    took = median(run.wall_seconds for run in runs)
    yield "summary of the exported tables", f"{took:.2f} s", "below 5 s"
    same = runs[0].out == kvledger("summary", many, "--format", "json").out
    yield "summary of the tables and of the journal", _same(same), "the same"
    seconds, sums = min((duckdb_totals(tables / "requests.parquet") for _ in range(rounds)), key=_first)
    yield "DuckDB, the same sums", f"{seconds:.2f} s", ""
    (row,) = json.loads(runs[0].out)
    yield "sums of DuckDB and of summary", _same(sums == {name: row[name] for name in sums}), "the same"


def _first(timed: tuple[float, dict[str, int]]) -> float:
    return timed[0]


def _same(same: bool) -> str:
    return "the same" if same else "DIFFERENT"


def main() -> int:
    """Measure and print. Returns 0 whatever the figures are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'what':<62} {'figure':>10}  target")
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
        for what, figure, target in rows(Path(name), arguments.requests, arguments.rounds):
            print(f"{what:<62} {figure:>10}  {target}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
