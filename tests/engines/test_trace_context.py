"""What is recorded about the origin of a request and an engine: trace context, hand-over, engine index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.driving import start

from kvledger.audit.conformance.driver import Driver, tokens
from kvledger.audit.conformance.host import build_request
from kvledger.audit.engines.configuration import engine_index
from kvledger.audit.events import EngineStarted, RequestAdded

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def arrival(**said: Any) -> RequestAdded:
    """The event of a request that came with ``said``."""

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        request = build_request("a", tokens(40, "a"), hasher=None, max_tokens=1)
        for name, value in said.items():
            setattr(request, name, value)
        driver.scheduler.add_request(request)
        return driver

    _, events = observe(scenario)
    (added,) = (event for event in events if isinstance(event, RequestAdded))
    return added


def noted(headers: dict[str, str] | None) -> str | None:
    return arrival(trace_headers=headers).traceparent


def test_the_trace_context_is_recorded_and_no_other_header() -> None:
    assert CONTEXT == noted({"traceparent": CONTEXT, "tracestate": "secret=1", "authorization": "secret"})


@pytest.mark.parametrize(
    "said", ["", "the prompt itself", CONTEXT.upper(), CONTEXT + "\n", CONTEXT + "-more"]
)
def test_a_malformed_trace_context_is_not_recorded(said: str) -> None:
    assert noted({"traceparent": said}) is None


def test_no_headers_no_context() -> None:
    assert noted(None) is None


@pytest.mark.parametrize(
    ("said", "transferred"),
    [
        ({"do_remote_prefill": True, "remote_engine_id": "p"}, True),
        ({"do_remote_decode": True}, False),
        (None, False),
    ],
)
def test_a_request_that_a_prefill_engine_computed_says_so(
    said: dict[str, Any] | None, transferred: bool
) -> None:
    assert transferred == arrival(kv_transfer_params=said).transferred


def test_the_engines_index_is_what_its_own_metrics_call_it() -> None:
    """The ranks of a dense model all have rank 0; only the index tells them apart."""
    assert 3 == engine_index(SimpleNamespace(data_parallel_index=3, data_parallel_rank=0))
    assert 2 == engine_index(SimpleNamespace(data_parallel_rank=2))
    assert 0 == engine_index(SimpleNamespace())


def test_the_index_is_in_the_configuration() -> None:
    _, events = observe(start)
    (started,) = (event for event in events if isinstance(event, EngineStarted))

    assert 0 == started.configuration["engine_index"]
