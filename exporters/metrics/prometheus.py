"""The metric table as Prometheus families. Following is ``sidecar.py``, HTTP is ``web.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from math import inf, isinf

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as OpenMetricsExemplar

from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.metrics_state import Distribution, Exemplar
from .table import METRICS, SUFFIXES, Metric, collect
from .values import Sample

EXEMPLAR_CHARACTERS = 128
"""What OpenMetrics allows the names and values of an exemplar's labels together."""


class AuditCollector(Collector):
    """The metric table as Prometheus families.

    ``created``: counters say since when they count, as OpenMetrics has it: the earliest start of
    the engines of a name, which no restart of the follower changes.
    """

    def __init__(
        self,
        books: Callable[[], list[EngineAudit]],
        lock: AbstractContextManager[object],
        *,
        created: bool = False,
    ) -> None:
        self._books = books
        self._lock = lock
        self._created = created

    def describe(self) -> Iterator[Family]:
        """Every family, empty; so registration reads no book."""
        return (family(metric, ()) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Every family with its values of now."""
        with self._lock:
            families = [family(metric, of, created=self._created) for metric, of in collect(self._books())]
        yield from families


def family(metric: Metric, samples: Iterable[Sample], *, created: bool = False) -> Family:
    """One metric as prometheus_client has it, exemplars included."""
    shown = Family(metric.name, metric.help, metric.kind, metric.unit)
    for sample in samples:
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        value = sample.value
        if isinstance(value, Distribution):
            _buckets(shown, labels, value)
        else:
            suffix = SUFFIXES[metric.kind]
            shown.add_sample(metric.name + suffix, labels, value, exemplar=_exemplar(sample.exemplar))
        if created and sample.created and metric.kind in ("counter", "histogram"):
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
