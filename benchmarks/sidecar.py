"""What the sidecar costs beside many engines: its share of a core, its lag, and its memory.

Run it with `make bench ARGS=sidecar`, or alone with ``python benchmarks/sidecar.py``, which takes
``--requests 1000000`` for the long form of the memory row. How it is measured:

- The engines are simulated. Another process writes their journals in real time with the real writer, as
  the recorder does: a batch every 0.25 s, and unchanged steps only counted.
- The sidecar is `kvledger serve` itself, with its checkpoint, scraped every 5 s.
- Lag is the age of the last event in a scrape, so it includes every delay in between.
- A scrape is timed from the request to its last byte, in the format and with the compression that
  Prometheus asks for.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import re
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.sidecar` adds this itself

import psutil
from benchmarks.stats import percentile

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.exporters.sidecar.follower import Follower

ENGINES = 32
STEPS_A_SECOND = 50
RUNNING = 256
REQUESTS_A_SECOND = 5
WRITE_SECONDS = 0.25
FLUSH_SECONDS = 1.0
SCRAPE_SECONDS = 5.0
PROMPT_TOKENS = 1_000
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Load(NamedTuple):
    """The sidecar's load beside the engines. ``cpu_share`` is of one core; all but it are seconds."""

    engines: int
    cpu_share: float
    lag_median: float
    lag_worst: float
    scrape_median: float
    scrape_worst: float


class Engine:
    """A simulated engine of :data:`RUNNING` requests; at times one ends and one arrives."""

    def __init__(self, folder: Path, number: int) -> None:
        self._writer = JournalWriter(folder)
        self._wall = time.time()
        self._began = time.monotonic()
        self._process_id = number
        self._step = 0
        self._next = RUNNING
        self._running = deque(range(RUNNING))
        self._computed = dict.fromkeys(range(RUNNING), 0)
        self._fresh: int | None = None
        self._gone = -1
        self._repeats = 0
        self._flushed_at = 0
        self._events: list[ev.Event] = []
        self._writer.rotate()
        self._begin()

    @property
    def at(self) -> int:
        return int((time.monotonic() - self._began) * 1e6)

    def _begin(self) -> None:
        emit = self._events.append
        settings: dict[str, ev.Setting] = {"figures": "first", "asynchronous": True}
        emit(
            ev.EngineStarted(0, self._wall, "vllm", "0.32.0", "made up", "tokens", self._process_id, settings)
        )
        emit(ev.Snapshot(0, 0, [], 0))
        for request in self._running:
            self._arrive(request)
        self._schedule(dict.fromkeys(self._running, PROMPT_TOKENS), [])
        self._schedule(dict.fromkeys(self._running, 1), [])
        emit(ev.Delivered(self.at, [n for r in self._running for n in (r, 1)], []))
        self._repeat(2)

    def _arrive(self, request: int) -> None:
        at, emit = self.at, self._events.append
        self._computed[request] = 0
        emit(ev.RequestAdded(at, request, f"cmpl-{self._process_id}-{request:012d}", PROMPT_TOKENS))
        emit(ev.LookedUp(at, request, self._step + 1, 0))
        emit(ev.Admitted(at, request, self._step + 1, False, 0, 0, False, 0))

    def _schedule(self, changed: dict[int, int], dropped: list[int]) -> None:
        """A step; its output arrives after the next step is scheduled."""
        self._step += 1
        for request in self._running:
            self._computed[request] += changed.get(request, 1)
        rows = [n for r, tokens in changed.items() for n in (r, tokens, 0, self._computed[r])]
        self._events.append(ev.Stepped(self.at, self._step, rows, dropped))

    def _repeat(self, steps: int) -> None:
        self._step += steps
        self._repeats += steps
        for request in self._running:
            self._computed[request] += steps

    def step(self) -> None:
        """One step. Most steps are unchanged; in some, a request arrives and one stops."""
        if self._fresh is not None:
            self._flush_repeats()
            self._schedule({self._fresh: 1}, [self._gone])
            self._events.append(ev.Delivered(self.at, [self._fresh, 1], []))
            self._events.append(ev.Reported(self.at, self._fresh, PROMPT_TOKENS, 0, 0, PROMPT_TOKENS, 0))
            self._fresh = None
        elif self._step % (STEPS_A_SECOND // REQUESTS_A_SECOND) == self._process_id % 7:
            self._flush_repeats()
            self._come_and_go()
        else:
            self._repeat(1)
            if self.at - self._flushed_at > FLUSH_SECONDS * 1e6:
                self._flush_repeats()

    def _come_and_go(self) -> None:
        """A request arrives, and an output stops the oldest request, which the next step already contains."""
        self._fresh, self._gone = self._next, self._running[0]
        self._next += 1
        self._arrive(self._fresh)
        self._running.append(self._fresh)
        self._schedule({self._fresh: PROMPT_TOKENS}, [])
        self._events.append(ev.Delivered(self.at, [], []))
        self._running.popleft()
        tokens = self._computed.pop(self._gone)
        output = tokens - PROMPT_TOKENS
        self._events.append(ev.Finished(self.at, self._gone, "length", tokens, 1, 1, tokens, output))

    def _flush_repeats(self) -> None:
        self._flushed_at = self.at
        if self._repeats:
            self._events.append(ev.Repeated(self._flushed_at, self._repeats))
            self._repeats = 0

    def write(self) -> None:
        """Write the collected events, as the recorder's thread does."""
        events, self._events = self._events, []
        self._writer.write(events)

    def close(self) -> None:
        self._flush_repeats()
        self._events.append(ev.EngineStopped(self.at, "shutdown"))
        self.write()
        self._writer.close()


def generate(folder: Path, engines: int) -> None:
    """Write the journals of ``engines`` engines in real time, until standard input ends."""
    fleet = [Engine(folder / f"engine-{number:02d}", number) for number in range(engines)]
    writes = STEPS_A_SECOND * WRITE_SECONDS
    began, tick = time.monotonic(), 0
    print("writing", flush=True)
    while not _stop_requested():
        tick += 1
        for number, engine in enumerate(fleet):
            engine.step()
            if int(tick / writes + number / engines) != int((tick - 1) / writes + number / engines):
                engine.write()
        time.sleep(max(0.0, began + tick / STEPS_A_SECOND - time.monotonic()))
    for engine in fleet:
        engine.close()


def _stop_requested() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def measure(seconds: float, folder: Path, engines: int = ENGINES) -> Load:
    """Run the sidecar beside ``engines`` engines for ``seconds``."""
    root = folder / "fleet"
    root.mkdir()
    words = [sys.executable, __file__, "--generate", str(root), "--engines", str(engines)]
    writing = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writing.stdout is not None and writing.stdin is not None
    writing.stdout.readline()
    time.sleep(1)
    words = ["-m", "kvledger", "serve", str(root), "--web.listen-address", "127.0.0.1:0"]
    serving = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert serving.stderr is not None
    try:
        url = serving.stderr.readline().split()[-1]
        process = psutil.Process(serving.pid)
        before, since = sum(process.cpu_times()[:2]), time.monotonic()
        lags: list[float] = []
        scrapes: list[float] = []
        while time.monotonic() - since < seconds:
            time.sleep(min(SCRAPE_SECONDS, seconds))
            began = time.monotonic()
            text = _scrape(url)
            scrapes.append(time.monotonic() - began)
            lags += _lags(text, time.time())
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - since)
    finally:
        serving.terminate()
        serving.communicate()
        writing.communicate("")
    return Load(engines, share, percentile(lags, 50), max(lags), percentile(scrapes, 50), max(scrapes))


_LAST = re.compile(r"^kvledger_last_event_timestamp_seconds\{.*\} (\S+)$", re.MULTILINE)


def _scrape(url: str) -> str:
    request = urllib.request.Request(url, headers={"Accept": OPENMETRICS, "Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return gzip.decompress(answer.read()).decode()


def _lags(text: str, now: float) -> Iterator[float]:
    return (now - float(last) for last in _LAST.findall(text))


# --- memory -----------------------------------------------------------------------------------------------

REQUESTS = 200_000


def resident_bytes(requests: int, folder: Path) -> tuple[int, int]:
    """Resident bytes after a tenth of ``requests`` have ended, and after all of them."""
    from benchmarks.replay import _step

    journal = folder / "many" / "engine"
    writer = JournalWriter(journal, Limits(segment_bytes=4 << 20, folder_bytes=32 << 20))
    started = ev.EngineStarted(0, time.time(), "vllm", "0.32.0", "made up", "tokens", 1, {})
    writer.rotate()
    writer.write([started, ev.Snapshot(0, 0, [], 0)])
    follower = Follower(journal.parent, journal.parent / ".kvledger")
    follower.catch_up()
    resident = []
    for part in range(1, 11):
        for number in range(requests * (part - 1) // 10, requests * part // 10):
            writer.write(list(_step(number, requests)))
            if number % 1_000 == 0:
                follower.poll()
        follower.poll()
        follower.save()
        gc.collect()
        resident.append(psutil.Process().memory_info().rss)
    follower.close()
    writer.close()
    return resident[0], resident[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long the sidecar follows the engines"
    )
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="number of requests for the memory row"
    )
    arguments = parser.parse_args()
    if arguments.generate:
        generate(arguments.generate, arguments.engines)
        return
    with tempfile.TemporaryDirectory(prefix="kvledger-bench-") as name:
        load = measure(arguments.seconds, Path(name), arguments.engines)
        few, many = resident_bytes(arguments.requests, Path(name))
    for what, figure in (
        (f"share of a core beside {load.engines} engines", f"{load.cpu_share:.2f}"),
        ("lag in seconds, median and worst", f"{load.lag_median:.2f}, {load.lag_worst:.2f}"),
        ("a scrape in seconds, median and worst", f"{load.scrape_median:.3f}, {load.scrape_worst:.3f}"),
        (f"MiB resident after {arguments.requests // 10:,} requests", f"{few / 2**20:.1f}"),
        (f"MiB resident after {arguments.requests:,} requests", f"{many / 2**20:.1f}"),
    ):
        print(f"| {what:50} | {figure:>12} |")


if __name__ == "__main__":
    main()
