"""Postings of scheduled steps and their output: the hot loop of a replay.

Work is counted when its output is delivered (``accounts.py``), because only then is it known which
tokens were rejected; until then the tokens are in flight. At any instant, scheduled = first prompt + first
output + rework + rejected + overrun + in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import events as ev
from ..causes import LOAD_FAILED, PAST_STOP
from .account import Account, InFlight, Life
from .accounts import (
    NO_DRAFTS,
    account_of,
    activate,
    add_line,
    begin_life,
    count_drafts,
    drafts_counted,
    enter_computed,
    execute,
    execute_invalid,
    find_account,
    is_steady,
    make_steady,
    make_unknown,
    settle_if_attained,
)
from .clocks import PREFILL_PLACE, UNIT, first_token, prefill_parts, share
from .entries import Entry, SampledTwice, StaleRejection, TokensMissing
from .ledger_state import LedgerState, ScheduledRow
from .lives import note_unanswered, resolve
from .weights import note_output


def _stepped(state: LedgerState, event: ev.Stepped) -> None:
    state.step = state.posted_step = event.step
    if state.lost_track is not None:
        return  # the step before, which this event refers to, was lost
    changed, dropped = ev.numbers(event.changed), ev.numbers(event.dropped)
    rows: list[tuple[int, ScheduledRow]] = []
    if changed or dropped:
        for request in dropped:
            find_account(state, request)
        for request, tokens, drafts in zip(changed[::4], changed[1::4], changed[2::4], strict=True):
            rows.append((request, (account_of(state, request), tokens, drafts)))
        if not state.last_step and not state.steady:  # every request of the step is listed
            dropped = list(state.living)
        scheduled = dict(state.last_step)
        for request in dropped:
            scheduled.pop(request, None)
        scheduled.update(rows)
        state.last_step = scheduled
    _schedule(state)
    if changed or dropped:
        _share_step(state, changed, dropped)
    for (_, (account, _, drafts)), computed in zip(rows, changed[3::4], strict=True):
        if account.unknown is None:
            if computed != account.computed:
                enter_computed(state, account, "scheduled", computed)
                if computed < account.computed == computed + account.stale_drafts:
                    _subtract_stale_drafts(account)
            elif computed > account.sequence_tokens + drafts:
                _compare_sequence(state, account, drafts)


def _share_step(state: LedgerState, changed: list[int], dropped: list[int]) -> None:
    """A step with other tokens begins."""
    tokens = len(state.steady)
    for row in state.last_step.values():
        tokens += row[1]
    state.step_clock.change(state.at, tokens)
    rows = dict.fromkeys(dropped, 0) | dict(zip(changed[::4], changed[1::4], strict=True))
    for request, own in rows.items():
        account = state.living.get(request)
        if account is not None and account.life is not None:
            share(account.life, state.step_clock, state.at, own)


def _compare_sequence(state: LedgerState, account: Account, drafts: int) -> None:
    """Make an entry if a step computes positions for which no step in flight can bring a token.

    Nothing is compared while a step may be in flight that was not posted.
    """
    known = state.steps_in_flight_known and not state.skip_deliveries
    if not state.sampled_beside_drafts or not known:
        return
    earlier = list(account.in_flight)[:-1]
    to_come = sum(1 + each.drafts for each in earlier if each.invalid_from < 0 and not each.overrun)
    limit = account.sequence_tokens + to_come
    if account.computed - drafts > limit:
        subject = TokensMissing(account.computed - drafts, account.sequence_tokens, to_come)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _schedule(state: LedgerState) -> None:
    """Post one scheduled step: its tokens are in flight."""
    scheduled = state.last_step
    state.undelivered.append(scheduled)
    state.scheduled_steps += 1
    for account, tokens, drafts in scheduled.values():
        life = account.life
        if life is None:
            life = _begin_unseen_life(state, account, tokens)
        start = account.computed
        account.in_flight.append(InFlight(start, tokens, drafts, life))
        account.computed = start + tokens
        account.in_flight_tokens += tokens
        account.scheduled += tokens
        life.scheduled += tokens
        if not life.ran:
            life.ran = True
            life.ran_at = state.at
            if not life.asynchronous:
                life.own = state.at - life.began_at << UNIT
            if account.plan is None:
                account.plan = (life.local, life.external)
            if account.reporting is None:
                account.reporting = life
        if account.lines is not None:
            note = f"scheduled (draft tokens: {drafts})" if drafts else "scheduled"
            add_line(state, account, note, credit=tokens)


def _begin_unseen_life(state: LedgerState, account: Account, tokens: int) -> Life:
    """Begin a life for a scheduled request whose admission was not observed."""
    if account.unknown is None:
        account.suspense += tokens
        make_unknown(account, "it ran without an admission")
    return begin_life(state, account, 0, 0)


def _delivered(state: LedgerState, event: ev.Delivered) -> None:
    if state.lost_track is not None:
        return
    changed, ignored = ev.numbers(event.changed), ev.numbers(event.ignored)
    for i in range(0, len(changed), 2):
        account = find_account(state, changed[i])
        if account is not None:
            account.sampled = changed[i + 1]
    for request in ignored:
        find_account(state, request)
    _deliver(state, frozenset(ignored))


def _delivered_whole(state: LedgerState, event: ev.DeliveredWhole) -> None:
    if state.lost_track is not None:
        return
    if event.requests:
        state.output_order = event.requests
    living = state.living
    for request, sampled in zip(state.output_order, event.sampled, strict=False):
        account = living.get(request)
        if account is not None and account.sampled != sampled:
            if account.steady_scheduled >= 0:
                activate(state, account)
            account.sampled = sampled
    _deliver(state, frozenset())


def _deliver(state: LedgerState, ignored: frozenset[int]) -> None:
    """Post the output of the oldest undelivered step. The output of ``ignored`` requests was dropped."""
    if state.skip_deliveries:
        state.skip_deliveries -= 1
        return
    if not state.undelivered:
        return
    state.delivered_steps += 1
    state.output_drafts, state.cut_drafts = NO_DRAFTS, 0
    newly_steady: list[Account] = []
    for request, (account, _, _) in state.undelivered.pop(0).items():
        if account.steady_scheduled >= 0 or not account.in_flight:
            continue
        flight = account.in_flight.pop(0)
        tokens = flight.tokens
        account.in_flight_tokens -= tokens
        accepted = request not in ignored if ignored else True
        if account.closed_at >= 0 or flight.overrun:
            if account.closed_at < 0 and accepted:
                _reject_past_stop(state, account, flight)
                _take_past_output(state, account, flight)
            continue
        life = flight.life
        sampled = account.sampled
        if flight.drafts and (sampled > 0 or not state.sampled_beside_drafts):
            rejected = flight.drafts - max(0, sampled) + state.sampled_beside_drafts
            if flight.drafts > tokens - state.sampled_beside_drafts:
                make_unknown(account, "a step had draft tokens without the token before them")
                continue
            tokens -= _reject(state, account, flight, rejected, accepted)
        if not life.delivered:
            if state.failed_blocks:
                note_unanswered(state, account, life)
            life.delivered = True
            if life.pending_end != life.pending_start:
                resolve(state, account, life)
        if flight.invalid_from >= 0 or life.ended_by:
            execute_invalid(account, flight, flight.start + tokens)
        else:
            execute(account, life, flight.start, flight.start + tokens)
        if sampled > 0 and accepted:
            if life.output_at < 0:
                life.output_at = state.at
                share(life, state.step_clock, state.at, life.step_tokens)
                life.own_at_output = life.own
            if life.number > 1:
                _compare_position(state, account, flight)
            if state.weights.stage:
                note_output(state.weights, account, flight)
            account.sequence_tokens += sampled
            if not account.settled:
                if account.first_token is None and not account.pooling:
                    account.first_token = first_token(account, state.at)
                    account.queued = account.waited_by_cause
                    account.prefill_parts = prefill_parts(account, account.first_token[PREFILL_PLACE])
                settle_if_attained(state, account)
            if sampled == tokens == 1 and not flight.drafts and is_steady(state, account):
                newly_steady.append(account)
    state.failed_blocks = []
    for account in newly_steady:
        make_steady(state, account)


def _compare_position(state: LedgerState, account: Account, flight: InFlight) -> None:
    """Make an entry if an output of a later life brings a token for a position that has one.

    Nothing is compared in a life that loads, which may begin elsewhere than its load ends, nor in a step with
    drafts, which may stand for tokens that have not come. Sessions, whose turns are cut, are not compared.
    """
    end = flight.start + flight.tokens
    known = not flight.drafts and not flight.life.external and flight.life.invalid_from < 0
    known = known and not (account.pooling or account.resumable)
    if known and end < account.sequence_tokens:
        subject = SampledTwice(end, account.sequence_tokens)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _reject(state: LedgerState, account: Account, flight: InFlight, rejected: int, accepted: bool) -> int:
    """Post rejected draft tokens; return how many."""
    account.drafted = True
    if accepted:
        count_drafts(state, flight, max(0, account.sampled - state.sampled_beside_drafts))
    if rejected <= 0:
        return 0
    account.rejected += rejected
    # Like the engine, which subtracts rejected drafts only from a count above zero.
    if flight.life is account.life and accepted and (flight.invalid_from < 0 or account.computed > 0):
        if flight.invalid_from >= 0:
            _reject_again(state, account, rejected)
        account.computed -= rejected
        flight.life.rejected += rejected
        add_line(state, account, "rejected drafts", debit=rejected)
    elif flight.life is not account.life and account.computed > 0:
        account.stale_drafts += rejected
    _begin_lower(account, flight, rejected)
    return rejected


def _begin_lower(account: Account, flight: InFlight, rejected: int) -> None:
    """The steps after ``flight``, of which drafts were rejected, begin as many positions lower."""
    for later in account.in_flight:
        # A step that was scheduled after a failed load starts at the count that the failure left.
        same_count = later.life is flight.life and (later.invalid_from < 0) == (flight.invalid_from < 0)
        # So does a step of a session's next turn, at the count that the stop left.
        same_count = same_count and later.overrun == flight.overrun
        if same_count and later.start > flight.start:
            later.start -= rejected


def _reject_past_stop(state: LedgerState, account: Account, flight: InFlight) -> None:
    """Output of a step past the stop of a session's turn was delivered, as vLLM before 0.22 does.

    The step is overrun, but the engine subtracts its rejected drafts from the count. If a step of the next
    turn has been scheduled at this count, the one after it computes as many tokens again.
    """
    if flight.drafts and account.sampled > 0 and flight.life is account.life:
        rejected = max(0, flight.drafts - account.sampled + state.sampled_beside_drafts)
        if account.in_flight and not account.in_flight[-1].overrun:
            _compute_again(account, account.computed, rejected, PAST_STOP)
        account.computed -= rejected
        add_line(state, account, "rejected drafts", debit=rejected)
        _begin_lower(account, flight, rejected)


def _take_past_output(state: LedgerState, account: Account, flight: InFlight) -> None:
    """Output of a step past the stop of a session's turn was delivered when the next turn had begun.

    The engine takes its tokens for those of the next turn.
    """
    end = flight.start + flight.tokens
    if (
        account.sampled > 0
        and account.life is not None
        and not flight.drafts
        and end < account.sequence_tokens
    ):
        subject = SampledTwice(end, account.sequence_tokens)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))
        account.sequence_tokens += account.sampled


def _reject_again(state: LedgerState, account: Account, rejected: int) -> None:
    """The engine subtracts drafts of a step before a failed load from the count, which no longer has them.

    So its next step computes as many tokens again, because of the failed load.
    """
    _compute_again(account, account.computed, rejected, LOAD_FAILED)
    subject = StaleRejection(account.computed, rejected)
    state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _subtract_stale_drafts(account: Account) -> None:
    """The engine has subtracted rejected drafts of the life before from the count, as 0.26 and earlier do."""
    step, rejected, account.stale_drafts = account.in_flight[-1], account.stale_drafts, 0
    _compute_again(account, step.start, rejected, account.lives[-2].ended_by)
    step.start -= rejected
    account.computed -= rejected


def _compute_again(account: Account, end: int, rejected: int, cause: str) -> None:
    """The next step begins ``rejected`` positions below ``end``, or lower if drafts are rejected."""
    drafts = sum(each.drafts for each in account.in_flight if each.invalid_from < 0)
    account.losses.add(max(0, end - rejected - drafts), end, cause)


def _repeated(state: LedgerState, event: ev.Repeated) -> None:
    """Post step by step until everything in flight is of this step, then the rest at once."""
    if state.lost_track is not None:
        return
    times = event.times
    nothing: frozenset[int] = frozenset()
    singly = min(times, len(state.undelivered) + state.skip_deliveries + 1)
    for _ in range(singly):
        _schedule(state)
        _deliver(state, nothing)
    state.posted_step += times
    state.step = max(state.step, state.posted_step)
    times -= singly
    if times:
        state.scheduled_steps += times
        state.delivered_steps += times
        for account, tokens, drafts in state.last_step.values():
            _repeat(state, account, tokens, drafts, times)


def _repeat(state: LedgerState, account: Account, tokens: int, drafts: int, times: int) -> None:
    """Post ``times`` unchanged steps and outputs of one request."""
    life = account.life
    if life is None:
        life = _begin_unseen_life(state, account, tokens * times)
    sampled = max(0, account.sampled)
    beside = state.sampled_beside_drafts
    rejected = max(0, drafts - sampled + beside) if drafts and (sampled or not beside) else 0
    advance = (tokens - rejected) * times
    start = account.in_flight[0].start if account.in_flight else account.computed
    for flight in account.in_flight:
        flight.start += advance
    account.computed += advance
    account.scheduled += tokens * times
    life.scheduled += tokens * times
    if drafts:
        account.drafted = True
    if rejected:
        account.rejected += rejected * times
        life.rejected += rejected * times
    account.sequence_tokens += sampled * times
    if account.lines is not None:
        add_line(state, account, f"scheduled, {times} unchanged steps", credit=tokens * times)
        if rejected:
            add_line(state, account, "rejected drafts", debit=rejected * times)
    execute(account, life, start, start + advance)


STEPS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.Stepped: _stepped,
    ev.Delivered: _delivered,
    ev.DeliveredWhole: _delivered_whole,
    ev.Repeated: _repeated,
    ev.DraftsCounted: drafts_counted,
}
"""Postings by event."""
