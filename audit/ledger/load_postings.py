"""Postings of external tokens: promised, loaded, failed or cancelled; of saves and of delayed frees.

What workers did with promised blocks is kept in ``transfers.py``; this file posts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import causes
from .. import events as ev
from ..bounded_tables import keep_newest
from ..figures.sums import add_tokens
from .account import EXTERNAL, Account, Life
from .accounts import (
    account_of,
    add_line,
    enter,
    enter_computed,
    enter_subjects,
    find_account,
    open_accounts,
    roll_back,
)
from .entries import Entry, ExternalTokensLost, FailedBlocksKept, Handover, Overdue, Unpromised, Unsaved
from .ledger_state import LedgerState
from .transfers import UnkeptPromise
from .work import load_failed

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
