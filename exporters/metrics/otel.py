"""Metrics and traces over OTLP, set up by the standard ``OTEL_*`` variables.

The metric table is handed to the exporter as it stands, with the times since which it counts: what
the ledger holds survives a restart of the sidecar, as an instrument's sums would not. A collector that
is down costs nothing but what it misses: spans wait in a bounded queue, metrics are told anew each time,
and both are sent by threads of their own.

On only where asked: an endpoint is set, or an exporter is named ``otlp``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from ... import __version__
from ...audit.errors import LedgerError
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.metrics_state import Distribution
from .spans import Ids, Spans
from .table import Metric, collect
from .values import Sample

logger = logging.getLogger("kvledger")

SIGNALS = ("traces", "metrics")
PROTOCOLS = ("http/protobuf", "grpc")
UNITS = {"tokens": "{token}", "seconds": "s", "ratio": "1", "": ""}
INTERVAL_MILLISECONDS = 60_000
WATCH_SECONDS = 1.0
CLOSE_MILLISECONDS = 3_000
TRUE = ("true", "1")

Environ = Mapping[str, str]


# --- settings -----------------------------------------------------------------------------------------


def wanted(environ: Environ) -> tuple[str, ...]:
    """The signals that these variables ask for. Raises :class:`LedgerError` for what there is not."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() in TRUE:
        return ()
    return tuple(signal for signal in SIGNALS if _wants(signal.upper(), environ))


def _wants(signal: str, environ: Environ) -> bool:
    exporter = environ.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        raise LedgerError(f"OTEL_{signal}_EXPORTER is {exporter!r}; there are otlp and none.")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in endpoints))


def protocol(signal: str, environ: Environ) -> str:
    """The protocol of a signal. Raises :class:`LedgerError` for one that there is not."""
    general = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOLS[0]
    said = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or general
    if said not in PROTOCOLS:
        raise LedgerError(f"OTLP over {said!r} is not to be had; there are {' and '.join(PROTOCOLS)}.")
    return said


def _exporter(signal: str, environ: Environ) -> Any:
    """The SDK's exporter; its endpoint, headers, time limit and certificates are of the variables too."""
    how = protocol(signal, environ)
    try:
        package = f"opentelemetry.exporter.otlp.proto.{how.partition('/')[0]}"
        if signal == "traces":
            return import_module(f"{package}.trace_exporter").OTLPSpanExporter()
        return import_module(f"{package}.metric_exporter").OTLPMetricExporter()
    except ImportError as error:
        raise LedgerError(
            f"OpenTelemetry over {how} needs {error.name}; install it with: pip install 'kvledger[otel]'."
        ) from error


def resource() -> Resource:
    """Who tells all this: ``kvledger``, unless the variables say otherwise."""
    default = Resource.create({"service.version": __version__})
    said = OTELResourceDetector().detect().attributes
    return default if "service.name" in said else default.merge(Resource({"service.name": "kvledger"}))


# --- the sender ---------------------------------------------------------------------------------------


class Telemetry:
    """Sends what the books hold, and the spans of what is watched, until it is closed.

    Raises :class:`LedgerError` where the variables ask for what there is not.

    ``books`` is asked under ``lock``, and every book that it gives is watched within a second; one that
    is watched sooner (:meth:`watch`) misses no request.
    """

    def __init__(
        self,
        books: Callable[[], Sequence[EngineAudit]],
        lock: AbstractContextManager[object],
        environ: Environ = os.environ,
    ) -> None:
        signals = wanted(environ)
        self._books = books
        self._lock = lock
        self._watched: WeakSet[EngineAudit] = WeakSet()
        self._resource = resource()
        self._provider: TracerProvider | None = None
        self._spans: Spans | None = None
        self._metrics: otel.MetricExporter | None = None
        self._interval = float(environ.get("OTEL_METRIC_EXPORT_INTERVAL") or INTERVAL_MILLISECONDS) / 1e3
        self._stop = threading.Event()
        loops = (self._watch, self._tell)
        self._threads = [threading.Thread(target=loop, name="kvledger-otel", daemon=True) for loop in loops]
        if "traces" in signals:
            ids = Ids()
            self._provider = TracerProvider(resource=self._resource, id_generator=ids, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(_exporter("traces", environ)))
            self._spans = Spans(self._provider, ids)
        if "metrics" in signals:
            self._metrics = _exporter("metrics", environ)

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def watch(self, book: EngineAudit) -> None:
        """Emit the spans of every request of ``book`` that ends from now on. Under the books' lock."""
        if self._spans is not None and book not in self._watched:
            self._watched.add(book)
            book.on_closed.append(partial(self._emit, self._spans, book))

    def _emit(self, spans: Spans, book: EngineAudit, account: Account, verdict: str) -> None:
        try:
            spans.emit(book, account, verdict)
        except Exception as error:  # whoever feeds the book goes on
            logger.warning("no spans of %s: %s: %s", account.request_id, type(error).__name__, error)

    def close(self) -> None:
        """Send what is there, for a few seconds at most."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_MILLISECONDS / 1e3)
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(CLOSE_MILLISECONDS / 1e3)
        if self._metrics is not None:
            self._metrics.shutdown(CLOSE_MILLISECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            with self._lock:
                for book in self._books():
                    self.watch(book)

    def _tell(self) -> None:
        while not self._stop.wait(self._interval):
            self._send()
        self._send()

    def _send(self) -> None:
        if self._metrics is None:
            return
        try:
            with self._lock:
                data = metrics_data(self._books(), self._resource)
            self._metrics.export(data)
        except Exception as error:  # metrics are told anew the next time
            logger.warning("metrics could not be sent: %s: %s", type(error).__name__, error)


def attach_telemetry(
    books: Callable[[], Sequence[EngineAudit]],
    lock: AbstractContextManager[object],
    environ: Environ = os.environ,
) -> Telemetry | None:
    """Begin to send, if the variables ask for it. Raises :class:`LedgerError` for what can't be done."""
    if not wanted(environ):
        return None
    telemetry = Telemetry(books, lock, environ)
    telemetry.start()
    return telemetry


# --- metrics as data ----------------------------------------------------------------------------------


def metrics_data(books: Sequence[EngineAudit], resource: Resource) -> otel.MetricsData:
    """The whole table as it stands."""
    now = time.time_ns()
    metrics = [_metric(metric, samples, now) for metric, samples in collect(books) if samples]
    scope = otel.ScopeMetrics(InstrumentationScope("kvledger", __version__), metrics, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])


def name(metric: Metric) -> str:
    """``kvledger.prompt_tokens``; a Prometheus that is told so calls it as ours does."""
    short = metric.exposed if metric.kind == "info" else metric.name
    return "kvledger." + short.removeprefix("kvledger_").removesuffix("_seconds")


def _metric(metric: Metric, samples: Sequence[Sample], now: int) -> otel.Metric:
    cumulative = otel.AggregationTemporality.CUMULATIVE
    data: Any
    if metric.kind == "histogram":
        data = otel.Histogram([_spread(metric, sample, now) for sample in samples], cumulative)
    elif metric.kind == "counter":
        data = otel.Sum([_number(metric, sample, now) for sample in samples], cumulative, True)
    else:
        data = otel.Gauge([_number(metric, sample, now) for sample in samples])
    return otel.Metric(name(metric), metric.help, UNITS[metric.unit], data)


def _number(metric: Metric, sample: Sample, now: int) -> otel.NumberDataPoint:
    assert not isinstance(sample.value, Distribution)
    return otel.NumberDataPoint(_labels(metric, sample), round(sample.created * 1e9), now, sample.value)


def _spread(metric: Metric, sample: Sample, now: int) -> otel.HistogramDataPoint:
    spread = sample.value
    assert isinstance(spread, Distribution)
    unsaid: Any = None  # the least and the most are not kept
    return otel.HistogramDataPoint(
        attributes=_labels(metric, sample),
        start_time_unix_nano=round(sample.created * 1e9),
        time_unix_nano=now,
        count=spread.observed,
        sum=spread.sum,
        bucket_counts=list(spread.counts),
        explicit_bounds=spread.bounds,
        min=unsaid,
        max=unsaid,
    )


def _labels(metric: Metric, sample: Sample) -> dict[str, str]:
    return dict(zip(metric.labels, sample.labels, strict=True))
