"""Serves the metric table over HTTP, with prometheus_client, while journals are followed.

Each journal has a thread and a book; a scrape reads all books under their lock. Nothing is answered
before the journals that stood there at the start have been read up to their end: a counter that
starts low and climbs would look like traffic.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal import Reader, find_journals
from kvledger.audit.replay import Book
from kvledger.exporters.metrics import METRICS, Metric

Started = Callable[[str], None]
"""Told the URL."""

POLL_SECONDS = 0.5
"""How often a journal is asked for more, and the folder for new journals."""


class BookCollector(Collector):
    """The metric table as Prometheus families; two books of one name are summed."""

    def __init__(self, books: Callable[[], list[Book]], lock: threading.Lock) -> None:
        self._books = books
        self._lock = lock

    def describe(self) -> Iterator[Family]:
        """Every family, empty; so registration reads no book."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Every family with its values of now."""
        with self._lock:
            books = self._books()
            samples = [(metric, list(metric.read(books))) for metric in METRICS]
        for metric, read in samples:
            summed: dict[tuple[str, ...], float] = {}
            for labels, value in read:
                apart = metric.kind != "counter"
                summed[labels] = value + (0 if apart else summed.get(labels, 0))
            yield _family(metric, summed)


def _family(metric: Metric, values: dict[tuple[str, ...], float] | None = None) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
    if metric.kind == "info":
        # What an info says is its labels; the family takes them as the value.
        family = InfoMetricFamily(metric.name, metric.help, labels=())
        for labels in values or {}:
            family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
        return family
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in (values or {}).items():
        family.add_metric(labels, value)
    return family


class Follower:
    """Follows every journal at or under ``path``, those to come included."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.books: dict[Path, Book] = {}
        self._path = path
        self._readers: dict[Path, Reader] = {}
        self.find(required=True)

    def catch_up(self) -> None:
        """Read all that is there by now."""
        for path, reader in list(self._readers.items()):
            self.books[path].read(reader, self.lock)
            if reader.ended:
                del self._readers[path]

    def follow(self, stop: threading.Event) -> None:
        """Read what comes, until told to stop."""
        while not stop.wait(POLL_SECONDS):
            self.find()
            self.catch_up()

    def find(self, *, required: bool = False) -> None:
        """Look for journals that were not there before."""
        try:
            found = find_journals([self._path])
        except LedgerError:
            if required:
                raise
            return
        for path in found:
            if path not in self.books:
                with self.lock:
                    self.books[path] = Book(path)
                self._readers[path] = Reader(path)


def serve(path: Path, address: str, started: Started) -> None:
    """Follow the journals under ``path`` and serve ``/metrics`` at ``address`` until interrupted.

    ``started`` is told the URL once scrapes are answered. Raises :class:`LedgerError` for an
    address that is none or is taken, for a path without journals, and for one that can't be read.
    """
    host, port = _parse(address)
    _check_free(host, port)
    follower = Follower(path)
    follower.catch_up()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BookCollector(lambda: list(follower.books.values()), follower.lock))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise _taken(host, port, error) from error
    stop = threading.Event()
    failed: list[BaseException] = []
    thread = threading.Thread(target=_guarded, args=(follower, stop, failed), daemon=True)
    thread.start()
    try:
        started(f"http://{host}:{server.server_address[1]}/metrics")
        while thread.is_alive():
            time.sleep(0.2)
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
    if failed:
        raise failed[0]


def _guarded(follower: Follower, stop: threading.Event, failed: list[BaseException]) -> None:
    try:
        follower.follow(stop)
    except BaseException as error:
        failed.append(error)


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise LedgerError(f"{address!r} is no listen address; one looks like 127.0.0.1:9464.")
    return host.strip("[]") or "0.0.0.0", int(port)


def _check_free(host: str, port: int) -> None:
    """Say so before a long journal is read."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _taken(host, port, error) from error


def _taken(host: str, port: int, error: OSError) -> LedgerError:
    return LedgerError(f"Can't listen on {host}:{port}: {error.strerror}.")
