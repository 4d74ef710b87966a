"""The metric table as Prometheus families. Following is ``sidecar.py``, HTTP is ``web.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvledger.audit.replay import Book
from kvledger.exporters.metrics import METRICS, Metric


class BookCollector(Collector):
    """The metric table as Prometheus families; two books of one name are summed.

    ``created``: counters say since when they count, as OpenMetrics has it: the earliest start of
    the engines of a name, which no restart of the follower changes.
    """

    def __init__(
        self, books: Callable[[], list[Book]], lock: threading.Lock, *, created: bool = False
    ) -> None:
        self._books = books
        self._lock = lock
        self._created = created

    def describe(self) -> Iterator[Family]:
        """Every family, empty; so registration reads no book."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Every family with its values of now."""
        with self._lock:
            books = self._books()
            samples = [(metric, list(metric.read(books))) for metric in METRICS]
            created = _created(books) if self._created else {}
        for metric, read in samples:
            summed: dict[tuple[str, ...], float] = {}
            for labels, value in read:
                apart = metric.kind != "counter"
                summed[labels] = value + (0 if apart else summed.get(labels, 0))
            yield _family(metric, summed, created)


def _created(books: list[Book]) -> dict[str, float]:
    """Unix time since when its figures count, by engine."""
    created: dict[str, float] = {}
    for book in books:
        if book.engine is not None:
            created[book.name] = min(book.created, created.get(book.name, book.created))
    return created


def _family(
    metric: Metric,
    values: dict[tuple[str, ...], float] | None = None,
    created: Mapping[str, float] = MappingProxyType({}),
) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
    if metric.kind == "info":
        # What an info says is its labels; the family takes them as the value.
        family = InfoMetricFamily(metric.name, metric.help, labels=())
        for labels in values or {}:
            family.add_metric((), dict(zip(metric.labels, labels, strict=True)))
        return family
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in (values or {}).items():
            family.add_metric(labels, value, created=created.get(labels[0]) if labels else None)
        return family
    family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in (values or {}).items():
        family.add_metric(labels, value)
    return family
