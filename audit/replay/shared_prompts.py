"""Find out which prompts of an engine with ``kv_role`` ``kv_consumer`` a prefill engine counts, too.

A transfer that the router asked for is marked in the request. Where prefill and decode engines share a store,
nothing marks the request of the decode engine, and a router may also send it a prompt that no prefill engine
had. So it waits here until a prefill engine of the same model has, or has not, a request of the same call,
prompt, sample and length (``prompt_pairs.py``).
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ..bounded_tables import keep_newest
from ..client_ids import part_of
from ..figures.sums import Sums

PRODUCER, CONSUMER = "kv_producer", "kv_consumer"

MOST_PREFILLED = 1 << 12
"""Requests of a prefill engine that are remembered."""

MOST_WAITING = 1 << 12
"""Requests of a decode engine that wait. What is more is unknown at once."""


class WaitingPrompt(msgspec.Struct, frozen=True, array_like=True):
    """An ended request of a decode engine. Times are Unix times."""

    key: int
    """Names the call, prompt, sample and length."""
    arrived: float
    closed: float
    tokens: dict[str, int]
    """Settled prompt tokens by source."""


class SharedPrompts(Sums):
    """What one engine has of prompts that two engines may share."""

    prefilled: dict[int, list[float]] = {}
    """A prefill engine's requests by their key: when they arrived, as far as no decode engine has them."""
    since: float = 0.0
    """The Unix time from which all of these are known; 0.0: all are."""
    waiting: list[WaitingPrompt] = []
    """A decode engine's requests that are not decided."""
    unknown: list[WaitingPrompt] = []
    """Those for which there is no room."""
    changes: int = 0
    """How often something was decided."""

    def prefill(self, request_id: str, prompt_tokens: int, arrived: float, *, suffixed: bool) -> None:
        """Remember a request that a prefill engine got."""
        key = key_of(request_id, prompt_tokens, suffixed=suffixed)
        self.prefilled[key] = [*self.prefilled.pop(key, ()), arrived]
        self._bound()

    def _bound(self) -> None:
        for times in keep_newest(self.prefilled, MOST_PREFILLED):
            self.since = max(self.since, *times)

    def wait(self, prompt: WaitingPrompt) -> None:
        """Let a decode engine's request wait."""
        self.waiting.append(prompt)
        if len(self.waiting) > MOST_WAITING:
            self.unknown.append(self.waiting.pop(0))

    def take(self, key: int) -> bool:
        """Whether this prefill engine had the request; it is then no other request's."""
        times = self.prefilled.pop(key, [])
        if times[1:]:
            self.prefilled[key] = times[1:]
        self.changes += bool(times)
        return bool(times)

    def merge(self, other: SharedPrompts) -> None:
        """Add those of another engine of the same name, which ran later."""
        for key, times in other.prefilled.items():
            self.prefilled[key] = [*self.prefilled.get(key, ()), *times]
        self._bound()
        self.since = max(self.since, other.since)
        self.waiting += other.waiting
        self.unknown += other.unknown


def key_of(request_id: str, prompt_tokens: int, *, suffixed: bool) -> int:
    """A number for the call, prompt, sample and length of a request."""
    words = "\0".join(map(str, (*part_of(request_id, suffixed=suffixed), prompt_tokens)))
    return int.from_bytes(blake2b(words.encode(), digest_size=7).digest(), "big")
