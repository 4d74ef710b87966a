"""What a start of the sidecar takes beside ended engines of level ``blocks``: memory, seconds, checkpoint.

Run it with ``python benchmarks/ended_pools.py``; it prints the table of ``docs/sidecar.md``. Each engine
has used every block of its pool several times. *One name*: engines of one model after each other, as a
server that is restarted. *Own names*: each has another model. The start runs in a process of its own, whose
peak counts.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvledger.audit import events as ev
from kvledger.audit import pool_calls
from kvledger.audit.journal.writer import JournalWriter
from kvledger.exporters.sidecar.follower import Follower

ENGINES = 100
BLOCKS = 8_448
EACH = 64
"""Blocks of a request."""
SIZE = 16
"""Tokens of a block."""

NAMES = {False: "one", True: "own"}
ENDS = {True: "stop", False: "kill"}
ROUNDS = 4
"""How often each block is used."""


def request(number: int) -> Iterator[ev.Event]:
    """A request that computes its prompt in one step, into the blocks that are next in the pool, and ends."""
    at, step, tokens = 1000 * number, number + 1, EACH * SIZE
    blocks = [1 + (number * EACH + each) % (BLOCKS - 1) for each in range(EACH)]
    cached = [number, 0, tokens, EACH]
    for each, block in enumerate(blocks, 1):
        cached += [block, (number * EACH + each) << 20, each * SIZE]
    yield ev.RequestAdded(at, number, f"r{number}", tokens)
    yield ev.LookedUp(at, number, step, 0)
    yield pool_calls.BlocksAllocated(at, step, 0, "allocate", [number, 0, EACH, *blocks])
    yield ev.BlocksCached(at, step, 0, cached)
    yield ev.Admitted(at, number, step, False, 0, 0, False, 0)
    yield ev.Stepped(at, step, [number, tokens, 0, tokens], [number - 1] if number else [])
    yield ev.Delivered(at + 1, [number, 1], [])
    yield ev.Finished(at + 1, number, "length", tokens, 0, 0, tokens + 1, 1)
    yield pool_calls.BlocksFreed(at + 1, step, 0, number, 0, "free", blocks[::-1], [0] * EACH)


def write(folder: Path, number: int, model: str, *, stopped: bool) -> None:
    """The journal of one engine that has ended; not ``stopped``: it was killed. Its audit is clean."""
    seen = ev.PoolSeen(0, 0, 0, BLOCKS, 0, BLOCKS - 1, 0, [0, SIZE, 2])
    requests = range(ROUNDS * (BLOCKS - 1) // EACH)
    served = [event for each in requests for event in request(each)]
    writer = JournalWriter(folder / f"engine-{number:08d}-{number}-0")
    writer.rotate()
    settings: dict[str, ev.Setting] = {"model": model, "block_size": SIZE, "blocks": BLOCKS}
    started = ev.EngineStarted(0, time.time(), "vllm", "0.32.0", "v1", "blocks", number, settings)
    writer.write([started, ev.Snapshot(0, 0, [], 0), seen, *served])
    if stopped:
        writer.write([ev.EngineStopped(served[-1].at, "shutdown")])
        writer.close()
    else:
        writer.abandon()


def start(folder: Path) -> None:
    """Start, save, and print the peak of memory, the seconds and the bytes of the checkpoint."""
    began = time.monotonic()
    follower = Follower(folder, folder / ".kvledger")
    follower.catch_up()
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time()
    saved = (folder / ".kvledger/checkpoint").stat().st_size / 2**20
    print(f"{peak:,.0f} MiB | {seconds:.1f} s | {cpu:.1f} s | {saved:.2f} MiB", flush=True)
    follower.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", type=int, nargs="?", default=ENGINES)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        start(given.start)
        return
    print("| ended engines | names | ended by | peak memory | ready after | CPU | checkpoint |")
    print("|---|---|---|---|---|---|---|")
    for own in (False, True):
        for stopped in (True, False):
            with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
                for number in range(given.engines):
                    write(Path(name), number, f"model-{number}" if own else "model", stopped=stopped)
                words = [sys.executable, __file__, "--start", name]
                found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
            print(
                f"| {given.engines} | {NAMES[own]} | {ENDS[stopped]} | {found} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
