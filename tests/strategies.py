"""Random event streams that a small, correct engine could have produced.

Hypothesis draws one string of bytes for each stream, and the simulated engine reads its choices from it. Zero
is always the least eventful choice, and after the last byte all choices are zero, so Hypothesis shrinks to
short streams in which little happens. This file chooses what the engine does;
:class:`tests.histories.Engine` counts and reports it.

Two upstream bugs happen as well, because the ledger must find them: a promise whose load is not planned, and
one that is never loaded. The engine's own counters stay right in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st
from tests.histories import Counters, Engine, Part, compressed

from kvledger.audit.events import Event

BLOCK = 4
ROUNDS = 80


@dataclass(frozen=True, repr=False)
class Story:
    """One stream. Its repr has one event per line, for the report of a failing example."""

    events: list[Event]

    def __repr__(self) -> str:
        return "\n".join(["Story:", *(f"  {event!r}" for event in self.events)])


def random_histories(*, repeats: bool = True) -> st.SearchStrategy[Story]:
    """Streams of one to four requests; ``repeats``: unchanged steps become ``Repeated``."""
    return st.binary(min_size=60, max_size=400).map(partial(story, repeats=repeats))


def story(choices: bytes, *, repeats: bool = True) -> Story:
    """The stream that these choices give."""
    simulation = Simulation(Choices(choices))
    simulation.run()
    stream = simulation.engine.events
    return Story(compressed(stream) if repeats else stream)


class Choices:
    """Choices read from bytes; all zero after the last byte."""

    def __init__(self, choices: bytes) -> None:
        self._rest = iter(choices)

    def below(self, bound: int) -> int:
        """0 <= choice < bound."""
        return next(self._rest, 0) % bound

    def chance(self, of_256: int) -> bool:
        """True about ``of_256`` times out of 256; False after the last byte."""
        return next(self._rest, 0) >= 256 - of_256


@dataclass
class Actor:
    """What the scheduler knows of a request besides its counters."""

    request: int
    prompt_tokens: int
    max_tokens: int
    pooling: bool
    chunks: int
    """Further chunks of a session."""
    state: str = "unborn"
    unproven: bool = False
    """No output of this life has come yet."""
    start: int = 0
    """Where this life's first step begins."""
    drains: bool = False
    """Preempted; output in flight is still to be delivered before it may resume."""
    sure: int | None = None
    """Preempted, output dropped: only positions below were executed for certain."""


@dataclass
class Simulation:
    """The driver. One call of :meth:`run`."""

    choices: Choices
    actors: list[Actor] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        below = self.choices.below
        self.depth = below(3)
        self.engine = Engine(asynchronous=self.depth > 0)
        self.spice = (0, 6, 20, 50)[below(4)]
        """How often rare things happen, out of 256."""
        self.connector = below(3)
        self.drafts = below(4)
        self.budget = (64, 5, 11, 1)[below(4)]
        self.recompute = not self.choices.chance(64)
        limit = below(64)
        self.rounds = limit - 20 if limit > 25 else ROUNDS
        for request in range(1 + below(4)):
            kind = below(8)
            actor = Actor(
                request,
                prompt_tokens=1 + below(30),
                max_tokens=1 + below(14),
                pooling=kind == 7,
                chunks=below(3) if kind in (5, 6) else 0,
            )
            self.actors.append(actor)

    # Small helpers.

    def rare(self) -> bool:
        """Whether something rare happens now."""
        return self.spice > 0 and self.choices.chance(self.spice)

    def counters(self, actor: Actor) -> Counters:
        """The engine's own counters."""
        return self.engine.requests[actor.request]

    # The loop.

    def run(self) -> None:
        """Rounds of schedule and output until all have ended, or the stream is cut off."""
        for _ in range(self.rounds):
            self.between_steps()
            rows = [row for actor in self.actors if (row := self.row(actor)) is not None]
            if rows:
                restated = {row[0] for row in rows} if self.rare() else ()
                self.engine.schedule(rows, restated)
            while self.engine.flight and (len(self.engine.flight) > self.depth or not rows):
                self.deliver()
                if rows:
                    break
            if all(actor.state == "done" for actor in self.actors) and not self.engine.flight:
                break

    def between_steps(self) -> None:
        """Arrivals, aborts, a reset, remote loads, new chunks."""
        for request in self.late:
            self.engine.finish_load(request)
        self.late.clear()
        for actor in self.actors:
            if actor.state == "unborn" and not self.rare():
                self.engine.add(
                    actor.request,
                    actor.prompt_tokens,
                    pooling=actor.pooling,
                    resumable=actor.chunks > 0,
                )
                actor.state = "waiting"
            elif actor.state in ("waiting", "remote", "running", "paused") and self.rare():
                self.abort(actor)
            elif actor.state == "remote":
                self.remote(actor)
            elif actor.state == "paused" and not self.rare():
                self.extend(actor)
            elif actor.state == "running" and self.overdue(actor) and self.choices.chance(64):
                self.engine.finish_load(actor.request)
        if self.rare():
            self.engine.census()
        if self.rare():
            running = [actor for actor in self.actors if actor.state == "running"]
            self.engine.reset(bool(running))
            for actor in running:
                self.preempt(actor, "reset", delivered=False)

    def overdue(self, actor: Actor) -> bool:
        """Whether the request runs although its asynchronous load was never reported as finished."""
        one = self.counters(actor)
        return one.waits and one.asynchronous

    def abort(self, actor: Actor) -> None:
        """The client aborts the request, at any moment."""
        if actor.state == "remote" and self.choices.chance(128):
            self.late.append(actor.request)
        self.engine.finish(actor.request, "aborted")
        actor.state = "done"

    def extend(self, actor: Actor) -> None:
        """A session's next chunk."""
        actor.chunks -= 1
        self.engine.extend(actor.request, 1 + self.choices.below(12))
        actor.state = "running"

    def remote(self, actor: Actor) -> None:
        """An asynchronous load finishes, fails, or goes on."""
        one = self.counters(actor)
        if self.rare():
            return  # Still under way.
        if self.choices.chance(60):
            self.engine.fail_load(actor.request, self.choices.below(one.computed))
            if not self.recompute:
                self.engine.finish(actor.request, "error")
                actor.state = "done"
                return
        elif one.computed < one.sequence_tokens and self.rare():
            actor.state = "running"  # The bug: it runs over a promise.
            return
        self.engine.finish_load(actor.request)
        if one.computed == 0:
            self.engine.release(actor.request)
            actor.state = "waiting"
            return
        if not self.replay(actor) and one.computed == one.sequence_tokens:
            self.engine.roll_back(actor.request, "full_hit", 1)
        actor.state = "running"

    def replay(self, actor: Actor) -> bool:
        """A sliding window before the hit's end is computed again."""
        computed = self.counters(actor).computed
        if computed == 0 or not self.rare():
            return False
        self.engine.roll_back(actor.request, "replay", 1 + self.choices.below(min(computed, 9)))
        return True

    def preempt(self, actor: Actor, cause: str, delivered: bool) -> None:
        """The request's life ends; its steps in flight stay."""
        one = self.counters(actor)
        live = [part for part in self.engine.parts(actor.request) if part.fate == "live"]
        sure = one.computed - sum(part.tokens for part in live)
        actor.sure = None if delivered else min(sure, actor.sure if actor.sure is not None else sure)
        actor.drains = delivered
        self.engine.preempt(actor.request, cause, delivered)
        actor.state = "waiting"

    # Scheduling.

    def row(self, actor: Actor) -> tuple[int, int, int] | None:
        """This request's share of the next step, if it gets one."""
        if actor.state == "running" and self.rare():
            self.preempt(actor, "blocks", delivered=not self.rare())
            return None
        if actor.state == "waiting":
            self.admit(actor)
        if actor.state != "running":
            return None
        one = self.counters(actor)
        wanted = one.sequence_tokens + one.placeholders - one.computed
        tokens = min(wanted, self.budget)
        if tokens <= 0 or (actor.pooling and one.computed >= one.prompt_tokens):
            return None
        drafts = 0
        if wanted == 1 and one.computed >= one.prompt_tokens and not actor.pooling:
            drafts = self.choices.below(2) if self.rare() else self.drafts
        if actor.unproven and not self.engine.parts(actor.request):
            actor.start = one.computed
        return actor.request, tokens + drafts, drafts

    def admit(self, actor: Actor) -> None:
        """Look up, match, and perhaps begin a life."""
        one = self.counters(actor)
        in_flight = self.engine.parts(actor.request)
        if actor.drains and in_flight:
            return
        if not in_flight:
            actor.sure = None
        asynchronous = self.connector == 2
        limit = one.sequence_tokens - 1
        local = 0
        if self.choices.chance(128):  # blocks that a step in flight fills are hits too
            local = BLOCK * self.choices.below(limit // BLOCK + 1)
        if actor.sure is not None:
            limit = min(limit, actor.sure)  # A store has no KV that the device has not computed yet.
        external = 0
        if self.connector and local <= limit and self.choices.chance(160):
            whole = asynchronous and limit == one.sequence_tokens - 1
            external = self.choices.below(limit + whole - local + 1)
        if self.rare():
            deferred = self.connector > 0 and self.choices.chance(128)
            self.engine.look_up(actor.request, local, None if deferred else external, asynchronous)
            reason = "deferred" if deferred else "not_allocated"
            self.engine.fail_admission(actor.request, reason, local, external)
            return
        self.engine.look_up(actor.request, local, external, asynchronous and external > 0)
        self.engine.admit(actor.request, local, external, asynchronous and external > 0)
        actor.unproven = True
        actor.start = local + external
        if one.asynchronous:
            actor.state = "remote"
            return
        self.replay(actor)
        actor.start = one.computed
        if external and self.choices.chance(64):
            covered = self.choices.below(external + 1) if self.rare() else external
            self.engine.plan_load(actor.request, covered)
        actor.state = "running"

    # Output.

    def deliver(self) -> None:
        """The output of the oldest step, and its consequences."""
        step = list(self.engine.flight[0])
        failed = self.failures(step)
        sampled = {part.request: self.sampled(part) for part in step}
        answered = [part for part in step if part.fate != "dropped"]
        self.engine.deliver(sampled)
        for part in step:
            actor = self.actors[part.request]
            if part.fate == "live":
                actor.unproven = False
        for part in answered:
            self.after(self.actors[part.request], part, sampled[part.request])
        for actor in failed:
            if not self.recompute:
                self.engine.finish(actor.request, "error")
                actor.state = "done"

    def sampled(self, part: Part) -> int:
        """Accepted drafts plus one; nothing for a prefill chunk."""
        if not part.samples:
            return 0
        return 1 + (self.choices.below(part.drafts + 1) if part.drafts else 0)

    def failures(self, step: Sequence[Part]) -> list[Actor]:
        """Synchronous loads that fail, and the hits of others that fall with them."""
        failed: list[Actor] = []
        for part in step:
            actor = self.actors[part.request]
            one = self.counters(actor)
            if one.finished or part.fate != "live" or not actor.unproven:
                continue
            promised = one.waits and not one.asynchronous
            if actor.start == 0 or not (promised or failed) or not self.choices.chance(60):
                continue
            if promised:
                lowest = min(one.local, actor.start - 1)
                valid = lowest + self.choices.below(actor.start - lowest)
                if self.rare():
                    valid = self.choices.below(actor.start)
            else:
                valid = self.choices.below(actor.start + 1)
            drafting = any(each.drafts for each in self.engine.parts(actor.request))
            self.engine.fail_load(actor.request, valid, later_delivered=not drafting and self.rare())
            one.waits = False
            actor.unproven = False
            failed.append(actor)
        return failed

    def after(self, actor: Actor, part: Part, sampled: int) -> None:
        """Stop the request with this output, perhaps."""
        one = self.counters(actor)
        if one.finished:
            return
        if actor.pooling:
            in_flight = self.engine.parts(actor.request)
            if part.fate == "live" and one.computed >= one.prompt_tokens and not in_flight:
                self.engine.finish(actor.request, "stopped")
                actor.state = "done"
            return
        if not sampled:
            return
        beyond = max(0, one.output_tokens - actor.max_tokens)
        if self.rare():
            beyond = max(beyond, self.choices.below(sampled))
        elif one.output_tokens < actor.max_tokens:
            return
        if actor.chunks and actor.state == "running" and part.fate == "live":
            self.engine.stop_chunk(actor.request, beyond, silent=self.choices.chance(128))
            actor.state = "paused"
            if self.choices.chance(128):
                self.extend(actor)
            return
        self.engine.finish(actor.request, "length", beyond)
        actor.state = "done"
