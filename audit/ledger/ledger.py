"""The only place that posts: events in, entries out.

``Ledger.apply`` never raises on a surprising host. What it cannot place goes to the account's
``suspense`` or makes the account *unknown*; checks (``invariants/``) judge, the ledger does not.

Work is counted when its output is delivered, because only then is it known what was rejected; until
then it is in flight. Scheduled = first prompt + first output + rework + rejected + overrun + in
flight, at any instant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from .. import causes
from .. import events as ev
from .account import COMPUTED, EXTERNAL, LOCAL, Account, InFlight, Life, Line, Settlement, Statement
from .blocks.ledger import BlockLedger
from .blocks.subjects import Finding, Subject
from .transfers import Transfers, Unkept


class ReportedCounts(msgspec.Struct, frozen=True, gc=False):
    """The engine's figures beside the ledger's, at one named instant.

    ``instant``: ``admitted``, ``scheduled``, ``rolled back``, ``loaded``, ``preempted``,
    ``census``, ``finished``. Figures the engine does not have are -1.
    """

    instant: str
    computed: int
    ledger_computed: int
    in_flight: int = -1
    ledger_in_flight: int = -1
    placeholders: int = -1
    sequence: int = -1
    ledger_sequence: int = -1


class Voided(NamedTuple):
    """Promised external tokens that will not come. ``blocks``: ids known to stay unfilled.

    ``by_worker``: what a worker did or did not, ``never_started`` or ``failure_unheard``; "" where the
    scheduler's side says it all.
    """

    tokens: int
    cause: str
    start: int
    blocks: list[int]
    by_worker: str = ""


class Overdue(NamedTuple):
    """Something that a connector has begun and not ended for ``OVERDUE_SECONDS``.

    ``what``: ``load`` (``tokens`` are still pending) or ``free`` (``blocks`` are still kept). ``done``:
    the workers reported it finished all the same.
    """

    what: str
    request_id: str
    seconds: int
    tokens: int
    blocks: int
    done: bool = False


class Unpromised(NamedTuple):
    """A worker loads blocks that nobody was promised: whatever they held is overwritten."""

    worker: int
    step: int
    blocks: list[int]


class Unsaved(NamedTuple):
    """A worker was handed orders to save, and was not made to wait for them before blocks may go."""

    worker: int
    step: int
    saves: int


class ReportedLookups(NamedTuple):
    """The engine's look-up statistics for one step beside what its admissions should give."""

    requests: int
    queries: int
    hits: int
    ledger_requests: int
    ledger_queries: int
    ledger_hits: int
    source: str


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What one event meant: its subject, and the account as it stood right after posting."""

    number: int
    step: int
    at: int
    subject: (
        ev.Event
        | ReportedCounts
        | Voided
        | Overdue
        | Unpromised
        | Unsaved
        | ReportedLookups
        | Settlement
        | Subject
    )
    account: Account | None


class Totals(msgspec.Struct):
    """Sums over accounts. Tokens, but for the three counts of requests."""

    requests: int = 0
    unknown_requests: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    local: int = 0
    external: int = 0
    computed: int = 0
    unattained: int = 0
    plan_requests: int = 0
    plan_local: int = 0
    plan_external: int = 0
    scheduled: int = 0
    first_prompt: int = 0
    first_output: int = 0
    rework: dict[str, int] = {}
    rejected: int = 0
    overrun: int = 0
    in_flight: int = 0
    hit_again: int = 0
    loaded_again: int = 0
    promised: int = 0
    loaded: int = 0
    voided: dict[str, int] = {}
    discarded: dict[str, int] = {}

    def add(self, account: Account) -> None:
        """Add an account; of an unknown one only that it is there."""
        self.requests += 1
        self.preemptions += account.preemptions
        if account.unknown is not None:
            self.unknown_requests += 1
            return
        for settlement in account.settlements:
            self.prompt_tokens += settlement.prompt_tokens - settlement.carried
            self.local += settlement.local
            self.external += settlement.external
            self.computed += settlement.computed
            self.unattained += settlement.unattained
        if account.plan is not None:
            self.plan_requests += 1
            self.plan_local += account.plan[0]
            self.plan_external += account.plan[1]
        self.scheduled += account.scheduled
        self.first_prompt += account.first_prompt
        self.first_output += account.first_output
        self.rejected += account.rejected
        self.overrun += account.overrun
        if account.in_flight:
            self.in_flight += sum(f.tokens for f in account.in_flight if not f.overrun)
        self.hit_again += account.hit_again
        self.loaded_again += account.loaded_again
        self.promised += account.promised
        self.loaded += account.loaded
        for sums, tokens in (
            (self.rework, account.rework),
            (self.voided, account.voided),
            (self.discarded, account.discarded),
        ):
            if tokens:
                _merge(sums, tokens)

    def merge(self, other: Totals) -> None:
        """Add another's sums."""
        for name in self.__struct_fields__:
            sum_, more = getattr(self, name), getattr(other, name)
            if isinstance(sum_, dict):
                _merge(sum_, more)
            else:
                setattr(self, name, sum_ + more)

    def copy(self) -> Totals:
        """An independent copy."""
        return msgspec.structs.replace(
            self,
            rework=dict(self.rework),
            voided=dict(self.voided),
            discarded=dict(self.discarded),
        )


OVERDUE_SECONDS = 600
"""Connectors give up a transfer by themselves before this; NIXL, by default, after 480."""

DONE_KEPT = 4096
"""So many requests are remembered of which workers reported a transfer finished."""

Row = tuple[Account, int, int]
"""One request's part of a step: account, scheduled tokens, drafts among them."""

Watch = Callable[[str], bool]


class Ledger:
    """Accounts of one engine, kept from its events in order.

    ``keep_closed`` keeps the accounts of ended requests (else memory is bounded by open ones).
    ``watch(request_id)`` says whose statement lines are kept.
    """

    def __init__(self, *, keep_closed: bool = False, watch: Watch | None = None) -> None:
        self.engine: ev.EngineStarted | None = None
        self.stopped: str | None = None
        self.closed: dict[str, Account] = {}
        self.blocks = BlockLedger()
        self.transfers = Transfers()
        self.gaps = 0
        self.hook_failures = 0
        self.number = -1
        self.step = 0
        self.at = 0
        self._keep_closed = keep_closed
        self._watch = watch
        self._totals = Totals()
        self._living: dict[int, Account] = {}
        self._steady: dict[int, Account] = {}
        self._scheduled_steps = 0
        self._delivered_steps = 0
        self._roster: dict[int, Row] = {}
        self._undelivered: deque[dict[int, Row]] = deque()
        self._skip_deliveries = 0
        self._order: list[int] = []
        self._delayed: dict[int, tuple[int, str, int]] = {}
        self._done: dict[str, None] = {}
        self._expected_local = [0, 0, 0]
        self._expected_external = [0, 0, 0]
        self._blind: str | None = None
        self._count_unsure = False
        self._reports = "first"
        self._sampled_beside_drafts = 1
        self._entries: list[Entry] = []
        self._posting: dict[type[ev.Event], Callable[..., None]] = {
            ev.EngineStarted: self._engine_started,
            ev.EngineStopped: self._engine_stopped,
            ev.Gap: self._gap,
            ev.HookFailed: self._hook_failed,
            ev.RequestAdded: self._request_added,
            ev.LookedUp: self._looked_up,
            ev.Matched: self._matched,
            ev.AdmissionFailed: self._admission_failed,
            ev.Admitted: self._admitted,
            ev.LookupsCounted: self._lookups_counted,
            ev.LoadPlanned: self._load_planned,
            ev.LoadFinished: self._load_finished,
            ev.LoadFailed: self._load_failed,
            ev.RolledBack: self._rolled_back,
            ev.Stepped: self._stepped,
            ev.Delivered: self._delivered,
            ev.DeliveredWhole: self._delivered_whole,
            ev.Repeated: self._repeated,
            ev.Reported: self._reported,
            ev.Preempted: self._preempted,
            ev.CacheReset: self._note,
            ev.Extended: self._extended,
            ev.Finished: self._finished,
            ev.Census: self._census,
            ev.Snapshot: self._snapshot,
            ev.LookupKept: self._note,
            ev.Tracked: self._note,
            ev.SavePlanned: self._save_planned,
            ev.FreeDelayed: self._free_delayed,
            ev.FreeCompleted: self._free_completed,
            ev.ChildMatched: self._note,
            ev.BlocksPromised: self._blocks_promised,
            ev.WorkerStepped: self._worker_stepped,
        }
        for kind in BlockLedger.EVENTS:
            self._posting[kind] = self._block

    def apply(self, event: ev.Event, number: int | None = None) -> list[Entry]:
        """Post one event; the entries it made, in order. Never raises on what a host may do."""
        self.number = self.number + 1 if number is None else number
        self.at = event.at
        self._entries = []
        post = self._posting.get(type(event))
        if post is not None:
            post(event)
        if self.blocks.pools and type(event) not in BlockLedger.EVENTS:
            self._enter_found(self.blocks.after(event, self.open), self.step)
        return self._entries

    # --- asking ---------------------------------------------------------------------------------

    @property
    def open(self) -> dict[int, Account]:
        """The accounts of requests that have not ended, by number, posted up to now."""
        for account in self._steady.values():
            self._catch_up(account)
        return self._living

    @property
    def named(self) -> dict[int, Account]:
        """As :attr:`open`, where only those that the last event named are sure to be posted up to now."""
        return self._living

    def account(self, request_id: str) -> Statement | None:
        """The frozen account of a request, open or (if kept) closed; None if never seen."""
        for account in self.open.values():
            if account.request_id == request_id:
                return account.freeze()
        account_ = self.closed.get(request_id)
        return account_.freeze() if account_ else None

    def accounts(self) -> Iterator[Account]:
        """Closed (if kept), then open accounts."""
        yield from self.closed.values()
        yield from self.open.values()

    @property
    def read_to(self) -> float:
        """When the last event posted happened, Unix time; 0 before the first."""
        started = self.engine
        return started.wall_seconds + (self.at - started.at) / 1e6 if started else 0.0

    @property
    def ended(self) -> Totals:
        """Sums over the accounts of ended requests, which only ever rise."""
        return self._totals

    def totals(self) -> Totals:
        """Sums over all accounts ever seen, open ones included."""
        totals = self._totals.copy()
        for account in self.open.values():
            totals.add(account)
        return totals

    # --- the engine -----------------------------------------------------------------------------

    def _engine_started(self, event: ev.EngineStarted) -> None:
        if self.engine is None:
            self.engine = event
            self._reports = str(event.configuration.get("figures"))
            beside = event.configuration.get("sampled_beside_drafts")
            self._sampled_beside_drafts = 0 if beside == 0 else 1  # 0: diffusion
        self._enter(event)

    def _engine_stopped(self, event: ev.EngineStopped) -> None:
        self.stopped = event.reason
        self._enter(event)

    def _gap(self, event: ev.Gap) -> None:
        self.gaps += 1
        self._forget(f"events were lost ({event.reason})")
        self._enter(event)

    def _hook_failed(self, event: ev.HookFailed) -> None:
        self.hook_failures += 1
        self._forget(f"the observer {event.hook} failed")
        self._enter(event)

    def _forget(self, reason: str) -> None:
        """From here on nothing is known of what runs, until a snapshot."""
        self._rouse_all()
        for account in self._living.values():
            _make_unknown(account, reason)
            account.in_flight.clear()
            account.in_flight_tokens = 0
        self._roster = {}
        self._undelivered.clear()
        self._order = []
        self._delayed = {}
        self._done = {}
        self._blind = reason
        self._count_unsure = True
        self.blocks.forget()
        self.transfers.forget()

    # --- coming and being looked up -----------------------------------------------------------------

    def _request_added(self, event: ev.RequestAdded) -> None:
        account = self._open(event.request, event.request_id, event.prompt_tokens)
        account.pooling = event.pooling
        account.resumable = event.resumable
        account.traceparent = event.traceparent
        account.transferred = event.transferred
        self._enter(event, account)

    def _looked_up(self, event: ev.LookedUp) -> None:
        account = self._account(event.request)
        account.looked_up_step = event.step
        account.looked_up_local = event.local_tokens
        account.matched_external = 0
        self.step = event.step
        self._enter(event, account)

    def _matched(self, event: ev.Matched) -> None:
        account = self._account(event.request)
        account.matched_external = event.external_tokens
        self._enter(event, account)

    def _admission_failed(self, event: ev.AdmissionFailed) -> None:
        account = self._account(event.request)
        account.looked_up_step = event.step
        account.looked_up_local = event.local_tokens
        self._enter(event, account)

    def _note(self, event: ev.Event) -> None:
        request = getattr(event, "request", None)
        self._enter(event, None if request is None else self._account(request))

    def _admitted(self, event: ev.Admitted) -> None:
        account = self._account(event.request)
        self.step = event.step
        if account.life is not None:
            _make_unknown(account, "a life began while another lasted")
            self._end_life(account, causes.LOST)
        life = self._begin_life(account, event.local_tokens, event.external_tokens)
        life.asynchronous = event.asynchronous
        self._hit(account, life)
        promised = event.external_tokens
        account.computed = event.local_tokens + promised
        if promised > 0:
            account.promised += promised
            self._line(account, "external tokens promised", credit=promised)
        elif promised < 0:
            # The engine took a negative match at its word: the count fell below the local hit.
            self._lose(account, account.computed, event.local_tokens, causes.NEGATIVE_MATCH)
        self._expect(account, event)
        self._enter(event, account)
        self._state(account, "admitted", event.computed_tokens)

    def _begin_life(self, account: Account, local: int, external: int) -> Life:
        life = Life(len(account.lives) + 1, local, external, asynchronous=False)
        life.began_at, life.began_step = self.at, self.step
        account.life = life
        account.lives.append(life)
        account.admissions += 1
        return life

    def _hit(self, account: Account, life: Life) -> None:
        gaps = account.spans.fill(0, life.local, LOCAL, life.number)
        again = max(0, life.local) - sum(end - start for start, end in gaps)
        account.hit_again += again
        account.computed = life.local
        note = f"local hit (repeat hit: {again})" if again else "local hit"
        self._line(account, note if life.local else "admitted, no local hit", credit=life.local)

    def _expect(self, account: Account, event: ev.Admitted) -> None:
        if account.unknown is not None:
            self._count_unsure = True
        local, external = self._expected_local, self._expected_external
        if event.counted:
            local[0] += 1
            local[1] += account.sequence_tokens
            local[2] += event.local_tokens
        queries = account.sequence_tokens - event.local_tokens
        if queries:
            external[0] += 1
            external[1] += queries
            external[2] += event.external_tokens

    def _lookups_counted(self, event: ev.LookupsCounted) -> None:
        said = (
            ("local", event.local_requests, event.local_queries, event.local_hits),
            ("external", event.external_requests, event.external_queries, event.external_hits),
        )
        expected = {"local": self._expected_local, "external": self._expected_external}
        for source, requests, queries, hits in said:
            if requests >= 0 and not self._count_unsure:
                own = expected[source]
                subject = ReportedLookups(requests, queries, hits, own[0], own[1], own[2], source)
                self._entries.append(Entry(self.number, event.step, self.at, subject, None))
        self._expected_local = [0, 0, 0]
        self._expected_external = [0, 0, 0]
        self._count_unsure = self._blind is not None

    # --- external tokens --------------------------------------------------------------------------

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        account = self._account(event.request)
        life = account.life
        if life is not None and life.pending:
            covered = min(life.pending_start + max(0, event.tokens), life.pending_end)
            if covered < life.pending_end:
                life.missing_blocks = event.missing_blocks
                self._void(account, life, covered, life.pending_end, causes.NOT_PLANNED)
                life.pending_end = covered
        self._enter(event, account)

    def _load_finished(self, event: ev.LoadFinished) -> None:
        account = self._find(event.request)
        if account is None:
            self._enter(event)  # It had ended: a late completion is of blocks only.
            return
        life = account.life
        waited = life is not None and life.pending and not life.ran
        if life is not None and life.asynchronous and not life.ran:
            life.load_ended_at = self.at
        if life is not None and life.pending:
            self._load(account, life, event.computed_tokens, causes.FAILED)
            self._unload(self.transfers.resolved(event.request))
        self._enter(event, account)
        if waited:
            self._state(account, "loaded", event.computed_tokens)

    def _load_failed(self, event: ev.LoadFailed) -> None:
        account = self._account(event.request)
        self._state(account, "load failed", event.before_tokens)
        life, valid = account.life, event.computed_tokens
        if life is not None:
            if life.asynchronous and not life.ran:
                life.load_ended_at = self.at
            if life.pending_end > valid:
                kept = max(life.pending_start, valid)
                self._void(account, life, kept, life.pending_end, causes.FAILED)
                life.pending_end = kept
            account.spans.revoke(valid, life.number)
            life.invalid_from = valid if life.invalid_from < 0 else min(valid, life.invalid_from)
            promise_end = life.local + max(0, life.external)
            self._lose(account, valid, account.computed, causes.LOAD_FAILED, promise_end)
            for flight in account.in_flight:
                if flight.life is life and flight.invalid_from < 0:
                    flight.invalid_from = valid
        self._enter(event, account)

    def _save_planned(self, event: ev.SavePlanned) -> None:
        account = self._account(event.request)
        account.saved_tokens = max(account.saved_tokens, event.end)
        self._line(account, f"save ordered for positions {event.start} to {event.end}")
        self._enter(event, account)

    def _free_delayed(self, event: ev.FreeDelayed) -> None:
        self._delayed[event.request] = (self.at, event.request_id, event.blocks)
        self._enter(event)

    def _free_completed(self, event: ev.FreeCompleted) -> None:
        kept = self._delayed.pop(event.request, None)
        if kept is not None:
            self._done.pop(kept[1], None)
        self._enter(event)

    def _overdue(self) -> None:
        """Loads and kept blocks that a connector should have been done with."""
        limit = self.at - OVERDUE_SECONDS * 1_000_000
        for account in self.open.values():
            life = account.life
            if life is not None and life.pending and not life.ran and life.began_at <= limit:
                seconds = (self.at - life.began_at) // 1_000_000
                done = account.request_id in self._done
                subject = Overdue("load", account.request_id, seconds, life.pending, 0, done)
                self._entries.append(Entry(self.number, self.step, self.at, subject, account))
        for since, request_id, blocks in self._delayed.values():
            if since <= limit:
                seconds = (self.at - since) // 1_000_000
                subject = Overdue("free", request_id, seconds, 0, blocks, request_id in self._done)
                self._entries.append(Entry(self.number, self.step, self.at, subject, None))

    def _blocks_promised(self, event: ev.BlocksPromised) -> None:
        account = self._account(event.request)
        self.transfers.promised(event, account)
        self._enter(event, account)

    def _worker_stepped(self, event: ev.WorkerStepped) -> None:
        anew = event.step > self.transfers.steps.get(event.worker, -1)
        self._unload(self.transfers.worked(event))
        if anew:
            self._work_compared(event)
        self._enter(event)

    def _work_compared(self, event: ev.WorkerStepped) -> None:
        """What a worker did and nobody ordered, or the other way round."""
        self._done.update(dict.fromkeys((*event.received, *event.sent)))
        while len(self._done) > DONE_KEPT:
            del self._done[next(iter(self._done))]
        midst = any(account.unknown is not None for account in self._living.values())
        blocks = [] if midst or not self._promises_seen() else self.transfers.unpromised(event)
        subjects: list[Unpromised | Unsaved] = []
        if blocks:
            subjects.append(Unpromised(event.worker, event.step, blocks))
        if event.saves > 0 and not event.saved:
            subjects.append(Unsaved(event.worker, event.step, event.saves))
        for subject in subjects:
            self._entries.append(Entry(self.number, event.step, self.at, subject, None))

    def _promises_seen(self) -> bool:
        """Whether this engine's promises are all told by block, in the step that makes them."""
        said = self.engine.configuration if self.engine is not None else {}
        return said.get("groups") == 1 and not said.get("deferred_loads", True)

    def _unload(self, found: Iterator[Unkept]) -> None:
        """Of a promise what a worker knows not to have come, also where the engine took it for loaded."""
        for account, life, start, by_worker, blocks in found:
            self._find(account.request)
            end = life.pending_end
            if life.pending:
                life.pending_end = start = max(start, life.pending_start)
            else:
                end = life.local + life.loaded
                withdrawn = account.spans.withdraw(start, end, life.number)
                account.loaded_again -= end - start - withdrawn
                account.loaded -= end - start
                life.loaded -= end - start
            life.missing_blocks = blocks
            if start < end:
                self._void(account, life, start, end, causes.NEVER_LOADED, by_worker)

    def _load(self, account: Account, life: Life, upto: int, cause: str) -> None:
        """Resolve a promise: loaded below position ``upto``, void for ``cause`` above."""
        start, end = life.pending_start, life.pending_end
        life.pending_start = life.pending_end
        upto = min(max(upto, start), end)
        gaps = account.spans.fill(start, upto, EXTERNAL, life.number)
        again = upto - start - sum(high - low for low, high in gaps)
        account.loaded_again += again
        account.loaded += upto - start
        life.loaded += upto - start
        if upto > start:
            note = f"loaded {upto - start} external tokens"
            self._line(account, f"{note} (repeat load: {again})" if again else note)
        if upto < end:
            self._void(account, life, upto, end, cause)

    def _void(
        self, account: Account, life: Life, start: int, end: int, cause: str, by_worker: str = ""
    ) -> None:
        tokens = end - start
        life.voids.append((start, end, cause))
        _add(life.voided, cause, tokens)
        _add(account.voided, cause, tokens)
        self._line(account, f"{tokens} external tokens failed or cancelled: {causes.external_loss(cause)}")
        blocks = life.missing_blocks if by_worker or cause == causes.NOT_PLANNED else []
        subject = Voided(tokens, cause, start, blocks, by_worker)
        self._entries.append(Entry(self.number, self.step, self.at, subject, account))

    def _rolled_back(self, event: ev.RolledBack) -> None:
        account = self._account(event.request)
        self._state(account, "rolled back", event.before_tokens)
        if event.cause == causes.SESSION:
            for flight in account.in_flight:
                if not flight.overrun:
                    flight.overrun = True
                    account.overrun += flight.tokens
        if event.cause in (causes.SESSION, causes.PAST_STOP):
            self._past_the_end(account, event.computed_tokens)
        if event.cause == causes.RELEASED:
            self._end_life(account, causes.LOAD_FAILED)
        else:
            self._lose(account, event.computed_tokens, account.computed, event.cause)
        self._enter(event, account)

    def _lose(self, account: Account, start: int, end: int, cause: str, alive_from: int = 0) -> None:
        """The life's count falls from ``end`` to ``start``; below ``alive_from`` no KV was lost."""
        tokens = end - start
        if tokens <= 0:
            return
        account.losses.add(max(start, alive_from), _delivered_end(account, end), cause)
        account.computed = start
        if account.life is not None:
            _add(account.life.rolled_back, cause, tokens)
        self._line(account, f"rolled back: {causes.loss(cause)}", debit=tokens)

    # --- steps and output: the hot loop -----------------------------------------------------------

    def _stepped(self, event: ev.Stepped) -> None:
        self.step = event.step
        if self._blind is not None:
            return  # what it differs from was lost
        changed = event.changed
        if changed or event.dropped:
            for request in event.dropped:
                self._find(request)
            rows = [
                (changed[i], (self._account(changed[i]), changed[i + 1], changed[i + 2]))
                for i in range(0, len(changed), 4)
            ]
            roster = dict(self._roster)
            for request in event.dropped:
                roster.pop(request, None)
            roster.update(rows)
            self._roster = roster
        self._schedule()
        for i in range(0, len(changed), 4):
            account = self._living[changed[i]]
            if account.unknown is None:
                self._state(account, "scheduled", changed[i + 3])

    def _schedule(self) -> None:
        roster = self._roster
        self._undelivered.append(roster)
        self._scheduled_steps += 1
        for account, tokens, drafts in roster.values():
            life = account.life
            if life is None:
                life = self._adopt(account, tokens)
            start = account.computed
            account.in_flight.append(InFlight(start, tokens, drafts, life))
            account.computed = start + tokens
            account.in_flight_tokens += tokens
            account.scheduled += tokens
            life.scheduled += tokens
            if not life.ran:
                life.ran = True
                if account.plan is None:
                    account.plan = (life.local, life.external)
                if account.reporting is None or (self._reports == "last" and not account.settled):
                    account.reporting = life
            if account.lines is not None:
                note = f"scheduled (draft tokens: {drafts})" if drafts else "scheduled"
                self._line(account, note, credit=tokens)

    def _adopt(self, account: Account, tokens: int) -> Life:
        """A step runs a request that has no life: nobody saw it admitted."""
        if account.unknown is None:
            account.suspense += tokens
            _make_unknown(account, "it ran without having been admitted")
        return self._begin_life(account, 0, 0)

    def _delivered(self, event: ev.Delivered) -> None:
        if self._blind is not None:
            return
        changed = event.changed
        for i in range(0, len(changed), 2):
            account = self._find(changed[i])
            if account is not None:
                account.sampled = changed[i + 1]
        for request in event.ignored:
            self._find(request)
        self._deliver(frozenset(event.ignored) if event.ignored else frozenset())

    def _delivered_whole(self, event: ev.DeliveredWhole) -> None:
        if self._blind is not None:
            return
        if event.requests:
            self._order = event.requests
        living = self._living
        for request, sampled in zip(self._order, event.sampled, strict=False):
            account = living.get(request)
            if account is not None and account.sampled != sampled:
                if account.steady_scheduled >= 0:
                    self._rouse(account)
                account.sampled = sampled
        self._deliver(frozenset())

    def _deliver(self, ignored: frozenset[int]) -> None:
        if self._skip_deliveries:
            self._skip_deliveries -= 1
            return
        if not self._undelivered:
            return
        self._delivered_steps += 1
        calm: list[Account] = []
        for request, (account, _, _) in self._undelivered.popleft().items():
            if account.steady_scheduled >= 0 or not account.in_flight:
                continue
            flight = account.in_flight.popleft()
            tokens = flight.tokens
            account.in_flight_tokens -= tokens
            if account.closed_at >= 0 or flight.overrun:
                continue
            life = flight.life
            sampled = account.sampled
            heard = request not in ignored if ignored else True
            if flight.drafts and (sampled > 0 or not self._sampled_beside_drafts):
                rejected = flight.drafts - max(0, sampled) + self._sampled_beside_drafts
                tokens -= self._reject(account, flight, rejected, heard)
            if not life.delivered:
                life.delivered = True
                if life.pending:
                    self._resolve(account, life)
            if flight.invalid_from >= 0 or life.ended_by:
                self._execute_in_vain(account, flight, tokens)
            else:
                self._execute(account, life, flight.start, flight.start + tokens)
            if sampled > 0 and heard:
                account.sequence_tokens += sampled
                if not account.settled:
                    self._settle(account)
                if sampled == tokens == 1 and not flight.drafts and self._is_steady(account):
                    calm.append(account)
        for account in calm:
            self._calm(account)

    def _reject(self, account: Account, flight: InFlight, rejected: int, heard: bool) -> int:
        account.drafted = True
        if rejected <= 0:
            return 0
        account.rejected += rejected
        if flight.life is account.life and heard:
            account.computed -= rejected
            flight.life.rejected += rejected
            self._line(account, "rejected drafts", debit=rejected)
        for later in account.in_flight:
            if later.life is flight.life and later.start > flight.start:
                later.start -= rejected
        return rejected

    def _resolve(self, account: Account, life: Life) -> None:
        """The first step of a life that reads promised tokens has run."""
        if life.asynchronous:
            self._load(account, life, 0, causes.NEVER_LOADED)
        else:
            self._load(account, life, life.pending_end, causes.FAILED)
            self._unload(self.transfers.resolved(account.request))

    # --- steady decode: posted when somebody asks ---------------------------------------------------
    #
    # A request that only decodes, a token a step, moves every balance by one, and most requests of
    # most steps do. Such an account is steady: steps and outputs are counted once for all of them,
    # and the account is posted when an event names it or somebody reads it.

    def _is_steady(self, account: Account) -> bool:
        """Whether each further step and output, as long as nothing names it, adds one token."""
        life, row = account.life, self._roster.get(account.request)
        if life is None or row is None or row[1] != 1 or row[2] or account.lines is not None:
            return False
        flights, rows = account.in_flight, account.spans.rows
        if len(flights) != len(self._undelivered) or not rows or life.pending:
            return False
        at = rows[-1].end
        for place, flight in enumerate(flights):
            plain = flight.life is life and flight.tokens == 1 and not flight.drafts
            if not plain or flight.overrun or flight.invalid_from >= 0 or flight.start != at + place:
                return False
        last = rows[-1]
        return (
            at >= account.prompt_tokens
            and last.source is COMPUTED
            and last.life == life.number
            and account.computed == at + len(flights)
        )

    def _calm(self, account: Account) -> None:
        account.steady_scheduled = self._scheduled_steps
        account.steady_delivered = self._delivered_steps
        self._steady[account.request] = account
        del self._roster[account.request]

    def _rouse(self, account: Account) -> None:
        """By hand from here on, also in the steps that are in flight."""
        self._catch_up(account)
        account.steady_scheduled = account.steady_delivered = -1
        request = account.request
        del self._steady[request]
        row: Row = (account, 1, 0)
        self._roster[request] = row
        for roster in self._undelivered:
            roster[request] = row

    def _rouse_all(self) -> None:
        for account in list(self._steady.values()):
            self._rouse(account)

    def _catch_up(self, account: Account) -> None:
        """Post the steps and outputs that there were since."""
        scheduled = self._scheduled_steps - account.steady_scheduled
        delivered = self._delivered_steps - account.steady_delivered
        if not (scheduled or delivered):
            return
        account.steady_scheduled, account.steady_delivered = self._scheduled_steps, self._delivered_steps
        life, flights = account.life, account.in_flight
        assert life is not None
        account.computed += scheduled
        account.scheduled += scheduled
        life.scheduled += scheduled
        account.in_flight_tokens += scheduled - delivered
        account.sequence_tokens += delivered
        account.first_output += delivered
        account.spans.rows[-1].end += delivered
        depth = len(flights) + scheduled - delivered
        while len(flights) > depth:
            flights.pop()
        while len(flights) < depth:
            flights.append(InFlight(0, 1, 0, life))
        for start, flight in enumerate(flights, account.computed - depth):
            flight.start = start

    def _execute_in_vain(self, account: Account, flight: InFlight, tokens: int) -> None:
        """Executed after its life was over, or above a load that failed: at once lost again."""
        life, start, end = flight.life, flight.start, flight.start + tokens
        self._execute(account, life, start, end)
        if flight.invalid_from >= 0:
            account.spans.revoke(max(start, flight.invalid_from), life.number)
            account.losses.add(max(start, flight.invalid_from), end, causes.LOAD_FAILED)
        else:
            account.losses.add(start, end, life.ended_by)

    def _execute(self, account: Account, life: Life, start: int, end: int) -> None:
        """Positions [start, end) were executed."""
        prompt = account.prompt_tokens
        rows = account.spans.rows
        if rows and start >= prompt:
            last = rows[-1]
            if last.end == start and last.source is COMPUTED and last.life == life.number:
                last.end = end
                account.first_output += end - start
                return
        gaps = account.spans.fill(start, end, COMPUTED, life.number)
        new = 0
        for low, high in gaps:
            new += high - low
            in_prompt = max(0, min(high, prompt) - low)
            account.first_prompt += in_prompt
            account.first_output += high - low - in_prompt
            if in_prompt:
                account.executed_first.append((low, low + in_prompt, life.number))
        if new < end - start:
            again = _without(start, end, gaps)
            for low, high, cause in account.losses.split(again):
                _add(account.rework, cause, high - low)
                if cause == causes.UNKNOWN:
                    account.suspense += high - low
                if low < prompt:
                    account.executed_again.append((low, min(high, prompt), cause))

    def _settle(self, account: Account) -> None:
        tally = account.spans.tally(account.carried, account.prompt_tokens)
        settlement = Settlement(
            prompt_tokens=account.prompt_tokens,
            carried=account.carried,
            local=tally[LOCAL],
            external=tally[EXTERNAL],
            computed=tally[COMPUTED],
            unattained=tally["unattained"],
            at=self.at,
            step=self.step,
        )
        account.settled = True
        account.settlements.append(settlement)
        self._entries.append(Entry(self.number, self.step, self.at, settlement, account))
        if account.lines is not None:
            figures = ", ".join(f"{n} {source}" for source, n in tally.items() if n)
            self._line(account, f"prompt settled: {figures}")

    def _repeated(self, event: ev.Repeated) -> None:
        """The first few by hand, until all that is in flight is of this step; the rest at once."""
        if self._blind is not None:
            return
        times = event.times
        nothing: frozenset[int] = frozenset()
        by_hand = times if self._skip_deliveries else min(times, len(self._undelivered) + 1)
        for _ in range(by_hand):
            self._schedule()
            self._deliver(nothing)
        self.step += times
        times -= by_hand
        if times:
            self._scheduled_steps += times
            self._delivered_steps += times
            for account, tokens, drafts in self._roster.values():
                self._repeat(account, tokens, drafts, times)

    def _repeat(self, account: Account, tokens: int, drafts: int, times: int) -> None:
        life = account.life
        if life is None:
            life = self._adopt(account, tokens * times)
        sampled = max(0, account.sampled)
        beside = self._sampled_beside_drafts
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
            self._line(account, f"scheduled, {times} unchanged steps", credit=tokens * times)
            if rejected:
                self._line(account, "rejected drafts", debit=rejected * times)
        self._execute(account, life, start, start + advance)

    def _reported(self, event: ev.Reported) -> None:
        account = self._account(event.request)
        account.reports += 1
        if self._reports == "mixed":
            account.reporting = _life_reported(account, event)
        if account.reported is None:
            account.reported = (event.local_tokens, event.external_tokens, event.computed_tokens)
        if account.lines is not None:
            told = f"{event.local_tokens} local, {event.external_tokens} external"
            self._line(account, f"reported: {told}, {event.computed_tokens} computed")
        self._enter(event, account)

    # --- preemption, sessions, the end ----------------------------------------------------------------

    def _preempted(self, event: ev.Preempted) -> None:
        account = self._account(event.request)
        self.step = event.step
        self._state(
            account,
            "preempted",
            event.before_tokens,
            event.in_flight_tokens,
            event.placeholder_tokens,
        )
        account.preemptions += 1
        self._end_life(account, event.cause)
        self._enter(event, account)

    def _end_life(self, account: Account, cause: str) -> None:
        life = account.life
        if life is None:
            return
        if life.pending and life.ran and not life.asynchronous and cause in causes.PREEMPTIONS:
            # The step in flight loads it all the same; the engine will hear of no failure now.
            self._load(account, life, life.pending_end, causes.FAILED)
        if life.pending:
            lost_by = causes.EXTERNAL_LOSS_AT_END[cause]
            self._void(account, life, life.pending_start, life.pending_end, lost_by)
            life.pending_start = life.pending_end
        life.discarded = account.computed
        life.ended_at, life.ended_by = self.at, cause
        if account.computed:
            _add(account.discarded, cause, account.computed)
            account.losses.add(0, _delivered_end(account, account.computed), cause)
        tokens, account.computed, account.life = account.computed, 0, None
        self._line(account, f"discarded: {causes.loss(cause)}", debit=tokens, life=life.number)

    def _extended(self, event: ev.Extended) -> None:
        account = self._account(event.request)
        self._state(account, "extended", event.computed_tokens)
        account.spans.truncate(event.computed_tokens)
        account.carried = event.computed_tokens
        account.prompt_tokens = account.sequence_tokens = event.prompt_tokens
        account.settled = False
        account.reports = 0
        self._line(account, f"prompt extended to {event.prompt_tokens} tokens")
        self._enter(event, account)

    def _finished(self, event: ev.Finished) -> None:
        account = self._account(event.request)
        self._state(
            account,
            "finished",
            event.computed_tokens,
            event.in_flight_tokens,
            event.placeholder_tokens,
            event.sequence_tokens,
        )
        account.outcome = event.reason
        account.closed_at = self.at
        if event.sequence_tokens >= 0:
            self._past_the_end(account, event.sequence_tokens)
        for flight in account.in_flight:
            if not flight.overrun:
                flight.overrun = True
                account.overrun += flight.tokens
        self._end_life(account, causes.FINISHED)
        if not account.settled:
            self._settle(account)
        self._enter(event, account)
        self._close(event.request, account)

    def _past_the_end(self, account: Account, end: int) -> None:
        """Drafts accepted beyond a stop were executed past the end of the sequence: overrun."""
        beyond = min(account.spans.end - max(end, account.prompt_tokens), account.first_output)
        if beyond > 0:
            account.first_output -= beyond
            account.overrun += beyond
            account.spans.truncate(account.spans.end - beyond)

    def _close(self, request: int, account: Account) -> None:
        self._living.pop(request, None)
        self.transfers.closed(request)
        self._totals.add(account)
        if self._keep_closed:
            self.closed[account.request_id] = account

    # --- statements at rest ---------------------------------------------------------------------------

    def _census(self, event: ev.Census) -> None:
        self.step = event.step
        rows = event.rows
        for i in range(0, len(rows), 5):
            account = self._living.get(rows[i])
            if account is not None:
                if account.steady_scheduled >= 0:
                    self._catch_up(account)
                self._state(account, "census", *rows[i + 1 : i + 5])
        self._overdue()
        self._enter(event)

    def _snapshot(self, event: ev.Snapshot) -> None:
        """A reader that came along checks it as a census; one that begins here starts from it."""
        self.step = event.step
        self._rouse_all()
        begins_here = self._blind is not None or not (self._undelivered or self._roster)
        self._roster = {}
        self._order = []
        self._blind = None
        if begins_here:
            self._skip_deliveries = event.undelivered_steps
        named = set()
        for row in event.rows:
            named.add(row.request)
            account = self._living.get(row.request)
            if account is None:
                account = self._open(row.request, row.request_id, row.prompt_tokens)
                account.transferred = row.transferred
                if not row.fresh:
                    _make_unknown(account, "the trace begins in its midst")
                    account.preemptions = row.preemptions
            if account.unknown is not None and not row.fresh:
                self._restate(account, row)
            else:
                self._state(
                    account,
                    "census",
                    row.computed_tokens,
                    row.in_flight_tokens,
                    row.placeholder_tokens,
                    row.sequence_tokens,
                )
        for request in [r for r in self._living if r not in named]:
            self._vanish(request)
        self._enter(event)

    def _restate(self, account: Account, row: ev.SnapshotRow) -> None:
        if account.life is None and row.computed_tokens:
            self._begin_life(account, 0, 0)
        account.computed = max(0, row.computed_tokens)
        account.sequence_tokens = row.sequence_tokens
        account.settled = account.settled or row.sequence_tokens > account.prompt_tokens

    def _vanish(self, request: int) -> None:
        """It ended where nobody saw it."""
        account = self._account(request)
        _make_unknown(account, "its end was not seen")
        account.outcome = causes.UNKNOWN
        account.closed_at = self.at
        self._close(request, account)

    def lose_open(self) -> None:
        """The engine is gone, and nobody saw how those that are open ended."""
        for request in list(self.open):
            self._vanish(request)

    def forget_steps(self) -> None:
        """Let go of the steps, and of the ended requests in them: there will be no more."""
        self._rouse_all()
        self._roster = {}
        self._undelivered.clear()

    def absorb(self, other: Ledger) -> None:
        """Add what another ledger counted and closed. The earlier engine stands."""
        if other.engine is not None:
            read_to = max(self.read_to, other.read_to)
            if self.engine is None or other.engine.wall_seconds < self.engine.wall_seconds:
                self.engine = other.engine
            self.at = self.engine.at + round((read_to - self.engine.wall_seconds) * 1e6)
        self.stopped = other.stopped
        self.gaps += other.gaps
        self.hook_failures += other.hook_failures
        self._totals.merge(other._totals)

    # --- blocks --------------------------------------------------------------------------------------

    def _block(self, event: ev.Event) -> None:
        self._enter_found(self.blocks.apply(event, self.open), getattr(event, "step", self.step))
        for request, lost in self.blocks.lost:
            account = self._living.get(request)
            # Of a session nobody looks up the later chunks.
            if account is not None and not account.resumable and lost.start < account.prompt_tokens:
                account.lost.append(lost)

    def _enter_found(self, found: list[Finding], step: int) -> None:
        for subject, request in found:
            self._entries.append(Entry(self.number, step, self.at, subject, self.open.get(request)))

    # --- helpers -------------------------------------------------------------------------------------

    def _open(self, request: int, request_id: str, prompt_tokens: int) -> Account:
        if request in self._living:
            self._vanish(request)
        account = Account(request, request_id, prompt_tokens, self.at)
        if self._watch is not None and self._watch(request_id):
            account.lines = []
        if self._blind is not None:
            _make_unknown(account, self._blind)
        self._living[request] = account
        return account

    def _find(self, request: int) -> Account | None:
        """The open account of a request, posted up to now and by hand from here on."""
        account = self._living.get(request)
        if account is not None and account.steady_scheduled >= 0:
            self._rouse(account)
        return account

    def _account(self, request: int) -> Account:
        account = self._living.get(request)
        if account is not None:
            if account.steady_scheduled >= 0:
                self._rouse(account)
        else:
            account = self._open(request, f"#{request}", 0)
            _make_unknown(account, "its arrival was not seen")
        return account

    def _enter(self, event: ev.Event, account: Account | None = None) -> None:
        self._entries.append(Entry(self.number, self.step, self.at, event, account))

    def _state(
        self,
        account: Account,
        instant: str,
        computed: int,
        in_flight: int = -1,
        placeholders: int = -1,
        sequence: int = -1,
    ) -> None:
        if account.unknown is None and computed != -1:
            subject = ReportedCounts(
                instant,
                computed,
                account.computed,
                in_flight,
                account.in_flight_tokens,
                placeholders,
                sequence,
                account.sequence_tokens,
            )
            self._entries.append(Entry(self.number, self.step, self.at, subject, account))

    def _line(self, account: Account, text: str, credit: int = 0, debit: int = 0, life: int = 0) -> None:
        if account.lines is not None:
            number = life or (account.life.number if account.life else len(account.lives))
            account.lines.append(
                Line(
                    self.number,
                    self.at,
                    self.step,
                    number,
                    text,
                    credit,
                    debit,
                    account.computed,
                )
            )


def _life_reported(account: Account, event: ev.Reported) -> Life | None:
    """The life whose hits these are, less what failed to load; else the first that ran."""
    executed_again = event.cached_tokens + 1 == event.prompt_tokens
    for life in account.lives:
        external = life.external - life.voided.get(causes.FAILED, 0)
        surplus = event.local_tokens - life.local
        if event.external_tokens == external and (surplus == 0 or (executed_again and surplus == 1)):
            return life
    return account.reporting


def _delivered_end(account: Account, end: int) -> int:
    """``end``, less what is still in flight in the present life: that KV has not come to be."""
    for flight in account.in_flight:
        if flight.life is account.life and flight.invalid_from < 0:
            return min(flight.start, end)
    return end


def _make_unknown(account: Account, reason: str) -> None:
    if account.unknown is None:
        account.unknown = reason


def _add(table: dict[str, int], key: str, tokens: int) -> None:
    table[key] = table.get(key, 0) + tokens


def _merge(into: dict[str, int], table: dict[str, int]) -> None:
    for key, tokens in table.items():
        _add(into, key, tokens)


def _without(start: int, end: int, gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of [start, end) is in none of ``gaps`` (sorted, disjoint)."""
    pieces = []
    for low, high in gaps:
        if start < low:
            pieces.append((start, low))
        start = high
    if start < end:
        pieces.append((start, end))
    return pieces
