"""A second implementation of the accounts: one record per position, a list of steps, no optimisation.

It reads the same events as ``kvledger.audit.ledger`` and shares no code with it: no ranges and no fast path
for repeats. It is slow on purpose; the longest prompts in the tests have a few hundred tokens. Streams must
start with the engine: no :class:`Snapshot`, no :class:`Gap`.

It does not use the engine's own counts, except for the position of a truncation, the start of a session's
new chunk and the length of the sequence at the end. It compares the other counts, and keeps differences in
:attr:`Naive.differences`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvledger.audit.events import (
    Admitted,
    Census,
    Delivered,
    DeliveredWhole,
    Event,
    Extended,
    Finished,
    LoadFailed,
    LoadFinished,
    LoadPlanned,
    Preempted,
    Repeated,
    RequestAdded,
    RolledBack,
    Stepped,
)

CAUSE_OF_PROMISES = True
"""Whether a promise that is discarded unloaded with its life gives the cause of later rework.

False: the position keeps the cause for which it lost its KV in an earlier life.
"""

SESSION_FORGETS = True
"""Whether a session's new chunk starts with fresh positions where output was cut off.

True: computing the chunk's tokens is first prompt. False: the positions had KV before, so it is rework with
the cause ``session``.
"""


@dataclass
class Position:
    """Everything that happened at one position of a request's sequence."""

    origin: str | None = None
    origin_life: int = 0
    executed: set[int] = field(default_factory=set)
    """The lives whose steps computed the position."""
    came: set[int] = field(default_factory=set)
    """The lives in which a hit or a load gave the position its KV."""
    alive: int = 0
    """The life that holds the KV now; 0: none."""
    lost: str = "unexplained"
    """The cause for which the KV was last lost."""
    first_output: int = 0

    @property
    def reached(self) -> bool:
        """Whether the position ever had KV."""
        return bool(self.executed or self.came)


@dataclass
class Life:
    """A life: from an admission to the next preemption, a load failure that frees the blocks, or the end."""

    number: int
    local: int
    external: int
    asynchronous: bool
    count: int
    pending: set[int]
    over: str | None = None
    steps_scheduled: int = 0
    again: set[int] = field(default_factory=set)
    """Positions rolled back while promised: they are computed, whether loaded or not."""


@dataclass
class Work:
    """One request's share of a step in flight."""

    life: Life
    start: int
    tokens: int
    drafts: int
    first_of_life: bool
    reads_pending: bool
    void_from: int | None = None
    """After a failed load: tokens computed from here up have no valid KV below them."""
    closed: bool = False
    """Whether these tokens are counted as overrun."""
    posted: int = 0
    """How many of the tokens were counted as executed when a later life hit their KV."""


@dataclass
class Request:
    """One request's account, kept by position."""

    request: int
    prompt_tokens: int
    carried: int = 0
    positions: dict[int, Position] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    finished: bool = False
    settled: bool = False
    incomplete: bool = False
    """Whether an output came while a prompt position had no valid KV; the prompt is settled later then."""
    settlements: list[dict[str, int]] = field(default_factory=list)
    plan: tuple[int, int] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    rework: Counter[str] = field(default_factory=Counter)
    voided: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)

    def at(self, position: int) -> Position:
        """The record of one position, created on first use."""
        assert position >= 0
        return self.positions.setdefault(position, Position())

    @property
    def life(self) -> Life | None:
        """The present life, if any."""
        if self.lives and self.lives[-1].over is None:
            return self.lives[-1]
        return None

    @property
    def undelivered(self) -> int:
        """The engine's count of tokens in flight, overrun ones included."""
        return sum(work.tokens for work in self.works)

    # Positions get KV.

    def come(self, life: Life, position: int, source: str) -> None:
        """A hit or a load gives one position its KV."""
        one = self.at(position)
        if one.reached:
            self.counts["hit_again" if source == "local" else "loaded_again"] += 1
        one.came.add(life.number)
        if life.over is None and position not in life.again:
            one.alive = life.number
        if one.origin is None:
            one.origin, one.origin_life = source, life.number

    def load(self, life: Life, position: int) -> None:
        """A promised position was loaded."""
        life.pending.discard(position)
        self.counts["loaded"] += 1
        self.come(life, position, "external")

    def void(self, life: Life, position: int, cause: str) -> None:
        """A promised position will not be loaded."""
        life.pending.discard(position)
        self.voided[cause] += 1

    def execute(self, work: Work, position: int) -> None:
        """A scheduled position was computed by the model."""
        one = self.at(position)
        if one.reached:
            self.rework[one.lost] += 1
        elif position < self.prompt_tokens:
            self.counts["first_prompt"] += 1
        else:
            self.counts["first_output"] += 1
            one.first_output += 1
        one.executed.add(work.life.number)
        if work.void_from is not None and position >= work.void_from:
            if not one.alive:
                one.lost = "load_failed"
            return
        if one.origin is None:
            one.origin, one.origin_life = "computed", work.life.number
        if work.life.over is None:
            one.alive = work.life.number
        elif not one.alive:
            one.lost = work.life.over

    # Positions lose KV.

    def lose(self, position: int, cause: str) -> None:
        """One position loses its KV, if it has any."""
        one = self.at(position)
        if one.alive:
            one.alive = 0
            one.lost = cause

    def end_life(self, life: Life, cause: str, void_cause: str) -> None:
        """Discard everything of the life."""
        in_flight = any(work.life is life and not work.closed for work in self.works)
        if life.asynchronous or void_cause != "preempted" or not in_flight:  # else the step in flight loads
            for position in sorted(life.pending):
                self.void(life, position, void_cause)
        own = [work for work in self.works if work.life is life and not work.closed]
        scheduled = sum(work.tokens for work in own if work.void_from is None)
        promised = range(life.local, min(life.local + life.external, life.count - scheduled))
        for position in range(life.count):
            self.lose(position, cause)
            if CAUSE_OF_PROMISES and position in promised:
                self.at(position).lost = cause
        self.discarded[cause] += life.count
        life.count = 0
        life.over = cause

    def overrun(self) -> None:
        """Count the tokens in flight as overrun."""
        for work in self.works:
            if not work.closed:
                self.counts["overrun"] += work.tokens - work.posted
                work.closed = True
                if work.life.over is not None:
                    for position in sorted(work.life.pending):
                        self.void(work.life, position, "preempted")

    def past_the_end(self, end: int) -> None:
        """Count output computed from position ``end`` up as overrun."""
        for number, position in self.positions.items():
            if number >= end and position.first_output:
                self.counts["first_output"] -= position.first_output
                self.counts["overrun"] += position.first_output
                position.first_output = 0

    # The figures.

    def settle(self) -> None:
        """Attribute every position of the present prompt or chunk, once."""
        origins: Counter[str] = Counter()
        for position in range(self.carried, self.prompt_tokens):
            origins[self.at(position).origin or "unattained"] += 1
        self.settlements.append(
            {
                "local": origins["local"],
                "external": origins["external"],
                "computed": origins["computed"],
                "unattained": origins["unattained"],
                "carried": self.carried,
                "prompt_tokens": self.prompt_tokens,
            }
        )
        self.settled = True

    def result(self) -> dict[str, Any]:
        """The account as plain figures."""
        figures: dict[str, Any] = {
            name: self.counts[name]
            for name in (
                "scheduled",
                "first_prompt",
                "first_output",
                "rejected",
                "overrun",
                "hit_again",
                "loaded_again",
                "preemptions",
                "promised",
                "loaded",
            )
        }
        figures["rework"] = {cause: tokens for cause, tokens in self.rework.items() if tokens}
        figures["voided"] = {cause: tokens for cause, tokens in self.voided.items() if tokens}
        figures["discarded"] = {cause: tokens for cause, tokens in self.discarded.items() if tokens}
        figures["settlements"] = [dict(settled) for settled in self.settlements]
        figures["plan"] = self.plan
        life = self.life
        figures["computed"] = life.count if life else 0
        figures["in_flight"] = self.undelivered
        figures["unclassified"] = sum(work.tokens - work.posted for work in self.works if not work.closed)
        figures["pending"] = sum(len(life.pending) for life in self.lives)
        return figures


class Naive:
    """All requests of one engine: post events with :meth:`apply`, read :meth:`result`."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.differences: list[str] = []
        # Decoding: the full last step, what each request sampled last, the steps in flight.
        self._scheduled: dict[int, tuple[int, int]] = {}
        self._sampled: dict[int, int] = {}
        self._order: list[int] = []
        self._flight: list[dict[int, Work]] = []

    def result(self) -> dict[int, dict[str, Any]]:
        """Every request's figures."""
        return {number: one.result() for number, one in self.requests.items()}

    def compare(self, event: Event, count: str, reported: int, ours: int) -> None:
        """Compare an engine-reported count with the model's."""
        if reported != ours:
            self.differences.append(f"{count}: the engine says {reported}, we {ours}, at {event}")

    def apply(self, event: Event) -> None:
        """Post one event."""
        match event:
            case RequestAdded():
                self.requests[event.request] = Request(event.request, event.prompt_tokens)
            case Admitted():
                self._admitted(event)
            case LoadPlanned():
                self._load_planned(event)
            case LoadFinished():
                self._load_finished(event)
            case LoadFailed():
                self._load_failed(event)
            case RolledBack():
                self._rolled_back(event)
            case Stepped():
                self._stepped(event, event.changed, event.dropped)
            case Delivered():
                self._delivered(event.changed, event.ignored)
            case DeliveredWhole():
                self._order = event.requests or self._order
                told = zip(self._order, event.sampled, strict=True)
                self._delivered([number for row in told for number in row], [])
            case Repeated():
                for _ in range(event.times):
                    self._stepped(event, [], [])
                    self._delivered([], [])
            case Preempted():
                self._preempted(event)
            case Extended():
                self._extended(event)
            case Finished():
                self._finished(event)
            case Census():
                self._census(event)
            case _:
                pass

    # Admission and external tokens.

    def _admitted(self, event: Admitted) -> None:
        one = self.requests[event.request]
        assert one.life is None, "admitted twice"
        local, external = event.local_tokens, event.external_tokens
        life = Life(
            number=len(one.lives) + 1,
            local=local,
            external=external,
            asynchronous=event.asynchronous,
            count=local + external,
            pending=set(range(local, local + external)),
        )
        one.lives.append(life)
        for work in one.works:  # steps run in order, so these fill the blocks before the new life reads them
            if not work.closed and work.life is not life and not work.life.asynchronous:
                for position in [each for each in sorted(work.life.pending) if each < local]:
                    one.load(work.life, position)
            while work.posted < work.tokens - work.drafts and work.start + work.posted < local:
                if work.closed or work.life is life:
                    break
                one.execute(work, work.start + work.posted)
                work.posted += 1
        for position in range(local):
            one.come(life, position, "local")
        for position in range(local + external, local):
            one.lose(position, "negative_external")
        one.counts["promised"] += max(0, external)
        self.compare(event, "admitted", event.computed_tokens, life.count)

    def _load_planned(self, event: LoadPlanned) -> None:
        one = self.requests[event.request]
        life = one.life
        if life is None or life.asynchronous:
            return
        for position in sorted(life.pending):
            if position >= life.local + event.tokens:
                one.void(life, position, "not_planned")

    def _load_finished(self, event: LoadFinished) -> None:
        one = self.requests[event.request]
        life = one.life
        if life is None:
            return  # A late completion touches blocks only.
        for position in sorted(life.pending):
            if position < event.computed_tokens:
                one.load(life, position)
            else:
                one.void(life, position, "failed")

    def _load_failed(self, event: LoadFailed) -> None:
        one = self.requests[event.request]
        life = one.life
        if life is None:
            return
        self.compare(event, "before the failed load", event.before_tokens, life.count)
        valid = event.computed_tokens
        for position in sorted(life.pending):
            if position >= valid:
                one.void(life, position, "failed")
        for number, record in one.positions.items():
            if number < valid:
                continue
            if record.origin_life == life.number:
                record.origin, record.origin_life = None, 0
            if life.number in record.came:
                # It was never valid: what it was lost for before stays the cause, unless this
                # life had executed it since.
                record.came.discard(life.number)
                if life.number not in record.executed:
                    record.alive = 0
            one.lose(number, "load_failed")
        for work in one.works:
            if work.life is life and not work.closed:
                work.void_from = min(valid, work.void_from if work.void_from is not None else valid)
        life.count = valid

    def _rolled_back(self, event: RolledBack) -> None:
        one = self.requests[event.request]
        life = one.life
        if event.cause == "session":
            one.overrun()
        if life is None:
            return
        self.compare(event, "before the roll back", event.before_tokens, life.count)
        if event.cause == "session":
            one.past_the_end(event.computed_tokens)
        if event.cause == "released":
            one.end_life(life, "released", "released")
            return
        for position in range(event.computed_tokens, event.before_tokens):
            one.lose(position, event.cause)
            if position in life.pending:
                one.at(position).lost = event.cause
                life.again.add(position)
        life.count = event.computed_tokens

    # Steps and output.

    def _stepped(self, event: Event, changed: list[int], dropped: list[int]) -> None:
        for request in dropped:
            del self._scheduled[request]
        stated: dict[int, int] = {}
        for request, tokens, drafts, computed in zip(*[iter(changed)] * 4, strict=True):
            self._scheduled[request] = (tokens, drafts)
            stated[request] = computed
        step: dict[int, Work] = {}
        for request, (tokens, drafts) in self._scheduled.items():
            one = self.requests[request]
            life = one.life
            assert life is not None, "scheduled without an admission"
            if one.plan is None:
                one.plan = (life.local, life.external)
            work = Work(
                life=life,
                start=life.count,
                tokens=tokens,
                drafts=drafts,
                first_of_life=life.steps_scheduled == 0,
                reads_pending=life.asynchronous and bool(life.pending),
            )
            life.steps_scheduled += 1
            life.count += tokens
            one.counts["scheduled"] += tokens
            one.works.append(work)
            step[request] = work
            if request in stated:
                self.compare(event, "after scheduling", stated[request], life.count)
        self._flight.append(step)

    def _delivered(self, changed: list[int], ignored: list[int]) -> None:
        sampled = dict(zip(*[iter(changed)] * 2, strict=True))
        for request, work in self._flight.pop(0).items():
            one = self.requests[request]
            if request in sampled:
                tokens = sampled[request]
            elif request in ignored:
                tokens = 0
            else:
                tokens = self._sampled[request]
            if request not in ignored:
                self._sampled[request] = tokens
            one.works.remove(work)
            if not work.closed:
                self._answer(one, work, tokens, request in ignored)

    def _answer(self, one: Request, work: Work, sampled: int, ignored: bool) -> None:
        life = work.life
        if work.first_of_life and not life.asynchronous:
            for position in sorted(life.pending):
                one.load(life, position)
        if work.reads_pending:
            for position in sorted(life.pending):
                one.void(life, position, "never_loaded")
        rejected = 0
        if work.drafts and sampled > 0:
            rejected = work.drafts - (sampled - 1)
            one.counts["rejected"] += rejected
        for position in range(work.start + work.posted, work.start + work.tokens - rejected):
            one.execute(work, position)
        if rejected and life.over is None and not ignored:
            life.count -= rejected
        if rejected:
            # The device executes the next steps lower, whatever the scheduler makes of this one.
            # A step scheduled after a truncation already starts below the garbage of those before.
            for later in one.works:
                if later.life is life and (later.void_from is None) == (work.void_from is None):
                    later.start -= rejected
        if sampled > 0 and not ignored and not one.settled:
            if all(one.at(position).origin for position in range(one.carried, one.prompt_tokens)):
                one.settle()
            else:
                one.incomplete = True

    # Preemption, sessions, the end.

    def _preempted(self, event: Preempted) -> None:
        one = self.requests[event.request]
        one.counts["preemptions"] += 1
        self.compare(event, "in flight at preemption", event.in_flight_tokens, one.undelivered)
        life = one.life
        if life is None:
            return
        self.compare(event, "before the preemption", event.before_tokens, life.count)
        one.end_life(life, event.cause, "preempted")

    def _extended(self, event: Extended) -> None:
        one = self.requests[event.request]
        if one.incomplete and not one.settled:
            one.settle()
        one.prompt_tokens = event.prompt_tokens
        one.carried = event.computed_tokens
        one.settled = one.incomplete = False
        for number, position in one.positions.items():
            if number >= one.carried:
                position.origin, position.origin_life = None, 0
                if SESSION_FORGETS:
                    position.first_output = 0
                    position.executed.clear()
                    position.came.clear()
        self.compare(event, "extended", event.computed_tokens, one.life.count if one.life else 0)

    def _finished(self, event: Finished) -> None:
        one = self.requests[event.request]
        if one.finished:
            return
        life = one.life
        self.compare(event, "computed at the end", event.computed_tokens, life.count if life else 0)
        if event.in_flight_tokens >= 0:
            self.compare(event, "in flight at the end", event.in_flight_tokens, one.undelivered)
        one.overrun()
        if event.sequence_tokens >= 0:
            one.past_the_end(event.sequence_tokens)
        if life is not None:
            one.end_life(life, "finished", "finished")
        if not one.settled:
            one.settle()
        one.finished = True

    def _census(self, event: Census) -> None:
        for request, computed, in_flight, _, _ in zip(*[iter(event.rows)] * 5, strict=True):
            one = self.requests[request]
            self.compare(event, f"request {request}", computed, one.life.count if one.life else 0)
            if in_flight >= 0:
                self.compare(event, f"request {request} in flight", in_flight, one.undelivered)


def account(events: Iterable[Event]) -> dict[int, dict[str, Any]]:
    """The figures of every request after the whole stream."""
    model = Naive()
    for event in events:
        model.apply(event)
    return model.result()


def check(figures: dict[str, Any]) -> None:
    """Check the identities that hold for any account after any event."""
    executed = figures["first_prompt"] + figures["first_output"] + sum(figures["rework"].values())
    rest = figures["rejected"] + figures["overrun"] + figures["unclassified"]
    assert figures["scheduled"] == executed + rest, figures
    voided = sum(figures["voided"].values())
    assert figures["promised"] == figures["loaded"] + voided + figures["pending"], figures
    for settled in figures["settlements"]:
        sources = ("local", "external", "computed", "unattained")
        own = settled["prompt_tokens"] - settled["carried"]
        assert sum(settled[source] for source in sources) == own, figures
    assert "unexplained" not in figures["rework"], figures
    assert all(value >= 0 for value in figures.values() if isinstance(value, int)), figures
