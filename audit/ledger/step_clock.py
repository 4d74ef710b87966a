"""How the requests of a step share its time: by the tokens that each has in the step.

A step lasts until the next one is scheduled. Steps with the same tokens follow each other unrecorded, and the
shares in them are equal, so only the time from one change to the next is needed. The clock adds up the time of
one token. A request's share is the difference of two readings, times its tokens.
"""

from __future__ import annotations

from .account import Account
from .life import Life


class StepClock:
    """Microseconds that one token of each step took, added up."""

    def __init__(self) -> None:
        self.reading = 0.0
        """The sum up to the last change."""
        self.since = 0
        """The time of the last change."""
        self.tokens = 0
        """The tokens of the present step."""

    def read(self, at: int) -> float:
        """The sum up to ``at``."""
        return self.reading + (at - self.since) / self.tokens if self.tokens else self.reading

    def change(self, at: int, tokens: int) -> float:
        """A step with other tokens begins; returns the reading."""
        self.reading, self.since, self.tokens = self.read(at), at, tokens
        return self.reading


def share(life: Life, reading: float, tokens: int) -> None:
    """Add the life's share up to this reading; from there it has ``tokens`` in each step."""
    life.own += life.step_tokens * (reading - life.shared_to)
    life.step_tokens, life.shared_to = tokens, reading


def prefill_parts(account: Account, prefill: int) -> tuple[int, int]:
    """The request's own part of its ``prefill`` microseconds, and the rest. All shares are added."""
    own = round(next((life.own for life in account.lives if life.ran_at >= 0), 0.0))
    return own, prefill - own


def decode_parts(account: Account, decode: int) -> tuple[int, int]:
    """The request's own part of its ``decode`` microseconds, and the rest. All shares are added."""
    own = round(sum(life.own - life.own_at_output for life in account.lives if life.output_at >= 0))
    return own, decode - own
