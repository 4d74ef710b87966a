"""Recorded events of a crowd on the real scheduler, with times as an engine would have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from tests.engines.observed import observe
from tests.scenarios.workloads import crowd

from kvledger.audit import events as ev
from kvledger.audit.simulate.study import setup
from kvledger.audit.traffic.reader import Traffic, TrafficReader


def recording(**options: Any) -> list[ev.Event]:
    """The events of a crowd of requests, at level blocks. Time 0 is the first event's."""
    _, events = observe(crowd, "blocks", **options)
    return events


def read_traffic(events: Iterable[ev.Event]) -> Traffic:
    reader = TrafficReader()
    for event in events:
        reader.feed(event)
    return reader.traffic()


def traffic_of(events: list[ev.Event]) -> Traffic:
    """Their traffic, as another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(read_traffic(events)), type=Traffic)


def arguments(traffic: Traffic, **changes: ev.Setting) -> dict[str, Any]:
    """The arguments of the recorded engine with other settings."""
    return setup(traffic, changes)
