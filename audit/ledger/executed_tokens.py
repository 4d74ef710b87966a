"""Postings of executed tokens: each is first prompt, first output or rework.

The tokens of a step are posted when its output is delivered. There is one exception: a new life may hit
blocks that a step of an ended life still has in flight. The engine runs steps in order, so that step fills
the blocks before the new life reads them, and its tokens are posted before the hit.
"""

from __future__ import annotations

from .. import causes
from ..figures.sums import add_tokens
from .account import Account
from .life import InFlight, Life
from .position_ranges import COMPUTED


def execute(account: Account, life: Life, start: int, end: int) -> None:
    """Post the execution of positions [start, end)."""
    prompt = account.prompt_tokens
    rows = account.positions.ranges
    if rows and start >= prompt:
        last = rows[-1]
        if last.end == start and last.source is COMPUTED and last.life == life.number:
            last.end = end
            account.first_output += end - start
            return
    gaps = account.positions.fill(start, end, COMPUTED, life.number)
    new = 0
    for low, high in gaps:
        new += high - low
        in_prompt = max(0, min(high, prompt) - low)
        account.first_prompt += in_prompt
        account.first_output += high - low - in_prompt
        if in_prompt:
            account.executed_first.append((low, low + in_prompt, life.number))
    if new < end - start:
        again = _without(start, end, gaps)
        for low, high, cause in account.losses.split(again):
            add_tokens(account.rework, cause, high - low)
            if cause == causes.UNKNOWN:
                account.suspense += high - low
            if low < prompt:
                account.executed_again.append((low, min(high, prompt), cause))


def execute_invalid(account: Account, flight: InFlight, end: int) -> None:
    """Post tokens of an ended life, or above a failed load, up to position ``end``.

    Their KV is lost at once.
    """
    life, start = flight.life, flight.start + flight.posted
    execute(account, life, start, end)
    if flight.invalid_from >= 0:
        account.positions.revoke(max(start, flight.invalid_from), life.number)
        account.losses.add(max(start, flight.invalid_from), end, causes.LOAD_FAILED)
    else:
        account.losses.add(start, end, life.ended_by)


def execute_before_hit(account: Account, hit_end: int) -> None:
    """Post the tokens below position ``hit_end`` that steps of ended lives have in flight.

    Drafts are left out: the sequence does not contain them yet, so no hit covers them.
    """
    for flight in account.in_flight:
        end = min(flight.start + flight.tokens - flight.drafts, hit_end)
        if flight.life.ended_by and not flight.overrun and end > flight.start + flight.posted:
            execute_invalid(account, flight, end)
            flight.posted = end - flight.start


def _without(start: int, end: int, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [start, end) that are in none of ``gaps`` (sorted, disjoint)."""
    pieces = []
    for low, high in gaps:
        if start < low:
            pieces.append((start, low))
        start = high
    if start < end:
        pieces.append((start, end))
    return pieces
