"""Serves the metric table over HTTP, with prometheus_client, while journals are followed.

Each journal has a thread and a book; a scrape reads all books under their lock. Nothing is answered
before the journals that stood there at the start have been read up to their end: a counter that
starts low and climbs would look like traffic.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from math import inf, isinf
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as OpenMetricsExemplar

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal import Reader, find_journals
from kvledger.audit.replay import Book
from kvledger.audit.tallies import Distribution, Exemplar
from kvledger.exporters.metrics import METRICS, SUFFIXES, Metric, collect
from kvledger.exporters.readings import Sample

Started = Callable[[str], None]
"""Told the URL."""

EXEMPLAR_CHARACTERS = 128
"""What OpenMetrics allows the names and values of an exemplar's labels together."""

POLL_SECONDS = 0.5
"""How often a journal is asked for more, and the folder for new journals."""


class BookCollector(Collector):
    """The metric table as Prometheus families."""

    def __init__(self, books: Callable[[], list[Book]], lock: AbstractContextManager[object]) -> None:
        self._books = books
        self._lock = lock

    def describe(self) -> Iterator[Family]:
        """Every family, empty; so registration reads no book."""
        return (family(metric, ()) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Every family with its values of now."""
        with self._lock:
            families = [family(metric, samples) for metric, samples in collect(self._books())]
        yield from families


def family(metric: Metric, samples: Iterable[Sample]) -> Family:
    """One metric as prometheus_client has it, created times and exemplars included."""
    shown = Family(metric.name, metric.help, metric.kind, metric.unit)
    for sample in samples:
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        value = sample.value
        if isinstance(value, Distribution):
            _buckets(shown, labels, value)
        else:
            suffix = SUFFIXES[metric.kind]
            shown.add_sample(metric.name + suffix, labels, value, exemplar=_exemplar(sample.exemplar))
        if sample.created and metric.kind in ("counter", "histogram"):
            shown.add_sample(f"{metric.name}_created", labels, sample.created)
    return shown


def _buckets(shown: Family, labels: dict[str, str], spread: Distribution) -> None:
    """Counts up to each bound, then their number and sum."""
    upto = 0
    for place, bound in enumerate((*spread.bounds, inf)):
        upto += spread.counts[place]
        exemplar = _exemplar(spread.exemplars.get(place))
        of_bound = {**labels, "le": "+Inf" if isinf(bound) else str(float(bound))}
        shown.add_sample(f"{shown.name}_bucket", of_bound, upto, exemplar=exemplar)
    shown.add_sample(f"{shown.name}_count", labels, upto)
    shown.add_sample(f"{shown.name}_sum", labels, spread.sum)


def _exemplar(exemplar: Exemplar | None) -> OpenMetricsExemplar | None:
    """As OpenMetrics has it: at most 128 characters of labels, so the trace id, then the request's."""
    if exemplar is None:
        return None
    labels: dict[str, str] = {}
    left = EXEMPLAR_CHARACTERS
    for name, text in (("trace_id", exemplar.trace_id), ("request_id", exemplar.request_id)):
        if text and len(name) + len(text) <= left:
            labels[name] = text
            left -= len(name) + len(text)
    return OpenMetricsExemplar(labels, exemplar.value, exemplar.at_seconds) if labels else None


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
