"""Whether the engine as a whole makes progress while requests are open, found at each census.

Progress is a token that has KV for the first time, or the end of a request. Nothing is noted in a step.
"""

from __future__ import annotations

from .. import events as ev
from .account import Account
from .entries import Entry, Livelocked, StoodStill
from .ledger_state import LedgerState
from .stalls import STALLED_SECONDS

IDLE_CALLS = 1_024
"""An engine stands still if so many calls of ``schedule`` in a row scheduled none of the ready requests."""

LIVELOCKED_STEPS = 512
"""An engine is livelocked after at least so many steps without progress."""

RECOMPUTED_TIMES = 2
"""The least number of times that it has by then computed the tokens of all open requests."""


def enter_no_progress(state: LedgerState, event: ev.Census) -> None:
    """Make an entry if the engine stands still or is livelocked."""
    _enter_stood_still(state, event)
    _enter_livelocked(state)


def _enter_stood_still(state: LedgerState, event: ev.Census) -> None:
    """An engine whose calls of ``schedule`` schedule nothing, though requests wait for nothing else.

    A connector may free blocks at any time, or be asked for a match again, and a client may end a session,
    which keeps the place of a request; so there it takes ten minutes. A request that runs needs neither.
    """
    steps, since, calls = state.stood_still
    if state.scheduled_steps != steps or event.ready_requests < 1 or not state.living:
        state.stood_still = state.scheduled_steps, event.at, 0
        return
    calls += event.idle_calls
    state.stood_still = steps, since, calls
    seconds = (event.at - since) // 1_000_000
    waits = event.paused_sessions or _may_be_freed(state)
    if calls >= IDLE_CALLS and (seconds >= STALLED_SECONDS or event.rows or not waits):
        named = [state.living[row] for row in event.rows[::5] if row in state.living]
        if not named and event.first_ready in state.living:
            named = [state.living[event.first_ready]]
        first = min(named or state.living.values(), key=lambda account: (account.priority, account.added_at))
        subject = StoodStill(calls, seconds, event.ready_requests, event.paused_sessions)
        _enter(state, subject, first)


def _may_be_freed(state: LedgerState) -> bool:
    """Whether a connector may let a request run without a step of this engine."""
    settings = state.engine.configuration if state.engine is not None else {}
    return bool(settings.get("connector") or state.delayed_frees)


def _enter_livelocked(state: LedgerState) -> None:
    """An engine whose steps compute the same tokens again and again."""
    now = {
        request: (account.first_prompt + account.first_output, account.scheduled)
        for request, account in state.living.items()
    }
    (steps, since), before = state.no_progress_since, state.no_progress
    progressed = bool(state.steady) or any(account.unknown for account in state.living.values())
    progressed |= any(first > before.get(request, (0, 0))[0] for request, (first, _) in now.items())
    if progressed or not now or not before.keys() <= now.keys():
        state.no_progress_since, state.no_progress = (state.scheduled_steps, state.at), now
        return
    done = {request: count - before.get(request, (0, 0))[1] for request, (_, count) in now.items()}
    steps, tokens = state.scheduled_steps - steps, sum(done.values())
    whole = sum(account.sequence_tokens for account in state.living.values())
    if steps >= LIVELOCKED_STEPS and tokens >= RECOMPUTED_TIMES * whole:
        most = state.living[max(done, key=lambda request: done[request])]
        seconds = (state.at - since) // 1_000_000
        _enter(state, Livelocked(steps, seconds, tokens, len(now), most.preemptions), most)


def _enter(state: LedgerState, subject: StoodStill | Livelocked, account: Account) -> None:
    state.entries.append(Entry(state.number, state.step, state.at, subject, account))
