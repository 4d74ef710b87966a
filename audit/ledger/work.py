"""What a scheduled token counts as, by release and by what was executed."""

from __future__ import annotations

import re

from .. import causes
from .. import events as ev
from ..figures.sums import add_tokens
from .account import COMPUTED, Account, InFlight, Life
from .entries import CountedDrafts, Entry, MiscountedLookups, PromptUnreported, SiblingAdded
from .ledger_state import LedgerState

# --- executed tokens -----------------------------------------------------------------------------------
#
# Postings of executed tokens: each is first prompt, first output or rework.
#
# The tokens of a step are posted when its output is delivered. There is one exception: a new life may hit
# blocks that a step of an ended life still has in flight. The engine runs steps in order, so that step fills
# the blocks before the new life reads them, and its tokens are posted before the hit.


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
    if end <= prompt and gaps == [(start, end)]:  # a part of the prompt, for the first time
        account.first_prompt += end - start
        account.executed_first.append((start, end, life.number))
        return
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


# --- counting rules ------------------------------------------------------------------------------------
#
# Where the account shows that the engine counts something by another rule than the figure's definition.
#
# These functions make entries only; the definitions are in ``checks/figures.py`` and the checks in
# ``checks/prompt_drifts.py`` and ``checks/lookup_drifts.py``.


_SAMPLE = re.compile(r"(\d+)_(.+-[0-9a-f]{8})")
"""vLLM's id of one sample of a client's request: its number, and the shared id with its random end."""

_REPORTING = ("first", "last", "mixed")
"""Values of the engine's setting ``figures`` with which it reports a prompt's sources at all."""

NO_DRAFTS = (0, 0, 0)
"""Draft tokens of an output without any: proposed, padding, accepted."""


def expect_queries(state: LedgerState, account: Account, life: Life, event: ev.Admitted, asked: int) -> None:
    """Note what the exported statistics should count for this admission, of which ``asked`` by the connector.

    Lookups after a preemption are counted apart, and no counter exports them.
    """
    local = account.sequence_tokens if event.counted else 0
    exempt = state.prefix_caching and not event.counted
    if not event.resumed:
        life.queried_local = local
        life.queried_external = 0 if exempt else asked
        return
    if local and state.counts_local:
        miscounted(state, account, "resumed", "local", 1, local, event.local_tokens)
    if asked and not exempt and state.counts_external:
        miscounted(state, account, "resumed", "external", 1, asked, event.external_tokens)


def never_ran(state: LedgerState, account: Account, life: Life) -> None:
    """A life ended before it ran: its lookups were counted, and nothing read what they hit."""
    if life.queried_local and state.counts_local:
        miscounted(state, account, "never_ran", "local", 1, life.queried_local, life.local)
    if life.queried_external and state.counts_external:
        miscounted(state, account, "never_ran", "external", 1, life.queried_external, max(0, life.external))


def load_failed(state: LedgerState, account: Account, life: Life, tokens: int) -> None:
    """External tokens failed to load: they were counted as hits of the connector."""
    if life.queried_external and state.counts_external:
        miscounted(state, account, "load_failed", "external", 0, 0, tokens)


def counted_otherwise(
    state: LedgerState, source: str, counted: tuple[int, ...], expected: list[int], beside: tuple[int, ...]
) -> list[int]:
    """What the ledger compares the engine's statistics of this step with.

    ``beside``: lookups that are not to be counted. If the engine counted all of them, that is entered, and
    they are part of the comparison.
    """
    why = "attempts" if source == "local" else "exempt"
    if not beside[0]:
        return expected
    together = [own + more for own, more in zip(expected, beside, strict=True)]
    if counted != tuple(together):
        return expected
    miscounted(state, None, why, source, *beside)
    return together


def unreported(state: LedgerState, account: Account) -> None:
    """Enter the tokens of a prompt, or of a session's chunk, that ended without a report of the engine."""
    if account.reports or state.reported_admission not in _REPORTING or not account.settlements:
        return
    last = account.settlements[-1]
    session = len(account.settlements) > 1
    if session and state.reported_admission == "mixed":
        return  # up to 0.19 each chunk is reported, and only the first report is recorded
    if not session and (account.plan is None or last.at != account.closed_at or account.sampled):
        return
    tokens = last.local + last.external + last.computed
    if tokens:
        _enter(state, PromptUnreported(tokens, session), account)


def count_drafts(state: LedgerState, flight: InFlight, accepted: int) -> None:
    """Add the draft tokens of one request in an output. In the first step of a life they are padding."""
    proposed, padding, taken = state.output_drafts
    if flight.life.delivered:
        proposed += flight.drafts
    else:
        padding += flight.drafts
    state.output_drafts = (proposed, padding, taken + accepted)


def cut_off(state: LedgerState, account: Account, sequence_tokens: int) -> None:
    """A request with drafts has ended: the engine drops what an output sampled past the stop."""
    cut = account.sequence_tokens - sequence_tokens
    if account.drafted and sequence_tokens >= 0 and cut > 0:
        state.cut_drafts += cut - 1  # The token sampled beside the drafts is the first to go, and no draft.
        account.sequence_tokens = sequence_tokens


def drafts_counted(state: LedgerState, event: ev.DraftsCounted) -> None:
    """Post the engine's statistics of speculative decoding; those of a diffusion model are other figures."""
    if state.sampled_beside_drafts and state.lost_track is None:
        counted = event.draft_tokens, event.accepted_tokens
        _enter(state, CountedDrafts(state.step, *counted, *state.output_drafts, state.cut_drafts), None)


def sibling(state: LedgerState, account: Account) -> None:
    """Enter that this request and one that lives are samples of one client's request."""
    named = _SAMPLE.fullmatch(account.request_id) if "_" in account.request_id else None
    if named is None or named[1] == "0":
        return
    earlier = f"{int(named[1]) - 1}_{named[2]}"
    for other in state.living.values():
        if other.request_id == earlier and other.prompt_tokens == account.prompt_tokens:
            _enter(state, SiblingAdded(named[2], int(named[1])), account)
            return


def miscounted(
    state: LedgerState, account: Account | None, why: str, source: str, requests: int, queries: int, hits: int
) -> None:
    """Enter lookups that the engine counts by a rule of its own."""
    _enter(state, MiscountedLookups(why, source, requests, queries, hits), account)


def _enter(
    state: LedgerState,
    subject: MiscountedLookups | PromptUnreported | CountedDrafts | SiblingAdded,
    account: Account | None,
) -> None:
    state.entries.append(Entry(state.number, state.step, state.at, subject, account))
