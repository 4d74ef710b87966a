"""A life of a request, and its tokens in flight.

Both are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen (``statements.py``). The
account that holds the lives is in ``account.py``, and the posting functions write them.
"""

from __future__ import annotations

import msgspec

from .statements import LifeStatement
from .weights import Made


class InFlight(msgspec.Struct, eq=False):
    """One request's tokens of a scheduled step whose output has not come."""

    start: int
    """First scheduled position."""
    tokens: int
    """Scheduled tokens."""
    drafts: int
    """Draft tokens among them."""
    life: Life
    """The life that scheduled them."""
    overrun: bool = False
    """Whether the request had stopped before this step's output."""
    invalid_from: int = -1
    """First position that is not valid because a load failed; -1: all are valid."""
    posted: int = 0
    """How many of the tokens, from the first on, were posted as work before the output came."""
    weights: tuple[int, int] | None = None
    """The version of the step's weights, and the oldest one in the chain of the KV that it reads; None:
    the weights have not changed since the step."""


class Life(msgspec.Struct, eq=False):
    """A life: from an admission to the next preemption, a load failure that frees the blocks, or the end.

    Counts are tokens; times are microseconds since the engine started.
    """

    number: int
    """1 for the request's first life."""
    local: int
    """Local hit at admission."""
    external: int
    """External tokens that the connector promised at admission."""
    asynchronous: bool
    """Whether the request waits for its external tokens before it runs."""
    pending_start: int = 0
    """First promised position that is neither loaded nor lost."""
    pending_end: int = 0
    """End of the promised positions that are neither loaded nor lost."""
    queried_local: int = 0
    """Tokens that the engine's exported statistics should count as queried in its own cache; 0: none."""
    queried_external: int = 0
    """The same for the connector."""
    missing_blocks: list[int] = []
    """Promised blocks that no load filled, as far as known."""
    loaded: int = 0
    """External tokens loaded."""
    loaded_again: int = 0
    """Those of them over positions that had KV before."""
    tiers: dict[str, int] = {}
    """The promised tokens by tier, as the connector reported them; empty: it reported none."""
    voided: dict[str, int] = {}
    """External tokens that failed or were cancelled, by cause."""
    voids: list[tuple[int, int, str]] = []
    """The failed or cancelled external tokens by position: start, end, cause."""
    invalid_from: int = -1
    """First position that a failed load left without valid KV; -1: no load failed."""
    scheduled: int = 0
    """Tokens scheduled."""
    rejected: int = 0
    """Draft tokens rejected."""
    rolled_back: dict[str, int] = {}
    """Computed tokens rolled back while the life lasted, by cause."""
    kept_end: int = 0
    """Positions below it have been computed, though a roll-back may have lowered the count since."""
    discarded: int = 0
    """Computed tokens when the life ended."""
    ran: bool = False
    """Whether a step scheduled the life."""
    ran_at: int = -1
    """Time of the first such step; -1: there was none."""
    output_at: int = -1
    """Time of the first output that brought a token; -1: there was none."""
    own: int = 0
    """The time of its share of steps, in the unit of the step clock, up to ``shared_to``."""
    own_at_output: int = 0
    """The same at the first output that brought a token."""
    step_tokens: int = 0
    """Its tokens in the present step."""
    shared_to: int = 0
    """The reading of the step clock up to which ``own`` is added."""
    made: list[Made] = []
    """The weights that its KV was made with, by position; empty: those before the first change."""
    delivered: bool = False
    """Whether the output of such a step has come."""
    began_at: int = 0
    """Time of the admission."""
    began_step: int = 0
    """Step of the admission."""
    ended_at: int = -1
    """Time of the end; -1 while the life lasts."""
    ended_by: str = ""
    """Cause of the end; empty while the life lasts."""
    load_ended_at: int = -1
    """Time when an asynchronous load finished or failed; -1: not yet, or no such load."""

    def __post_init__(self) -> None:
        self.pending_start = self.local
        self.pending_end = self.local + max(0, self.external)

    @property
    def lost_external(self) -> int:
        """External tokens that failed or were cancelled."""
        return sum(self.voided.values())

    @property
    def pending(self) -> int:
        """Promised tokens that are neither loaded nor lost yet."""
        return self.pending_end - self.pending_start


def life_statement(life: Life) -> LifeStatement:
    return LifeStatement(
        number=life.number,
        began_at=life.began_at,
        began_step=life.began_step,
        ended_at=life.ended_at,
        ended_by=life.ended_by,
        local=life.local,
        external=life.external,
        loaded=life.loaded,
        voided=dict(life.voided),
        scheduled=life.scheduled,
        rejected=life.rejected,
        rolled_back=dict(life.rolled_back),
        discarded=life.discarded,
    )
