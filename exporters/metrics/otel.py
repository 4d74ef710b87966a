"""Metrics and traces over OTLP, configured by the standard ``OTEL_*`` variables.

The exporter gets the metric table's own sums and start times instead of OpenTelemetry instruments: the
ledger's sums survive a restart of the sidecar, an instrument's would not. A collector that is down never
blocks kvledger: spans wait in a bounded queue, metrics are sent whole each time, and threads send both.

It is on only if an endpoint is set or an exporter is named ``otlp``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import blake2b
from importlib import import_module
from typing import Any
from weakref import WeakSet

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from ... import __version__
from ...audit.causes import PREEMPTIONS
from ...audit.errors import PACKAGES, LedgerError
from ...audit.ledger.account import Account, Life
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import TRACEPARENT, Distribution
from ..sidecar.threads import StartThread, start_thread
from .metric_list import Metric, collect
from .values import MetricSample

# --- One request as spans: a span for the request, a child span for each life, and span events.
#
# Spans are emitted when the account closes, with the times of the journal's events. Ids are hashes of the
# request's identity and not random: a sidecar that reads a segment again after a crash emits the same spans
# with the same ids. Attribute names follow OpenTelemetry's conventions for generative AI where these fit,
# and are ``kvledger.*`` elsewhere: https://opentelemetry.io/docs/specs/semconv/gen-ai/

OLDEST_SECONDS = 600.0
"""Requests that ended longer ago come from an old journal; no span is emitted for them."""

Attributes = dict[str, AttributeValue]
CACHE_WRITE = ("gen_ai.usage.cache_write.input_tokens", "gen_ai.usage.cache_creation.input_tokens")
"""The present and the older name of one attribute; backends know the one or the other."""

FINISH_REASONS = {"stopped": "stop", "length_capped": "length"}


class Ids(IdGenerator):
    """An id generator that returns the ids set just before."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        """The trace id of a request without a caller's trace."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """The id of the span that begins now."""
        return self.span_id

    def set_from(self, *name: object) -> None:
        """Set both ids to a hash of ``name``."""
        digest = blake2b("\0".join(map(str, name)).encode(), digest_size=24).digest()
        self.trace_id = int.from_bytes(digest[:16], "big") or 1
        self.span_id = int.from_bytes(digest[16:], "big") or 1


class RequestSpans:
    """Emits the spans of ended requests. ``provider`` must have been created with ``ids``.

    The provider samples, queues and exports: ending a span only puts it into a bounded queue.
    """

    def __init__(self, provider: TracerProvider, ids: Ids, clock: Callable[[], float] = time.time) -> None:
        self._tracer: Tracer = provider.get_tracer("kvledger", __version__)
        self._ids = ids
        self._clock = clock
        """Returns the Unix time, in seconds."""
        self._one_at_a_time = threading.Lock()
        """Held while one request is emitted, because ``ids`` hold the ids of one span."""

    def emit(self, engine_audit: FollowedAudit, account: Account, verdict: str) -> None:
        """Emit the spans of a request of ``engine_audit`` that has just ended."""
        if engine_audit.metrics.seconds(account.closed_at) < self._clock() - OLDEST_SECONDS:
            return
        with self._one_at_a_time:
            self._emit(engine_audit, account, verdict)

    def _emit(self, engine_audit: FollowedAudit, account: Account, verdict: str) -> None:
        name = (
            engine_audit.name,
            engine_audit.path.name,
            engine_audit.metrics.created_seconds,
            account.request,
        )
        self._ids.set_from(*name)
        span = self._tracer.start_span(
            "kvledger.request",
            context=_parent_context(account),
            attributes=request_attributes(engine_audit, account, verdict),
            start_time=_nanoseconds(engine_audit, account.added_at),
        )
        if account.outcome == "error":
            span.set_status(Status(StatusCode.ERROR))
        inside = trace.set_span_in_context(span)
        for at, event, attributes in request_events(account):
            span.add_event(event, attributes, _nanoseconds(engine_audit, at))
        for life in account.lives:
            self._ids.set_from(*name, life.number)
            child = self._tracer.start_span(
                "kvledger.life",
                context=inside,
                attributes=life_attributes(life),
                start_time=_nanoseconds(engine_audit, life.began_at),
            )
            if life.load_ended_at >= 0:
                loaded: Attributes = {"kvledger.loaded_tokens": life.loaded}
                child.add_event("kvledger.load_ended", loaded, _nanoseconds(engine_audit, life.load_ended_at))
            child.end(_nanoseconds(engine_audit, life.ended_at if life.ended_at >= 0 else account.closed_at))
        span.end(_nanoseconds(engine_audit, account.closed_at))


def _parent_context(account: Account) -> Context:
    """The caller's trace if the engine received one; else an empty context, which begins a trace."""
    empty = Context()
    header = TRACEPARENT.fullmatch(account.traceparent or "")
    if header is None:
        return empty
    trace_id, span_id, flags = (int(part, 16) for part in header.groups())
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), empty)


def _nanoseconds(engine_audit: FollowedAudit, at: int) -> int:
    return round(engine_audit.metrics.clock_seconds * 1e6 + at) * 1_000


def request_attributes(engine_audit: FollowedAudit, account: Account, verdict: str) -> Attributes:
    """Attributes of a request span; an unknown request has its identity and the reason, and no figures."""
    configuration = engine_audit.engine.configuration if engine_audit.engine else {}
    attributes: Attributes = {
        "kvledger.engine": engine_audit.name,
        "kvledger.request_id": account.request_id,
        "kvledger.verdict": verdict,
        "gen_ai.response.finish_reasons": (FINISH_REASONS.get(account.outcome, account.outcome),),
    }
    if configuration.get("model"):
        attributes["gen_ai.request.model"] = str(configuration["model"])
    if account.unknown is not None:
        return attributes | {"kvledger.unknown": account.unknown}
    attributes["gen_ai.usage.input_tokens"] = sum(s.prompt_tokens - s.carried for s in account.settlements)
    if len(account.settlements) == 1:  # later prompts of a session contain earlier output
        attributes["gen_ai.usage.output_tokens"] = account.sequence_tokens - account.prompt_tokens
    for source in ("local", "external", "computed", "unattained"):
        tokens = sum(getattr(s, source) for s in account.settlements)
        attributes[f"kvledger.prompt.{source}_tokens"] = tokens
    cached = sum(s.local + s.external for s in account.settlements)
    attributes["gen_ai.usage.cache_read.input_tokens"] = cached
    if configuration.get("prefix_caching"):
        written = sum(s.computed for s in account.settlements)
        attributes |= dict.fromkeys(CACHE_WRITE, written)
    return attributes | {
        "kvledger.preemptions": account.preemptions,
        "kvledger.scheduled_tokens": account.scheduled,
        "kvledger.rework_tokens": sum(account.rework.values()),
        "kvledger.promised_tokens": account.promised,
        "kvledger.loaded_tokens": account.loaded,
    }


def request_events(account: Account) -> Iterator[tuple[int, str, Attributes]]:
    """Span events: preemptions, resumptions, and when each prompt was settled."""
    for life in account.lives:
        if life.number > 1:
            yield life.began_at, "kvledger.resumed", {"kvledger.life": life.number}
        if life.ended_by in PREEMPTIONS:
            discarded: Attributes = {
                "kvledger.cause": life.ended_by,
                "kvledger.discarded_tokens": life.discarded,
            }
            yield life.ended_at, "kvledger.preempted", discarded
    for settlement in account.settlements:
        if account.unknown is None:
            settled: Attributes = {
                "kvledger.prompt.local_tokens": settlement.local,
                "kvledger.prompt.external_tokens": settlement.external,
                "kvledger.prompt.computed_tokens": settlement.computed,
            }
            yield settlement.at, "kvledger.settled", settled


def life_attributes(life: Life) -> Attributes:
    """Attributes of a life span: its balances."""
    attributes: Attributes = {
        "kvledger.life": life.number,
        "kvledger.ended_by": life.ended_by,
        "kvledger.local_tokens": life.local,
        "kvledger.external_tokens": life.external,
        "kvledger.loaded_tokens": life.loaded,
        "kvledger.scheduled_tokens": life.scheduled,
        "kvledger.rejected_tokens": life.rejected,
        "kvledger.discarded_tokens": life.discarded,
        "kvledger.asynchronous": life.asynchronous,
    }
    return attributes | {f"kvledger.voided_tokens.{cause}": tokens for cause, tokens in life.voided.items()}


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
