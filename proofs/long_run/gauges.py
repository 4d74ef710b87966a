"""Watches a long run: memory, disk, and the time of a scrape, as often as asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import psutil
from tests.serving.processes import Prometheus, Server

MIB = 1 << 20
FLAT = 1.1
"""A figure is flat if that of the last fifth of the run is at most this many times the third's."""


def fastest_tenth(times: Sequence[float]) -> float:
    """The time within which a tenth of the scrapes ended. Other work on the machine hardly moves it."""
    return quantiles(times, n=10, method="inclusive")[0] if len(times) > 1 else times[0]


class Moment(NamedTuple):
    """What was seen at one time."""

    sidecar: float
    """Resident MiB."""
    prometheus: float
    """Resident MiB."""
    journals: float
    """MiB on disk, without the next two."""
    kept: float
    """MiB on disk."""
    checkpoint: float
    """MiB on disk."""
    scrape: float
    """Milliseconds that `/metrics` took."""
    series: float
    """Samples on that page."""


class Trend(NamedTuple):
    """A figure of the first, the third and the last fifth of the run, and the largest value."""

    first: float
    third: float
    last: float
    most: float

    @property
    def flat(self) -> bool:
        """Whether the last fifth is like the third. Before, processes start and the folder fills up."""
        return self.last <= FLAT * self.third


class Watcher:
    """Collects moments."""

    def __init__(self, sidecar: Server, prometheus: Prometheus, journals: Path) -> None:
        self.moments: list[Moment] = []
        self.cpu_seconds = 0.0
        """CPU time of the sidecar, over all of its processes."""
        self._sidecar, self._prometheus, self._journals = sidecar, prometheus, journals
        self._cpu = (0, 0.0)

    def look(self) -> None:
        """Add a moment, if all processes answer."""
        with contextlib.suppress(OSError, psutil.Error):
            began = time.monotonic()
            text = self._sidecar.get("/metrics")
            took = 1e3 * (time.monotonic() - began)
            process = psutil.Process(self._sidecar.pid)
            self._count_cpu(process)
            self.moments.append(
                Moment(
                    process.memory_info().rss / MIB,
                    psutil.Process(self._prometheus.pid).memory_info().rss / MIB,
                    _mib(self._journals, "engine-*/*"),
                    _mib(self._journals, ".kvledger-facts/**/*"),
                    _mib(self._journals, ".kvledger/*"),
                    took,
                    sum(not line.startswith("#") for line in text.splitlines()),
                )
            )

    def _count_cpu(self, process: psutil.Process) -> None:
        before = self._cpu[1] if self._cpu[0] == process.pid else 0.0
        now = sum(process.cpu_times()[:2])
        self.cpu_seconds += now - before
        self._cpu = (process.pid, now)

    def trend(self, name: str, figure: Callable[[Sequence[float]], float] = median) -> Trend:
        """How one field of the moments went. ``figure`` stands for a fifth."""
        values: Sequence[float] = [getattr(moment, name) for moment in self.moments]
        fifth = max(1, len(values) // 5)
        parts = (values[:fifth], values[2 * fifth : 3 * fifth] or values, values[-fifth:])
        first, middle, last = map(figure, parts)
        return Trend(first, middle, last, max(values))


def _mib(folder: Path, pattern: str) -> float:
    total = 0
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total / MIB
