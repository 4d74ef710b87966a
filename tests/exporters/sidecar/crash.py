"""The sidecar as a process that is killed at any instant, while engines write and Prometheus scrapes.

Here belong the engines that append (:class:`Engines`), the scraper that never looks away
(:class:`Scraper`) and the process (:class:`Process`). The process polls and saves as often as it can,
so that kills land in readings, checkpoints and answers alike.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tests import journals
from tests.histories import GOLDEN

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStopped, Event, Snapshot
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.replay import checkpoint
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.metrics.prometheus import AuditCollector

PROGRAM = (
    "from kvledger.exporters import sidecar\n"
    "sidecar.POLL_SECONDS, sidecar.SAVE_SECONDS, sidecar.LEAST_SAVE_SECONDS = 0.02, 0.05, 0.0\n"
    "from kvledger.cli import main\n"
    "main()"
)
ACCEPT = "application/openmetrics-text; version=1.0.0"
PAUSE_SECONDS = 0.002

Key = tuple[str, frozenset[tuple[str, str]]]


def renumbered(event: Any, request: int) -> Event:
    """A golden history's event (of request 0) with another request number."""
    if hasattr(event, "request_id"):
        return replace(event, request=request, request_id=f"r-{request}")
    if hasattr(event, "request"):
        return replace(event, request=request)
    changes: dict[str, Any] = {}
    if width := {"Stepped": 4, "Delivered": 2, "Census": 5}.get(type(event).__name__):
        name = "rows" if width == 5 else "changed"
        flat = list(getattr(event, name))
        flat[::width] = [request] * len(flat[::width])
        changes[name] = flat
    for name in ("dropped", "ignored"):
        if hasattr(event, name):
            changes[name] = [request] * len(getattr(event, name))
    return replace(event, **changes) if changes else event


class Engines:
    """Engines that append to journals under ``root``, one of them at a time, until :meth:`stop`.

    Every so often one ends, in good order or killed, and another comes under the same process id.
    The journals of some that ended are moved to ``gone``, once a checkpoint has them to their end: what
    is removed before it was read is lost, and no sidecar can help it.
    """

    LIVES = 400
    """Batches that an engine writes before it ends."""

    def __init__(self, root: Path, gone: Path, seed: int) -> None:
        self._root, self._gone = root, gone
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._number = itertools.count()
        self._leaving: set[str] = set()
        root.mkdir()
        gone.mkdir()
        self._thread.start()

    def stop(self) -> None:
        """One more instant, and all have ended."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        writing = [self._engine(process_id) for process_id in range(3)]
        while not self._stop.is_set():
            place = self._dice.randrange(3)
            if next(writing[place], None) is None:
                writing[place] = self._engine(place)
                self._move()
            time.sleep(PAUSE_SECONDS)
        for one in writing:
            one.close()

    def _engine(self, process_id: int) -> Iterator[int]:
        number = next(self._number)
        folder = self._root / f"engine-{number:04d}"
        writer = JournalWriter(folder, Limits(segment_bytes=20_000))
        start = [
            replace(
                journals.STARTED,
                process_id=process_id,
                wall_seconds=1e9 + number,
                configuration={"model": f"model-{process_id}"},  # no other engine decides its label
            ),
            Snapshot(0, 0, [], 0),
        ]
        writer.rotate()
        writer.write(start)
        rest = [event for batch in range(self.LIVES) for event in self._request(batch)]
        place = 0
        try:
            for batch in range(self.LIVES):
                size = self._dice.randrange(1, 12)
                writer.write(rest[place : place + size])
                place += size
                at_rest = place >= len(rest) or type(rest[place]).__name__ == "RequestAdded"
                if writer.wants_rotation and at_rest:
                    writer.rotate()
                    writer.write(start)
                yield batch
        finally:
            if self._dice.random() < 0.5:
                writer.write([EngineStopped(1_000_000, "shutdown")])
                writer.close()
            else:
                writer.abandon()
        if self._dice.random() < 0.5:
            self._leaving.add(folder.name)

    def _move(self) -> None:
        try:
            loaded = checkpoint.load(self._root / checkpoint.HIDDEN)
        except LedgerError:
            return
        read = {one.name for one in loaded.journals if one.ended} if loaded else set()
        for name in self._leaving & read:
            shutil.move(self._root / name, self._gone / name)
            self._leaving.remove(name)

    def _request(self, number: int) -> list[Event]:
        return [renumbered(event, number) for event in self._dice.choice(GOLDEN).events()]


class Scraper:
    """Scrapes without a pause. ``faults``: counters that fell or vanished, and start times that changed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.faults: list[str] = []
        self.scrapes = 0
        self.refused = 0
        self.last: dict[Key, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            now = scrape(self.url)
            if now is None:
                self.refused += 1
                time.sleep(PAUSE_SECONDS)
                continue
            self.compare(now)

    def compare(self, now: dict[Key, float]) -> None:
        """Record each counter that fell or vanished since the last scrape."""
        for key, value in self.last.items():
            name, labels = key[0], sorted(key[1])
            if key not in now:
                self.faults.append(f"{name} {labels} vanished at {value}")
            elif name.endswith("_created"):
                if now[key] != value:
                    self.faults.append(f"{name} {labels} moved from {value} to {now[key]}")
            elif now[key] < value:
                self.faults.append(f"{name} {labels} fell from {value} to {now[key]}")
        self.last = now
        self.scrapes += 1


def scrape(url: str) -> dict[Key, float] | None:
    """Every counter and histogram of the ledger; None while the sidecar does not answer.

    Those of the process (``process_*``, ``python_*``) begin at zero with each process.
    """
    request = urllib.request.Request(url, headers={"Accept": ACCEPT})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError, ValueError, EOFError):
        return None
    if not text.endswith("# EOF\n"):
        return None  # it was killed while it answered, as Prometheus would see
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram") and family.name.startswith("kvledger_")
        for sample in family.samples
    }


def counted(audits: list[FollowedAudit]) -> dict[Key, float]:
    """The same figures of audits in this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AuditCollector(lambda: audits, threading.Lock(), created=True))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


class Process:
    """``kvledger serve``, restarted at one address."""

    def __init__(self, root: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._root = root
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        words = ["serve", str(self._root), "--web.listen-address", self.address]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stderr=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        assert "Serving" in self._process.stderr.readline()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def terminate(self) -> tuple[int, str]:
        """The exit code, and the standard error since it was ready."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        _, stderr = self._process.communicate(timeout=60)
        return self._process.returncode, stderr


def kills() -> int:
    """The number of kills: KVLEDGER_KILLS, or as many as fit into a minute."""
    return int(os.environ.get("KVLEDGER_KILLS", "15"))
