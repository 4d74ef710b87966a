"""How the requests of a step share its time: by the tokens that each has in the step.

A step lasts until the next one is scheduled. Steps with the same tokens follow each other unrecorded, and
the shares in them are equal, so only the time from one change to the next is needed. The clock adds up the
time of one token. A request's share is the difference of two readings, times its tokens.

Readings are whole numbers, so that a difference does not depend on where a replay began.
"""

from __future__ import annotations

from collections.abc import Iterable

from .account import Account
from .life import Life

UNIT = 20
"""A reading of 1 is 2 to the power of -20 microseconds."""

_MODULUS = (1 << 63) - 1
"""Readings begin again at 2 to the power of 63, so that a checkpoint can hold them."""


class StepClock:
    """The time that one token of each step took, added up."""

    def __init__(self) -> None:
        self.reading = 0
        """The sum up to the last change."""
        self.since = 0
        """The time of the last change."""
        self.tokens = 0
        """The tokens of the present step."""

    def read(self, at: int) -> int:
        """The sum up to ``at``."""
        if not self.tokens:
            return self.reading
        return (self.reading + (at - self.since << UNIT) // self.tokens) & _MODULUS

    def read_anew(self, lives: Iterable[Life]) -> None:
        """Let the present reading be 0; only differences are ever used. ``lives``: all that have tokens."""
        for life in lives:
            life.shared_to = life.shared_to - self.reading & _MODULUS
        self.reading = 0

    def change(self, at: int, tokens: int) -> None:
        """A step with other tokens begins."""
        self.reading, self.since, self.tokens = self.read(at), at, tokens


def share(life: Life, clock: StepClock, at: int, tokens: int) -> None:
    """Add the life's share up to ``at``; from there it has ``tokens`` in each step."""
    if life.step_tokens or tokens:
        reading = clock.read(at)
        life.own += life.step_tokens * (reading - life.shared_to & _MODULUS)
        life.step_tokens, life.shared_to = tokens, reading if tokens else 0


def prefill_parts(account: Account, prefill: int) -> tuple[int, int]:
    """The request's own part of its ``prefill`` microseconds, and the rest. All shares are added."""
    for life in account.lives:
        if life.ran_at >= 0:
            return _parts(life.own, prefill)
    return _parts(0, prefill)


def decode_parts(account: Account, decode: int) -> tuple[int, int]:
    """The request's own part of its ``decode`` microseconds, and the rest. All shares are added."""
    own = 0
    for life in account.lives:
        if life.output_at >= 0:
            own += life.own - life.own_at_output
    return _parts(own, decode)


def _parts(own: int, whole: int) -> tuple[int, int]:
    microseconds = own + (1 << UNIT - 1) >> UNIT
    return microseconds, whole - microseconds
