"""Histories of a correct engine, altered so that the engine reports one thing wrongly."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import Violation
from kvledger.audit.events import Delivered, EngineStarted, Event, Reported, Stepped


def started(**configuration: str | int | bool) -> EngineStarted:
    """An engine with these settings."""
    return EngineStarted(0, 0.0, "vllm", "0.32.0", "v1", "steps", 123, {**configuration})


def audited(stream: list[Event], **configuration: str | int | bool) -> Auditor:
    """The auditor after an engine start and the events of a stream."""
    auditor = Auditor(keep_closed=True, debug=True)
    auditor.feed_all([started(**configuration), *stream])
    return auditor


def violation_ids(stream: list[Event], **configuration: str | int | bool) -> list[str]:
    """The ids of the findings in a stream, in the order in which the auditor found them.

    Without the drifts of figures: see :func:`drift_ids`.
    """
    return [violation.id for violation in without_drifts(audited(stream, **configuration))]


def without_drifts(auditor: Auditor) -> list[Violation]:
    """The findings of an auditor, without the drifts of figures."""
    return [violation for violation in auditor.violations if not violation.id.startswith("metrics/")]


def drift_ids(stream: list[Event], **configuration: str | int | bool) -> list[str]:
    """The ids of the drifts of figures in a stream, in the order in which the auditor found them."""
    ids = [violation.id for violation in audited(stream, **configuration).violations]
    return [id for id in ids if id.startswith("metrics/")]


def index_of(stream: list[Event], kind: type[Event], nth: int = 0) -> int:
    """The index of the nth event of a kind; -1 is the last."""
    return [n for n, event in enumerate(stream) if isinstance(event, kind)][nth]


def altered(stream: list[Event], kind: type[Event], nth: int = 0, **figures: Any) -> list[Event]:
    """The stream with other figures in its nth event of a kind."""
    index = index_of(stream, kind, nth)
    return [*stream[:index], replace(stream[index], **figures), *stream[index + 1 :]]


def with_after(stream: list[Event], kind: type[Event], nth: int, *more: Event) -> list[Event]:
    """The stream with more events after its nth one of a kind."""
    index = index_of(stream, kind, nth) + 1
    return [*stream[:index], *more, *stream[index:]]


def without(stream: list[Event], kind: type[Event], nth: int = 0) -> list[Event]:
    """The stream without its nth event of a kind."""
    index = index_of(stream, kind, nth)
    return [*stream[:index], *stream[index + 1 :]]


def miscounted(stream: list[Event], step: int, tokens: int) -> list[Event]:
    """The stream with the engine-reported count after its nth step (of one request) off by some tokens."""
    event = stream[index_of(stream, Stepped, step)]
    assert isinstance(event, Stepped)
    assert event.changed, "this step reports no count"
    return altered(stream, Stepped, step, changed=[*event.changed[:3], event.changed[3] + tokens])


def report(
    prompt_tokens: int, local: int, external: int, computed: int | None = None, cached: int = -1
) -> Reported:
    """The prompt figures that the engine reports; by default the rest of the prompt is computed."""
    rest = prompt_tokens - local - external if computed is None else computed
    hit = local + external if cached < 0 else cached
    return Reported(10_000, 0, prompt_tokens, local, external, rest, hit)


def with_report(stream: list[Event], event: Reported, output: int = -1) -> list[Event]:
    """The stream with this report after its nth output."""
    return with_after(stream, Delivered, output, event)
