"""Isolation classes of cached blocks and of the requests that hit them.

The hash of a cached block covers every position below its end. So a request may hit the block only if it has
the writer's cache salt and LoRA adapter, and the same multimodal inputs before that end. Later inputs may
differ.
"""

from __future__ import annotations

from .entries import ForeignHit
from .holdings import Holdings
from .records import Holder

FIXED = 2
"""The class of the cache salt and the class of the LoRA adapter; a pair for each multimodal input follows."""

SALT, ADAPTER, INPUT = "cache salt", "LoRA adapter", "multimodal input"
"""What the KV of two requests may differ in."""


def isolation_below(isolation: list[int] | None, end: int) -> list[int] | None:
    """The isolation classes that KV below position ``end`` depends on; None: not known."""
    if isolation is None or len(isolation) <= FIXED or isolation[-1] < end:
        return isolation
    below = isolation[:FIXED]
    for place in range(FIXED, len(isolation), 2):
        if isolation[place + 1] < end:
            below += isolation[place : place + 2]
    return below if any(below) else []


def difference(left: list[int], right: list[int]) -> list[str]:
    """What two lists of isolation classes differ in."""
    left, right = left or [0, 0], right or [0, 0]
    pairs = (SALT, left[0], right[0]), (ADAPTER, left[1], right[1]), (INPUT, left[FIXED:], right[FIXED:])
    return [name for name, one, other in pairs if one != other]


def report_other_classes(holdings: Holdings, number: int, holder: Holder, blocks: list[int]) -> None:
    """Report the hits of a request on blocks that were written under other isolation classes."""
    own, pool = holdings.isolation.get(holder.request), holdings.pools[number]
    foreign = []
    for block in blocks:
        record = pool.records.get(block)
        if own is None or record is None or record.isolation is None or record.isolation == own:
            continue
        if record.isolation != isolation_below(own, record.least_end):
            foreign.append(block)
    if own is None or not foreign:
        return
    first = pool.records[foreign[0]]
    assert first.isolation is not None
    differs = difference(first.isolation, isolation_below(own, first.least_end) or [])
    story = holdings.story(number, foreign[0], second=holder)
    tokens = len(foreign) * pool.groups[holder.group][0]
    holdings.report(ForeignHit(number, foreign, tokens, first.writer, holder, differs, story), holder.request)
