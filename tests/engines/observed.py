"""Run scenarios on a real scheduler under observation, and audit the recorded events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import Event, PoolCalls
from kvledger.audit.ledger.blocks.pool import calls
from kvledger.audit.traffic.driver import Observation

Drive = Callable[..., Any]


def observe(scenario: Drive, level: str = "tokens", **setup: Any) -> tuple[Any, list[Event]]:
    """Run a scenario with an observer on its scheduler; return the driver and all events in order."""
    observation = Observation(level)
    return scenario(observation, **setup), observation.stop()


def each(events: Iterable[Event]) -> list[Event]:
    """The same events, with every call of a pool as a separate event."""
    return [one for event in events for one in (calls(event) if isinstance(event, PoolCalls) else [event])]


def audited(events: list[Event]) -> Auditor:
    """The auditor after all of ``events``; a check that raises is raised."""
    auditor = Auditor(keep_closed=True, debug=True)
    auditor.feed_all(events)
    return auditor


def findings(auditor: Auditor) -> set[tuple[str, str | None]]:
    """Invariant and request of every finding, without the drifts of :func:`drifts`."""
    found = {(violation.id, violation.request) for violation in auditor.violations}
    return {(id, request) for id, request in found if not id.startswith("metrics/")}


def drifts(auditor: Auditor) -> set[str]:
    """The drifts of figures, which are found once an engine, without their family."""
    ids = {violation.id for violation in auditor.violations}
    return {id.removeprefix("metrics/") for id in ids if id.startswith("metrics/")}
