"""`make bench`: measures what kvledger costs an engine, and prints one table.

Figures are medians with their 95 % bootstrap interval. Most are ratios of two engines that took turns in
one process, because only ratios can be compared between machines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.run` adds this itself

from benchmarks import page
from benchmarks.process import settle
from benchmarks.stats import Estimate
from benchmarks.validity import InvalidRound

from kvledger.audit.demo.engine import output_to

BLOCKS = ("blocks-256", "blocks-1024", "blocks-pool", "blocks-churn")
SCHEDULER = ("steady-256", "steady-1024", "churn", "churn-short", "images", "speculative", *BLOCKS)
REPLAY = ("churn-short", "speculative")
PARTS = (*SCHEDULER, "engine", "content", "replay", "sidecar", "turns")

Progress = Callable[[str], None]


class Row(NamedTuple):
    """One row of the table; ``part`` names the part of the benchmark that measures it."""

    what: str
    figure: str
    interval: str
    target: str
    met: bool | None
    part: str
    all_runs: str = ""
    """The figure of each run, in the order of the runs, if there were several."""


class Amount(NamedTuple):
    """How much is measured. ``share`` is the share of a workload's requests that run."""

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
    """The rows of one workload on the real scheduler, and of the journal that it wrote."""
    from benchmarks.scheduler import BY_KEY, Effort, measure

    workload = BY_KEY[key].shrunk(amount.share)
    measured = measure(workload, Effort(amount.rounds, amount.steps), folder, progress)
    cpu, tail = measured.cpu_ratio("observed", "bare"), measured.p99_ratio("observed", "bare")
    limit = workload.limit
    yield _ratio(f"{workload.name}: CPU a step, observed / bare", cpu, key, at_most=limit)
    error = measured.cpu_ratio("again", "on")
    yield _ratio(f"{workload.name}: CPU a step, bare / bare, two engines", error, key)
    yield _ratio(f"{workload.name}: p99 step, observed / bare", tail, key)
    cpu, tail = measured.cpu_ratio("bare", "off"), measured.p99_ratio("bare", "off")
    yield _ratio(f"{workload.name}: CPU a step, vLLM's log_stats on / off", cpu, key)
    yield _ratio(f"{workload.name}: p99 step, vLLM's log_stats on / off", tail, key)
    if key.startswith("steady"):
        size = measured.journal_bytes / measured.generated_tokens
        what = f"{workload.name}: journal, bytes a token"
        yield Row(what, f"{size:.3f}", "", "at most 0.1", size <= 0.1, key)
    if workload.output_tokens and measured.requests:
        size = measured.journal_bytes / measured.requests
        what = f"{workload.name}: journal, bytes a request"
        yield Row(what, f"{size:.0f}", "", "at most 1,024", size <= 1024, key)


def engine_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The rows of the real engine."""
    from benchmarks import engine

    with output_to(folder / "engine.log"):
        rate, error = engine.measure(amount.rounds, amount.turns, folder, progress)
    yield _ratio("real engine on this CPU: tokens a second, observed / bare", rate, "engine", at_least=0.99)
    yield _ratio("real engine on this CPU: tokens a second, bare / bare, two engines", error, "engine")


def content_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The rows of level ``content``: beside level ``blocks`` on real engines, the forms, and the seals."""
    from benchmarks import content_engine, content_forms

    for large in (True, False) if amount.share == 1.0 else (False,):  # the large model takes minutes
        turns, place = max(1, amount.turns // 5) if large else amount.turns, folder / f"large-{large}"
        with output_to(folder / "content.log"):
            rates = content_engine.measure(large, amount.rounds, turns, place, progress)
        model = "steps of 20 ms or more" if large else "the demo's tiny model"
        name = f"real engine on this CPU, {model} ({rates.step_milliseconds:.0f} ms a step): tokens a second"
        at_least = 0.98 if large else 0.0
        yield _ratio(f"{name}, content / blocks", rates.content, "content", at_least=at_least)
        yield _ratio(f"{name}, blocks / blocks, two engines", rates.error, "content")
        what = f"real engine on this CPU, {model}: hit blocks compared, none differed"
        yield Row(what, f"{rates.compared:,}", "", "", None, "content")

    progress("content: fingerprints")
    for what, rate in content_forms.rates(amount.rounds):
        interval = f"{rate.low:.2f} to {rate.high:.2f}"
        yield Row(f"fingerprints, {what}: GB a second", f"{rate.median:.2f}", interval, "", None, "content")
    yield Row("seals: bytes a block", f"{content_forms.seal_bytes():.0f}", "", "", None, "content")


def replay_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The rows of replay: how fast a journal is audited, and in how much memory."""
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
    """The rows of the sidecar: beside engines that write in real time, and its memory over many requests."""
    from benchmarks import sidecar

    progress(f"sidecar: beside engines, {amount.seconds:.0f} seconds")
    load = sidecar.measure(amount.seconds, folder, max(2, round(sidecar.ENGINES * amount.share)))
    fleet = f"sidecar: {load.engines} engines, 50 steps and 5 requests a second each"
    share, lag = load.cpu_share, load.lag_worst
    yield Row(f"{fleet}: share of a core", f"{share:.2f}", "", "at most 0.5", share <= 0.5, "sidecar")
    what = f"{fleet}: lag in seconds (median {load.lag_median:.1f}), worst"
    yield Row(what, f"{lag:.1f}", "", "at most 2", lag <= 2, "sidecar")
    what = f"{fleet}: a scrape in seconds (worst {load.scrape_worst:.2f}), median"
    yield Row(what, f"{load.scrape_median:.3f}", "", "at most 0.25", load.scrape_median <= 0.25, "sidecar")
    requests = round(sidecar.REQUESTS * amount.share)
    progress(f"sidecar: memory over {requests:,} requests")
    few, many = sidecar.resident_bytes(requests, folder)
    what = f"sidecar: resident memory after {requests:,} requests / after a tenth"
    yield Row(what, f"{many / few:.3f}", "", "at most 1.1", many / few <= 1.1, "sidecar")


def turns_rows(amount: Amount, folder: Path, progress: Progress) -> Iterator[Row]:
    """The row of turns: what counting them adds to the audit of an engine that is followed."""
    from benchmarks import replay
    from benchmarks.scheduler import BY_KEY

    workload = BY_KEY["blocks-churn"].shrunk(amount.share)
    progress(f"turns: {workload.name}")
    ratio = replay.cost_of_turns(workload, amount.steps, amount.replays, folder)
    yield _ratio(f"{workload.name}: CPU of the sidecar's audit, with turns / without", ratio, "turns")


def _ratio(what: str, ratio: Estimate, part: str, at_most: float = 0.0, at_least: float = 0.0) -> Row:
    target, met = "", None
    if at_most:
        target, met = f"at most {at_most}", ratio.median <= at_most
    if at_least:
        target, met = f"at least {at_least}", ratio.median >= at_least
    return Row(what, f"{ratio.median:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}", target, met, part)


HEADINGS = ("what", "median", "95 % interval", "target", "met", "each of several runs", "command")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row."""
    met = {None: "", True: "yes", False: "no"}
    return (row.what, row.figure, row.interval, row.target, met[row.met], row.all_runs, command(row.part))


def command(part: str) -> str:
    """The command that measures a part."""
    return f"make bench ARGS={part}"


def middle(runs: Sequence[Row]) -> Row:
    """The run with the median figure, of an odd number of runs of one row."""
    if len(runs) == 1:
        return runs[0]
    chosen = sorted(runs, key=lambda row: float(row.figure.replace(",", "")))[len(runs) // 2]
    return chosen._replace(all_runs=", ".join(row.figure for row in runs))


def merged(before: Sequence[tuple[str, ...]], rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The page's table with the rows of the measured parts replaced, in the order of the parts."""
    measured = {command(row.part) for row in rows}
    lines = [line for line in before if line[-1] not in measured] + [cells(row) for row in rows]
    order = {command(part): place for place, part in enumerate(PARTS)}
    return sorted((line for line in lines if line[-1] in order), key=lambda line: order[line[-1]])


def text(lines: Sequence[tuple[str, ...]], ran_on: str) -> str:
    """The first half of docs/performance.md."""
    return f"""# Performance

Generated by `make bench ARGS=--write`, or part by part (`make bench ARGS="churn --write"`); do not edit. The
last part ran on {ran_on} Rows near their target were
measured several times (`make bench ARGS="churn --runs 3 --write"`): the row is the run with the median
figure, beside the figures of all runs.

{page.table(HEADINGS, lines)}

## How the scheduler rows are measured

*CPU a step* is the CPU time of `add_request`, `schedule` and `update_from_output` of vLLM's real
scheduler. Scripted model output takes the place of the model. For the observed engine, all CPU time of the
journal's writer thread is included; the thread writes once a second of that engine's own time.

- *Observed* is the engine with kvledger. *Bare* is the same engine without it, with vLLM's own statistics
  on, as in production. The level is `tokens`; rows that begin with *level blocks* use
  `KVLEDGER_LEVEL=blocks`.
- Four engines run in one process and execute the same steps: one observed, two bare, and one with vLLM's
  statistics off. They take turns of three steps. The first step of a turn is not timed, because the
  previous engine has filled the CPU caches with its own data.
- The first three engines are equal, and each of them is the observed one for a third of a round. This
  cancels the effect of where an engine's objects lie in memory.
- A row is measured in {FULL.rounds} rounds of {FULL.steps} timed steps, half as many with 1,024 running
  requests. Every round creates new engines. A round counts only if its journal contains every request and
  every step and audits clean.
- Within a round, sums over 8 steps are compared: observed against the mean of both bare engines. The
  round's figure is the Hodges-Lehmann estimate of these ratios, averaged (geometric mean) over the three
  engines that were observed. The row shows the median of the rounds and its 95 % bootstrap interval.
- *Bare / bare* compares the two bare engines in the same way. Its distance from 1 is the error of the
  benchmark.
- *p99 step* is wall time, compared once a round.

A real engine also waits for its model in each step, so there the share of kvledger is smaller.

*Steady* workloads only decode. *Churn* has prompts of 64 to 256 tokens, partly shared, and outputs of 64 to
256 tokens; with *6 to 7 ends a step*, outputs have 16 to 64 tokens. *Speculative* accepts a random number
of three draft tokens. 256 requests run unless the row says otherwise.

## How the other rows are measured

- *Real engine*: vLLM's engine with the demo's model of about 0.4 million weights and 32 concurrent
  requests, as long as those of *churn*. Its steps are as short as steps get, so this is the worst case.
  Three engines take turns as above, and all time of a step counts, including the wait for the journal
  once a second. Shorter requests would raise the share of kvledger, because most of its work is done when
  a request begins or ends.
- *Content / blocks*: as *real engine*, with one engine at level `content`, which verifies every hit, and two
  at level `blocks`. Each prompt begins with one of eight prefixes of 128 tokens. The model with *steps of
  20 ms or more* has 8 layers of 768 and random weights; no limit is set for the demo's tiny model.
- *Fingerprints*: 64 blocks in an order without neighbours, one thread. *Seals*: the fingerprint of a block
  on the device, and the numbers that the worker keeps of it.
- *Replay*: reads, decodes and checks a journal in which no step repeats the step before.
- *Sidecar*: `kvledger serve` beside engines that write their journals in real time.
- *With turns / without*: the audit that the sidecar makes of a journal, with all that metrics need, and the
  same without the observer that counts turns of sessions. They are timed one after the other.
"""


def measure(parts: list[str], amount: Amount, progress: Progress) -> Iterator[Row]:
    """The rows of ``parts``, in the order of the table."""
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
        folder = Path(name)
        for part in parts:
            if part in SCHEDULER:
                yield from scheduler_rows(part, amount, folder, progress)
            else:
                yield from ROWS[part](amount, folder, progress)


ROWS = {
    "engine": engine_rows,
    "content": content_rows,
    "replay": replay_rows,
    "sidecar": sidecar_rows,
    "turns": turns_rows,
}


def _progress_on(terminal: TextIO) -> Progress:
    def show(what: str) -> None:
        if terminal.isatty():
            print(f"\r\033[K{what}", end="", file=terminal, flush=True)

    return show


def main() -> int:
    """Measure and print. Returns 0 whatever the figures are, 1 if a round does not count."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark works")
    parser.add_argument(
        "--write", action="store_true", help=f"also write the table into {page.PAGE.relative_to(page.ROOT)}"
    )
    parser.add_argument(
        "--runs", type=int, choices=(1, 3, 5), default=1, help="how often to measure; shows the median run"
    )
    arguments = parser.parse_args()
    settle()
    ran_on = page.machine()
    progress = _progress_on(sys.stderr)
    parts = [part for part in PARTS if part in (arguments.parts or PARTS)]
    runs: dict[str, list[Row]] = {}
    try:
        for _ in range(arguments.runs):
            for row in measure(parts, QUICK if arguments.quick else FULL, progress):
                runs.setdefault(row.what, []).append(row)
                progress("")
                print(f"{row.what}: {row.figure} ({row.interval})", file=sys.stderr, flush=True)
    except InvalidRound as error:
        progress("")
        print(f"The benchmark failed: {error}.", file=sys.stderr)
        return 1
    rows = [middle(same) for same in runs.values()]
    print(f"{ran_on}\n\n{page.table(HEADINGS, list(map(cells, rows)))}")
    if arguments.write:
        page.put_first(text(merged(page.read_table(), rows), ran_on))
    return 0


if __name__ == "__main__":
    sys.exit(main())
