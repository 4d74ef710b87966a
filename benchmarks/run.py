"""`make bench`: measures what observing costs, and prints one table.

Figures are medians, with their 95 % bootstrap interval, and most are ratios of two
things that took turns in one process: only ratios mean the same on another machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))  # as `python -m benchmarks.run` has it

from benchmarks import page
from benchmarks.process import settle
from benchmarks.stats import Estimate
from benchmarks.validity import InvalidRound

from kvledger.audit.demo.process import quiet

BLOCKS = ("blocks-256", "blocks-1024", "blocks-pool", "blocks-churn")
SCHEDULER = ("steady-256", "steady-1024", "churn", "churn-short", "speculative", *BLOCKS)
REPLAY = ("churn-short", "speculative")
PARTS = (*SCHEDULER, "engine", "replay", "sidecar")

Progress = Callable[[str], None]


class Row(NamedTuple):
    """One line of the table; ``part`` measures it again."""

    what: str
    figure: str
    interval: str
    target: str
    met: bool | None
    part: str


class Amount(NamedTuple):
    """How much is measured. ``share`` of the requests run that a workload asks for."""

    share: float
    rounds: int
    steps: int
    turns: int
    replays: int
    requests: tuple[int, int]
    seconds: float


FULL = Amount(share=1.0, rounds=7, steps=288, turns=20, replays=5, requests=(20_000, 100_000), seconds=120.0)
QUICK = Amount(share=0.1, rounds=2, steps=16, turns=1, replays=2, requests=(100, 200), seconds=2.0)


def scheduler_rows(key: str, amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """A workload on the real scheduler, and the journal that was written of it."""
    from benchmarks.scheduler import BY_KEY, Effort, measure

    workload = BY_KEY[key].shrunk(amount.share)
    found = measure(workload, Effort(amount.rounds, amount.steps), folder, progress)
    ours, tail = found.cpu_ratio("observed", "bare"), found.p99_ratio("observed", "bare")
    limit = workload.limit
    yield _ratio(f"{workload.name}: CPU a step, observed / bare", ours, key, at_most=limit)
    nothing = found.cpu_ratio("again", "on")
    yield _ratio(f"{workload.name}: CPU a step, bare / bare, two engines", nothing, key)
    yield _ratio(f"{workload.name}: p99 step, observed / bare", tail, key)
    peer, tail = found.cpu_ratio("bare", "off"), found.p99_ratio("bare", "off")
    yield _ratio(f"{workload.name}: CPU a step, vLLM's log_stats on / off", peer, key)
    yield _ratio(f"{workload.name}: p99 step, vLLM's log_stats on / off", tail, key)
    if key.startswith("steady"):
        size = found.journal_bytes / found.generated_tokens
        what = f"{workload.name}: journal, bytes a token"
        yield Row(what, f"{size:.3f}", "", "at most 0.1", size <= 0.1, key)
    if workload.output_tokens and found.requests:
        size = found.journal_bytes / found.requests
        what = f"{workload.name}: journal, bytes a request"
        yield Row(what, f"{size:.0f}", "", "at most 1,024", size <= 1024, key)


def engine_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The real engine."""
    from benchmarks import engine

    with quiet(folder / "engine.log"):
        ours, nothing = engine.measure(amount.rounds, amount.turns, folder, progress)
    yield _ratio("real engine on this CPU: tokens a second, observed / bare", ours, "engine", at_least=0.99)
    yield _ratio("real engine on this CPU: tokens a second, bare / bare, two engines", nothing, "engine")


def replay_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """An audit of a journal: its speed and its memory."""
    from benchmarks import replay
    from benchmarks.scheduler import BY_KEY

    for key in REPLAY:
        workload = BY_KEY[key].shrunk(amount.share)
        progress(f"replay: {workload.name}")
        rate = replay.request_steps_per_second(workload, amount.steps, amount.replays, folder)
        yield Row(
            f"{workload.name}: request-steps audited a second",
            f"{rate.median:,.0f}",
            f"{rate.low:,.0f} to {rate.high:,.0f}",
            "at least 200,000",
            rate.median >= 200_000,
            "replay",
        )
    few, many = amount.requests
    progress(f"replay: memory over {many:,} requests")
    growth = replay.peak_bytes(many, folder) / replay.peak_bytes(few, folder)
    yield Row(
        f"replay: peak memory, {many:,} requests / {few:,} requests",
        f"{growth:.3f}",
        "",
        "at most 1.1",
        growth <= 1.1,
        "replay",
    )


def sidecar_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The sidecar beside a fleet that is written in real time; its memory over many requests."""
    from benchmarks import sidecar

    progress(f"sidecar: beside a fleet, {amount.seconds:.0f} seconds")
    load = sidecar.measure(amount.seconds, folder, max(2, round(sidecar.ENGINES * amount.share)))
    fleet = f"sidecar: {load.engines} engines, 50 steps and 5 requests a second each"
    share, lag = load.cpu_share, load.lag_worst
    yield Row(f"{fleet}: share of a core", f"{share:.2f}", "", "at most 0.5", share <= 0.5, "sidecar")
    what = f"{fleet}: lag in seconds (median {load.lag_median:.1f}), worst"
    yield Row(what, f"{lag:.1f}", "", "at most 2", lag <= 2, "sidecar")
    requests = round(sidecar.REQUESTS * amount.share)
    progress(f"sidecar: memory over {requests:,} requests")
    few, many = sidecar.resident_bytes(requests, folder)
    what = f"sidecar: resident memory after {requests:,} requests / after a tenth"
    yield Row(what, f"{many / few:.3f}", "", "at most 1.1", many / few <= 1.1, "sidecar")


def _ratio(what: str, ratio: Estimate, part: str, at_most: float = 0.0, at_least: float = 0.0) -> Row:
    target, met = "", None
    if at_most:
        target, met = f"at most {at_most}", ratio.median <= at_most
    if at_least:
        target, met = f"at least {at_least}", ratio.median >= at_least
    return Row(what, f"{ratio.median:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}", target, met, part)


HEADINGS = ("what", "median", "95 % interval", "target", "met", "command")


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table."""
    met = {None: "", True: "yes", False: "no"}
    return (row.what, row.figure, row.interval, row.target, met[row.met], command(row.part))


def command(part: str) -> str:
    """What measures it."""
    return f"make bench ARGS={part}"


def merged(before: Sequence[tuple[str, ...]], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The page's table with the rows of what was measured now, in the order of the parts."""
    now = {command(row.part) for row in rows}
    lines = [line for line in before if line[-1] not in now] + [cells(row) for row in rows]
    order = {command(part): place for place, part in enumerate(PARTS)}
    return sorted((line for line in lines if line[-1] in order), key=lambda line: order[line[-1]])


def text(lines: Sequence[tuple[str, ...]], ran_on: str) -> str:
    """The first half of docs/performance.md."""
    return f"""# What it costs

Made by `make bench ARGS=--write`, or part by part (`make bench ARGS="churn --write"`); do not edit. The last
part ran on {ran_on}

{page.table(HEADINGS, lines)}

*CPU a step* is CPU time in `add_request`, `schedule` and `update_from_output` of vLLM's real
scheduler, with made-up model output, and for the observed engine all CPU time of the writer thread
besides, which writes once a second of that engine's own time. *Bare* is the same engine with its own
statistics on, as it serves. Four engines in one process do the same steps and take turns of three: one
observed, two bare, one without statistics; the first three are equal and are the observed one by turns,
so that it cancels out where the memory of each lies. The first step of a turn is not timed, for it
finds the caches as another engine left them. There are {FULL.rounds} rounds of {FULL.steps} timed
steps, half as many with 1,024 running, and new engines for every round. Sums over 8 steps are compared,
observed with the mean of both bare; these ratios' Hodges-Lehmann estimate, as geometric mean of the three
that were observed, is a round's, and the figure is the median of the rounds with its 95 % bootstrap
interval.
*Bare / bare* compares the two bare engines in the same way: it is 1 but for what the benchmark itself is
wrong by. *p99 step* is wall time, compared by the round. A step of a real engine waits for the model
besides, so there the share is less.

*Steady* is decode only. *Churn* has prompts of 64 to 256 tokens, partly shared, and outputs of 64 to
256 tokens, or of 16 to 64. *Speculative* accepts a random number of three drafts; 256 requests run
where nothing else is said. *Level blocks* is the same at `KVLEDGER_LEVEL=blocks`, everything else at
the level `tokens`.

The *real engine* has the demo's model of some 0.4 million weights, so its steps are as short as steps
get, and serves 32 requests at a time, as long as those of *churn*: with shorter ones our share is larger,
for most of it is where requests begin and end. Three engines take turns in the same way,
and all time of a step counts, with the wait for the journal once a second. A replay reads, decodes
and checks a journal in which no step repeats the one before.
"""


def measure(parts: list[str], amount: Amount, progress: Progress) -> Iterator[Row]:
    """All rows of ``parts``, in the table's order."""
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
        folder = Path(name)
        for part in parts:
            if part in SCHEDULER:
                yield from scheduler_rows(part, amount, folder, progress)
            else:
                yield from ROWS[part](amount, folder, progress)


ROWS = {"engine": engine_rows, "replay": replay_rows, "sidecar": sidecar_rows}


def _teller(terminal: TextIO) -> Progress:
    def tell(what: str) -> None:
        if terminal.isatty():
            print(f"\r\033[K{what}", end="", file=terminal, flush=True)

    return tell


def main() -> int:
    """Measure and print. Returns 0 whatever the figures are, 1 if a round does not count."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    parser.add_argument(
        "--write", action="store_true", help=f"also write it into {page.PAGE.relative_to(page.ROOT)}"
    )
    asked = parser.parse_args()
    settle()
    ran_on = page.machine()
    tell = _teller(sys.stderr)
    parts = [part for part in PARTS if part in (asked.parts or PARTS)]
    rows = []
    try:
        for row in measure(parts, QUICK if asked.quick else FULL, tell):
            rows.append(row)
            tell("")
            print(f"{row.what}: {row.figure} ({row.interval})", file=sys.stderr, flush=True)
    except InvalidRound as error:
        tell("")
        print(f"The benchmark failed: {error}.", file=sys.stderr)
        return 1
    print(f"{ran_on}\n\n{page.table(HEADINGS, list(map(cells, rows)))}")
    if asked.write:
        page.write_first(text(merged(page.told(), rows), ran_on))
    return 0


if __name__ == "__main__":
    sys.exit(main())
