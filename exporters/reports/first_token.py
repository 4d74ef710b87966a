"""The time to first token and the time per output token by cause, as they are printed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...audit.causes import FIRST_TOKEN, QUEUED
from ..answer import counted, listed
from ..answer import milliseconds as shown


class FirstTokens(msgspec.Struct, frozen=True):
    """Of one request or several: ``microseconds`` by cause, summed over all ``requests`` with an output."""

    microseconds: Mapping[str, int]
    requests: int = 1

    @classmethod
    def of(cls, figures: Mapping[str, int]) -> FirstTokens:
        """Those of sums of figures, by the figure's name."""
        return cls(
            {cause: figures[f"{cause}_microseconds"] for cause in FIRST_TOKEN}, figures["first_tokens"]
        )

    def means(self) -> list[tuple[str, float]]:
        """Cause and mean milliseconds, longest first; causes without any are left out."""
        return _means(self.microseconds, self.requests)

    def sentence(self) -> str:
        """``Time to first token: 34.5 ms, 20.0 ms queued and 14.5 ms prefill.``"""
        many = f" of {counted(self.requests, 'request')}, mean" if self.requests > 1 else ""
        return f"Time to first token{many}: {_total_and_parts(self.means())}"


def queued_sentence(microseconds: Mapping[str, int], requests: int = 1) -> str:
    """``Queued: 20.0 ms, 15.0 ms budget and 5.0 ms next step.``

    ``microseconds``: by cause of :data:`~kvledger.audit.causes.QUEUE`.
    """
    prefix = f"{QUEUED}_"
    by_cause = {cause.removeprefix(prefix): spent for cause, spent in microseconds.items()}
    return f"Queued{', mean' if requests > 1 else ''}: {_total_and_parts(_means(by_cause, requests))}"


def later_tokens_sentence(microseconds: Mapping[str, int], tokens: int) -> str:
    """``Time per output token of 120 tokens: 12.1 ms, 11.0 ms decode and 1.1 ms decode again.``

    ``tokens``: the output tokens after the first of each request.
    """
    by_cause = _total_and_parts(_means(microseconds, tokens))
    return f"Time per output token of {counted(tokens, 'token')}: {by_cause}"


def _means(microseconds: Mapping[str, int], number: int) -> list[tuple[str, float]]:
    """Cause and mean milliseconds, longest first; causes without any are left out."""
    spent = sorted(microseconds.items(), key=lambda item: -item[1])
    return [(cause.replace("_", " "), us / number / 1e3) for cause, us in spent if us and number]


def _total_and_parts(means: list[tuple[str, float]]) -> str:
    """``34.5 ms, 20.0 ms queued and 14.5 ms prefill.``"""
    total = shown(sum(spent for _, spent in means))
    parts = [f"{shown(spent)} {cause}" for cause, spent in means]
    return total + (f", {listed(parts)}." if parts else ".")
