"""Writes a random trace of many requests: `python -m tests.simulated_trace 1000000 -o DIR`.

Each engine has one journal, written in segments by the real writer, as a recorder would. The same seed
gives the same bytes. ``simulated.py`` decides what the engines do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.simulated import BLOCK, Mix, Simulated

from kvledger.audit import events as ev
from kvledger.audit.analysis.calls import CallAccount
from kvledger.audit.client_ids import part_of
from kvledger.audit.journal.format import segments
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import each_account
from kvledger.audit.replay.observers import KeptAccounts

WALL_SECONDS = 1_767_225_600.0
"""Start of every engine of the trace: the beginning of 2026."""

EVERYTHING = Limits(folder_bytes=1 << 40)


def started(at: int, engine: int) -> ev.EngineStarted:
    """The event that describes the engine at the head of each segment."""
    configuration: dict[str, ev.Setting] = {
        "model": ("small-8b", "large-70b")[engine % 2],
        "block_size": BLOCK,
        "connector": "LMCacheConnectorV1",
        "figures": "first",
        "asynchronous": False,
    }
    wall = WALL_SECONDS + at / 1e6
    return ev.EngineStarted(at, wall, "vllm", "0.32.0", "v1", "tokens", 4000 + engine, configuration)


def write_journal(
    folder: Path,
    requests: int,
    seed: int,
    engine: int = 0,
    mix: Mix | None = None,
    limits: Limits = EVERYTHING,
) -> int:
    """Write one engine's journal into ``folder``; returns its number of events."""
    simulated = Simulated(requests, seed + engine, mix)
    writer = JournalWriter(folder, limits)
    writer.rotate()
    writer.write([started(0, engine), ev.Snapshot(0, 0, [], 0)])
    for events in simulated.events():
        writer.write(events)
        if writer.wants_rotation:
            writer.write(simulated.flush())
            writer.rotate()
            writer.write([started(simulated.at, engine), simulated.snapshot()])
    writer.write([ev.EngineStopped(simulated.at, "shutdown")])
    writer.close()
    assert not writer.lost_events
    return writer.written_events


MIX = Mix(running=24, waiting=6, median_output=40)


def cut_trace(folder: Path, mix: Mix = MIX, requests: int = 4_000, segment: int = 60_000) -> Path:
    """A simulated engine's journal in many small segments."""
    write_journal(folder, requests, 5, mix=mix, limits=Limits(folder_bytes=1 << 40, segment_bytes=segment))
    assert 6 < len(segments(folder))
    return folder


def write_trace(folder: Path, requests: int, *, engines: int = 1, seed: int = 0, jobs: int = 1) -> list[int]:
    """Write ``requests`` into ``engines`` journals below ``folder``; returns the events of each."""
    shares = [requests // engines + (engine < requests % engines) for engine in range(engines)]
    folders = [folder / f"engine-{engine:02d}" for engine in range(engines)]
    write = partial(_write_share, seed=seed)
    if jobs == 1:
        return list(map(write, folders, shares, range(engines)))
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(write, folders, shares, range(engines)))


def _write_share(folder: Path, requests: int, engine: int, seed: int) -> int:
    return write_journal(folder, requests, seed, engine)


def write_usage_log(folder: Path, file: Path) -> None:
    """Write what a server would tell the clients of a trace, a chat completion a line."""
    with file.open("w") as log:
        for path in journals_at([folder]):
            audit = EngineAudit(path, [KeptAccounts], invariants=())
            for account in each_account(audit):
                call = CallAccount.of(account)
                usage = {
                    "prompt_tokens": call.prompt_tokens,
                    "completion_tokens": call.output_tokens,
                    "prompt_tokens_details": {"cached_tokens": call.local + call.external},
                }
                name = part_of(call.request_id, suffixed=audit.random_suffixes).call
                log.write(json.dumps({"id": name, "usage": usage}) + "\n")


def main(words: Iterable[str] | None = None) -> int:
    """Write the trace and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", type=int)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--engines", type=int, default=1, help="number of journals to divide the requests among"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes that write")
    parser.add_argument("--usage-log", type=Path, metavar="FILE", help="write what clients are told, too")
    arguments = parser.parse_args(None if words is None else list(words))
    began = time.monotonic()
    events = write_trace(
        arguments.output,
        arguments.requests,
        engines=arguments.engines,
        seed=arguments.seed,
        jobs=arguments.jobs,
    )
    size = sum(path.stat().st_size for path in arguments.output.rglob("*.kvl"))
    took = time.monotonic() - began
    print(f"{arguments.requests:,} requests, {sum(events):,} events, {size:,} bytes in {took:.1f} s")
    if arguments.usage_log is not None:
        write_usage_log(arguments.output, arguments.usage_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
