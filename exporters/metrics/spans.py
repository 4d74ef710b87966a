"""One request as spans: a span for the request, a child span for each life, and span events.

Spans are emitted when the account closes, with the times of the journal's events. Ids are hashes of the
request's identity and not random: a sidecar that reads a segment again after a crash emits the same spans
with the same ids. Attribute names follow OpenTelemetry's conventions for generative AI where these fit,
and are ``kvledger.*`` elsewhere: https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from ... import __version__
from ...audit.causes import PREEMPTIONS
from ...audit.ledger.account import Account, Life
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import TRACEPARENT

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
