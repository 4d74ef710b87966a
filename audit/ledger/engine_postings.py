"""Postings of what concerns the whole engine: start and end, lost events, census and snapshot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import causes
from .. import events as ev
from .account import Account
from .accounts import account_of, begin_life, close_unseen, enter, enter_reported, make_unknown, open_account
from .ledger_state import LedgerState
from .load_postings import enter_overdue
from .progress import enter_no_progress
from .stalls import enter_misqueued, enter_stalled
from .unchanged_steps import activate_all, catch_up
from .weights import UNKNOWN
from .weights_postings import take_versions

NAME_LENGTH = 80
"""Characters kept of the names of an exception and of the method that it left."""


def _engine_started(state: LedgerState, event: ev.EngineStarted) -> None:
    if state.engine is None:
        if state.number > 0 and not state.sums.gaps:  # the journal's oldest segments were removed
            forget(state, causes.BEGAN_BEFORE)
        state.engine = event
        state.reported_admission = str(event.configuration.get("figures"))
        state.prefix_caching = event.configuration.get("prefix_caching") is not False
        beside = event.configuration.get("sampled_beside_drafts")
        state.sampled_beside_drafts = 0 if beside == 0 else 1  # 0: diffusion
        state.queue.recorded = bool(event.configuration.get("queue_causes"))
        state.blocks.keeps_state_places = event.configuration.get("model_runner") == "v1"
    state.clock = event.began_seconds
    enter(state, event)


def _engine_stopped(state: LedgerState, event: ev.EngineStopped) -> None:
    state.stopped = event.reason
    enter(state, event)


def _gap(state: LedgerState, event: ev.Gap) -> None:
    """Lose track until the next snapshot. Segments removed before the first event seen are no loss."""
    if state.engine is None and event.reason == ev.REMOVED:
        state.sums.removed_events += event.lost_events
    else:
        state.sums.gaps += 1
    forget(state, f"events were lost ({event.reason})")
    enter(state, event)


def _hook_failed(state: LedgerState, event: ev.HookFailed) -> None:
    state.sums.hook_failures += 1
    state.steps_in_flight_known = False
    forget(state, f"the hook {event.hook} failed")
    enter(state, event)


def _engine_raised(state: LedgerState, event: ev.EngineRaised) -> None:
    error = error_name(event)
    state.sums.count_error(error)
    if event.lost:
        forget(state, f"the engine raised {error}")
    enter(state, event)


def error_name(event: ev.EngineRaised) -> str:
    """The exception and the method that it left."""
    return f"{event.error[:NAME_LENGTH]} in {event.method[:NAME_LENGTH]}"


def forget(state: LedgerState, reason: str) -> None:
    """Make every open account unknown; steps are posted again from the next snapshot on."""
    activate_all(state)
    for account in state.living.values():
        make_unknown(account, reason)
        account.in_flight.clear()
        account.in_flight_tokens = 0
    state.last_step = {}
    state.step_clock.change(state.at, 0)
    state.undelivered.clear()
    state.output_order = []
    state.delayed_frees = {}
    state.finished_transfers = {}
    state.lost_track = reason
    state.lookups_unsure = True
    state.queue.set(causes.QUEUED_UNKNOWN, state.at)
    state.blocks.forget()
    state.weights.cached_since = UNKNOWN
    state.transfers.forget()
    state.encoder.forget()


def _census(state: LedgerState, event: ev.Census) -> None:
    state.step = event.step
    for rows in (event.rows, event.waiting_rows):
        for i in range(0, len(rows), 5):
            account = state.living.get(rows[i])
            if account is not None:
                if account.steady_scheduled >= 0:
                    catch_up(state, account)
                enter_reported(state, account, "census", *rows[i + 1 : i + 5])
    enter_misqueued(state, event.misqueued)
    enter_overdue(state)
    enter_stalled(state)
    enter_no_progress(state, event)
    enter(state, event)


def _snapshot(state: LedgerState, event: ev.Snapshot) -> None:
    """A reader already in sync checks the snapshot like a census; a new reader starts from it."""
    state.step = event.step
    activate_all(state)
    take_versions(state, event)
    begins_here = state.lost_track is not None or not (state.undelivered or state.last_step)
    rotated = state.lost_track == causes.BEGAN_BEFORE
    state.last_step = {}
    state.output_order = []
    state.lost_track = None
    if begins_here:
        state.skip_deliveries = event.undelivered_steps
        if not event.undelivered_steps and not any(row.in_flight_tokens > 0 for row in event.rows):
            state.steps_in_flight_known = True
    named = set()
    for row in event.rows:
        named.add(row.request)
        state.blocks.identify(row.request, row.isolation)
        account = state.living.get(row.request)
        if account is None:
            account = open_account(state, row.request, row.request_id, row.prompt_tokens, seen=False)
            account.transferred, account.labels = row.transferred, row.labels
            account.remote_decode, account.remote_request = row.remote_decode, row.remote_request
            if row.labels is not None:
                account.priority = row.labels.priority
            if not row.fresh:
                began = causes.BEGAN_BEFORE if rotated else "the trace begins while the request runs"
                make_unknown(account, began)
                account.preemptions = row.preemptions
        if account.unknown is not None and not row.fresh:
            _take_counts(state, account, row)
        else:
            enter_reported(
                state,
                account,
                "census",
                row.computed_tokens,
                row.in_flight_tokens,
                row.placeholder_tokens,
                row.sequence_tokens,
            )
    for request in [r for r in state.living if r not in named]:
        close_unseen(state, request)
    enter(state, event)


def _take_counts(state: LedgerState, account: Account, row: ev.SnapshotRow) -> None:
    """Take the engine's counts for a request whose past is unknown."""
    if account.life is None and row.computed_tokens:
        begin_life(state, account, 0, 0)
    account.computed = max(0, row.computed_tokens)
    account.sequence_tokens = row.sequence_tokens
    account.settled = account.settled or row.sequence_tokens > account.prompt_tokens


def _left_waiting(state: LedgerState, event: ev.LeftWaiting) -> None:
    state.queue.set(event.cause, state.at)
    enter(state, event)


def _note(state: LedgerState, event: ev.Event) -> None:
    """Only enter the event, for the checks."""
    request = getattr(event, "request", None)
    enter(state, event, None if request is None else account_of(state, request))


OBSERVATION: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.EngineStarted: _engine_started,
    ev.EngineStopped: _engine_stopped,
    ev.Gap: _gap,
    ev.HookFailed: _hook_failed,
    ev.EngineRaised: _engine_raised,
    ev.Census: _census,
    ev.Snapshot: _snapshot,
    ev.LeftWaiting: _left_waiting,
    ev.LookupKept: _note,
    ev.Tracked: _note,
    ev.ChildMatched: _note,
}
"""Postings by event."""
