"""Deferred postings of steady accounts.

A request that only decodes adds one token to every balance in each step, and most requests of most steps
do. Such an account is *steady*: steps and outputs are counted once for all steady accounts, and a steady
account is posted when an event names its request or somebody reads the account.
"""

from __future__ import annotations

from .account import Account
from .ledger_state import LedgerState, ScheduledRow
from .life import InFlight
from .position_ranges import COMPUTED
from .weights_of_requests import is_noted


def is_steady(state: LedgerState, account: Account) -> bool:
    """Whether each further step and output adds one token, until an event names the request."""
    life, row = account.life, state.last_step.get(account.request)
    if life is None or row is None or row[1] != 1 or row[2] or account.lines is not None:
        return False
    flights, rows = account.in_flight, account.positions.ranges
    if len(flights) != len(state.undelivered) or not rows or life.pending:
        return False
    at = rows[-1].end
    for place, flight in enumerate(flights):
        plain = flight.life is life and flight.tokens == 1 and not flight.drafts and flight.weights is None
        if not plain or flight.overrun or flight.invalid_from >= 0 or flight.start != at + place:
            return False
    if state.weights.stage and not is_noted(state.weights, account):
        return False
    last = rows[-1]
    return (
        at >= account.prompt_tokens
        and last.source is COMPUTED
        and last.life == life.number
        and account.computed == at + len(flights)
    )


def make_steady(state: LedgerState, account: Account) -> None:
    """Defer the account's postings from here on."""
    account.steady_scheduled = state.scheduled_steps
    account.steady_delivered = state.delivered_steps
    state.steady[account.request] = account
    del state.last_step[account.request]


def activate(state: LedgerState, account: Account) -> None:
    """Post the account step by step from here on, beginning with the steps in flight."""
    catch_up(state, account)
    account.steady_scheduled = account.steady_delivered = -1
    request = account.request
    del state.steady[request]
    row: ScheduledRow = (account, 1, 0)
    state.last_step[request] = row
    for roster in state.undelivered:
        roster[request] = row


def activate_all(state: LedgerState) -> None:
    """Activate every steady account."""
    for account in list(state.steady.values()):
        activate(state, account)


def catch_up(state: LedgerState, account: Account) -> None:
    """Post the steps and outputs since the account was last posted."""
    scheduled = state.scheduled_steps - account.steady_scheduled
    delivered = state.delivered_steps - account.steady_delivered
    if not (scheduled or delivered):
        return
    account.steady_scheduled, account.steady_delivered = state.scheduled_steps, state.delivered_steps
    life, flights = account.life, account.in_flight
    assert life is not None
    account.computed += scheduled
    account.scheduled += scheduled
    life.scheduled += scheduled
    account.in_flight_tokens += scheduled - delivered
    account.sequence_tokens += delivered
    account.first_output += delivered
    account.positions.ranges[-1].end += delivered
    depth = len(flights) + scheduled - delivered
    while len(flights) > depth:
        flights.pop()
    while len(flights) < depth:
        flights.append(InFlight(0, 1, 0, life))
    for start, flight in enumerate(flights, account.computed - depth):
        flight.start = start


def open_accounts(state: LedgerState) -> dict[int, Account]:
    """The open accounts by request number, all posted up to now. It takes a time for each steady account."""
    for account in state.steady.values():
        catch_up(state, account)
    return state.living


def posted(state: LedgerState, request: int) -> Account | None:
    """The open account of a request, posted up to now; None if there is none.

    An event that names a few requests posts these only, so its time does not depend on how many run.
    """
    account = state.living.get(request)
    if account is not None and account.steady_scheduled >= 0:
        catch_up(state, account)
    return account
