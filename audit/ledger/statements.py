"""What leaves the ledger: immutable statements, settlements and statement lines of one account."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Settlement(msgspec.Struct, frozen=True):
    """Where the tokens of one prompt (or one session chunk) came from; never changed afterwards.

    ``local + external + computed + unattained == prompt_tokens - carried``; each is counted by itself.
    ``invalid_hits``: the unattained tokens that the engine hit in cached blocks without valid KV.
    """

    prompt_tokens: int
    carried: int
    local: int
    external: int
    computed: int
    unattained: int
    at: int
    step: int
    invalid_hits: int = 0

    @property
    def new_tokens(self) -> int:
        """Prompt tokens without those that a session carried over from its chunk before."""
        return self.prompt_tokens - self.carried


class LifeStatement(msgspec.Struct, frozen=True):
    """A life's balances. Tokens; ``began_at`` and ``ended_at`` in microseconds, -1 while it lasts."""

    number: int
    began_at: int
    began_step: int
    ended_at: int
    ended_by: str
    local: int
    external: int
    loaded: int
    voided: dict[str, int]
    scheduled: int
    rejected: int
    rolled_back: dict[str, int]
    discarded: int


class AccountStatement(msgspec.Struct, frozen=True):
    """The frozen account of one request. All counts are tokens, except ``preemptions``."""

    request: int
    request_id: str
    prompt_tokens: int
    sequence_tokens: int
    added_at: int
    closed_at: int
    outcome: str
    unknown: str | None
    preemptions: int
    computed: int
    in_flight: int
    scheduled: int
    first_prompt: int
    first_output: int
    rework: dict[str, int]
    rejected: int
    overrun: int
    settlements: list[Settlement]
    plan: tuple[int, int] | None
    reported: tuple[int, int, int] | None
    hit_again: int
    loaded_again: int
    promised: int
    loaded: int
    voided: dict[str, int]
    discarded: dict[str, int]
    suspense: int
    lives: list[LifeStatement]
    traceparent: str | None = None
    transferred: bool = False
    remote_decode: bool = False
    remote_request: str = ""
    first_token: dict[str, int] | None = None
    """Microseconds to the first output, by cause."""
    queued: dict[str, int] | None = None
    """The part of it before the first admission, by cause."""
    output_time: dict[str, int] | None = None
    """Microseconds from the first output to the last, by cause."""
    later_tokens: int = 0
    """Output tokens that came in that time."""

    @property
    def settled(self) -> Settlement | None:
        """The first (for all but sessions: the only) settlement."""
        return self.settlements[0] if self.settlements else None


class CachedRange(NamedTuple):
    """Positions [start, end) whose KV the prefix cache had under the same hash before this request made it.

    ``since``: the step in which it was cached (-1: not observed). ``left``: the step in which it left the
    cache (-1: another block has it still), and ``how``: ``evicted`` or ``reset``. ``came_back``: the step in
    which another request cached it again, before this one did (-1: none did). ``own``: this request's
    allocation evicted it. ``missed``: why a lookup missed it while it was cached; empty if this request had
    cached it.
    """

    start: int
    end: int
    since: int
    left: int
    came_back: int
    how: str
    own: bool
    missed: str


class GroupBlock(NamedTuple):
    """What the cache had, in another group than that of full attention, of a block that a request made.

    ``end``: where the block ends, in tokens; the rest as in :class:`CachedRange`.
    """

    group: int
    end: int
    since: int
    left: int
    came_back: int
    how: str
    own: bool


class Line(NamedTuple):
    """One line of an account statement. ``balance`` is the life's computed tokens after it.

    ``credit`` and ``debit`` are KV tokens; a line with neither is a memorandum.
    """

    number: int
    at: int
    step: int
    life: int
    text: str
    credit: int
    debit: int
    balance: int
