"""Every metric through every exporter, decoded by the format's own decoder, keeps name, unit and value."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporters.metrics.receivers import Received, attributes, grpc_receiver, http_receiver

from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.metrics_state import Distribution
from kvledger.exporters.metrics import metric_list, prometheus
from kvledger.exporters.metrics.metric_list import METRICS, Metric
from kvledger.exporters.metrics.openmetrics import END, Exposition, exposition
from kvledger.exporters.metrics.otel import attach_telemetry
from kvledger.exporters.metrics.values import EngineAudits, Health, MetricSample

HOSTILE = 'a "b"\\c\n=1+1 é\u2028\r'
"""The value of a label, with everything that a format must escape."""

BEGAN = 1_700_000_000.0

UNITS = {"s": "seconds", "By": "bytes", "1": "ratio"}
"""The units of UCUM that become the end of a name in Prometheus; what is in braces does not.
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/"""

Labels = frozenset[tuple[str, str]]
Value = float | tuple[tuple[float, ...], tuple[int, ...], float]


class Told(NamedTuple):
    """What an exporter told of one metric. ``unit`` "": the format has none. A histogram is its bounds, the
    counts of its buckets, and its sum."""

    kind: str
    unit: str
    labels: Labels
    value: Value


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Told]:
    """Gives each metric of the table a value that no other one has; returns them by name."""
    samples = [(metric, _planted(metric, number)) for number, metric in enumerate(METRICS, 2)]
    for module in ("metric_list", "prometheus", "otel"):
        rows = [(metric, [sample]) for metric, sample in samples]
        monkeypatch.setattr(f"kvledger.exporters.metrics.{module}.collect", lambda _, rows=rows: rows)
    told = {}
    for metric, sample in samples:
        spread = sample.value
        value: Value = spread if isinstance(spread, int | float) else _of(spread)
        labels = frozenset(zip(metric.labels, sample.labels, strict=True))
        told[metric.exposed] = Told(metric.kind, metric.unit, labels, value)
    return told


def _planted(metric: Metric, number: int) -> MetricSample:
    labels = tuple(f"{HOSTILE}{place}" for place in range(len(metric.labels)))
    if metric.kind != "histogram":
        return MetricSample(labels, 1 if metric.kind == "info" else number + 0.25, BEGAN)
    spread = Distribution.over((0.5, 8.0))
    for value in (0.25, 4.0, number + 0.25):
        spread.observe(value)
    return MetricSample(labels, spread, BEGAN)


def _of(spread: Distribution) -> Value:
    return spread.bounds, tuple(spread.counts), spread.sum


def of_families(families: Iterable[Any]) -> dict[str, Told]:
    """What a reader of one of Prometheus's formats finds, without the times at which counters began."""
    found: dict[str, Told] = {}
    upto: dict[str, dict[float, float]] = {}
    for family in families:
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            name, value = sample.name, sample.value
            if family.type == "histogram":
                name = name.removesuffix("_bucket").removesuffix("_count")
                if "le" in sample.labels:
                    upto.setdefault(name, {})[float(sample.labels["le"])] = value
                if not sample.name.endswith("_sum"):
                    continue
                name = name.removesuffix("_sum")
                counts = [int(b - a) for a, b in itertools.pairwise([0, *upto[name].values()])]
                bounds = tuple(bound for bound in upto[name] if not math.isinf(bound))
                value = bounds, tuple(counts), value
            if not name.endswith("_created"):
                found[name] = Told(family.type, family.unit, labels, value)
    return found


def families(audits: Sequence[FollowedAudit] = ()) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(prometheus.AuditCollector(lambda: list(audits), threading.Lock(), created=True))
    return registry


def test_prometheus_text_has_every_metric(planted: dict[str, Told]) -> None:
    """The format has no units, and no kind for information."""
    kinds = {"info": "gauge"}

    assert {
        name: told._replace(kind=kinds.get(told.kind, told.kind), unit="") for name, told in planted.items()
    } == of_families(parse_text(generate_latest(families()).decode()))


def test_openmetrics_has_every_metric(planted: dict[str, Told]) -> None:
    assert planted == of_families(parse_open(exposition(families().collect())))


@pytest.mark.usefixtures("planted")
def test_the_text_of_a_whole_scrape_is_that_of_its_families() -> None:
    whole, families_then = Exposition(), exposition(families().collect())

    assert families_then == whole.text(metric_list.collect([])) + END
    assert families_then == whole.text(metric_list.collect([])) + END  # now from what it remembers


# --- OTLP ------------------------------------------------------------------------------------------------


def of_otlp(metrics: Iterable[Any]) -> dict[str, Told]:
    """What a receiver of OTLP finds, by the names that Prometheus gives it."""
    found: dict[str, Told] = {}
    for metric in metrics:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        (point,) = data.data_points
        name = metric.name.replace(".", "_")
        suffix = UNITS.get(metric.unit, "") if metric.unit != "1" or kind == "gauge" else ""
        if suffix and not name.endswith(f"_{suffix}"):
            name = f"{name}_{suffix}"
        unit = UNITS.get(metric.unit, metric.unit.strip("{}") + "s" if metric.unit else "")
        value: Any
        if kind == "histogram":
            value = tuple(point.explicit_bounds), tuple(point.bucket_counts), point.sum
            assert (point.count, data.aggregation_temporality) == (sum(point.bucket_counts), 2)
        else:
            value = getattr(point, point.WhichOneof("value"))
        if kind == "sum":
            assert (data.is_monotonic, data.aggregation_temporality) == (True, 2)
            name, kind = f"{name}_total", "counter"
        elif name.endswith("_info"):
            kind = "info"
        if kind in ("counter", "histogram"):
            assert round(BEGAN * 1e9) == point.start_time_unix_nano < point.time_unix_nano
        found[name] = Told(
            kind, unit.replace("batchs", "batches"), frozenset(attributes(point).items()), value
        )
    return found


@pytest.mark.parametrize(
    ("receiver", "how"), [(http_receiver, "http/protobuf"), (grpc_receiver, "grpc")], ids=["http", "grpc"]
)
def test_otlp_has_every_metric(
    planted: dict[str, Told],
    receiver: Callable[[], AbstractContextManager[tuple[str, Received]]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with receiver() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint + "/v1/metrics" * (how != "grpc"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", how)
        telemetry = attach_telemetry(lambda: EngineAudits([], Health()), threading.Lock())
        assert telemetry is not None
        telemetry.close()

    assert planted == of_otlp(received.latest.values())


# --- nothing that a client wrote, but its id ---------------------------------------------------------------


CANARY_TOKENS = tuple(range(70_000_001, 70_000_001 + 48 * 7, 7))
CANARY_TEXT = "canary-of-the-prompt"


def test_neither_metrics_nor_spans_hold_a_prompts_text_or_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from tests.engines.observed import observe
    from tests.scenarios.driving import start

    from kvledger.audit.traffic.driver import Driver

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        driver.add("a", CANARY_TOKENS, max_tokens=3, of_request={"cache_salt": CANARY_TEXT})
        driver.run()
        return driver

    _, stream = observe(scenario)
    audit = FollowedAudit(Path("engine-1"))
    with http_receiver() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry = attach_telemetry(lambda: EngineAudits([audit], Health()), threading.Lock())
        assert telemetry is not None
        telemetry.watch(audit)
        for number, event in enumerate(stream):
            audit.feed(number, event)
        scraped = Exposition().text(metric_list.collect([audit]))
        assert scraped + END == exposition(families([audit]).collect())
        telemetry.close()

    assert {"kvledger.request", "kvledger.life"} == {span.name for span in received.spans}
    texts = [scraped, *map(str, received.traces), *map(str, received.metrics)]
    for text in texts:
        assert CANARY_TEXT not in text
        assert not {str(token) for token in CANARY_TOKENS} & set(re.findall(r"\d{8}", text))
