"""Requests that no step schedules although others run, and misqueued requests, found at each census.

Nothing is noted in a step. A census looks at the requests that the last step did not schedule, and remembers
since when each of them has not run.
"""

from __future__ import annotations

from .account import Account
from .entries import Entry, Misqueued, Stalled
from .ledger_state import LedgerState

STALLED_STEPS = 4_096
"""A running request is stalled if none of this many steps scheduled it, for :data:`STEPS_SECONDS`."""

STEPS_SECONDS = 60
"""Without a model, a scheduler makes thousands of steps a second; no client has waited long by then."""

STALLED_SECONDS = 600
"""A request that no step scheduled for this long is stalled, if it runs or if later requests overtook it."""


def enter_stalled(state: LedgerState) -> None:
    """Make entries of the requests that have not run for too long while others ran."""
    idle: dict[int, tuple[int, int, int]] = {}
    newest: dict[int, int] | None = None
    for request, account in state.living.items():
        if request in state.steady or request in state.last_step or account.resumable:
            continue
        since = state.idle.get(request)
        if since is None or since[0] != account.scheduled:
            since = account.scheduled, state.scheduled_steps, state.at
        idle[request] = since
        steps, seconds = state.scheduled_steps - since[1], (state.at - since[2]) // 1_000_000
        runs = account.life is not None and account.life.ran
        left_out = runs and steps >= STALLED_STEPS and seconds >= STEPS_SECONDS
        if not steps or (seconds < STALLED_SECONDS and not left_out):
            continue
        if not runs:
            newest = _newest_running(state) if newest is None else newest
            if _waits_for_load(account) or not _overtaken(state, account, newest):
                continue
        subject = Stalled(steps, seconds, runs)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))
    state.idle = idle


def enter_misqueued(state: LedgerState, places: dict[str, int]) -> None:
    """Make entries of the requests that are not in as many queues as they should be."""
    if not places:
        return
    living = {account.request_id: account for account in state.living.values()}
    for request_id, count in places.items():
        account = living.get(request_id)
        if count != (account is not None):
            subject = Misqueued(request_id, count, account is not None)
            state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _waits_for_load(account: Account) -> bool:
    """Whether the connector still loads the request's tokens: that is ``connector/never-finished``."""
    return account.life is not None and account.life.pending > 0


def _newest_running(state: LedgerState) -> dict[int, int]:
    """For each priority, the arrival time of the last request of this priority that runs."""
    newest: dict[int, int] = {}
    for account in state.living.values():
        if account.life is not None and account.life.ran:
            newest[account.priority] = max(newest.get(account.priority, 0), account.added_at)
    return newest


def _overtaken(state: LedgerState, account: Account, newest: dict[int, int]) -> bool:
    """Whether a request that came later, and is no more urgent, runs. Not known with a limit of LoRAs."""
    settings = state.engine.configuration if state.engine is not None else {}
    if settings.get("loras", 0):
        return False
    return any(at > account.added_at for priority, at in newest.items() if priority >= account.priority)
