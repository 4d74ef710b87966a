"""An account kept position by position: the definitions of the figures.

:mod:`tests.differential.oracle` knows when something happens, from what a scheduler's methods were given and
returned. What it counts as is here, once. Nothing is shared with ``kvledger.audit.ledger``, which keeps
ranges: if the two differ, one of them is wrong.

- *executed*: a position whose token a step ran through the model. A rejected draft is not executed.
- A position *has KV* once it was executed, hit or loaded. Executing it again is rework.
- *origin*: what gave a position its first valid KV. A load that failed gives none, and a position that was
  executed above a failed load has no valid KV until it is executed again.
- *overrun*: in flight when the request or the chunk stopped, or executed past the end of the sequence.
- *settled*: the origins of a prompt's positions at the first output at which each has valid KV, or at the end
  of the request or chunk.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

SUMS = (
    "scheduled",
    "first_prompt",
    "first_output",
    "rework",
    "rejected",
    "overrun",
    "hit_again",
    "loaded_again",
    "preemptions",
    "promised",
    "loaded",
)
SOURCES = ("local", "external", "computed", "unattained")


@dataclass
class Position:
    """Everything that happened at one position of a request's sequence."""

    origin: str = ""
    """What gave the position its first valid KV: local, external or computed. Empty: nothing yet."""
    origin_life: int = 0
    executed: set[int] = field(default_factory=set)
    """The lives whose steps computed the position."""
    came: set[int] = field(default_factory=set)
    """The lives in which a hit or a load gave the position its KV."""
    first_output: int = 0

    @property
    def has_kv(self) -> bool:
        """Whether the position ever had KV."""
        return bool(self.executed or self.came)


@dataclass
class Life:
    """From an admission to a preemption, a load failure that frees the blocks, or the end."""

    number: int
    local: int
    external: int
    asynchronous: bool
    pending: set[int]
    """Promised positions that are neither loaded nor given up."""
    over: str = ""
    """The cause for which the life ended; empty while it lasts."""


@dataclass
class Work:
    """One request's share of a step in flight."""

    life: Life
    start: int
    tokens: int
    drafts: int
    valid_below: int | None = None
    """After a failed load: positions from here up are executed without valid KV below them."""
    overrun: bool = False
    """Whether the tokens that were not executed are counted as overrun."""
    executed: int = 0
    """Tokens that a later hit proves to be executed before the step's output came."""


@dataclass
class Account:
    """One request's account, kept by position."""

    prompt_tokens: int
    carried: int = 0
    positions: dict[int, Any] = field(default_factory=dict)
    lives: list[Any] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    finished: bool = False
    settled: bool = False
    incomplete: bool = False
    """Whether an output came while a position of the prompt had no valid KV."""
    settlements: list[dict[str, int]] = field(default_factory=list)
    plan: tuple[int, int] | None = None

    position: ClassVar[type[Position]] = Position
    """The record that a model keeps of a position."""

    def at(self, position: int) -> Any:
        """The record of one position, created on first use."""
        assert position >= 0
        return self.positions.setdefault(position, self.position())

    @property
    def life(self) -> Any:
        """The present life; None if there is none."""
        return self.lives[-1] if self.lives and not self.lives[-1].over else None

    # Positions get KV.

    def come(self, life: Life, position: int, source: str) -> None:
        """A hit or a load gives one position its KV."""
        one = self.at(position)
        if one.has_kv:
            self.counts["hit_again" if source == "local" else "loaded_again"] += 1
        one.came.add(life.number)
        if not one.origin:
            one.origin, one.origin_life = source, life.number

    def load(self, life: Life, position: int) -> None:
        """A promised position was loaded."""
        life.pending.discard(position)
        self.counts["loaded"] += 1
        self.come(life, position, "external")

    def execute(self, work: Work, position: int) -> None:
        """A scheduled position was computed by the model."""
        one = self.at(position)
        if one.has_kv:
            self.counts["rework"] += 1
        elif position < self.prompt_tokens:
            self.counts["first_prompt"] += 1
        else:
            self.counts["first_output"] += 1
            one.first_output += 1
        one.executed.add(work.life.number)
        if not one.origin and self.is_valid(work, position):
            one.origin, one.origin_life = "computed", work.life.number

    @staticmethod
    def is_valid(work: Work, position: int) -> bool:
        """Whether the positions below had valid KV when this one was executed."""
        return work.valid_below is None or position < work.valid_below

    def reject(self, work: Work, sampled: int, later: list[Work]) -> int:
        """Count the drafts that the step's output rejects, and move the steps in flight behind it down."""
        rejected = work.drafts - (sampled - 1) if work.drafts and sampled else 0
        self.counts["rejected"] += rejected
        for each in later:
            # They were scheduled as if all drafts were accepted. A step scheduled after a failed load already
            # starts below the garbage of those before.
            if each.life is work.life and (each.valid_below is None) == (work.valid_below is None):
                each.start -= rejected
        return rejected

    def distrust(self, life: Life, valid: int) -> None:
        """A load failed: the life gave no position from ``valid`` up valid KV."""
        for number, one in self.positions.items():
            if number >= valid:
                if one.origin_life == life.number:
                    one.origin, one.origin_life = "", 0
                one.came.discard(life.number)

    # Ends.

    def overrun(self, works: list[Work]) -> None:
        """Count the tokens in flight as overrun."""
        for work in works:
            if not work.overrun:
                self.counts["overrun"] += work.tokens - work.executed
                work.overrun = True

    def past_the_end(self, end: int) -> None:
        """Count output executed from position ``end`` up as overrun."""
        for number, one in self.positions.items():
            if number >= end and one.first_output:
                self.counts["first_output"] -= one.first_output
                self.counts["overrun"] += one.first_output
                one.first_output = 0

    def extend(self, carried: int, prompt_tokens: int) -> None:
        """A session's next chunk: the positions from ``carried`` up hold other tokens now."""
        if self.incomplete and not self.settled:
            self.settle()
        self.carried, self.prompt_tokens = carried, prompt_tokens
        self.settled = self.incomplete = False
        for number in [number for number in self.positions if number >= carried]:
            del self.positions[number]

    def answer(self) -> None:
        """An output was handed to the client."""
        if not self.settled:
            self.incomplete = any(
                not self.at(number).origin for number in range(self.carried, self.prompt_tokens)
            )
            if not self.incomplete:
                self.settle()

    def settle(self) -> None:
        """Attribute every position of the present prompt or chunk, once."""
        origins = Counter(
            self.at(number).origin or "unattained" for number in range(self.carried, self.prompt_tokens)
        )
        sources = {source: origins[source] for source in SOURCES}
        self.settlements.append({**sources, "carried": self.carried, "prompt_tokens": self.prompt_tokens})
        self.settled = True

    def figures(self) -> dict[str, Any]:
        """The account as plain figures, named as in an account statement of the ledger."""
        return {
            **{name: self.counts[name] for name in SUMS},
            "settlements": [dict(settlement) for settlement in self.settlements],
            "plan": self.plan,
        }
