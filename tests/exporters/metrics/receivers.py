"""Real OTLP receivers: a gRPC server and an HTTP server that decode what arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Received:
    """The decoded requests."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self.metrics: list[Any] = []

    @property
    def spans(self) -> list[Any]:
        """Every span, in order of arrival."""
        return [
            span
            for request in self.traces
            for of_resource in request.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]

    @property
    def latest(self) -> dict[str, Any]:
        """The metrics of the last request, by name."""
        return {
            metric.name: metric
            for of_resource in self.metrics[-1].resource_metrics
            for scope in of_resource.scope_metrics
            for metric in scope.metrics
        }


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span, an event, a point or a resource."""
    return {pair.key: _value(pair.value) for pair in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    field = getattr(value, kind)
    return [_value(item) for item in field.values] if kind == "array_value" else field


@contextmanager
def http_receiver() -> Iterator[tuple[str, Received]]:
    """A receiver for HTTP with protobuf: its endpoint and what it received."""
    received = Received()
    decoders = {
        "/v1/traces": (received.traces, trace_service_pb2.ExportTraceServiceRequest),
        "/v1/metrics": (received.metrics, metrics_service_pb2.ExportMetricsServiceRequest),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            into, message = decoders[self.path]
            into.append(message.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_receiver() -> Iterator[tuple[str, Received]]:
    """A receiver for gRPC: its endpoint and what it received."""
    received = Received()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.traces.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.metrics.append(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(None).wait()
