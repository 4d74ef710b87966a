"""What ended engines cost the sidecar: a scrape, a start, and the series, by how many engines ever ran.

Run it with ``python benchmarks/restarts.py``; it prints the table of ``docs/sidecar.md``. Every engine has
ended, its journal is still there, and its model is its own, so that no two share a label. The *first start*
has no checkpoint and reads every journal; the *restart* has one. Seconds are CPU time, so that other work on
the machine counts little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.replay import OPEN, _step

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.pages import Site

ENGINES = (10, 100, 1_000)
REQUESTS = 20
"""Requests of each engine."""

TURNS = 5
"""Scrapes of each kind; the median counts."""

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Cost(NamedTuple):
    """CPU seconds, and the samples of one scrape."""

    engines: int
    series: int
    text_seconds: float
    openmetrics_seconds: float
    restart_seconds: float
    first_start_seconds: float


def write(folder: Path, number: int) -> None:
    """The journal of one engine that has ended."""
    writer = JournalWriter(folder / f"engine-{number:08d}-{number}-0")
    writer.rotate()
    named: dict[str, ev.Setting] = {"model": f"model-{number}"}
    started = ev.EngineStarted(0, time.time(), "vllm", "0.32.0", "made up", "tokens", number, named)
    events: list[ev.Event] = [started, ev.Snapshot(0, 0, [], 0)]
    for request in range(REQUESTS + OPEN):
        events += _step(request, REQUESTS)
    writer.write([*events, ev.EngineStopped(REQUESTS + OPEN, "shutdown")])
    writer.close()


def measure(engines: int, folder: Path) -> Cost:
    """Start beside so many ended engines, start again, and scrape."""
    for number in range(engines):
        write(folder, number)
    state = folder / ".kvledger"
    starts = []
    for _ in range(2):
        began = time.process_time()
        follower = Follower(folder, state)
        follower.catch_up()
        starts.append(time.process_time() - began)
        follower.close()
    site = Site(follower)
    text, _ = _scrape(site, "")
    openmetrics, series = _scrape(site, OPENMETRICS)
    return Cost(engines, series, text, openmetrics, starts[1], starts[0])


def _scrape(site: Site, accept: str) -> tuple[float, int]:
    """The median seconds of a scrape, and its samples."""
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": accept}
    seconds = []
    for _ in range(TURNS):
        began = time.process_time()
        body = b"".join(site(environ, _ignore))
        seconds.append(time.process_time() - began)
    return sorted(seconds)[TURNS // 2], sum(not line.startswith(b"#") for line in body.splitlines())


def _ignore(*_: object) -> None:
    """Take a status and headers."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", type=int, nargs="*", default=ENGINES)
    print("| ended engines | samples | scrape, text | scrape, OpenMetrics | restart | first start |")
    print("|---|---|---|---|---|---|")
    for engines in parser.parse_args().engines:
        with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
            cost = measure(engines, Path(name))
        figures = " | ".join(f"{seconds:.2f} s" for seconds in cost[2:])
        print(f"| {cost.engines:,} | {cost.series:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
