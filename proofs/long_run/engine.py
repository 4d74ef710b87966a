"""One engine of the long run: a simulated engine that writes a real journal, faster than time.

``python -m proofs.long_run.engine FOLDER --begin 0 --seconds 10800 ...`` runs until its time is over,
prints what it emitted as JSON, and ends in good order or by SIGKILL. What it emitted is summed up twice:
by a few lines here, and by a ledger that reads the events as they are written, without a journal.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.simulated import BLOCK, Mix, Simulated

from kvledger.audit import events as ev
from kvledger.audit.figures.totals import Totals
from kvledger.audit.journal import catalogue
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit

BATCH_EVENTS = 256
"""Events that are written at once. Fewer are lost at a kill."""

MIX = Mix(running=256, waiting=1_000, session=0.0)


class Emitted(msgspec.Struct):
    """What one engine emitted.

    ``requests`` to ``events`` are counted here, event by event; the rest is the ledger's.
    """

    requests: int = 0
    ended_requests: int = 0
    prompt_tokens: int = 0
    """Of ended requests."""
    output_tokens: int = 0
    """Of ended requests."""
    preemptions: int = 0
    events: int = 0
    removed_segments: int = 0
    journal_bytes: int = 0
    verdicts: dict[str, int] = {}
    """Ended requests by verdict and outcome."""
    totals: Totals = msgspec.field(default_factory=Totals)
    """Sums over ended requests."""


class Served(Simulated):
    """A simulated engine at which ``rate`` requests arrive in each second of its time."""

    def __init__(self, seed: int, rate: float, seconds: float) -> None:
        super().__init__(0, seed, MIX)
        self._rate = rate
        self._until = round(seconds * 1e6)
        self._all = round(seconds * rate)

    def batches(self) -> Iterator[list[ev.Event]]:
        """The events until the time is over and every request has arrived."""
        while self.at < self._until or self._numbers < self._all:
            due = min(self._all, int(self.at * self._rate / 1e6))
            self._to_come = due - self._numbers
            self._one_step()
            if len(self._out) >= BATCH_EVENTS:
                yield self._take()

    def abort(self) -> list[ev.Event]:
        """Abort every request, as an engine does that gets SIGTERM, and stop."""
        for one in list(self.living):
            self._leave(one)
            self._finished(one, "aborted")
        return [*self.flush(), ev.EngineStopped(self.at, "shutdown")]


class Lifetime:
    """An engine from its start to its end, with its journal and its sums."""

    def __init__(self, folder: Path, number: int, simulated: Served, wall_seconds: float) -> None:
        self._simulated = simulated
        self._wall = wall_seconds
        limits = catalogue.limits()
        catalogue.make_room(folder, limits.folder_bytes)
        place = folder / f"engine-{number:08d}-{os.getpid()}-0"
        self._writer = JournalWriter(place, limits)
        self._ledger = EngineAudit(place)
        self._prompts: dict[int, int] = {}
        self._segments = 0
        self.emitted = Emitted()

    def begin(self) -> None:
        """Begin a segment."""
        self._segments += 1
        self._write(self._simulated.flush())
        self._writer.rotate()
        self._write([_started(self._wall, self._simulated.at), self._simulated.snapshot()])

    def write(self, events: list[ev.Event]) -> None:
        """Write events, and begin a segment where one is due."""
        self._write(events)
        if self._writer.wants_rotation:
            self.begin()

    def _write(self, events: list[ev.Event]) -> None:
        """Write events, and add them to the sums."""
        if not events:
            return
        self._writer.write(events)
        emitted = self.emitted
        for event in events:
            self._ledger.feed(emitted.events, event)
            emitted.events += 1
            if isinstance(event, ev.RequestAdded):
                emitted.requests += 1
                self._prompts[event.request] = event.prompt_tokens
            elif isinstance(event, ev.Finished):
                emitted.ended_requests += 1
                emitted.prompt_tokens += self._prompts.pop(event.request)
                emitted.output_tokens += event.output_tokens
            elif isinstance(event, ev.Preempted):
                emitted.preemptions += 1

    def end(self, *, killed: bool) -> Emitted:
        """The sums at the end. A killed engine writes nothing more."""
        if not killed:
            self._write(self._simulated.abort())
            self._writer.close()
        assert not self._writer.lost_events
        self._ledger.end(stopped=not killed)
        emitted = self.emitted
        emitted.totals = self._ledger.closed
        emitted.verdicts = {" ".join(kind): count for kind, count in self._ledger.journal.requests.items()}
        emitted.journal_bytes = self._writer.written_bytes
        emitted.removed_segments = self._segments - len(list(self._writer.folder.glob("*.kvl")))
        return emitted


def _started(wall_seconds: float, at: int) -> ev.EngineStarted:
    settings: dict[str, ev.Setting] = {
        "model": "small-8b",
        "block_size": BLOCK,
        "connector": "LMCacheConnectorV1",
        "figures": "first",
        "asynchronous": False,
    }
    process = os.getpid()
    wall = wall_seconds + at / 1e6
    return ev.EngineStarted(at, wall, "vllm", "0.32.0", "v1", "tokens", process, settings)


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--wall", type=float, required=True, help="Unix time at which the engine starts")
    parser.add_argument("--seconds", type=float, required=True, help="simulated seconds until the end")
    parser.add_argument("--rate", type=float, required=True, help="requests that arrive in a second")
    parser.add_argument("--speed", type=float, required=True, help="simulated seconds in a second")
    parser.add_argument("--kill", action="store_true", help="end by SIGKILL")
    arguments = parser.parse_args()
    simulated = Served(arguments.number, arguments.rate, arguments.seconds)
    lifetime = Lifetime(arguments.folder, arguments.number, simulated, arguments.wall)
    lifetime.begin()
    began = time.monotonic()
    for events in simulated.batches():
        lifetime.write(events)
        time.sleep(max(0.0, began + simulated.at / 1e6 / arguments.speed - time.monotonic()))
    print(msgspec.json.encode(lifetime.end(killed=arguments.kill)).decode(), flush=True)
    if arguments.kill:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
