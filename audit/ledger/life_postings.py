"""Postings of a request from its arrival to its end: admissions, roll-backs, preemptions, reports.

External tokens are posted in ``load_postings.py``, scheduled steps and outputs in ``steps.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import causes
from .. import events as ev
from ..figures.sums import add_tokens
from .account import LOCAL, Account, Life
from .accounts import (
    account_of,
    add_line,
    begin_life,
    close_account,
    delivered_end,
    end_wait,
    enter,
    enter_computed,
    enter_reported,
    enter_subjects,
    make_unknown,
    open_account,
    roll_back,
    see_demand,
    settle,
)
from .clocks import DECODE_PLACE, decode_parts, output_time, share
from .entries import Entry, ReportedLookups, TurnOvercounted
from .ledger_state import LedgerState
from .load_postings import cancel_in_flight, load_before_hit, lose_external
from .weights_of_requests import end_turn
from .weights_postings import finished
from .work import (
    counted_otherwise,
    cut_off,
    execute_before_hit,
    expect_queries,
    never_ran,
    sibling,
    unreported,
)


def _request_added(state: LedgerState, event: ev.RequestAdded) -> None:
    account = open_account(state, event.request, event.request_id, event.prompt_tokens)
    account.pooling = event.pooling
    account.priority = event.priority
    account.labels = event.labels
    account.resumable = event.resumable
    account.reads_cache = event.reads_cache
    account.max_tokens = event.max_tokens
    account.traceparent = event.traceparent
    if (
        event.traceparent
        and state.watch is not None
        and state.watch(event.traceparent)
        and account.lines is None
    ):
        account.lines = []
    account.transferred, account.remote_decode = event.transferred, event.remote_decode
    account.remote_request = event.remote_request
    state.blocks.identify(event.request, event.isolation)
    sibling(state, account)
    enter(state, event, account)


def _looked_up(state: LedgerState, event: ev.LookedUp) -> None:
    account = account_of(state, event.request)
    account.looked_up_step = event.step
    account.looked_up_local = event.local_tokens
    account.asked_from = -1
    state.step = event.step
    enter(state, event, account)


def _matched(state: LedgerState, event: ev.Matched) -> None:
    account = account_of(state, event.request)
    account.asked_from = event.local_tokens
    enter(state, event, account)


def _admission_failed(state: LedgerState, event: ev.AdmissionFailed) -> None:
    account = account_of(state, event.request)
    account.looked_up_step = event.step
    account.looked_up_local = event.local_tokens
    enter(state, event, account)


def _admitted(state: LedgerState, event: ev.Admitted) -> None:
    account = account_of(state, event.request)
    state.step = event.step
    if account.life is not None:
        make_unknown(account, "a life began while another lasted")
        end_life(state, account, causes.LOST)
    if account.in_flight:
        load_before_hit(state, account, event.local_tokens)
        execute_before_hit(account, event.local_tokens)
    if state.blocks.demand.known(event.request):
        end_wait(state, account)
    life = begin_life(state, account, event.local_tokens, event.external_tokens)
    life.asynchronous = event.asynchronous
    if state.reported_admission == "last" and not (account.settled or account.incomplete):
        account.reporting = life
    if event.sampled_misses:
        for cause, blocks in zip(causes.SAMPLED_MISSES, event.sampled_misses, strict=False):
            if blocks:
                add_tokens(account.sampled_misses, cause, blocks)
    _local_hit(state, account, life)
    promised = event.external_tokens
    account.computed = event.local_tokens + promised
    if promised > 0:
        account.promised += promised
        add_line(state, account, "external tokens promised", credit=promised)
    elif promised < 0:
        # The engine used a negative match, so its count fell below the local hit.
        roll_back(state, account, account.computed, event.local_tokens, causes.NEGATIVE_MATCH)
    _expect_lookup(state, account, life, event)
    enter(state, event, account)
    enter_computed(state, account, "admitted", event.computed_tokens)


def _local_hit(state: LedgerState, account: Account, life: Life) -> None:
    """Post the local hit of a new life."""
    again = 0
    if life.local > 0:
        gaps = account.positions.fill(0, life.local, LOCAL, life.number)
        again = life.local - sum([end - start for start, end in gaps])
        account.hit_again += again
    account.computed = life.local
    if account.lines is not None:
        note = f"local hit (repeat hit: {again})" if again else "local hit"
        add_line(state, account, note if life.local else "admitted, no local hit", credit=life.local)


def withdraw_hit(state: LedgerState, request: int, start: int, end: int) -> None:
    """Positions [start, end) of the present life's local hit have no valid KV: they have no origin yet.

    A prompt that is settled stays as it is.
    """
    account = state.living.get(request)
    if account is None or account.settled or account.life is None:
        return
    tokens = account.positions.withdraw(start, end, account.life.number, LOCAL)
    if tokens:
        account.invalid_hits.append((start, end))
        add_line(state, account, f"invalid hit: {tokens} tokens have no valid KV")


def _expect_lookup(state: LedgerState, account: Account, life: Life, event: ev.Admitted) -> None:
    """Count the lookups that the engine's statistics should show for this admission."""
    if account.unknown is not None:
        state.lookups_unsure = True
    local, external = state.expected_local, state.expected_external
    if state.prefix_caching and not event.counted:
        external = state.exempt_external
    if event.counted:
        local[0] += 1
        local[1] += account.sequence_tokens + event.cut_tokens
        local[2] += event.local_tokens
    queries = account.sequence_tokens - _queried_from(account, event)
    if queries:
        external[0] += 1
        external[1] += queries
        external[2] += event.external_tokens
    expect_queries(state, account, life, event, queries)


def _queried_from(account: Account, event: ev.Admitted) -> int:
    """The position from which the connector was queried for this admission.

    This is the local hit, except where the engine gives up a hit no longer than the replayed window, after it
    has asked the connector beyond that hit. A lookup that follows the question may also shorten the hit: then
    the shorter hit counts.
    """
    given_up = event.local_tokens < account.asked_from <= account.looked_up_local
    return account.asked_from if given_up else event.local_tokens


def _lookups_counted(state: LedgerState, event: ev.LookupsCounted) -> None:
    reported = (
        ("local", event.local_requests, event.local_queries, event.local_hits),
        ("external", event.external_requests, event.external_queries, event.external_hits),
    )
    failed = (event.failed_requests, event.failed_queries, event.failed_hits)
    expected = {
        "local": (state.expected_local, failed),
        "external": (state.expected_external, tuple(state.exempt_external)),
    }
    state.counts_local, state.counts_external = event.local_requests >= 0, event.external_requests >= 0
    for source, requests, queries, hits in reported:
        counted = requests, queries, hits
        if requests >= 0 and not state.lookups_unsure and counted != tuple(expected[source][0]):
            own = counted_otherwise(state, source, counted, *expected[source])
            subject = ReportedLookups(requests, queries, hits, own[0], own[1], own[2], source)
            state.entries.append(Entry(state.number, event.step, state.at, subject, None))
    state.expected_local = [0, 0, 0]
    state.expected_external = [0, 0, 0]
    state.exempt_external = [0, 0, 0]
    state.lookups_unsure = state.lost_track is not None


def _rolled_back(state: LedgerState, event: ev.RolledBack) -> None:
    account = account_of(state, event.request)
    enter_computed(state, account, "rolled back", event.before_tokens)
    if event.cause == causes.SESSION:
        _overrun_in_flight(state, account)
        if account.life is not None:  # a preempted request has no KV that its turn could give up
            overrun_past(account, event.computed_tokens)
    if event.cause == causes.RELEASED:
        end_life(state, account, causes.LOAD_FAILED)
    else:
        roll_back(state, account, event.computed_tokens, account.computed, event.cause)
    enter(state, event, account)


def _preempted(state: LedgerState, event: ev.Preempted) -> None:
    account = account_of(state, event.request)
    state.step = event.step
    enter_reported(
        state,
        account,
        "preempted",
        event.before_tokens,
        event.in_flight_tokens,
        event.placeholder_tokens,
    )
    account.preemptions += 1
    end_life(state, account, event.cause)
    if event.cause == causes.BLOCKS and len(state.blocks.pools) == 1:
        state.blocks.demand.preempt(event.request)
        see_demand(state)
    enter(state, event, account)


def end_life(state: LedgerState, account: Account, cause: str) -> None:
    """End the present life: its pending external tokens are lost and its computed tokens discarded."""
    life = account.life
    if life is None:
        return
    # A step in flight loads the tokens before its output comes, also after a preemption.
    if life.pending and not (cause in causes.PREEMPTIONS and _loads_in_flight(account, life)):
        lost_by = causes.EXTERNAL_LOSS_AT_END.get(cause, causes.LOST)
        lose_external(state, account, life, life.pending_start, life.pending_end, lost_by)
        life.pending_start = life.pending_end
    if not life.ran:
        never_ran(state, account, life)
    if state.blocks.lives:
        enter_subjects(state, state.blocks.life_ends(account, life, cause), state.step)
    life.discarded = account.computed
    life.ended_at, life.ended_by = state.at, cause
    share(life, state.step_clock, state.at, 0)
    if account.computed:
        add_tokens(account.discarded, cause, account.computed)
        account.losses.add(0, delivered_end(account, account.computed), cause)
    tokens, account.computed, account.life = account.computed, 0, None
    if account.lines is not None:
        add_line(state, account, f"discarded: {causes.loss(cause)}", debit=tokens, life=life.number)


def _loads_in_flight(account: Account, life: Life) -> bool:
    """Whether a step in flight loads the pending tokens of a life synchronously."""
    return not life.asynchronous and any(
        flight.life is life and not flight.overrun for flight in account.in_flight
    )


def _overrun_in_flight(state: LedgerState, account: Account) -> None:
    """The request or its turn stopped: the tokens in flight are overrun, and ended lives load no more."""
    for flight in account.in_flight:
        if not flight.overrun:
            flight.overrun = True
            account.overrun += flight.tokens - flight.posted
            cancel_in_flight(state, account, flight.life)


def _extended(state: LedgerState, event: ev.Extended) -> None:
    account = account_of(state, event.request)
    enter_computed(state, account, "extended", event.computed_tokens)
    if 0 <= event.turn_tokens < event.computed_tokens and account.unknown is None:
        subject = TurnOvercounted(event.turn_tokens, event.computed_tokens)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))
    if account.incomplete and not account.settled:
        settle(state, account)
    unreported(state, account)
    end_turn(state.weights, account, event.turn_tokens)
    account.sampled_by = []
    account.labelled = []
    account.positions.truncate(event.computed_tokens)
    account.carried = min(event.computed_tokens, event.prompt_tokens)  # of an overcounted turn, all of it
    account.prompt_tokens = account.sequence_tokens = event.prompt_tokens
    account.settled = account.incomplete = False
    account.reports = 0
    state.blocks.identify(event.request, event.isolation)
    add_line(state, account, f"prompt extended to {event.prompt_tokens} tokens")
    enter(state, event, account)


def _finished(state: LedgerState, event: ev.Finished) -> None:
    account = account_of(state, event.request)
    enter_reported(
        state,
        account,
        "finished",
        event.computed_tokens,
        event.in_flight_tokens,
        event.placeholder_tokens,
        event.sequence_tokens,
    )
    account.outcome = event.reason
    account.closed_at = state.at
    if event.sequence_tokens >= 0:
        overrun_past(account, event.sequence_tokens)
    if account.in_flight:
        _overrun_in_flight(state, account)
    if event.reason in causes.WITH_LAST_OUTPUT:
        _time_output(state, account, event.output_tokens)
    state.last_ended = None
    if account.unknown is None:
        life = account.life
        unloaded = life.pending if life is not None and life.asynchronous and not life.ran else 0
        state.last_ended = event.request, event.computed_tokens, account.computed, unloaded
    end_life(state, account, causes.FINISHED)
    if not account.settled:
        settle(state, account)
    unreported(state, account)
    cut_off(state, account, event.sequence_tokens)
    if account.sampled_by:
        finished(state, account, event.sequence_tokens)
    end_turn(state.weights, account, event.sequence_tokens)
    enter(state, event, account)
    if state.blocks.demand.known(event.request):
        end_wait(state, account)
    close_account(state, event.request, account)


def _time_output(state: LedgerState, account: Account, output_tokens: int) -> None:
    """The request ends with its last output: divide the time since the first one."""
    if account.first_token is not None and not account.resumable:
        since = account.added_at + sum(account.first_token)
        account.output_time = output_time(account, since, state.at)
        if account.life is not None:
            share(account.life, state.step_clock, state.at, 0)
        account.decode_parts = decode_parts(account, account.output_time[DECODE_PLACE])
        account.later_tokens = output_tokens - 1


def overrun_past(account: Account, end: int) -> None:
    """Move output computed at position ``end`` or above from first output to overrun.

    ``end`` is the end of the request's sequence, or of what a session keeps of a turn.
    """
    start = max(end, account.prompt_tokens)
    if account.positions.end > start:
        beyond = account.positions.first_computed_from(start)
        account.first_output -= beyond
        account.overrun += beyond
        account.positions.truncate(start)


def _reported(state: LedgerState, event: ev.Reported) -> None:
    account = account_of(state, event.request)
    account.reports += 1
    if state.reported_admission == "mixed":
        account.reporting = _life_reported(account, event)
    if account.reported is None:
        account.reported = (event.local_tokens, event.external_tokens, event.computed_tokens)
    if account.lines is not None:
        hits = f"{event.local_tokens} local, {event.external_tokens} external"
        add_line(state, account, f"reported: {hits}, {event.computed_tokens} computed")
    enter(state, event, account)


def _life_reported(account: Account, event: ev.Reported) -> Life | None:
    """The life whose hits the report names, less failed loads; else the life reported before."""
    executed_again = event.cached_tokens + 1 == event.prompt_tokens
    for life in account.lives:
        external = life.external - life.voided.get(causes.FAILED, 0)
        surplus = event.local_tokens - life.local
        if event.external_tokens == external and (surplus == 0 or (executed_again and surplus == 1)):
            return life
    return account.reporting


LIVES: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.RequestAdded: _request_added,
    ev.LookedUp: _looked_up,
    ev.Matched: _matched,
    ev.AdmissionFailed: _admission_failed,
    ev.Admitted: _admitted,
    ev.LookupsCounted: _lookups_counted,
    ev.RolledBack: _rolled_back,
    ev.Reported: _reported,
    ev.Preempted: _preempted,
    ev.Extended: _extended,
    ev.Finished: _finished,
}
"""Postings by event."""
