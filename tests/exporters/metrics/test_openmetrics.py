"""What is written in OpenMetrics is what ``prometheus_client`` writes and reads of the same samples."""

from __future__ import annotations

import math

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from kvledger.exporters.metrics.openmetrics import exposition

ODD = 'a "quoted" \\ path\nand {a=b} line, é'


def families() -> list[Family]:
    """One family of each kind, with texts that must be escaped and numbers at their limits."""
    counter = Family("calls", ODD, "counter")
    counter.add_sample("calls_total", {"engine": ODD}, 3, exemplar=Exemplar({"request_id": ODD}, 1.0, 2.5))
    counter.add_sample("calls_created", {"engine": ODD}, 1.7e9)
    gauge = Family("size_bytes", "Size.", "gauge", "bytes")
    for place, value in enumerate((0, 1.5, 1e-9, 123_456_789_012, math.inf, -math.inf, math.nan)):
        gauge.add_sample("size_bytes", {"place": str(place)}, value)
    spread = Family("wait_seconds", "Wait.", "histogram", "seconds")
    spread.add_sample("wait_seconds_bucket", {"le": "1.0"}, 2, exemplar=Exemplar({}, 0.25))
    spread.add_sample("wait_seconds_bucket", {"le": "+Inf"}, 2)
    spread.add_sample("wait_seconds_count", {}, 2)
    spread.add_sample("wait_seconds_sum", {}, 0.5)
    info = Family("build", "Build.", "info")
    info.add_sample("build_info", {"version": "1"}, 1)
    return [counter, gauge, spread, info, Family("nothing", "No sample.", "gauge")]


class Collected(Collector):
    def collect(self) -> list[Family]:
        return families()


def test_the_text_is_read_as_that_of_prometheus_client() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    theirs = generate_latest(registry).decode()
    ours = exposition(families())

    assert sorted(theirs.splitlines()) == sorted(ours.splitlines())
    assert repr(list(text_string_to_metric_families(theirs))) == repr(
        list(text_string_to_metric_families(ours))
    )
