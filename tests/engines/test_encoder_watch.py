"""The encoder cache of real schedulers, with managers of every shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import images, start
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import EncoderCacheSeen, EncoderCacheUsed, EngineStarted, Event
from kvledger.audit.traffic.driver import Observation


class Passing(EncoderCacheManager):
    """Passes on what it gets."""

    def allocate(self, *args: Any, **kwargs: Any) -> None:
        super().allocate(*args, **kwargs)

    def check_and_update_cache(self, request: Any, input_id: int, more: bool = True) -> bool:
        return super().check_and_update_cache(request, input_id)


class Tiered(EncoderCacheManager):
    """Directs workers to a second tier."""

    def get_manager_metadata(self) -> Any:
        return {"tier": "host"}


class Renamed(EncoderCacheManager):
    """Can't be called as vLLM's own."""

    def allocate(self, what: Any) -> None:
        raise NotImplementedError


def recorded(kind: type | None, serve: Callable[[Any], None]) -> list[Event]:
    observation = Observation()

    def attach(scheduler: Any) -> None:
        if kind is not None:
            scheduler.encoder_cache_manager = kind(cache_size=64)
        observation(scheduler)

    serve(start(attach, encoder_tokens=64 if kind is not None else 0))
    return observation.stop()


def two_readers(driver: Any) -> None:
    for name in ("a", "b"):
        driver.add(name, 100, 3, of_request=images(("cat", 16, 32)))
        driver.run()


class Keeping(EncoderCacheManager):
    """Keeps what the request "a" holds when it ends."""

    def free(self, request: Any) -> None:
        if request.request_id != "a":
            super().free(request)

    def free_encoder_input(self, request: Any, input_id: int) -> None:
        if request.request_id != "a":
            super().free_encoder_input(request, input_id)


class Crediting(EncoderCacheManager):
    """Counts an output as evictable once more."""

    def check_and_update_cache(self, request: Any, input_id: int) -> bool:
        found = super().check_and_update_cache(request, input_id)
        self.num_freeable_slots += 32 if found else 0
        return found


def setting(events: list[Event]) -> Any:
    (started,) = [event for event in events if isinstance(event, EngineStarted)]
    return started.configuration["encoder_cache"]


@pytest.mark.parametrize("kind", [EncoderCacheManager, Passing])
def test_a_manager_is_observed_whatever_it_passes_on(kind: type) -> None:
    events = recorded(kind, two_readers)
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(events)

    assert 64 == setting(events)
    assert {"a": (32, 0), "b": (0, 32)} == {
        account.request_id: (account.encoder_computed, account.encoder_cached)
        for account in auditor.ledger.accounts()
    }
    assert "clean" == auditor.verdict


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Keeping, "Request a has ended and"), (Crediting, "counts 96 embeddings")],
)
def test_a_census_compares_what_requests_hold(kind: type, says: str) -> None:
    auditor = Auditor()
    auditor.feed_all(recorded(kind, two_readers))

    (violation,) = auditor.violations
    assert "encoder/free-space" == violation.id
    assert says in violation.message


@pytest.mark.parametrize("kind", [Tiered, Renamed])
def test_a_manager_of_another_kind_is_not_observed(kind: type) -> None:
    events = recorded(kind, lambda driver: None)

    assert setting(events) is None
    assert not any(isinstance(event, EncoderCacheSeen | EncoderCacheUsed) for event in events)


def test_a_model_of_text_has_no_encoder_cache() -> None:
    def serve(driver: Any) -> None:
        driver.add("r", 100, 3)
        driver.run()

    events = recorded(None, serve)

    assert setting(events) is None
    assert not any(isinstance(event, EncoderCacheSeen | EncoderCacheUsed) for event in events)


def test_readers_of_a_popular_output_are_forgotten_when_they_have_ended() -> None:
    def serve(driver: Any) -> None:
        for number in range(200):
            driver.add(f"r{number}", 40, 1, of_request=images(("cat", 8, 16)))
            driver.run()

    auditor = Auditor()
    auditor.feed_all(recorded(EncoderCacheManager, serve))

    (readers,) = auditor.ledger.encoder.readers.values()
    assert len(readers) <= 66
