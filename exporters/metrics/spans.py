"""One request as spans: the request, a child a life, and what happened in between as their events.

Emitted when the account closes, with the times of the events. Ids are made of what is emitted, not
drawn: a sidecar that reads a segment again after a crash emits the same spans under the same ids.
Names follow the conventions for generative AI where they fit and are ``kvledger.*`` elsewhere:
https://opentelemetry.io/docs/specs/semconv/gen-ai/
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
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.metrics_state import TRACEPARENT

OLDEST_SECONDS = 600.0
"""Requests that ended longer ago are read from an old journal, and are not news."""

Attributes = dict[str, AttributeValue]
FINISH_REASONS = {"stopped": "stop", "length_capped": "length"}


class Ids(IdGenerator):
    """Gives out the ids that were set just before."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        """For a request without a caller's trace."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """For the span that begins now."""
        return self.span_id

    def of(self, *name: object) -> None:
        """Set both, of what is to be emitted."""
        digest = blake2b("\0".join(map(str, name)).encode(), digest_size=24).digest()
        self.trace_id = int.from_bytes(digest[:16], "big") or 1
        self.span_id = int.from_bytes(digest[16:], "big") or 1


class Spans:
    """Emits the spans of requests that have ended. ``provider`` must have been made with ``ids``.

    Sampling, queues and export are the provider's: ending a span only puts it into a bounded queue.
    """

    def __init__(self, provider: TracerProvider, ids: Ids, clock: Callable[[], float] = time.time) -> None:
        self._tracer: Tracer = provider.get_tracer("kvledger", __version__)
        self._ids = ids
        self._clock = clock
        self._one_at_a_time = threading.Lock()

    def emit(self, book: EngineAudit, account: Account, verdict: str) -> None:
        """One request of ``book`` that has just ended."""
        if book.metrics.seconds(account.closed_at) < self._clock() - OLDEST_SECONDS:
            return
        with self._one_at_a_time:
            self._emit(book, account, verdict)

    def _emit(self, book: EngineAudit, account: Account, verdict: str) -> None:
        name = (book.name, book.path.name, book.metrics.created_seconds, account.request)
        self._ids.of(*name)
        span = self._tracer.start_span(
            "kvledger.request",
            context=_callers(account),
            attributes=request_attributes(book, account, verdict),
            start_time=_nanoseconds(book, account.added_at),
        )
        if account.outcome == "error":
            span.set_status(Status(StatusCode.ERROR))
        inside = trace.set_span_in_context(span)
        for at, event, attributes in request_events(account):
            span.add_event(event, attributes, _nanoseconds(book, at))
        for life in account.lives:
            self._ids.of(*name, life.number)
            child = self._tracer.start_span(
                "kvledger.life",
                context=inside,
                attributes=life_attributes(life),
                start_time=_nanoseconds(book, life.began_at),
            )
            if life.load_ended_at >= 0:
                loaded: Attributes = {"kvledger.loaded_tokens": life.loaded}
                child.add_event("kvledger.load_ended", loaded, _nanoseconds(book, life.load_ended_at))
            child.end(_nanoseconds(book, life.ended_at if life.ended_at >= 0 else account.closed_at))
        span.end(_nanoseconds(book, account.closed_at))


def _callers(account: Account) -> Context:
    """The caller's trace, if the engine was handed one; else the request begins a trace."""
    nobody = Context()
    said = TRACEPARENT.fullmatch(account.traceparent or "")
    if said is None:
        return nobody
    trace_id, span_id, flags = (int(part, 16) for part in said.groups())
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), nobody)


def _nanoseconds(book: EngineAudit, at: int) -> int:
    return round(book.metrics.clock_seconds * 1e6 + at) * 1_000


def request_attributes(book: EngineAudit, account: Account, verdict: str) -> Attributes:
    """What is known of a request; of an unknown one who it is, and why nothing else is known."""
    said = book.engine.configuration if book.engine else {}
    attributes: Attributes = {
        "kvledger.engine": book.name,
        "kvledger.request_id": account.request_id,
        "kvledger.verdict": verdict,
        "gen_ai.response.finish_reasons": (FINISH_REASONS.get(account.outcome, account.outcome),),
    }
    if said.get("model"):
        attributes["gen_ai.request.model"] = str(said["model"])
    if account.unknown is not None:
        return attributes | {"kvledger.unknown": account.unknown}
    attributes["gen_ai.usage.input_tokens"] = sum(s.prompt_tokens - s.carried for s in account.settlements)
    if len(account.settlements) == 1:  # a session's later prompts hold what was output before
        attributes["gen_ai.usage.output_tokens"] = account.sequence_tokens - account.prompt_tokens
    for source in ("local", "external", "computed", "unattained"):
        tokens = sum(getattr(s, source) for s in account.settlements)
        attributes[f"kvledger.prompt.{source}_tokens"] = tokens
    cached = sum(s.local + s.external for s in account.settlements)
    attributes["gen_ai.usage.cache_read.input_tokens"] = cached
    return attributes | {
        "kvledger.preemptions": account.preemptions,
        "kvledger.scheduled_tokens": account.scheduled,
        "kvledger.rework_tokens": sum(account.rework.values()),
        "kvledger.promised_tokens": account.promised,
        "kvledger.loaded_tokens": account.loaded,
    }


def request_events(account: Account) -> Iterator[tuple[int, str, Attributes]]:
    """What happened between its lives, and when its prompt was settled."""
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
    """A life's balances."""
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
