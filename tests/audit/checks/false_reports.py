"""Honest histories in which the engine tells one thing otherwise than it was."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import Delivered, EngineStarted, Event, Reported, Stepped


def started(**configuration: str | int | bool) -> EngineStarted:
    """An engine with these settings."""
    return EngineStarted(0, 0.0, "vllm", "0.32.0", "v1", "steps", 123, {**configuration})


def audited(stream: list[Event], **configuration: str | int | bool) -> Auditor:
    """What an auditor made of a stream, preceded by its engine's start."""
    auditor = Auditor(keep_closed=True, debug=True)
    auditor.feed_all([started(**configuration), *stream])
    return auditor


def found(stream: list[Event], **configuration: str | int | bool) -> list[str]:
    """The ids of what is wrong with a stream, in order of first sight."""
    return [violation.id for violation in audited(stream, **configuration).violations]


def place(stream: list[Event], kind: type[Event], nth: int = 0) -> int:
    """Where the nth event of a kind stands; -1 is the last."""
    return [n for n, event in enumerate(stream) if isinstance(event, kind)][nth]


def told(stream: list[Event], kind: type[Event], nth: int = 0, **figures: Any) -> list[Event]:
    """The stream, its nth event of a kind telling other figures."""
    at = place(stream, kind, nth)
    return [*stream[:at], replace(stream[at], **figures), *stream[at + 1 :]]


def with_after(stream: list[Event], kind: type[Event], nth: int, *more: Event) -> list[Event]:
    """The stream with more events after its nth one of a kind."""
    at = place(stream, kind, nth) + 1
    return [*stream[:at], *more, *stream[at:]]


def without(stream: list[Event], kind: type[Event], nth: int = 0) -> list[Event]:
    """The stream without its nth event of a kind."""
    at = place(stream, kind, nth)
    return [*stream[:at], *stream[at + 1 :]]


def miscounted(stream: list[Event], step: int, tokens: int) -> list[Event]:
    """The stream, the engine's count after its nth step (of one request) off by some tokens."""
    event = stream[place(stream, Stepped, step)]
    assert isinstance(event, Stepped)
    assert event.changed, "this step states no count"
    return told(stream, Stepped, step, changed=[*event.changed[:3], event.changed[3] + tokens])


def report(
    prompt_tokens: int, local: int, external: int, computed: int | None = None, cached: int = -1
) -> Reported:
    """What the engine tells its front end; the rest of the prompt is computed unless said."""
    rest = prompt_tokens - local - external if computed is None else computed
    hit = local + external if cached < 0 else cached
    return Reported(10_000, 0, prompt_tokens, local, external, rest, hit)


def reported(stream: list[Event], said: Reported, output: int = -1) -> list[Event]:
    """The stream with this report beside its nth output."""
    return with_after(stream, Delivered, output, said)
