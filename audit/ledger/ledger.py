"""The ledger: events in, entries out.

:meth:`Ledger.apply` is the only way to post. It finds the posting function for an event in the tables of
``observation``, ``lives``, ``loads`` and ``steps``, and never raises on what a host may do: tokens that it
cannot place go to the account's ``suspense``, or make the account *unknown*. Checks judge, the ledger
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

from .. import events as ev
from ..causes import END_UNSEEN, NOT_HIT
from ..events import AnyEvent
from ..figures.totals import Totals
from .account import Account, AccountStatement
from .accounts import (
    activate_all,
    close_unseen,
    enter_subjects,
    make_unknown,
    open_accounts,
    posted,
    see_demand,
)
from .blocks.ledger import BlockLedger
from .blocks.reads import given_back_in_flight
from .content_postings import CONTENTS, CUSTODY, RECOMPUTED, compare_hashed, follow_waiting
from .encoder import ENCODER
from .engine_postings import OBSERVATION, forget
from .entries import Entry
from .ledger_state import LedgerState
from .lives import LIVES, LOADS, withdraw_hit
from .steps import STEPS
from .weights_postings import WEIGHTS, admitted, loaded, step_runs


def _block(state: LedgerState, event: ev.Event) -> None:
    """Post an event of blocks, and note which parts of a prompt had been in the cache before."""
    subjects = state.blocks.apply(event)
    if state.blocks.demand.waiting:
        see_demand(state)
    if state.blocks.hash_arrived:
        compare_hashed(state)
    enter_subjects(state, subjects, getattr(event, "step", state.step))
    if state.blocks.cached_before or state.blocks.cached_in_group:
        _cached_before(state)


def _cached_before(state: LedgerState) -> None:
    """Note which parts of a prompt the cache had before, once they are computed."""
    settings = state.engine.configuration if state.engine else {}
    gives_up = settings.get("drafter") or settings.get("replay_tokens")
    for request, cached in state.blocks.cached_before:
        account = state.living.get(request)
        # The later chunks of a session get no prefix-cache lookup.
        if account is None or account.resumable or cached.start >= account.prompt_tokens:
            continue
        if gives_up and cached.missed:  # blocks that a drafter needs, or a hit within the replayed window
            cached = cached._replace(missed=NOT_HIT)
        before = account.cached_before[-1:]
        if before and before[0].end == cached.start and before[0][2:] == cached[2:]:
            cached = cached._replace(start=account.cached_before.pop().start)
        account.cached_before.append(cached)
    for request, block in state.blocks.cached_in_group:
        account = state.living.get(request)
        if account is not None and not account.resumable and block.end <= account.prompt_tokens:
            account.cached_in_group.append(block)


POSTINGS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    **OBSERVATION,
    **LIVES,
    **LOADS,
    **STEPS,
    **WEIGHTS,
    **CONTENTS,
    **CUSTODY,
    **RECOMPUTED,
    **ENCODER,
    **dict.fromkeys(BlockLedger.EVENTS, _block),
}
"""The posting function of every event."""


def _follow_blocks(state: LedgerState, event: ev.Event) -> None:
    """Note what an event of requests says of blocks."""
    blocks = state.blocks
    if blocks.follows(event):
        enter_subjects(state, blocks.after(event), state.step)
        for request, start, end in blocks.invalid_hits:
            withdraw_hit(state, request, start, end)


def _follow_transfers(state: LedgerState, event: ev.Event) -> None:
    if state.custody.waiting:
        follow_waiting(state)


def _follow_runs(state: LedgerState, event: ev.Event) -> None:
    if state.weights.differing:
        step_runs(state)


def _count_prefixes(state: LedgerState, event: ev.HitsCompared) -> None:
    for name, blocks in (
        ("equal", event.equal),
        ("unknown", event.unknown),
        ("other", len(event.other) // 3),
    ):
        if blocks:
            state.sums.count_prefixes(name, blocks)


def _forget_sketches(state: LedgerState, event: ev.Event) -> None:
    state.sketches.forget()


def _note_promise(state: LedgerState, event: ev.Event) -> None:
    if state.contents.watches:
        state.contents.noted(event, sum(pool.blocks for pool in state.blocks.pools.values()))


def _weigh_hits(state: LedgerState, event: ev.Admitted) -> None:
    if state.weights.stage:
        admitted(state, event)


def _load_begins(state: LedgerState, event: ev.Admitted) -> None:
    """An asynchronous load begins: no step in flight may write its blocks."""
    known = state.steps_in_flight_known and not state.skip_deliveries
    if event.asynchronous and event.external_tokens > 0 and state.undelivered and known:
        state.blocks.findings = []
        given_back_in_flight(state.blocks, event.request, state.undelivered)
        enter_subjects(state, state.blocks.findings, state.step)


def _weigh_load(state: LedgerState, event: ev.LoadFinished) -> None:
    if state.weights.stage and event.request in state.living:
        loaded(state, state.living[event.request])


_FOLLOWING: dict[Callable[[LedgerState, Any], None], tuple[type[ev.Event], ...]] = {
    _follow_transfers: (ev.Stepped,),
    _follow_runs: (ev.Stepped, ev.Repeated),
    _forget_sketches: (ev.PoolReset,),
    _count_prefixes: (ev.HitsCompared,),
    _note_promise: (ev.Admitted, ev.BlocksPromised),
    _follow_blocks: tuple(kind for kind in get_args(ev.EmittedEvent) if kind not in BlockLedger.EVENTS),
    _weigh_hits: (ev.Admitted,),
    _load_begins: (ev.Admitted,),
    _weigh_load: (ev.LoadFinished,),
}
"""What other ledgers do after an event was posted, in this order."""


def _posting(kind: type[ev.Event], *, blocks: bool) -> tuple[Callable[[LedgerState, Any], None], ...]:
    """Everything that an event does, in order."""
    followers = [follow for follow, kinds in _FOLLOWING.items() if kind in kinds]
    return (*filter(None, [POSTINGS.get(kind)]), *(f for f in followers if blocks or f is not _follow_blocks))


_KINDS = (*get_args(AnyEvent), ev.PoolCalls)
OF_REQUESTS = {kind: _posting(kind, blocks=False) for kind in _KINDS}
"""What an event does as long as no pool is known."""

OF_ALL = {kind: _posting(kind, blocks=True) for kind in _KINDS}
"""What it does once one is."""


class Ledger(LedgerState, dict=True, eq=False):
    """Accounts of one engine, kept from its events in order.

    ``keep_closed`` keeps the accounts of ended requests; without it, memory grows with the open ones only.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks.requests = self

    def take_up(self, saved: LedgerState) -> None:
        """Go on from the state that another ledger had. What the caller decided of this one stays."""
        saved.keep_closed, saved.blocks.removed_kept = self.keep_closed, self.blocks.removed_kept
        for name in LedgerState.__struct_fields__:
            setattr(self, name, getattr(saved, name))
        self.blocks.weights, self.blocks.requests = self.weights, self

    def apply(self, event: ev.Event, number: int | None = None) -> list[Entry]:
        """Post one event and return the entries it made, in order."""
        self.number = self.number + 1 if number is None else number
        self.at = event.at
        self.entries = []
        for post in (OF_ALL if self.blocks.pools else OF_REQUESTS)[type(event)]:
            post(self, event)
        return self.entries

    def posted(self, request: int) -> Account | None:
        """The open account of a request, posted up to now."""
        return posted(self, request)

    def sequence_tokens(self, request: int) -> int:
        """Length of a request's sequence up to now; -1: not known. It posts nothing: blocks ask it often."""
        account = self.living.get(request)
        if account is None or account.unknown is not None:
            return -1
        deferred = self.delivered_steps - account.steady_delivered if account.steady_scheduled >= 0 else 0
        return account.sequence_tokens + deferred

    def scheduled(self, request: int) -> tuple[int, int] | None:
        """Tokens and drafts that the last step that was posted scheduled of a request; None if it did not."""
        row = self.last_step.get(request)
        if row is None:
            return (1, 0) if request in self.steady else None
        return row[1], row[2]

    @property
    def is_in_flight(self) -> bool:
        """Whether a step may be in flight."""
        return bool(self.undelivered or self.skip_deliveries or not self.steps_in_flight_known)

    # --- questions ------------------------------------------------------------------------------

    @property
    def open(self) -> dict[int, Account]:
        """The accounts of requests that have not ended, by number, posted up to now."""
        return open_accounts(self)

    def account(self, request_id: str) -> AccountStatement | None:
        """The account statement of a request, open or (if kept) closed; None if never seen."""
        for account in self.open.values():
            if account.request_id == request_id:
                return account.freeze()
        closed = self.closed.get(request_id)
        return closed.freeze() if closed else None

    def accounts(self) -> Iterator[Account]:
        """Closed (if kept), then open accounts."""
        yield from self.closed.values()
        yield from self.open.values()

    @property
    def read_to(self) -> float:
        """Unix time of the last event posted; 0 before the first."""
        return self.clock + self.at / 1e6 if self.engine else 0.0

    def totals(self) -> Totals:
        """Sums over the ended requests that count, and all open ones."""
        totals = self.sums.ended.copy()
        for account in self.open.values():
            totals.add(account)
        return totals

    # --- the end of an engine -------------------------------------------------------------------

    def doubt_open(self) -> None:
        """Make the open accounts of an engine that is gone unknown; no event shows their end."""
        for account in self.open.values():
            make_unknown(account, END_UNSEEN)

    def lose_open(self) -> None:
        """Close the open accounts of an engine that is gone; how their requests ended is not known."""
        for request in list(self.open):
            close_unseen(self, request)

    def forget_steps(self) -> None:
        """Drop the steps, and the ended requests in them, when no more will come."""
        activate_all(self)
        self.last_step = {}
        self.undelivered.clear()

    def abandon(self, reason: str) -> None:
        """Make every open account unknown until the next snapshot, because an event was posted in part.

        Steady accounts are not caught up: what is known of them may contradict itself.
        """
        for account in self.steady.values():
            account.steady_scheduled = account.steady_delivered = -1
        self.steady.clear()
        self.entries = []
        forget(self, reason)
