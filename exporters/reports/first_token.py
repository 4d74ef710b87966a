"""The time to first token by cause, as it is printed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...audit.causes import FIRST_TOKEN
from .terminal import counted, listed


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
        if not self.requests:
            return []
        spent = sorted(self.microseconds.items(), key=lambda item: -item[1])
        return [(cause.replace("_", " "), us / self.requests / 1e3) for cause, us in spent if us]

    def sentence(self) -> str:
        """``Time to first token: 34.5 ms, 20.0 ms queued and 14.5 ms prefill.``"""
        many = f" of {counted(self.requests, 'request')}, mean" if self.requests > 1 else ""
        means = self.means()
        total = shown(sum(spent for _, spent in means))
        parts = [f"{shown(spent)} {cause}" for cause, spent in means]
        return f"Time to first token{many}: {total}" + (f", {listed(parts)}." if parts else ".")


def shown(milliseconds: float) -> str:
    """``1.20 s`` or ``34.5 ms``."""
    return f"{milliseconds / 1e3:,.2f} s" if milliseconds >= 1000 else f"{milliseconds:.1f} ms"
