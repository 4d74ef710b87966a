"""What is recorded about the origin of a request and an engine: trace context, KV transfer, engine index."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.scenarios.driving import start

from kvledger.audit.engines.configuration import engine_index
from kvledger.audit.events import EngineStarted, RequestAdded
from kvledger.audit.traffic.driver import Driver, tokens
from kvledger.audit.traffic.engine_setup import build_request

CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def arrival(**attributes: Any) -> RequestAdded:
    """The ``RequestAdded`` event of a request with these attributes."""

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        request = build_request("a", tokens(40, "a"), hasher=None, max_tokens=1)
        for name, value in attributes.items():
            setattr(request, name, value)
        driver.scheduler.add_request(request)
        return driver

    _, events = observe(scenario)
    (added,) = (event for event in events if isinstance(event, RequestAdded))
    return added


def recorded_traceparent(headers: dict[str, str] | None) -> str | None:
    return arrival(trace_headers=headers).traceparent


def test_the_trace_context_is_recorded_and_no_other_header() -> None:
    assert CONTEXT == recorded_traceparent(
        {"traceparent": CONTEXT, "tracestate": "secret=1", "authorization": "secret"}
    )


@pytest.mark.parametrize(
    "traceparent", ["", "the prompt itself", CONTEXT.upper(), CONTEXT + "\n", CONTEXT + "-more"]
)
def test_a_malformed_trace_context_is_not_recorded(traceparent: str) -> None:
    assert recorded_traceparent({"traceparent": traceparent}) is None


def test_a_request_without_headers_has_no_trace_context() -> None:
    assert recorded_traceparent(None) is None


@pytest.mark.parametrize(
    ("params", "transferred"),
    [
        ({"do_remote_prefill": True, "remote_engine_id": "p"}, True),
        ({"do_remote_decode": True}, False),
        (None, False),
    ],
)
def test_a_request_computed_by_a_prefill_engine_is_recorded_as_transferred(
    params: dict[str, Any] | None, transferred: bool
) -> None:
    assert transferred == arrival(kv_transfer_params=params).transferred


def test_the_engine_index_is_the_one_in_vllms_metrics() -> None:
    """The ranks of a dense model all have rank 0; only the index tells them apart."""
    assert 3 == engine_index(SimpleNamespace(data_parallel_index=3, data_parallel_rank=0))
    assert 2 == engine_index(SimpleNamespace(data_parallel_rank=2))
    assert 0 == engine_index(SimpleNamespace())


def test_the_engine_index_is_in_the_configuration() -> None:
    _, events = observe(start)
    (started,) = (event for event in events if isinstance(event, EngineStarted))

    assert 0 == started.configuration["engine_index"]


def test_a_long_request_id_is_cut_in_the_journal_and_stays_apart_from_another() -> None:
    """vLLM takes an id of any length from a client's header, and tells requests apart by its end."""
    long = ["r" * 10_000 + str(number) for number in range(2)]

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        for request_id in long:
            driver.scheduler.add_request(
                build_request(request_id, tokens(40, "a"), hasher=None, max_tokens=1)
            )
        return driver

    _, events = observe(scenario)

    ids = [event.request_id for event in events if isinstance(event, RequestAdded)]
    assert [256, 256] == [len(request_id) for request_id in ids]
    assert 2 == len(set(ids))
