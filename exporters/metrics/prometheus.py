"""The metric table as Prometheus metric families. HTTP is in ``exporters/sidecar/http_server.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as OpenMetricsExemplar

from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import Distribution, Exemplar
from .metric_list import METRICS, SUFFIXES, Metric, collect
from .values import MetricSample

EXEMPLAR_CHARACTERS = 128
"""OpenMetrics limits the names and values of an exemplar's labels to this sum."""


class AuditCollector(Collector):
    """A prometheus_client collector over the metric table.

    ``created`` adds the OpenMetrics ``_created`` samples: the earliest start of the engines of a name,
    which does not change when the follower restarts.
    """

    def __init__(
        self,
        audits: Callable[[], list[FollowedAudit]],
        lock: AbstractContextManager[object],
        *,
        created: bool = False,
    ) -> None:
        self._audits = audits
        """Returns the audits; it is called with the lock held."""
        self._lock = lock
        """Held while the figures are read."""
        self._created = created

    def describe(self) -> Iterator[Family]:
        """Every family without samples, so that registration reads no audit."""
        return (family(metric, ()) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Every family with its present samples."""
        with self._lock:
            families = [
                family(metric, samples, created=self._created) for metric, samples in collect(self._audits())
            ]
        yield from families


def family(metric: Metric, samples: Iterable[MetricSample], *, created: bool = False) -> Family:
    """Convert one metric and its samples, exemplars included."""
    result = Family(metric.name, metric.help, metric.kind, metric.unit)
    for sample in samples:
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        value = sample.value
        if isinstance(value, Distribution):
            _add_buckets(result, labels, value)
        else:
            suffix = SUFFIXES[metric.kind]
            result.add_sample(
                metric.name + suffix, labels, value, exemplar=openmetrics_exemplar(sample.exemplar)
            )
        if created and sample.created and metric.kind in ("counter", "histogram"):
            result.add_sample(f"{metric.name}_created", labels, sample.created)
    return result


def _add_buckets(histogram: Family, labels: dict[str, str], spread: Distribution) -> None:
    """Add the cumulative counts, the total count and the sum."""
    upto = 0
    for place, le in enumerate(bucket_bounds(spread)):
        upto += spread.counts[place]
        exemplar = openmetrics_exemplar(spread.exemplars.get(place))
        histogram.add_sample(f"{histogram.name}_bucket", {**labels, "le": le}, upto, exemplar=exemplar)
    histogram.add_sample(f"{histogram.name}_count", labels, upto)
    histogram.add_sample(f"{histogram.name}_sum", labels, spread.sum)


def bucket_bounds(spread: Distribution) -> list[str]:
    """The upper bound of each bucket, as the label ``le`` has it."""
    return [*(str(float(bound)) for bound in spread.bounds), "+Inf"]


def openmetrics_exemplar(exemplar: Exemplar | None) -> OpenMetricsExemplar | None:
    """Keep the trace id, then the request id, as far as 128 characters of labels allow.

    A quote in an id is written as in a Python string: not every parser of exemplars knows an escaped quote.
    """
    if exemplar is None:
        return None
    labels: dict[str, str] = {}
    left = EXEMPLAR_CHARACTERS
    for name, text in (("trace_id", exemplar.trace_id), ("request_id", exemplar.request_id)):
        text = text.replace('"', r"\x22")
        if text and len(name) + len(text) <= left:
            labels[name] = text
            left -= len(name) + len(text)
    return OpenMetricsExemplar(labels, exemplar.value, exemplar.at_seconds) if labels else None
