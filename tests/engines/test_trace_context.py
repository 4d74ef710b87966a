"""What the adapter notes so that figures can be joined: the caller's trace context and the engine's index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe

from kvledger.audit.conformance.driver import Driver, start, tokens
from kvledger.audit.conformance.host import build_request
from kvledger.audit.engines.observer import _engine_index
from kvledger.audit.events import EngineStarted, RequestAdded

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def noted(headers: dict[str, str] | None) -> str | None:
    def course(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        request = build_request("a", tokens(40, "a"), hasher=None, max_tokens=1)
        request.trace_headers = headers
        driver.scheduler.add_request(request)
        return driver

    _, events = observe(course)
    (added,) = (event for event in events if isinstance(event, RequestAdded))
    return added.traceparent


def test_the_callers_trace_context_is_noted_and_no_other_header() -> None:
    assert CONTEXT == noted({"traceparent": CONTEXT, "tracestate": "secret=1", "authorization": "secret"})


@pytest.mark.parametrize(
    "said", ["", "the prompt itself", CONTEXT.upper(), CONTEXT + "\n", CONTEXT + "-more"]
)
def test_what_is_no_trace_context_is_not_noted(said: str) -> None:
    assert noted({"traceparent": said}) is None


def test_no_headers_no_context() -> None:
    assert noted(None) is None


def test_the_engines_index_is_what_its_own_metrics_call_it() -> None:
    """The ranks of a dense model all have rank 0; only the index tells them apart."""
    assert 3 == _engine_index(SimpleNamespace(data_parallel_index=3, data_parallel_rank=0))
    assert 2 == _engine_index(SimpleNamespace(data_parallel_rank=2))
    assert 0 == _engine_index(SimpleNamespace())


def test_the_index_is_in_the_configuration() -> None:
    _, events = observe(start)
    (started,) = (event for event in events if isinstance(event, EngineStarted))

    assert 0 == started.configuration["engine_index"]
