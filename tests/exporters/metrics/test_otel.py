"""What a real OTLP receiver gets: the metric table and the spans of requests and lives."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests import journals
from tests.exporters.metrics.receivers import Received, attributes, grpc_receiver, http_receiver
from tests.histories import events

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Event, Gap, RequestAdded, Setting, Snapshot
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.metrics import otel
from kvledger.exporters.metrics.otel import Telemetry, attach_telemetry, protocol, wanted

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RESUMED = "A0+32 L s56 o P A0+160 L s40 o+ s1 o+ F"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the environment's OTEL variables, and bypass proxies for the receivers."""
    for name in list(otel.os.environ):
        if name.startswith("OTEL_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def started(*, at: float | None = None, configuration: dict[str, Setting] | None = None) -> FollowedAudit:
    engine_audit = FollowedAudit(Path("engine-1"))
    configuration = {"model": "tiny", **(configuration or {})}
    began = replace(journals.STARTED, wall_seconds=at or time.time(), configuration=configuration)
    for number, event in enumerate((began, Snapshot(0, 0, [], 0))):
        engine_audit.feed(number, event)
    return engine_audit


def feed(engine_audit: FollowedAudit, stream: list[Event], first: int = 2) -> None:
    for number, event in enumerate(stream, first):
        engine_audit.feed(number, event)


def called(stream: list[Event], flags: str = "01") -> list[Event]:
    """The same history with a caller's trace context."""
    added, *rest = stream
    assert isinstance(added, RequestAdded)
    return [replace(added, traceparent=f"00-{TRACE}-{PARENT}-{flags}"), *rest]


def received_from(
    engine_audit: FollowedAudit, stream: list[Event], monkeypatch: pytest.MonkeyPatch, **variables: str
) -> Received:
    """What an HTTP receiver got while an audit was fed a stream."""
    with http_receiver() as (endpoint, received):
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **variables}.items():
            monkeypatch.setenv(name, value)
        telemetry = attach_telemetry(lambda: [engine_audit], threading.Lock())
        assert telemetry is not None
        telemetry.watch(engine_audit)
        feed(engine_audit, stream)
        telemetry.close()
    return received


# --- both protocols ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("receiver", "how"), [(http_receiver(), "http/protobuf"), (grpc_receiver(), "grpc")], ids=["http", "grpc"]
)
def test_a_receiver_gets_spans_and_metrics(
    receiver: AbstractContextManager[tuple[str, Received]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_audit = started()
    with receiver as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", how)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-7")
        telemetry = attach_telemetry(lambda: [engine_audit], threading.Lock())
        assert telemetry is not None
        telemetry.watch(engine_audit)
        feed(engine_audit, events(200, RESUMED))
        telemetry.close()

    assert ["kvledger.life", "kvledger.life", "kvledger.request"] == sorted(
        span.name for span in received.spans
    )
    of_resource = attributes(received.metrics[0].resource_metrics[0].resource)
    assert ("kvledger", "pod-7") == (of_resource["service.name"], of_resource["k8s.pod.name"])
    (point,) = [
        point
        for point in received.latest["kvledger.prompt_tokens"].sum.data_points
        if attributes(point)["source"] == "external"
    ]
    assert 104 in (point.as_double, point.as_int)


# --- metrics -------------------------------------------------------------------------------------------


def test_a_histogram_keeps_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_audit = started()
    (point,) = (
        received_from(engine_audit, events(200, RESUMED), monkeypatch)
        .latest["kvledger.request_cached_ratio"]
        .histogram.data_points
    )

    assert (1, 0.52) == (point.count, point.sum)
    assert len(point.explicit_bounds) + 1 == len(point.bucket_counts)
    assert not point.HasField("min") and not point.HasField("max")


# --- spans ---------------------------------------------------------------------------------------------


def spans(received: Received) -> tuple[Any, list[Any]]:
    """The request's span, and its lives' in order."""
    (request,) = [span for span in received.spans if span.name == "kvledger.request"]
    lives = [span for span in received.spans if span.name == "kvledger.life"]
    return request, sorted(lives, key=lambda span: span.start_time_unix_nano)


def test_a_request_and_its_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_audit = started()
    stream = events(200, RESUMED)
    request, lives = spans(received_from(engine_audit, stream, monkeypatch))

    values = attributes(request)
    assert (200, 2, 104) == tuple(
        values[f"gen_ai.usage.{what}"]
        for what in ("input_tokens", "output_tokens", "cache_read.input_tokens")
    )
    assert ("tiny", ["stop"]) == (values["gen_ai.request.model"], values["gen_ai.response.finish_reasons"])
    assert ("request-0", "clean", 1) == tuple(
        values[f"kvledger.{what}"] for what in ("request_id", "verdict", "preemptions")
    )
    assert ["kvledger.preempted", "kvledger.resumed", "kvledger.settled"] == [e.name for e in request.events]
    assert [request.span_id] * 2 == [life.parent_span_id for life in lives]
    assert ["blocks", "finished"] == [attributes(life)["kvledger.ended_by"] for life in lives]
    assert [["kvledger.load_ended"]] * 2 == [[event.name for event in life.events] for life in lives]


@pytest.mark.parametrize(("configuration", "written"), [({"prefix_caching": True}, 96), ({}, None)])
def test_tokens_written_to_the_cache_have_both_names(
    configuration: dict[str, Setting], written: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None are written if the engine caches no prefixes."""
    engine_audit = started(configuration=configuration)
    request, _ = spans(received_from(engine_audit, events(200, RESUMED), monkeypatch))

    values = attributes(request)
    for name in ("cache_write", "cache_creation"):
        assert written == values.get(f"gen_ai.usage.{name}.input_tokens")


def test_span_times_are_event_times(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_audit = started()
    stream = events(200, RESUMED)
    request, lives = spans(received_from(engine_audit, stream, monkeypatch))
    assert engine_audit.engine is not None
    began = round(engine_audit.engine.wall_seconds * 1e6)

    assert (began + stream[0].at) * 1000 == request.start_time_unix_nano
    assert (began + stream[-1].at) * 1000 == request.end_time_unix_nano == lives[-1].end_time_unix_nano
    preempted = next(event for event in stream if type(event).__name__ == "Preempted")
    assert (began + preempted.at) * 1000 == lives[0].end_time_unix_nano == request.events[0].time_unix_nano


def test_spans_belong_to_the_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    request, lives = spans(received_from(started(), called(events(200, RESUMED)), monkeypatch))

    assert (TRACE, PARENT) == (request.trace_id.hex(), request.parent_span_id.hex())
    assert {TRACE} == {life.trace_id.hex() for life in lives}


def test_spans_of_an_unsampled_caller_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [] == received_from(started(), called(events(200, RESUMED), flags="00"), monkeypatch).spans


def test_without_a_caller_a_request_begins_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    request, lives = spans(received_from(started(), events(200, RESUMED), monkeypatch))

    assert b"" == request.parent_span_id
    assert {request.trace_id} == {life.trace_id for life in lives}


def test_spans_sent_again_have_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash, when a segment is read again."""
    at = time.time()
    ids = [
        {
            (span.trace_id, span.span_id)
            for span in received_from(started(at=at), events(200, RESUMED), monkeypatch).spans
        }
        for _ in range(2)
    ]

    assert ids[0] == ids[1]
    assert 3 == len(ids[0])


def test_an_unknown_request_has_a_reason_and_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = events(200, "A0+0 s200 o+ F")
    request, _ = spans(
        received_from(started(), [*stream[:-1], Gap(stream[-1].at, 3, "x"), stream[-1]], monkeypatch)
    )

    values = attributes(request)
    assert ("unknown", "events were lost (x)") == (values["kvledger.verdict"], values["kvledger.unknown"])
    assert "gen_ai.usage.input_tokens" not in values


def test_a_request_that_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    request, _ = spans(received_from(started(), events(200, "A0+0 s200 o+ F:error"), monkeypatch))

    assert Status.STATUS_CODE_ERROR == request.status.code


def test_requests_of_an_old_journal_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [] == received_from(started(at=time.time() - 3_600), events(200, RESUMED), monkeypatch).spans


# --- a collector that is down ----------------------------------------------------------------------------


@pytest.fixture
def silence() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("how", ["http/protobuf", "grpc"])
def test_a_collector_that_never_answers_delays_nothing(
    silence: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand requests enter a queue of two hundred; sending holds no lock that the audit needs."""
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": silence,
        "OTEL_EXPORTER_OTLP_PROTOCOL": how,
        "OTEL_BSP_MAX_QUEUE_SIZE": "200",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "10",
    }.items():
        monkeypatch.setenv(name, value)
    engine_audit, lock = started(), threading.Lock()
    telemetry = Telemetry(lambda: [engine_audit], lock)
    telemetry.start()
    telemetry.watch(engine_audit)
    one = events(200, "A0+0 s200 o+ F")
    for _ in range(1_000):
        with lock:
            feed(engine_audit, one)

    assert 1_000 == engine_audit.closed.requests
    began = time.monotonic()
    telemetry.close()
    assert time.monotonic() - began < 30, "closing is bounded"


@pytest.fixture
def endless() -> Iterator[tuple[str, list[int]]]:
    """A collector that answers a request without end; the numbers of bytes that its answers got rid of."""
    sent: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(connection: socket.socket) -> None:
            sent.append(0)
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 20)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n")
                while True:
                    sent[-1] += connection.send(b"x" * 65536)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", sent
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_of_an_answer_without_end_nothing_is_read(
    signal: str, endless: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector gets rid of what the machine's own buffers hold, and of no more."""
    url, sent = endless
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", url)
    engine_audit = started()
    telemetry = Telemetry(lambda: [engine_audit], threading.Lock())
    telemetry.start()
    telemetry.watch(engine_audit)
    feed(engine_audit, events(200, "A0+0 s200 o+ F"))
    began = time.monotonic()
    telemetry.close()

    assert time.monotonic() - began < 10
    assert sent and max(sent) < 16 << 20


def test_an_exception_in_a_span_does_not_stop_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel.RequestSpans, "emit", lambda *_: 1 / 0)
    engine_audit = started()
    received_from(engine_audit, events(200, RESUMED), monkeypatch)

    assert 1 == engine_audit.closed.requests


# --- settings --------------------------------------------------------------------------------------------

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, ()),
        ({ENDPOINT: "x"}, ("traces", "metrics")),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "x"}, ("metrics",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("traces",)),
        ({ENDPOINT: "x", "OTEL_METRICS_EXPORTER": "none"}, ("traces",)),
        ({ENDPOINT: "x", "OTEL_SDK_DISABLED": "true"}, ()),
    ],
)
def test_the_variables_turn_signals_on(environ: dict[str, str], signals: tuple[str, ...]) -> None:
    assert signals == wanted(environ)


def test_nothing_is_attached_without_variables() -> None:
    assert attach_telemetry(list, threading.Lock()) is None


@pytest.mark.parametrize(
    ("environ", "values"),
    [
        ({}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "http/protobuf",
        ),
    ],
)
def test_the_protocol(environ: dict[str, str], values: str) -> None:
    assert values == protocol("traces", environ)


def test_unsupported_exporters_and_protocols_are_errors() -> None:
    message = "OTEL_TRACES_EXPORTER is 'zipkin'; kvledger supports otlp and none"
    with pytest.raises(LedgerError, match=message):
        wanted({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(LedgerError, match="OTLP over 'http/json' is not supported"):
        protocol("traces", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
