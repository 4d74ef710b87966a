"""What ended engines cost the sidecar: a start, a scrape, and memory, as docs/sidecar.md has them.

Run it with ``python benchmarks/ended_engines.py``. Every journal is still there. *Own names*: each engine has
another model, so that no two share a label; *one name*: a server that was restarted.

- ``tokens``: by how many engines ever ran. The *first start* has no checkpoint and reads every journal; the
  *restart* has one. Seconds are CPU time, so that other work on the machine counts little.
- ``blocks``: beside engines of level ``blocks`` that have used every block of their pools several times. Each
  start runs in a process of its own, whose peak of memory counts.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.replay import OPEN, _step

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.pages import Site

ENGINES, REQUESTS, TURNS = (10, 100, 1_000), 20, 5
"""Engines of level ``tokens``, requests of each, and scrapes of each kind, of which the median counts."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

POOLS, BLOCKS, EACH, SIZE, ROUNDS = 100, 8_448, 64, 16, 4
"""Engines of level ``blocks``, their blocks, blocks of a request, tokens of a block, uses of each block."""


def write(folder: Path, number: int, level: str, model: str, events: Iterable[ev.Event], end: int) -> None:
    """The journal of one engine that has ended; ``end`` 0: it was killed."""
    writer = JournalWriter(folder / f"engine-{number:08d}-{number}-0")
    writer.rotate()
    settings: dict[str, ev.Setting] = {"model": model, "block_size": SIZE, "blocks": BLOCKS}
    started = ev.EngineStarted(0, time.time(), "vllm", "0.32.0", "v1", level, number, settings)
    writer.write([started, ev.Snapshot(0, 0, [], 0), *events])
    if end:
        writer.write([ev.EngineStopped(end, "shutdown")])
        writer.close()
    else:
        writer.abandon()


# --- level tokens -----------------------------------------------------------------------------------------


def restarts(engines: int, folder: Path) -> str:
    """The row of so many ended engines: samples, and the seconds of scrapes and starts."""
    for number in range(engines):
        steps = [event for request in range(REQUESTS + OPEN) for event in _step(request, REQUESTS)]
        write(folder, number, "tokens", f"model-{number}", steps, REQUESTS + OPEN)
    starts = []
    for _ in range(2):
        began = time.process_time()
        follower = Follower(folder, folder / ".kvledger")
        follower.catch_up()
        starts.append(time.process_time() - began)
        follower.close()
    site = Site(follower)
    (text, _), (openmetrics, samples) = scrape(site, ""), scrape(site, OPENMETRICS)
    seconds = " | ".join(f"{each:.2f} s" for each in (text, openmetrics, starts[1], starts[0]))
    return f"| {engines:,} | {samples:,} | {seconds} |"


def scrape(site: Site, accept: str) -> tuple[float, int]:
    """The median seconds of a scrape, and its samples."""
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": accept}
    seconds = []
    for _ in range(TURNS):
        began = time.process_time()
        body = b"".join(site(environ, lambda *_: None))
        seconds.append(time.process_time() - began)
    return sorted(seconds)[TURNS // 2], sum(not line.startswith(b"#") for line in body.splitlines())


# --- level blocks -----------------------------------------------------------------------------------------


def request(number: int) -> Iterator[ev.Event]:
    """A request that computes its prompt in one step, into the blocks that are next in the pool, and ends."""
    at, step, tokens = 1000 * number, number + 1, EACH * SIZE
    blocks = [1 + (number * EACH + each) % (BLOCKS - 1) for each in range(EACH)]
    cached = [number, 0, tokens, EACH]
    for each, block in enumerate(blocks, 1):
        cached += [block, (number * EACH + each) << 20, each * SIZE]
    yield ev.RequestAdded(at, number, f"r{number}", tokens)
    yield ev.LookedUp(at, number, step, 0)
    yield ev.BlocksAllocated(at, step, 0, "allocate", [number, 0, EACH, *blocks])
    yield ev.BlocksCached(at, step, 0, cached)
    yield ev.Admitted(at, number, step, False, 0, 0, False, 0)
    yield ev.Stepped(at, step, [number, tokens, 0, tokens], [number - 1] if number else [])
    yield ev.Delivered(at + 1, [number, 1], [])
    yield ev.Finished(at + 1, number, "length", tokens, 0, 0, tokens + 1, 1)
    yield ev.BlocksFreed(at + 1, step, 0, number, 0, "free", blocks[::-1], [0] * EACH)


def pools(own: bool, stopped: bool, folder: Path) -> str:
    """The row of 100 ended engines: the peak of memory, seconds, and the bytes of the checkpoint."""
    for number in range(POOLS):
        seen = ev.PoolSeen(0, 0, 0, BLOCKS, 0, BLOCKS - 1, 0, [0, SIZE, 2])
        served = [event for each in range(ROUNDS * (BLOCKS - 1) // EACH) for event in request(each)]
        model = f"model-{number}" if own else "model"
        write(folder, number, "blocks", model, [seen, *served], served[-1].at if stopped else 0)
    words = [sys.executable, __file__, "--start", str(folder)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return f"| {POOLS} | {'own' if own else 'one'} | {'stop' if stopped else 'kill'} | {found} |"


def start(folder: Path) -> None:
    """Start, save, and print the peaks of memory, the seconds and the bytes of the checkpoint."""
    began = time.monotonic()
    follower = Follower(folder, folder / ".kvledger")
    follower.catch_up()
    seconds, cpu = time.monotonic() - began, time.process_time()
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu += children.ru_utime + children.ru_stime
    peak, of_one = own.ru_maxrss / 1024, children.ru_maxrss / 1024
    saved = (folder / ".kvledger/checkpoint").stat().st_size / 2**20
    print(
        f"{peak:,.0f} MiB | {of_one:,.0f} MiB | {seconds:.1f} s | {cpu:.1f} s | {saved:.2f} MiB", flush=True
    )
    follower.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", nargs="?", choices=("tokens", "blocks"))
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        start(given.start)
        return
    if given.level != "blocks":
        print("| ended engines | samples | scrape, text | scrape, OpenMetrics | restart | first start |")
        print("|---|---|---|---|---|---|")
        for engines in ENGINES:
            with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
                print(restarts(engines, Path(name)), flush=True)
    if given.level != "tokens":
        print("| ended engines | names | ended by | peak memory | process | ready after | CPU | checkpoint |")
        print("|---|---|---|---|---|---|---|---|")
        for own in (False, True):
            for stopped in (True, False):
                with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
                    print(pools(own, stopped, Path(name)), flush=True)


if __name__ == "__main__":
    main()
