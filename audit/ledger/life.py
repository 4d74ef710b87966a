"""A life of a request, and its tokens in flight.

Both are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen (``statements.py``). The
account that holds the lives is in ``account.py``, and the posting functions write them.
"""

from __future__ import annotations

from .statements import LifeStatement
from .weights import Made


class InFlight:
    """One request's tokens of a scheduled step whose output has not come."""

    __slots__ = ("drafts", "invalid_from", "life", "overrun", "posted", "start", "tokens", "weights")

    def __init__(self, start: int, tokens: int, drafts: int, life: Life) -> None:
        self.start = start
        """First scheduled position."""
        self.tokens = tokens
        """Scheduled tokens."""
        self.drafts = drafts
        """Draft tokens among them."""
        self.life = life
        """The life that scheduled them."""
        self.overrun = False
        """Whether the request had stopped before this step's output."""
        self.invalid_from = -1
        """First position that is not valid because a load failed; -1: all are valid."""
        self.posted = 0
        """How many of the tokens, from the first on, were posted as work before the output came."""
        self.weights: tuple[int, int] | None = None
        """The version of the step's weights, and the oldest one in the chain of the KV that it reads; None:
        the weights have not changed since the step."""


class Life:
    """A life: from an admission to the next preemption, a load failure that frees the blocks, or the end.

    Counts are tokens; times are microseconds since the engine started.
    """

    __slots__ = (
        "asynchronous",
        "began_at",
        "began_step",
        "delivered",
        "discarded",
        "ended_at",
        "ended_by",
        "external",
        "invalid_from",
        "kept_end",
        "load_ended_at",
        "loaded",
        "loaded_again",
        "local",
        "made",
        "missing_blocks",
        "number",
        "output_at",
        "own",
        "own_at_output",
        "pending_end",
        "pending_start",
        "queried_external",
        "queried_local",
        "ran",
        "ran_at",
        "rejected",
        "rolled_back",
        "scheduled",
        "shared_to",
        "step_tokens",
        "tiers",
        "voided",
        "voids",
    )

    def __init__(self, number: int, local: int, external: int, asynchronous: bool) -> None:
        self.number = number
        """1 for the request's first life."""
        self.local = local
        """Local hit at admission."""
        self.external = external
        """External tokens that the connector promised at admission."""
        self.asynchronous = asynchronous
        """Whether the request waits for its external tokens before it runs."""
        self.pending_start = local
        """First promised position that is neither loaded nor lost."""
        self.pending_end = local + max(0, external)
        """End of the promised positions that are neither loaded nor lost."""
        self.queried_local = 0
        """Tokens that the engine's exported statistics should count as queried in its own cache; 0: none."""
        self.queried_external = 0
        """The same for the connector."""
        self.missing_blocks: list[int] = []
        """Promised blocks that no load filled, as far as known."""
        self.loaded = 0
        """External tokens loaded."""
        self.loaded_again = 0
        """Those of them over positions that had KV before."""
        self.tiers: dict[str, int] = {}
        """The promised tokens by tier, as the connector reported them; empty: it reported none."""
        self.voided: dict[str, int] = {}
        """External tokens that failed or were cancelled, by cause."""
        self.voids: list[tuple[int, int, str]] = []
        """The failed or cancelled external tokens by position: start, end, cause."""
        self.invalid_from = -1
        """First position that a failed load left without valid KV; -1: no load failed."""
        self.scheduled = 0
        """Tokens scheduled."""
        self.rejected = 0
        """Draft tokens rejected."""
        self.rolled_back: dict[str, int] = {}
        """Computed tokens rolled back while the life lasted, by cause."""
        self.kept_end = 0
        """Positions below it have been computed, though a roll-back may have lowered the count since."""
        self.discarded = 0
        """Computed tokens when the life ended."""
        self.ran = False
        """Whether a step scheduled the life."""
        self.ran_at = -1
        """Time of the first such step; -1: there was none."""
        self.output_at = -1
        """Time of the first output that brought a token; -1: there was none."""
        self.own = 0
        """The time of its share of steps, in the unit of the step clock, up to ``shared_to``."""
        self.own_at_output = 0
        """The same at the first output that brought a token."""
        self.step_tokens = 0
        """Its tokens in the present step."""
        self.shared_to = 0
        """The reading of the step clock up to which ``own`` is added."""
        self.made: list[Made] = []
        """The weights that its KV was made with, by position; empty: those before the first change."""
        self.delivered = False
        """Whether the output of such a step has come."""
        self.began_at = 0
        """Time of the admission."""
        self.began_step = 0
        """Step of the admission."""
        self.ended_at = -1
        """Time of the end; -1 while the life lasts."""
        self.ended_by = ""
        """Cause of the end; empty while the life lasts."""
        self.load_ended_at = -1
        """Time when an asynchronous load finished or failed; -1: not yet, or no such load."""

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
