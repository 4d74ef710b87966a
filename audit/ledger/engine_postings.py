"""Postings of what the engine says of itself.

Its start and end, snapshots, censuses, lost events, failed hooks; and requests or engines that stand still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import causes
from .. import events as ev
from .account import Account
from .accounts import (
    account_of,
    activate_all,
    begin_life,
    catch_up,
    close_unseen,
    enter,
    enter_reported,
    make_unknown,
    open_account,
)
from .entries import Entry, Livelocked, Misqueued, Stalled, StoodStill
from .ledger_state import LedgerState
from .lives import enter_overdue
from .weights import UNKNOWN
from .weights_postings import take_versions

# --- stalls --------------------------------------------------------------------------------------------
#
# Requests that no step schedules although others run, and misqueued requests, found at each census.
#
# Nothing is noted in a step. A census looks at the requests that the last step did not schedule, and
# remembers since when each of them has not run.


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


# --- progress ------------------------------------------------------------------------------------------
#
# Whether the engine as a whole makes progress while requests are open, found at each census.
#
# Progress is a token that has KV for the first time, or the end of a request. Nothing is noted in a step.


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


# --- engine postings -----------------------------------------------------------------------------------
#
# Postings of what concerns the whole engine: start and end, lost events, census and snapshot.


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
        state.blocks.pins_last = event.configuration.get("connector", "") is not None
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
    state.slots.forget()


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
    for subject in state.slots.look(event, rests=not (state.living or state.undelivered)):
        state.entries.append(Entry(state.number, state.step, state.at, subject, None))
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
