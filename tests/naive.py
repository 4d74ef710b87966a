"""A second implementation of the accounts: one record per position, a list of steps, no optimisation.

It reads the same events as ``kvledger.audit.ledger`` and shares no code with it: no ranges and no fast path
for repeats. What a figure counts is in :mod:`tests.positions`. It is slow on purpose; the longest prompts in
the tests have a few hundred tokens. Streams must start with the engine: no :class:`Snapshot` and no
:class:`Gap`.

It does not use the engine's own counts, except for the position of a truncation, the start of a session's
new chunk and the length of the sequence at the end. It compares the other counts, and keeps differences in
:attr:`Naive.differences`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.positions import Account, Life, Position, Work

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


@dataclass
class NaivePosition(Position):
    """A position, and why its KV was lost."""

    alive: int = 0
    """The life that holds the KV now; 0: none."""
    lost: str = "unexplained"
    """The cause for which the KV was last lost."""


@dataclass
class NaiveLife(Life):
    """A life, and the count that the engine keeps of it."""

    count: int = 0
    steps_scheduled: int = 0
    again: set[int] = field(default_factory=set)
    """Positions rolled back while promised: they are computed, whether loaded or not."""


@dataclass
class NaiveWork(Work):
    """One request's share of a step in flight."""

    first_of_life: bool = False
    reads_pending: bool = False


@dataclass
class Request(Account):
    """One request's account, with the causes of what was lost."""

    works: list[NaiveWork] = field(default_factory=list)
    rework: Counter[str] = field(default_factory=Counter)
    voided: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)

    position = NaivePosition

    @property
    def undelivered(self) -> int:
        """The engine's count of tokens in flight, overrun ones included."""
        return sum(work.tokens for work in self.works)

    # Positions get KV.

    def come(self, life: Life, position: int, source: str) -> None:
        super().come(life, position, source)
        if not life.over and position not in life.again:
            self.at(position).alive = life.number

    def void(self, life: Life, position: int, cause: str) -> None:
        """A promised position will not be loaded."""
        life.pending.discard(position)
        self.voided[cause] += 1

    def execute(self, work: Work, position: int) -> None:
        one = self.at(position)
        if one.has_kv:
            self.rework[one.lost] += 1
        super().execute(work, position)
        if self.is_valid(work, position) and not work.life.over:
            one.alive = work.life.number
        elif not one.alive:
            one.lost = work.life.over if self.is_valid(work, position) else "load_failed"

    # Positions lose KV.

    def lose(self, position: int, cause: str) -> None:
        """One position loses its KV, if it has any."""
        one = self.at(position)
        if one.alive:
            one.alive = 0
            one.lost = cause

    def distrust(self, life: Life, valid: int) -> None:
        for number, one in self.positions.items():
            if number >= valid:
                if life.number in one.came and life.number not in one.executed:
                    # The KV was never valid: the cause for which the position lost KV before stays.
                    one.alive = 0
                self.lose(number, "load_failed")
        super().distrust(life, valid)

    def end_life(self, life: NaiveLife, cause: str, void_cause: str) -> None:
        """Discard everything of the life."""
        own = [work for work in self.works if work.life is life and not work.overrun]
        if life.asynchronous or void_cause != "preempted" or not own:  # else the step in flight loads
            for position in sorted(life.pending):
                self.void(life, position, void_cause)
        scheduled = sum(work.tokens for work in own if work.valid_below is None)
        promised = range(life.local, min(life.local + life.external, life.count - scheduled))
        for position in range(life.count):
            self.lose(position, cause)
            if position in promised:
                self.at(position).lost = cause
        self.discarded[cause] += life.count
        life.count = 0
        life.over = cause

    def overrun(self, works: list[Work]) -> None:
        for work in works:
            if not work.overrun and work.life.over:
                for position in sorted(work.life.pending):
                    self.void(work.life, position, "preempted")
        super().overrun(works)

    # The figures.

    def figures(self) -> dict[str, Any]:
        causes = {name: getattr(self, name) for name in ("rework", "voided", "discarded")}
        return {
            **super().figures(),
            **{name: {cause: n for cause, n in tokens.items() if n} for name, tokens in causes.items()},
            "computed": self.life.count if self.life else 0,
            "in_flight": self.undelivered,
            "unclassified": sum(work.tokens - work.executed for work in self.works if not work.overrun),
            "pending": sum(len(life.pending) for life in self.lives),
        }


class Naive:
    """All requests of one engine: post events with :meth:`apply`, read :meth:`result`."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.differences: list[str] = []
        # Decoding: the full last step, what each request sampled last, the steps in flight.
        self._scheduled: dict[int, tuple[int, int]] = {}
        self._sampled: dict[int, int] = {}
        self._order: list[int] = []
        self._flight: list[dict[int, NaiveWork]] = []

    def result(self) -> dict[int, dict[str, Any]]:
        """Every request's figures."""
        return {number: one.figures() for number, one in self.requests.items()}

    def compare(self, event: Event, count: str, reported: int, ours: int) -> None:
        """Compare an engine-reported count with the model's."""
        if reported != ours:
            self.differences.append(f"{count}: the engine says {reported}, we {ours}, at {event}")

    def apply(self, event: Event) -> None:
        """Post one event."""
        match event:
            case RequestAdded():
                self.requests[event.request] = Request(event.prompt_tokens)
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
        life = NaiveLife(
            number=len(one.lives) + 1,
            local=local,
            external=external,
            asynchronous=event.asynchronous,
            count=local + external,
            pending=set(range(local, local + external)),
        )
        one.lives.append(life)
        for work in one.works:  # steps run in order, so these fill the blocks before the new life reads them
            if not work.overrun and work.life is not life and not work.life.asynchronous:
                for position in [each for each in sorted(work.life.pending) if each < local]:
                    one.load(work.life, position)
            while work.executed < work.tokens - work.drafts and work.start + work.executed < local:
                if work.overrun or work.life is life:
                    break
                one.execute(work, work.start + work.executed)
                work.executed += 1
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
        one.distrust(life, valid)
        for work in one.works:
            if work.life is life and not work.overrun:
                work.valid_below = min(valid, work.valid_below if work.valid_below is not None else valid)
        life.count = valid

    def _rolled_back(self, event: RolledBack) -> None:
        one = self.requests[event.request]
        life = one.life
        if event.cause == "session":
            one.overrun(one.works)
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
        step: dict[int, NaiveWork] = {}
        for request, (tokens, drafts) in self._scheduled.items():
            one = self.requests[request]
            life = one.life
            assert life is not None, "scheduled without an admission"
            if one.plan is None:
                one.plan = (life.local, life.external)
            work = NaiveWork(
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
            if not work.overrun:
                self._answer(one, work, tokens, request in ignored)

    def _answer(self, one: Request, work: NaiveWork, sampled: int, ignored: bool) -> None:
        life = work.life
        if work.first_of_life and not life.asynchronous:
            for position in sorted(life.pending):
                one.load(life, position)
        if work.reads_pending:
            for position in sorted(life.pending):
                one.void(life, position, "never_loaded")
        rejected = one.reject(work, sampled, one.works)
        for position in range(work.start + work.executed, work.start + work.tokens - rejected):
            one.execute(work, position)
        if rejected and not life.over and not ignored:
            life.count -= rejected
        if sampled > 0 and not ignored:
            one.answer()

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
        one.extend(event.computed_tokens, event.prompt_tokens)
        self.compare(event, "extended", event.computed_tokens, one.life.count if one.life else 0)

    def _finished(self, event: Finished) -> None:
        one = self.requests[event.request]
        if one.finished:
            return
        life = one.life
        self.compare(event, "computed at the end", event.computed_tokens, life.count if life else 0)
        if event.in_flight_tokens >= 0:
            self.compare(event, "in flight at the end", event.in_flight_tokens, one.undelivered)
        one.overrun(one.works)
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
