"""The reference: what every request's account must say, kept position by position from a tape.

This file shares nothing with ``kvledger.audit.ledger``. What a figure counts is in :mod:`tests.positions`;
here is when it happens, by what the scheduler's methods were given and returned. Steps run on the device in
the order in which they were scheduled, so a hit of a later admission comes after the execution of an earlier
step, although the output of that step may be delivered later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.differential import release_rules, tape
from tests.differential.tape import Fact, State
from tests.positions import Account, Life, Work

WAITS_FOR_LOAD = "WAITING_FOR_REMOTE_KVS"


@dataclass
class Hit:
    """The local hit of an admission, which comes after the steps that are in flight at the admission."""

    life: Life
    valid: int = 1 << 62
    """A load failed before the hit is posted: it gives no position from this one up valid KV."""


@dataclass
class Load:
    """The end of an asynchronous load: the positions that were loaded."""

    life: Life
    positions: list[int]


@dataclass
class OracleAccount(Account):
    """The figures of one request."""

    resumable: bool = False
    ran: Life | None = None
    """The last life that was scheduled."""
    hits: int = 0
    """Computed tokens before the first step."""
    failed: Life | None = None
    """The last life whose load failed."""
    queue: list[Work | Hit | Load] = field(default_factory=list)
    """What the device has still to do, or has done without a delivered output, oldest first."""
    loads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The block table at the admission of each life, by the life's number."""
    load_failures: int = 0
    failed_lives: set[int] = field(default_factory=set)
    """The numbers of the lives in which one failed."""
    resets: int = 0
    """Resets of the prefix cache that preempted the request."""
    resumed_early: bool = False
    """Whether an output of a life came after a step had run the next one."""
    faults: set[str] = field(default_factory=set)
    """The known faults that what happened to the request shows, by their files in ``audit/faults/data``."""
    dropped_drafts: int = 0
    """Draft tokens in flight when the request or the chunk stopped, whose output the engine drops."""
    beyond_end: int = 0
    """Tokens that the engine's count had at the end of the request, more than its sequence."""
    sequence_tokens: int | None = None
    """Length of the request's sequence when it ended."""
    had_drafts: bool = False
    """Whether a step had drafts."""
    without_tokens: bool = False
    """Whether a step computed positions that have no token, so that nothing says what they count as."""
    undefined: bool = False
    """Whether a step had no token before its drafts, so that nothing says what it executed."""

    def works(self) -> list[Work]:
        return [each for each in self.queue if isinstance(each, Work)]

    def catch_up(self, *, everything: bool = False) -> None:
        """Post the hits and loads at the head of the queue; with ``everything`` also those behind work."""
        kept: list[Work | Hit | Load] = []
        for each in self.queue:
            if isinstance(each, Work) or (kept and not everything):
                kept.append(each)
            elif isinstance(each, Hit):
                for position in range(each.life.local):
                    self.come(each.life, position, "local")
                self.distrust(each.life, each.valid)
            else:
                for position in each.positions:
                    self.load(each.life, position)
        self.queue = kept

    def fail_load(self, life: Life, valid: int) -> None:
        """The engine keeps only the positions below ``valid``."""
        self.load_failures += 1
        self.failed_lives.add(life.number)
        self.failed = life
        self.lose_load(life, valid)

    def lose_load(self, life: Life, valid: int) -> None:
        """A load failed from position ``valid`` on."""
        life.pending = {position for position in life.pending if position < valid}
        self.distrust(life, valid)
        for hit in self.queue:
            if isinstance(hit, Hit) and hit.life is life:
                hit.valid = min(valid, hit.valid)
        for work in self.works():
            # A request keeps its count if another one computes the failed blocks again.
            if work.life is life and not work.overrun and work.start + work.tokens > valid:
                work.valid_below = valid if work.valid_below is None else min(valid, work.valid_below)

    # Ends.

    def stop(self, end: int) -> None:
        """The request or the chunk stopped, and its sequence ends at ``end``."""
        self._execute_below_hits()
        self.catch_up(everything=True)
        self.overrun(self.works())
        self.past_the_end(end)

    def _execute_below_hits(self) -> None:
        """Load and execute what the hits behind it in the queue prove to be loaded and executed."""
        for place, work in enumerate(self.queue):
            hits = [each.life.local for each in self.queue[place:] if isinstance(each, Hit)]
            if isinstance(work, Work) and not work.overrun and hits:
                if not work.life.asynchronous:
                    for position in sorted(each for each in work.life.pending if each < max(hits)):
                        self.load(work.life, position)
                for position in range(work.start, min(work.start + work.tokens - work.drafts, max(hits))):
                    self.execute(work, position)
                    work.executed += 1

    def figures(self) -> dict[str, Any]:
        return {
            **super().figures(),
            "admissions": [(life.local, life.external) for life in self.lives],
        }


@dataclass
class Lookups:
    """What the engine's lookup statistics must sum to."""

    requests: int = 0
    queries: int = 0
    hits: int = 0

    def add(self, queries: int, hits: int) -> None:
        """Add one lookup."""
        self.requests += 1
        self.queries += queries
        self.hits += hits


@dataclass
class Oracle:
    """All accounts of one engine."""

    block_size: int
    accounts: dict[str, OracleAccount] = field(default_factory=dict)
    local: Lookups = field(default_factory=Lookups)
    external: Lookups = field(default_factory=Lookups)
    flight: list[dict[str, Work]] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    """The local hit behind which an external lookup counts, by request."""
    follows: Callable[[str], bool] = release_rules.follows
    """Whether the release follows one of vLLM's rules."""

    def read(self, facts: Iterable[Fact]) -> Oracle:
        for fact in facts:
            match fact:
                case tape.Added():
                    self._added(fact)
                case tape.LookedUp():
                    # Also a second lookup, after the connector had nothing for a hit of only some groups.
                    self.asked[fact.request_id] = fact.local
                    if self.follows("attempts"):
                        self.local.add(fact.tokens, fact.local)
                case tape.Matched():
                    self.asked[fact.request_id] = fact.local
                case tape.Allocated():
                    self._admitted(fact)
                case tape.Preempted():
                    self._preempted(fact)
                case tape.Scheduled():
                    self._scheduled(fact)
                case tape.Arrived():
                    self._arrived(fact)
                case tape.Output():
                    self._output(fact)
                case tape.Aborted():
                    for name, state in fact.after.items():
                        self._end(name, state)
                case _:
                    pass
        return self

    def _added(self, fact: tape.Added) -> None:
        if fact.before is None:
            self.accounts[fact.request_id] = OracleAccount(fact.after.prompt_tokens, resumable=fact.resumable)
        elif fact.after.prompt_tokens > fact.before.prompt_tokens:
            self.accounts[fact.request_id].extend(fact.after.computed, fact.after.prompt_tokens)

    def _admitted(self, fact: tape.Allocated) -> None:
        account = self.accounts[fact.request_id]
        if account.finished:
            account.faults.add("ended-request-stays-queued")
        if account.life is not None:  # Its load failed as a whole, and the engine released its blocks.
            account.life.over = "ended"
        promised = set(range(fact.local, fact.local + fact.external))
        life = Life(len(account.lives) + 1, fact.local, fact.external, fact.asynchronous, promised)
        account.lives.append(life)
        account.loads[life.number] = fact.tables[0]
        account.counts["promised"] += fact.external
        account.queue.append(Hit(life))
        account.catch_up()
        if not self.follows("attempts"):
            self.local.add(len(fact.sequence), fact.local)
        self.external.add(len(fact.sequence) - self.asked.get(fact.request_id, 0), fact.external)

    def _preempted(self, fact: tape.Preempted) -> None:
        account = self.accounts[fact.request_id]
        account.counts["preemptions"] += 1
        account.resets += fact.reset
        if account.life is not None:
            account.life.over = "ended"

    def _scheduled(self, fact: tape.Scheduled) -> None:
        step: dict[str, Work] = {}
        for name, (tokens, drafts) in fact.rows.items():
            account = self.accounts[name]
            life = account.life
            assert life is not None, f"{name} was scheduled without an admission"
            if account.plan is None:
                account.plan, account.hits = (life.local, life.external), fact.computed[name]
            account.ran = life
            work = Work(life, fact.computed[name], tokens, drafts)
            known = len(fact.sequences[name])
            ahead = [each for each in account.works() if not each.overrun]
            to_come = sum(1 + each.drafts for each in ahead if each.start + each.tokens >= known)
            if work.start + tokens - drafts > known + to_come:
                account.without_tokens = True
                if account.resets and account.had_drafts:
                    account.faults.add("reset-drops-outputs-by-tokens")
            account.had_drafts |= drafts > 0
            account.counts["scheduled"] += tokens
            account.queue.append(work)
            step[name] = work
        self.flight.append(step)

    def _output(self, fact: tape.Output) -> None:
        step = self.flight.pop(0)
        failed = self._failures(fact)
        for name, work in step.items():
            account = self.accounts[name]
            account.catch_up()
            self._fail_ended(account, work.life, fact.invalid_blocks)
            assert account.queue[0] is work
            del account.queue[0]
            if not work.overrun and work.drafts >= work.tokens and fact.sampled.get(name):
                account.undefined = True
            account.dropped_drafts += work.drafts if work.overrun else 0
            if not work.overrun:
                self._execute(account, work, len(fact.sampled.get(name, ())))
                if name not in failed:
                    self._count_stale(account, work, fact, name)
            account.catch_up()
            if fact.returned.get(name, 0):
                if account.life is not None and account.life is account.ran is not work.life:
                    account.resumed_early = True
                position = work.start + work.tokens
                later = work.life is not account.lives[0] and not (work.drafts or work.life.external)
                later = later and not (work.overrun or account.resumable)
                later = later and work.life.number not in account.failed_lives
                if later and position < fact.before[name].tokens:
                    account.faults.add("resumed-before-its-output")
                account.answer()
        for name, state in fact.after.items():
            before, account = fact.before[name], self.accounts[name]
            turn_ended = account.resumable and name in fact.ended and name in step and not account.finished
            if turn_ended and not (name in failed and state.finished):
                # A turn gives up its last token, unless a failed load ends the request. A preempted request
                # has no KV to give up, and its sequence ends with the turn: ``state`` may have the tokens
                # of the next chunk.
                turn_end = before.tokens + fact.returned.get(name, 0)
                account.stop(state.computed if before.status == "RUNNING" else turn_end)
                if state.prompt_tokens > before.prompt_tokens:
                    account.extend(state.computed, state.prompt_tokens)
            self._end(name, state)
        if not self.follows("uncounted waits"):
            # Like the engine: a request that this output ends does not take its load over.
            for name in fact.received:
                self._received(self.accounts[name])

    def _execute(self, account: OracleAccount, work: Work, sampled: int) -> None:
        life = work.life
        if not life.asynchronous:
            for position in sorted(life.pending):
                account.load(life, position)
        rejected = account.reject(work, sampled, account.works())
        for position in range(work.start, work.start + work.tokens - rejected):
            account.execute(work, position)

    def _count_stale(self, account: OracleAccount, work: Work, fact: tape.Output, name: str) -> None:
        """Drafts of a step before a failed load, or of a past life, are no part of the count any more."""
        sampled = len(fact.sampled.get(name, ()))
        rejected = work.drafts - (sampled - 1) if work.drafts and sampled else 0
        before, after = fact.before[name].computed, fact.after[name].computed
        if rejected and 0 <= after <= before - rejected:  # a count of -1 stands for an unknown one
            if work.valid_below is not None:
                account.faults.add("rejection-before-a-failed-load")
            if work.life is not account.life:
                account.faults.add("rejection-of-a-past-life")

    def _failures(self, fact: tape.Output) -> set[str]:
        """The loads that this output reports failed, as far as the engine looks at the requests' blocks."""
        names: set[str] = set()
        for name, before in fact.before.items():
            account = self.accounts[name]
            life = account.life
            if life is None or before.finished:
                continue
            if name in fact.failed and before.status == WAITS_FOR_LOAD:
                # A request that goes on is looked up anew; one that ends keeps its local hit to the end.
                account.fail_load(life, life.local if fact.after[name].finished else 0)
                continue
            held = self._may_fail(account, before, fact.step.get(name, (0, 0))[0])
            looked_at = before.status in ("RUNNING", WAITS_FOR_LOAD)
            if looked_at and fact.invalid_blocks.intersection(held):
                account.fail_load(life, fact.after[name].computed)
                names.add(name)
            elif before.status == "RUNNING" and self._loads_now(account) and not life.asynchronous:
                first, last = min(life.pending) // self.block_size, max(life.pending) // self.block_size
                if fact.invalid_blocks.intersection(account.loads[life.number][first : last + 1]):
                    account.faults.add("failed-load-above-the-first-hits")
        return names

    @staticmethod
    def _loads_now(account: OracleAccount) -> bool:
        """Whether the output is that of the first step of a life which loads."""
        works = account.works()
        return bool(works and works[0].life is account.life and account.life.pending)

    def _fail_ended(self, account: OracleAccount, life: Life, invalid: frozenset[int]) -> None:
        """A life that ended before its synchronous load failed. The engine looks at no block of it."""
        if life.over == "ended" and life.pending and not life.asynchronous:
            starts = range(0, max(life.pending) + 1, self.block_size)
            failed = [
                start
                for start, block in zip(starts, account.loads[life.number], strict=False)
                if block in invalid
            ]
            if failed and failed[-1] + self.block_size > min(life.pending):
                account.lose_load(life, max(min(life.pending), failed[0]))

    def _may_fail(self, account: OracleAccount, before: State, scheduled: int) -> tuple[int, ...]:
        """The request's blocks whose failure the engine sees."""
        computed = before.computed - scheduled
        if before.status == WAITS_FOR_LOAD:
            if self.follows("uncounted waits") and account.failed is not account.life:
                return before.blocks
        elif self.follows("first hits"):
            computed = account.hits
        return before.blocks[: -(-computed // self.block_size)]

    def _arrived(self, fact: tape.Arrived) -> None:
        account = self.accounts[fact.request_id]
        if self.follows("uncounted waits"):
            self._received(account)
        if account.life is not None and fact.after > account.life.local + account.life.external:
            account.faults.add("load-rounded-up")

    def _received(self, account: OracleAccount) -> None:
        life = account.life
        if life is not None and life.pending and life.asynchronous:
            account.queue.append(Load(life, sorted(life.pending)))
            life.pending = set()
            account.catch_up()

    def _end(self, name: str, after: State) -> None:
        account = self.accounts[name]
        if account.finished or not after.finished:
            return
        account.beyond_end = max(0, after.computed - after.tokens)
        account.sequence_tokens = after.tokens
        account.stop(after.tokens)
        if account.life is not None:
            account.life.over = "ended"
        if not account.settled:
            account.settle()
        account.finished = True
