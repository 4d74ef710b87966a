"""The OpenMetrics text format.

``prometheus_client`` writes the format too, but looks at each character of each name of each sample, which
took most of a scrape. Format: https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from ...audit.replay.metrics_state import Distribution
from .metric_list import SUMMED, Metric
from .prometheus import bucket_bounds, openmetrics_exemplar
from .values import MetricSample

END = "# EOF\n"

Table = Iterable[tuple[Metric, Sequence[MetricSample]]]
"""Metrics with their samples, as ``metric_list.collect`` returns them."""


class _Numbers(dict[float, str]):
    """Numbers as the format writes them; most samples of a scrape have one of a few."""

    def __missing__(self, value: float) -> str:
        text = self[value] = number_text(value)
        return text


class Exposition:
    """Writes the metric table, with ``_created`` samples. It remembers how the lines of each series begin.

    Names and labels are most of a text, and the same at each scrape.
    """

    def __init__(self) -> None:
        self._beginnings: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        """By metric and labels: the beginning of each line of a series."""

    def text(self, table: Table) -> str:
        """The lines of all metrics; :data:`END` does not follow."""
        beginnings, numbers = self._beginnings, _Numbers()
        lines, written = [], 0
        for metric, samples in table:
            lines.append(heading(metric.name, metric.kind, metric.unit, metric.help))
            for sample in samples:
                of_series = beginnings.get((metric.name, sample.labels))
                if of_series is None:
                    of_series = beginnings[metric.name, sample.labels] = _beginnings(metric, sample)
                lines += map("{} {}\n".format, of_series, _values(sample, numbers))
            written += len(samples)
        if len(beginnings) > 2 * written:
            self._beginnings = {}  # most of them are of engines that are gone
        return "".join(lines)


def _beginnings(metric: Metric, sample: MetricSample) -> list[str]:
    """How the lines of a series begin, in order."""
    labels = dict(zip(metric.labels, sample.labels, strict=True))
    rows = [(metric.exposed, labels)]
    if isinstance(sample.value, Distribution):
        rows = [(f"{metric.name}_bucket", {**labels, "le": le}) for le in bucket_bounds(sample.value)]
        rows += [(f"{metric.name}_count", labels), (f"{metric.name}_sum", labels)]
    if metric.kind in SUMMED:
        rows.append((f"{metric.name}_created", labels))
    return [f"{name}{{{labels_text(some)}}}" if some else name for name, some in rows]


def _values(sample: MetricSample, numbers: _Numbers) -> Iterator[str]:
    """How these lines go on. A series that has no time of creation ends before that line."""
    value = sample.value
    if isinstance(value, Distribution):
        upto = 0
        for place, count in enumerate(value.counts):
            upto += count
            exemplar = value.exemplars.get(place)
            yield numbers[upto] + (exemplar_text(openmetrics_exemplar(exemplar)) if exemplar else "")
        yield numbers[upto]
        yield numbers[value.sum]
    else:
        exemplar = sample.exemplar
        yield numbers[value] + (exemplar_text(openmetrics_exemplar(exemplar)) if exemplar else "")
    if sample.created:
        yield numbers[sample.created]


def heading(name: str, kind: str, unit: str, help: str) -> str:
    """The lines before the samples of a family."""
    of_unit = f"# UNIT {name} {unit}\n" if unit else ""
    return f"# TYPE {name} {kind}\n{of_unit}# HELP {name} {escaped(help)}\n"


def exposition(families: Iterable[Family]) -> str:
    """All samples of ``families``, which have no timestamps."""
    lines = []
    numbers = _Numbers()
    for family in families:
        lines.append(heading(family.name, family.type, family.unit, family.documentation))
        for sample in family.samples:
            labels = f"{{{labels_text(sample.labels)}}}" if sample.labels else ""
            lines.append(f"{sample.name}{labels} {numbers[sample.value]}{exemplar_text(sample.exemplar)}\n")
    return "".join([*lines, END])


def exemplar_text(exemplar: Exemplar | None) -> str:
    """An exemplar as it follows a value; none is nothing."""
    if exemplar is None:
        return ""
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{labels_text(exemplar.labels)}}} {number_text(exemplar.value)}{at}"


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels as they stand between braces."""
    return ",".join([f'{name}="{escaped(value)}"' for name, value in labels.items()])


def number_text(value: float) -> str:
    """A number as the format writes it."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def escaped(text: str) -> str:
    """Text as it stands between quotes."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
