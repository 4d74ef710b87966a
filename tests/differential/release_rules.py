"""What the oracle must know of a vLLM release.

A rule says what releases do otherwise than 0.32, as their scheduler's source has it. Where a release is wrong
there is no rule: its fault is a file of ``audit/faults/data``, which names the releases that have it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from kvledger.audit.faults.catalogue import catalogue


class Rule(NamedTuple):
    """One rule, and the first release without it."""

    until: tuple[int, int]
    says: str


RULES = {
    "attempts": Rule((0, 27), "A local lookup is counted when it is made, also if no admission follows."),
    "uncounted waits": Rule(
        (0, 18),
        "A request that waits for its load has no computed tokens. The failure of any block counts, and the "
        "load ends when the scheduler asks for it.",
    ),
    "first hits": Rule(
        (0, 19), "Of a running request the failure of a block counts within the hits of its first run."
    ),
}


def follows(rule: str) -> bool:
    """Whether the installed release follows a rule."""
    return _release() < RULES[rule].until


def has(fault: str) -> bool:
    """Whether the installed release has a known fault."""
    return catalogue()[fault].releases.state("vllm", ".".join(map(str, _release()))) != "free"


@cache
def _release() -> tuple[int, ...]:
    import vllm

    return tuple(map(int, re.findall(r"\d+", vllm.__version__)[:3]))
