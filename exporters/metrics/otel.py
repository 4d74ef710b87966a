"""Metrics and traces over OTLP, configured by the standard ``OTEL_*`` variables.

The exporter gets the metric table's own sums and start times instead of OpenTelemetry instruments: the
ledger's sums survive a restart of the sidecar, an instrument's would not. A collector that is down never
blocks kvledger: spans wait in a bounded queue, metrics are sent whole each time, and threads send both.

It is on only if an endpoint is set or an exporter is named ``otlp``. What a span holds is in ``spans.py``.
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
from ...audit.errors import PACKAGES, LedgerError
from ...audit.ledger.account import Account
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import Distribution
from ..sidecar.threads import StartThread, start_thread
from .metric_list import Metric, collect
from .spans import Ids, RequestSpans
from .values import MetricSample

logger = logging.getLogger("kvledger")

SIGNALS = ("traces", "metrics")
PROTOCOLS = ("http/protobuf", "grpc")
_CODES = {"": "", "bytes": "By", "ratio": "1", "seconds": "s"}
"""The units that the Unified Code for Units of Measure has (https://ucum.org)."""


def unit_code(unit: str) -> str:
    """The code of a unit of the metric table. Things that are counted are named: ``{token}``."""
    one = unit.removesuffix("es") if unit.endswith("ches") else unit.removesuffix("s")
    return _CODES.get(unit, f"{{{one}}}")


INTERVAL_MILLISECONDS = 60_000
WATCH_SECONDS = 1.0
CLOSE_MILLISECONDS = 3_000
TRUE = ("true", "1")

Environ = Mapping[str, str]


# --- settings -----------------------------------------------------------------------------------------


def wanted(environ: Environ) -> tuple[str, ...]:
    """The signals that the variables turn on. Raises :class:`LedgerError` for an unknown exporter."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() in TRUE:
        return ()
    return tuple(signal for signal in SIGNALS if _wants(signal.upper(), environ))


def _wants(signal: str, environ: Environ) -> bool:
    exporter = environ.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        raise LedgerError(f"OTEL_{signal}_EXPORTER is {exporter!r}; kvledger supports otlp and none.")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in endpoints))


def protocol(signal: str, environ: Environ) -> str:
    """The OTLP protocol of a signal. Raises :class:`LedgerError` for an unknown one."""
    general = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOLS[0]
    chosen = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or general
    if chosen not in PROTOCOLS:
        raise LedgerError(f"OTLP over {chosen!r} is not supported; choose {' or '.join(PROTOCOLS)}.")
    return chosen


def _exporter(signal: str, environ: Environ) -> Any:
    """The SDK's exporter; it reads endpoint, headers and timeout from the variables."""
    transport = protocol(signal, environ)
    try:
        package = f"opentelemetry.exporter.otlp.proto.{transport.partition('/')[0]}"
        module = import_module(f"{package}.{signal.removesuffix('s')}_exporter")
        made = module.OTLPSpanExporter if signal == "traces" else module.OTLPMetricExporter
        chosen = any(name.endswith("_CREDENTIAL_PROVIDER") for name in environ)  # a session of the user's
        if transport == "grpc" or chosen:  # gRPC bounds an answer by itself
            return made()
        from .otlp_session import StatusOnly

        return made(session=StatusOnly())
    except ImportError as error:
        raise LedgerError(
            f"OTLP over {transport} needs {error.name}; install it with: pip install {PACKAGES['otel']}."
        ) from error


def resource() -> Resource:
    """The sender's resource: service ``kvledger``, unless the variables name another."""
    default = Resource.create({"service.version": __version__})
    configured = OTELResourceDetector().detect().attributes
    return default if "service.name" in configured else default.merge(Resource({"service.name": "kvledger"}))


# --- the sender ---------------------------------------------------------------------------------------


class Telemetry:
    """Sends the metrics of all audits and the spans of ended requests, until it is closed.

    ``audits`` is called with ``lock`` held. Spans are sent for an audit from :meth:`watch` on, which is
    called within a second for each audit that ``audits`` returns. Raises :class:`LedgerError` if the
    variables ask for something that is not supported.
    """

    def __init__(
        self,
        audits: Callable[[], Sequence[FollowedAudit]],
        lock: AbstractContextManager[object],
        environ: Environ = os.environ,
    ) -> None:
        signals = wanted(environ)
        self._audits = audits
        self._lock = lock
        self._watched: WeakSet[FollowedAudit] = WeakSet()
        """The audits whose requests become spans when they end."""
        self._resource = resource()
        """Says who sends: service ``kvledger``, unless the variables name another."""
        self._provider: TracerProvider | None = None
        """Samples, queues and exports the spans; None: traces are not sent."""
        self._spans: RequestSpans | None = None
        """Makes the spans of a request that ended; None: traces are not sent."""
        self._metrics: otel.MetricExporter | None = None
        """Exports the metrics; None: metrics are not sent."""
        self._interval = float(environ.get("OTEL_METRIC_EXPORT_INTERVAL") or INTERVAL_MILLISECONDS) / 1e3
        """Seconds from one export of the metrics to the next."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        """One thread looks for new audits, the other sends metrics."""
        if "traces" in signals:
            ids = Ids()
            self._provider = TracerProvider(resource=self._resource, id_generator=ids, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(_exporter("traces", environ)))
            self._spans = RequestSpans(self._provider, ids)
        if "metrics" in signals:
            self._metrics = _exporter("metrics", environ)

    def start(self, start: StartThread = start_thread) -> None:
        """Start the sending threads by ``start``."""
        self._threads = [start("spans", self._watch_all), start("otlp", self._send_metrics)]

    def watch(self, engine_audit: FollowedAudit) -> None:
        """Emit spans for every request of this audit that ends from now on. The caller holds the lock."""
        if self._spans is not None and engine_audit not in self._watched:
            self._watched.add(engine_audit)
            engine_audit.on_closed.append(partial(self._emit, self._spans, engine_audit))

    def _emit(self, spans: RequestSpans, engine_audit: FollowedAudit, account: Account, verdict: str) -> None:
        try:
            spans.emit(engine_audit, account, verdict)
        except Exception as error:  # the reading thread must not fail
            logger.warning("no spans of %s: %s: %s", account.request_id, type(error).__name__, error)

    def close(self, milliseconds: int = CLOSE_MILLISECONDS) -> None:
        """Send what is waiting, for ``milliseconds`` in all at most."""
        self._stop.set()
        deadline = time.monotonic() + milliseconds / 1e3
        closing = list(self._threads)
        if self._provider is not None:
            closing.append(threading.Thread(target=self._provider.shutdown, daemon=True))
            closing[-1].start()
        for thread in closing:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0.0))
        if self._metrics is not None:
            self._metrics.shutdown(max(int(1e3 * (deadline - time.monotonic())), 1))

    def _watch_all(self, beat: Callable[[], None]) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            beat()
            with self._lock:
                for engine_audit in self._audits():
                    self.watch(engine_audit)

    def _send_metrics(self, beat: Callable[[], None]) -> None:
        due = time.monotonic() + self._interval
        while not self._stop.wait(min(WATCH_SECONDS, max(0.0, due - time.monotonic()))):
            beat()
            if time.monotonic() >= due:
                due += self._interval
                self._send()
        self._send()

    def _send(self) -> None:
        if self._metrics is None:
            return
        try:
            with self._lock:
                data = metrics_data(self._audits(), self._resource)
            self._metrics.export(data)
        except Exception as error:  # the next export is complete
            logger.warning("metrics could not be sent: %s: %s", type(error).__name__, error)


def attach_telemetry(
    audits: Callable[[], Sequence[FollowedAudit]],
    lock: AbstractContextManager[object],
    environ: Environ = os.environ,
    start: StartThread = start_thread,
) -> Telemetry | None:
    """Start sending if the variables turn it on. Raises :class:`LedgerError` if they are wrong."""
    if not wanted(environ):
        return None
    telemetry = Telemetry(audits, lock, environ)
    telemetry.start(start)
    return telemetry


# --- metrics as data ----------------------------------------------------------------------------------


def metrics_data(audits: Sequence[FollowedAudit], resource: Resource) -> otel.MetricsData:
    """The metric table with its present values, as OTLP data."""
    now = time.time_ns()
    metrics = [_metric(metric, samples, now) for metric, samples in collect(audits) if samples]
    scope = otel.ScopeMetrics(InstrumentationScope("kvledger", __version__), metrics, "")
    return otel.MetricsData([otel.ResourceMetrics(resource, [scope], "")])


def name(metric: Metric) -> str:
    """``kvledger.prompt_tokens``; Prometheus's own OTLP translation gives our Prometheus name back."""
    short = metric.exposed if metric.kind == "info" else metric.name
    return "kvledger." + short.removeprefix("kvledger_").removesuffix("_seconds")


def _metric(metric: Metric, samples: Sequence[MetricSample], now: int) -> otel.Metric:
    cumulative = otel.AggregationTemporality.CUMULATIVE
    data: Any
    if metric.kind == "histogram":
        data = otel.Histogram([_spread(metric, sample, now) for sample in samples], cumulative)
    elif metric.kind == "counter":
        data = otel.Sum([_number(metric, sample, now) for sample in samples], cumulative, True)
    else:
        data = otel.Gauge([_number(metric, sample, now) for sample in samples])
    return otel.Metric(name(metric), metric.help, unit_code(metric.unit), data)


def _number(metric: Metric, sample: MetricSample, now: int) -> otel.NumberDataPoint:
    assert not isinstance(sample.value, Distribution)
    value = sample.value
    if not -(1 << 63) <= value < 1 << 63:  # an integer of OTLP has 64 bits
        value = float(value)
    return otel.NumberDataPoint(_labels(metric, sample), round(sample.created * 1e9), now, value)


def _spread(metric: Metric, sample: MetricSample, now: int) -> otel.HistogramDataPoint:
    spread = sample.value
    assert isinstance(spread, Distribution)
    not_kept: Any = None
    return otel.HistogramDataPoint(
        attributes=_labels(metric, sample),
        start_time_unix_nano=round(sample.created * 1e9),
        time_unix_nano=now,
        count=spread.observed,
        sum=spread.sum,
        bucket_counts=list(spread.counts),
        explicit_bounds=spread.bounds,
        min=not_kept,
        max=not_kept,
    )


def _labels(metric: Metric, sample: MetricSample) -> dict[str, str]:
    return dict(zip(metric.labels, sample.labels, strict=True))
