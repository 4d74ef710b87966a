"""Postings of a request from its arrival to its end: admissions, loads, roll-backs, preemptions, reports.

Scheduled steps and outputs are posted in ``steps.py``. What workers did with promised blocks is kept in
``transfers.py``, and posted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import causes
from .. import events as ev
from ..bounded_tables import keep_newest
from ..figures.sums import add_tokens
from .account import EXTERNAL, LOCAL, Account, Life
from .accounts import (
    account_of,
    add_line,
    begin_life,
    close_account,
    counted_otherwise,
    cut_off,
    delivered_end,
    end_wait,
    enter,
    enter_computed,
    enter_reported,
    enter_subjects,
    execute_before_hit,
    expect_queries,
    find_account,
    load_failed,
    make_unknown,
    never_ran,
    open_account,
    open_accounts,
    roll_back,
    see_demand,
    settle,
    sibling,
    unreported,
)
from .clocks import DECODE_PLACE, decode_parts, output_time, share
from .entries import (
    Entry,
    ExternalTokensLost,
    FailedBlocksKept,
    Handover,
    Overdue,
    ReportedLookups,
    SaveSkipped,
    TurnOvercounted,
    Unpromised,
    Unsaved,
)
from .ledger_state import LedgerState
from .transfers import UnkeptPromise
from .weights import end_turn
from .weights_postings import finished

# --- lives ---------------------------------------------------------------------------------------------
#
# A request from its arrival to its end.


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
    account.matched_tokens = max(account.matched_tokens, event.local_tokens + (event.external_tokens or 0))
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
    state.slots.note(state.step, f"{account.request_id} was preempted")
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
    state.slots.note(state.step, f"{account.request_id} ended")
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


# --- loads ---------------------------------------------------------------------------------------------
#
# Postings of external tokens: promised, loaded, failed or cancelled; of saves and of delayed frees.
#
# What workers did with promised blocks is kept in ``transfers.py``; this file posts it.


OVERDUE_SECONDS = 600
"""Connectors give up a transfer by themselves before this; NIXL, by default, after 480."""

FINISHED_TRANSFERS_KEPT = 4096
"""How many requests with finished transfers are remembered."""


def _load_planned(state: LedgerState, event: ev.LoadPlanned) -> None:
    account = account_of(state, event.request)
    life = account.life
    if life is not None and life.pending:
        covered = min(life.pending_start + max(0, event.tokens), life.pending_end)
        if covered < life.pending_end:
            life.missing_blocks = event.missing_blocks
            lose_external(state, account, life, covered, life.pending_end, causes.NOT_PLANNED)
            life.pending_end = covered
    enter(state, event, account)


def _load_finished(state: LedgerState, event: ev.LoadFinished) -> None:
    account = find_account(state, event.request)
    if account is None:
        enter(state, event)  # The request has ended: a late completion concerns blocks only.
        return
    life = account.life
    waited = life is not None and life.pending and not life.ran
    if life is not None and life.asynchronous and not life.ran:
        life.load_ended_at = state.at
    if life is not None and life.pending:
        load(state, account, life, event.computed_tokens, causes.FAILED)
        _take_back(state, state.transfers.resolved(event.request))
    enter(state, event, account)
    if waited:
        enter_computed(state, account, "loaded", event.computed_tokens)


def _load_failed(state: LedgerState, event: ev.LoadFailed) -> None:
    account = account_of(state, event.request)
    enter_computed(state, account, "load failed", event.before_tokens)
    life, valid = account.life, event.computed_tokens
    if life is not None:
        if life.asynchronous and not life.ran:
            life.load_ended_at = state.at
        if life.pending_end > valid:
            kept = max(life.pending_start, valid)
            lose_external(state, account, life, kept, life.pending_end, causes.FAILED)
            life.pending_end = kept
        account.positions.revoke(valid, life.number)
        life.invalid_from = valid if life.invalid_from < 0 else min(valid, life.invalid_from)
        promise_end = life.local + max(0, life.external)
        roll_back(state, account, valid, account.computed, causes.LOAD_FAILED, promise_end)
        for flight in account.in_flight:
            if flight.life is life and flight.invalid_from < 0:
                flight.invalid_from = valid
        _compare_failed_blocks(state, account, life, event)
    enter(state, event, account)


def _blocks_failed(state: LedgerState, event: ev.BlocksFailed) -> None:
    """Blocks failed. Post what the step whose output comes loaded for lives that have ended since.

    The engine's answer for lives that last comes next, see :func:`note_unanswered`.
    """
    enter(state, event)
    if state.skip_deliveries or not state.undelivered:
        return
    blocks = state.failed_blocks = event.blocks
    for account, _, _ in state.undelivered[0].values():
        flight = account.in_flight[0] if account.in_flight else None
        if flight is None or not flight.life.ended_by or flight.life.delivered or flight.life.asynchronous:
            continue
        life, promise = flight.life, state.transfers.of_life(account.request, flight.life)
        enter_subjects(state, state.blocks.load_failed(account.request, life, blocks), state.step)
        if promise is None or life.ended_by not in causes.PREEMPTIONS:
            continue
        failed = [block for block in promise.blocks if block in blocks]
        if failed:
            flight.invalid_from = promise.position(failed[0])
            _take_back(state, [promise.unkept(failed, "")], causes.FAILED)
            account.positions.revoke(flight.invalid_from, life.number)


def note_unanswered(state: LedgerState, account: Account, life: Life) -> None:
    """The output of a load came. Make an entry if blocks of it failed and the engine did nothing about it."""
    promise = state.transfers.of_life(account.request, life)
    if promise is None or life.asynchronous or life.delivered or life.ended_by or life.invalid_from >= 0:
        return
    failed = [block for block in promise.blocks if block in state.failed_blocks]
    if failed:
        subject = FailedBlocksKept(promise.position(failed[0]), account.computed, failed)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _compare_failed_blocks(state: LedgerState, account: Account, life: Life, event: ev.LoadFailed) -> None:
    """Make an entry if the engine keeps positions of a promised block that failed."""
    promise = state.transfers.promises.get(event.request)
    if promise is None or promise.life is not life:
        return
    whole = event.failed_blocks is None and event.computed_tokens == event.before_tokens
    unfilled = promise.blocks if whole else event.failed_blocks or ()
    failed = [block for block in promise.blocks if block in unfilled]
    if failed and promise.position(failed[0]) < event.computed_tokens:
        start = promise.position(failed[0])
        subject = FailedBlocksKept(start, event.computed_tokens, failed)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _blocks_promised(state: LedgerState, event: ev.BlocksPromised) -> None:
    account = account_of(state, event.request)
    state.transfers.promised(event, account)
    enter(state, event, account)


def _worker_stepped(state: LedgerState, event: ev.WorkerStepped) -> None:
    is_new = event.step > state.transfers.steps.get(event.worker, -1)
    _take_back(state, state.transfers.worked(event))
    if is_new:
        _compare_work(state, event)
    enter(state, event)


def _compare_work(state: LedgerState, event: ev.WorkerStepped) -> None:
    """Make entries of loads that were not promised, and of saves that were not waited for."""
    state.finished_transfers.update(dict.fromkeys((*event.received, *event.sent)))
    keep_newest(state.finished_transfers, FINISHED_TRANSFERS_KEPT)
    some_unknown = any(account.unknown is not None for account in state.living.values())
    blocks = [] if some_unknown or not _promises_reported(state) else state.transfers.unpromised(event)
    subjects: list[Unpromised | Unsaved] = []
    if blocks:
        subjects.append(Unpromised(event.worker, event.step, blocks))
    if event.saves > 0 and not event.saved:
        subjects.append(Unsaved(event.worker, event.step, event.saves))
    for subject in subjects:
        state.entries.append(Entry(state.number, event.step, state.at, subject, None))


def _promises_reported(state: LedgerState) -> bool:
    """Whether the engine's observer reports every promise by block, in the step that makes it."""
    settings = state.engine.configuration if state.engine is not None else {}
    return settings.get("groups") == 1 and not settings.get("deferred_loads", True)


def _take_back(state: LedgerState, unkept: Iterable[UnkeptPromise], cause: str = causes.NEVER_LOADED) -> None:
    """Post the tokens that a worker did not load as lost, even if they were posted as loaded."""
    for account, life, start, by_worker, blocks in unkept:
        find_account(state, account.request)
        loaded_end = life.local + life.loaded
        end = life.pending_end if life.pending else loaded_end
        if start < loaded_end:
            hit_end = min(loaded_end, max((each.local for each in account.lives[life.number :]), default=0))
            first_hit = account.positions.withdraw(start, hit_end, life.number)
            account.hit_again -= first_hit
            withdrawn = first_hit + account.positions.withdraw(max(start, hit_end), loaded_end, life.number)
            account.loaded_again -= loaded_end - start - withdrawn
            life.loaded_again -= loaded_end - start - withdrawn
            account.loaded -= loaded_end - start
            life.loaded -= loaded_end - start
        if life.pending:
            life.pending_end = max(start, life.pending_start)
        life.missing_blocks = blocks
        if start < end:
            lose_external(state, account, life, start, end, cause, by_worker)


def resolve(state: LedgerState, account: Account, life: Life) -> None:
    """Resolve a promise when the first step that reads its tokens has run."""
    if life.asynchronous:
        load(state, account, life, 0, causes.NEVER_LOADED)
    else:
        load(state, account, life, life.pending_end, causes.FAILED)
        _take_back(state, state.transfers.resolved(account.request))


def load(state: LedgerState, account: Account, life: Life, upto: int, cause: str) -> None:
    """Resolve a promise: tokens below position ``upto`` are loaded, those above are lost for ``cause``."""
    start, end = life.pending_start, life.pending_end
    life.pending_start = life.pending_end
    upto = min(max(upto, start), end)
    gaps = account.positions.fill(start, upto, EXTERNAL, life.number)
    again = upto - start - sum(high - low for low, high in gaps)
    account.loaded_again += again
    life.loaded_again += again
    account.loaded += upto - start
    life.loaded += upto - start
    if upto > start:
        state.weights.handed_over = state.weights.handed_over or account.transferred
        note = f"loaded {upto - start} external tokens"
        add_line(state, account, f"{note} (repeat load: {again})" if again else note)
    if upto < end:
        lose_external(state, account, life, upto, end, cause)


def load_before_hit(state: LedgerState, account: Account, hit_end: int) -> None:
    """Post what steps of ended lives load below position ``hit_end``, before a new life hits it."""
    for flight in account.in_flight:
        life, end = flight.life, flight.life.pending_end
        if life.ended_by and life.pending and life.pending_start < hit_end and not flight.overrun:
            life.pending_end = min(hit_end, end)
            load(state, account, life, life.pending_end, causes.FAILED)
            life.pending_end = end


def cancel_in_flight(state: LedgerState, account: Account, life: Life) -> None:
    """The step that loads the pending tokens of an ended life has no output that counts."""
    if life.ended_by and life.pending:
        cause = causes.EXTERNAL_LOSS_AT_END.get(life.ended_by, causes.LOST)
        start, life.pending_start = life.pending_start, life.pending_end
        lose_external(state, account, life, start, life.pending_end, cause)


def lose_external(
    state: LedgerState, account: Account, life: Life, start: int, end: int, cause: str, by_worker: str = ""
) -> None:
    """Post promised tokens [start, end) as failed or cancelled."""
    tokens = end - start
    life.voids.append((start, end, cause))
    add_tokens(life.voided, cause, tokens)
    add_tokens(account.voided, cause, tokens)
    if state.blocks.pools:
        state.blocks.lost(account.request, life.number, start, end, cause)
    add_line(state, account, f"{tokens} external tokens failed or cancelled: {causes.external_loss(cause)}")
    blocks = life.missing_blocks if by_worker or cause == causes.NOT_PLANNED else []
    if cause == causes.FAILED:
        load_failed(state, account, life, tokens)
    subject = ExternalTokensLost(tokens, cause, start, blocks, by_worker)
    state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _save_planned(state: LedgerState, event: ev.SavePlanned) -> None:
    account = account_of(state, event.request)
    held = max(account.saved_tokens, account.matched_tokens)
    if event.start > held + 1:  # a connector may find one token more than it promises: the last is computed
        subject = SaveSkipped(held, event.start)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))
    account.saved_tokens = max(account.saved_tokens, event.end)
    add_line(state, account, f"save ordered for positions {event.start} to {event.end}")
    enter(state, event, account)


def _tiers_reported(state: LedgerState, event: ev.TiersReported) -> None:
    account = account_of(state, event.request)
    if account.life is not None:
        account.tiered = True
        account.life.tiers = {}
        for tier, tokens in zip(event.tiers, event.tokens, strict=True):
            add_tokens(account.life.tiers, tier, tokens)
    enter(state, event, account)


def _store_keys(state: LedgerState, event: ev.StoreKeys) -> None:
    state.blocks.looked_up(event)
    enter(state, event, account_of(state, event.request))


def _free_delayed(state: LedgerState, event: ev.FreeDelayed) -> None:
    state.delayed_frees[event.request] = (state.at, event.request_id, event.blocks)
    enter(state, event)


def _free_completed(state: LedgerState, event: ev.FreeCompleted) -> None:
    kept = state.delayed_frees.pop(event.request, None)
    if kept is not None:
        state.finished_transfers.pop(kept[1], None)
    enter(state, event)


def _handed_over(state: LedgerState, event: ev.HandedOver) -> None:
    ended, state.last_ended = state.last_ended, None
    enter(state, event)
    if ended is None or ended[0] != event.request:
        return
    subject = Handover(
        event.request_id,
        event.computed_tokens,
        ended[1],
        ended[2],
        event.blocks,
        event.room_tokens,
        event.trimmed,
        ended[3],
    )
    state.entries.append(Entry(state.number, event.step, state.at, subject, None))


def enter_overdue(state: LedgerState) -> None:
    """Make entries of loads and delayed frees that a connector should have finished by now."""
    limit = state.at - OVERDUE_SECONDS * 1_000_000
    for account in open_accounts(state).values():
        life = account.life
        if life is not None and life.pending and not life.ran and life.began_at <= limit:
            seconds = (state.at - life.began_at) // 1_000_000
            done = account.request_id in state.finished_transfers
            subject = Overdue("load", account.request_id, seconds, life.pending, 0, done)
            state.entries.append(Entry(state.number, state.step, state.at, subject, account))
    for since, request_id, blocks in state.delayed_frees.values():
        if since <= limit:
            seconds = (state.at - since) // 1_000_000
            subject = Overdue("free", request_id, seconds, 0, blocks, request_id in state.finished_transfers)
            state.entries.append(Entry(state.number, state.step, state.at, subject, None))


LOADS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.LoadPlanned: _load_planned,
    ev.LoadFinished: _load_finished,
    ev.LoadFailed: _load_failed,
    ev.BlocksFailed: _blocks_failed,
    ev.SavePlanned: _save_planned,
    ev.FreeDelayed: _free_delayed,
    ev.FreeCompleted: _free_completed,
    ev.HandedOver: _handed_over,
    ev.BlocksPromised: _blocks_promised,
    ev.WorkerStepped: _worker_stepped,
    ev.StoreKeys: _store_keys,
    ev.TiersReported: _tiers_reported,
}
"""Postings by event."""
