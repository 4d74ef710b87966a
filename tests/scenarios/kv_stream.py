"""The stream of KV events that a driven scheduler publishes, and its comparison with the blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvledger.audit.analysis.routing import RoutedCache
from kvledger.audit.events import EngineStarted, Event, KVEventsReceived
from kvledger.audit.hash_key import HashKey
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.ledger.kv_events import Found, KVComparison, KVEventCounts
from kvledger.audit.replay.find import incomparable
from kvledger.exporters.kv_events import Received, decoded

KEY = "a key of the tests, no secret"


class Publisher:
    """Stands in for vLLM's publisher of one scheduler: encodes each batch as vLLM does and keeps it.

    ``KVLEDGER_EVENTS_KEY`` must be :data:`KEY`.
    """

    def __init__(self, scheduler: Any) -> None:
        self._endpoint = "tcp://*:5557"
        self.messages: list[Received] = []
        self._manager = manager = scheduler.kv_cache_manager
        manager.enable_kv_cache_events = manager.block_pool.enable_kv_cache_events = True
        scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        """Keep one batch."""
        self.messages.append(Received(len(self.messages), msgspec.msgpack.encode(batch), False))

    def get_publisher_config(self) -> None:
        """Nothing is configured."""

    def shutdown(self) -> None:
        """Nothing to close."""

    def stream(self) -> list[KVEventsReceived]:
        """Everything that was published, and what the pool has not given to the scheduler yet."""
        from vllm.distributed.kv_events import KVEventBatch

        if rest := self._manager.take_events():
            self.publish(KVEventBatch(ts=time.time(), events=rest))
        key = HashKey(KEY)
        return [decoded(message, 0, 0, key) for message in self.messages]


def compare(
    events: Sequence[Event], stream: Sequence[KVEventsReceived], *, step_by_step: bool = False
) -> tuple[list[Found], KVEventCounts]:
    """What the comparison finds in one pass, or after each event with what was published by then."""
    comparison, counts, rest = KVComparison(), KVEventCounts(), list(stream)
    comparison.cache = RoutedCache()
    started = next(event for event in events if isinstance(event, EngineStarted))
    if incomparable(started):
        return [], counts
    comparison.began, contents = started.began_seconds, Contents()
    for event in events:
        comparison.cache.feed(event, contents.read(event))
        now = comparison.began + event.at / 1e6
        while step_by_step and rest and rest[0].published_seconds <= now:
            comparison.receive(rest.pop(0), now, counts)
        if step_by_step:
            comparison.advance(now, now, counts)
    for batch in rest:
        comparison.receive(batch, now, counts)
    comparison.advance(now, now + 1, counts, ended=True)  # the journal has all that the engine did
    return list(comparison.differences()), counts
