"""What the real scheduler hears of the tiers of external tokens, recorded as the connector says it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start

from kvledger.audit.events import Admitted, Event, TiersReported
from kvledger.audit.traffic.driver import Driver


def asks() -> bool:
    """Whether this release asks connectors for tiers."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")


needs_tiers = pytest.mark.skipif(not asks(), reason="this release does not ask for tiers")


def with_connector_that_says(**tiers: int) -> list[Event]:
    """The events of a request with 64 external tokens, whose connector reports these tiers."""

    def scenario(attach: Any) -> Driver:
        driver = start(connector="scripted")
        driver.connector.get_external_cache_hit_sources = lambda request, num_external_tokens: tiers
        attach(driver.scheduler)
        driver.connector.store("r", 64)
        driver.add("r", 100, 3)
        driver.run()
        return driver

    return observe(scenario)[1]


def reported(events: list[Event]) -> list[TiersReported]:
    return [event for event in events if isinstance(event, TiersReported)]


@needs_tiers
def test_tiers_are_recorded_after_the_admission_as_the_connector_reports_them():
    events = with_connector_that_says(host=48, disk=16)
    (event,) = reported(events)
    (admitted,) = [place for place, each in enumerate(events) if isinstance(each, Admitted)]

    assert events[admitted + 1] is event
    assert (64, ["host", "disk"], [48, 16]) == (event.external_tokens, event.tiers, event.tokens)
    assert "clean" == audited(events).verdict
    (account,) = audited(events).ledger.accounts()
    assert {"host": 48, "disk": 16} == account.loaded_by_tier


@needs_tiers
def test_tiers_that_do_not_sum_are_found():
    assert ["connector/tiers-do-not-sum"] == [
        each.id for each in audited(with_connector_that_says(host=48)).violations
    ]


@needs_tiers
def test_a_connector_without_tiers_of_its_own_reports_tokens_as_unspecified():
    _, events = observe(SCENARIOS["external_sync_sync"])

    assert reported(events)
    assert {"external_unspecified"} == {tier for event in reported(events) for tier in event.tiers}


@pytest.mark.skipif(asks(), reason="this release asks for tiers")
def test_a_release_that_does_not_ask_has_no_tiers():
    _, events = observe(SCENARIOS["external_sync_sync"])

    assert [] == reported(events)
