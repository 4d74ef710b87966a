"""The account of one request: its lives, its tokens in flight, its figures, and where the KV of its positions
came from.

Accounts and lives are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen. The posting
functions write accounts; nothing here posts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgspec

from .. import causes
from ..causes import TIER_UNKNOWN, UNKNOWN
from ..events import RequestLabels
from ..figures.sums import merge_tokens

# --- statements ----------------------------------------------------------------------------------------
#
# What leaves the ledger: immutable statements, settlements and statement lines of one account.


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


class EncoderInput(NamedTuple):
    """One encoder input of a request: identity, first position, positions, and embeddings."""

    identity: int
    start: int
    positions: int
    embeddings: int

    @property
    def end(self) -> int:
        """The first position behind the input."""
        return self.start + self.positions


class CachedRange(NamedTuple):
    """Positions [start, end) whose KV the prefix cache had under the same hash before this request made it.

    ``since``: the step in which it was cached (-1: not observed). ``left``: the step in which it left the
    cache (-1: another block has it still), and ``how``: ``evicted`` or ``reset``;
    ``never_seen``: the cache never had it, and the rest says nothing. ``came_back``: the step in which
    another request cached it again, before this one did (-1: none did). ``own``: this request's
    allocation evicted it. ``missed``: why a lookup missed it while it was cached; empty if this request had
    cached it. ``gone``: it left in the step in which the first block was allocated to the request's life,
    by a call before that, and so before the lookup.
    """

    start: int
    end: int
    since: int
    left: int
    came_back: int
    how: str
    own: bool
    missed: str
    gone: bool = False


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


# --- position ranges -----------------------------------------------------------------------------------
#
# Positions of a request's sequence: where their KV came from, and why it was lost.
#
# Positions are kept as ranges, never one by one. Two questions are kept apart:
#
# - *Where did this position's KV come from?* The first valid origin stays (:class:`PositionRanges`).
# - *Did the position have KV before?* Then computing it again is rework, with the cause for which the KV was
#   last lost (:class:`Losses`).
#
# The answers differ after a failed load: tokens computed above it had KV, but not valid KV.


LOCAL = "local"
EXTERNAL = "external"
COMPUTED = "computed"
REVOKED = "revoked"
"""Origins of KV. REVOKED: computed, but above a failed load, so the KV was not valid."""
UNATTAINED = "unattained"
"""No valid origin."""


class PositionRange(msgspec.Struct, array_like=True, eq=False):
    """Positions [start, end) with one origin: KV from ``source`` in life ``life``.

    ``again``: the positions had KV before, which turned out not to be valid.
    """

    start: int
    """The first position."""
    end: int
    """One above the last position."""
    source: str
    life: int
    again: bool = False

    def continues(self, last: PositionRange) -> bool:
        """Whether this range directly continues ``last``, with the same origin."""
        return (
            last.end == self.start
            and last.source == self.source
            and last.life == self.life
            and last.again == self.again
        )


class PositionRanges(msgspec.Struct, array_like=True, eq=False):
    """The positions that had KV, and its origin: disjoint ranges, sorted by position."""

    ranges: list[PositionRange] = []
    """The ranges; a position in none has no origin."""

    def fill(self, start: int, end: int, source: str, life: int) -> list[tuple[int, int]]:
        """Give this origin to every position of [start, end) that has no valid origin.

        Returns the intervals that never had KV before. Revoked positions get the new origin and are not
        among these intervals.
        """
        if start >= end:
            return []
        ranges = self.ranges
        last = ranges[-1] if ranges else None
        if last is None or last.end < start:
            ranges.append(PositionRange(start, end, source, life))
            return [(start, end)]
        if last.end == start:
            if last.source == source and last.life == life and not last.again:
                last.end = end
            else:
                ranges.append(PositionRange(start, end, source, life))
            return [(start, end)]
        gaps: list[tuple[int, int]] = []
        kept: list[PositionRange] = []
        position = start
        for row in ranges:
            if row.end <= start or row.start >= end:
                if row.start >= end and position < end:
                    gaps.append((position, end))
                    kept.append(PositionRange(position, end, source, life))
                    position = end
                kept.append(row)
                continue
            if position < row.start:
                gaps.append((position, row.start))
                kept.append(PositionRange(position, row.start, source, life))
            if row.source == REVOKED:
                low, high = max(start, row.start), min(end, row.end)
                for piece in ((row.start, low), (high, row.end)):
                    if piece[0] < piece[1]:
                        kept.append(PositionRange(*piece, REVOKED, row.life))
                kept.append(PositionRange(low, high, source, life, again=True))
                kept.sort(key=_start)
            else:
                kept.append(row)
            position = max(position, row.end)
        if position < end:
            gaps.append((position, end))
            kept.append(PositionRange(position, end, source, life))
        self.ranges = _joined(kept)
        return gaps

    def revoke(self, start: int, life: int) -> None:
        """Mark the KV that life ``life`` gave to positions from ``start`` up as not valid.

        Computed positions become revoked, since computing them again is rework; hits and loads are
        forgotten.
        """
        kept: list[PositionRange] = []
        for row in self.ranges:
            if row.life != life or row.end <= start:
                kept.append(row)
                continue
            if row.start < start:
                kept.append(PositionRange(row.start, start, row.source, life, row.again))
            if row.source in (COMPUTED, REVOKED) or row.again:
                kept.append(PositionRange(max(start, row.start), row.end, REVOKED, life))
        self.ranges = kept

    def withdraw(self, start: int, end: int, life: int, source: str = EXTERNAL) -> int:
        """Forget the origin ``source`` that life ``life`` gave in [start, end); return the tokens."""
        kept: list[PositionRange] = []
        tokens = 0
        for row in self.ranges:
            low, high = max(start, row.start), min(end, row.end)
            if row.source != source or row.life != life or low >= high:
                kept.append(row)
                continue
            tokens += high - low
            for piece in ((row.start, low), (high, row.end)):
                if piece[0] < piece[1]:
                    kept.append(PositionRange(*piece, row.source, life, row.again))
        self.ranges = kept
        return tokens

    def truncate(self, end: int) -> None:
        """Forget positions from ``end`` up, which hold other tokens now."""
        self.ranges = [row for row in self.ranges if row.start < end]
        if self.ranges and self.ranges[-1].end > end:
            self.ranges[-1].end = end

    def first_computed_from(self, start: int) -> int:
        """Count the tokens from position ``start`` up whose first KV was computed, valid or not."""
        return sum(
            row.end - max(start, row.start)
            for row in self.ranges
            if row.end > start and (row.source in (COMPUTED, REVOKED) or row.again)
        )

    def tally(self, start: int, end: int) -> dict[str, int]:
        """Count tokens of [start, end) by origin; ``unattained`` are those without a valid origin."""
        tokens = {LOCAL: 0, EXTERNAL: 0, COMPUTED: 0, UNATTAINED: 0}
        position = start
        for row in self.ranges:
            low = position if position > row.start else row.start
            high = end if end < row.end else row.end
            if low >= high:
                continue
            tokens[UNATTAINED] += low - position
            tokens[UNATTAINED if row.source == REVOKED else row.source] += high - low
            position = high
        tokens[UNATTAINED] += max(0, end - position)
        return tokens

    @property
    def end(self) -> int:
        """One above the highest position that ever had KV."""
        return self.ranges[-1].end if self.ranges else 0


def _start(row: PositionRange) -> int:
    return row.start


def _joined(rows: list[PositionRange]) -> list[PositionRange]:
    joined: list[PositionRange] = []
    for row in rows:
        if joined and row.continues(joined[-1]):
            joined[-1].end = row.end
        else:
            joined.append(row)
    return joined


class Losses(msgspec.Struct, array_like=True, eq=False):
    """The cause for which each position last lost its KV. Newest first; covered older losses are dropped."""

    ranges: list[tuple[int, int, str]] = []
    """First position, one above the last position, and cause of each loss."""

    def add(self, start: int, end: int, cause: str) -> None:
        """Note that positions [start, end) lost their KV."""
        if start < end:
            older = [row for row in self.ranges if row[0] < start or row[1] > end] if self.ranges else ()
            self.ranges = [(start, end, cause), *older]

    def split(self, pieces: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
        """Split ``pieces`` by the cause of their last loss; ``unknown`` where no loss is known."""
        by_cause: list[tuple[int, int, str]] = []
        for low, high, cause in [*self.ranges, (0, 1 << 62, UNKNOWN)]:
            rest: list[tuple[int, int]] = []
            for start, end in pieces:
                first, last = max(start, low), min(end, high)
                if first >= last:
                    rest.append((start, end))
                    continue
                by_cause.append((first, last, cause))
                rest += [p for p in ((start, first), (last, end)) if p[0] < p[1]]
            pieces = rest
        return by_cause


# --- life ----------------------------------------------------------------------------------------------
#
# A life of a request, and its tokens in flight.
#
# Both are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen.
# An account holds its lives, and the posting functions write them.


Made: TypeAlias = tuple[int, int, int]
"""Positions from the first number up to the next item of a list: the stage in which their KV was computed,
and the oldest stage in their chain."""

Sampled: TypeAlias = tuple[int, int, int, int, int]
"""Tokens from a position up to the next item of a list: the stage of the steps that sampled them, the
oldest stage in the chain of the KV that the steps read, how many changes lie between (-1: not known), and the
version of the steps."""


NEW = -2
"""A figure that ``__post_init__`` sets, unless the struct is one that was saved."""


class InFlight(msgspec.Struct, array_like=True, eq=False):
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


class Life(msgspec.Struct, array_like=True, eq=False):
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
    pending_start: int = NEW
    """First promised position that is neither loaded nor lost."""
    pending_end: int = NEW
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
        if self.pending_start == NEW:
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


# --- tiers ---------------------------------------------------------------------------------------------
#
# Which tier gave the external tokens of a life, as far as the connector reported it.
#
# The connector reports the tiers of a promise as numbers of tokens, not by position. So the tier of a part
# of a promise is known only if the whole promise has one tier.


def tokens_by_tier(lives: Iterable[Life], part: str) -> dict[str, int]:
    """Tokens by tier of one attribute of lives, such as ``external`` or ``loaded``.

    Lives whose tiers were not reported are left out.
    """
    read = attrgetter(part)
    found: dict[str, int] = {}
    for life in lives:
        if life.tiers:
            merge_tokens(found, _split(life, read(life)))
    return found


def _split(life: Life, tokens: int) -> dict[str, int]:
    """``tokens`` of a life's promise, by tier."""
    if tokens <= 0:
        return {}
    tiers = {tier: count for tier, count in life.tiers.items() if count}
    if sum(tiers.values()) != life.external:
        return {TIER_UNKNOWN: tokens}
    if tokens == life.external:
        return tiers
    return {next(iter(tiers)) if len(tiers) == 1 else TIER_UNKNOWN: tokens}


# --- account -------------------------------------------------------------------------------------------
#
# The account of one request: its lives, its figures and its balances.
#
# Accounts are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen
# The posting functions write accounts; nothing here posts.


class Account(msgspec.Struct, array_like=True, eq=False):
    """Everything the ledger holds of one request. Only the ledger writes it.

    Counts are tokens; times are microseconds since the engine started.
    """

    request: int
    """The request's number."""
    request_id: str
    """The request's id, as the engine has it."""
    prompt_tokens: int
    """Length of the prompt; of a session, up to its last chunk."""
    added_at: int
    """Time when the request came."""
    sequence_tokens: int = NEW
    """Prompt and output tokens so far."""
    carried: int = 0
    """Tokens that a session's present chunk keeps from before."""
    closed_at: int = -1
    """Time of the end; -1 while the account is open."""
    outcome: str = ""
    """Why the request ended; empty while the account is open."""
    unknown: str | None = None
    """Why the account is unknown; None if it is known."""
    pooling: bool = False
    """Whether the request is for a pooling model."""
    resumable: bool = False
    """Whether the request is a streaming-input session."""
    reads_cache: bool = True
    """Whether the request may hit the prefix cache."""
    max_tokens: int | None = None
    """Most output tokens that the client asked for; None: not known."""
    priority: int = 0
    """Priority of the request; a lower number is more urgent."""
    labels: RequestLabels | None = None
    """Whom the request is for; None: it has no labels, or they were not recorded."""
    traceparent: str | None = None
    """The caller's W3C trace context."""
    transferred: bool = False
    """Whether a prefill engine hands over the KV, so external tokens are no cache hits."""
    remote_decode: bool = False
    """Whether this engine only prefills the request, and another one decodes."""
    remote_request: str = ""
    """Id of the request in the prefill engine; empty if not known."""
    positions: PositionRanges = msgspec.field(default_factory=PositionRanges)
    """The origin of each position's KV."""
    losses: Losses = msgspec.field(default_factory=Losses)
    """The cause for which each position last lost its KV."""
    life: Life | None = None
    """The present life; None while the request waits."""
    lives: list[Life] = []
    """All lives, oldest first."""
    computed: int = 0
    """Computed tokens of the present life, counted at scheduling as vLLM does."""
    in_flight: list[InFlight] = []
    """Scheduled tokens whose output has not come, oldest step first."""
    in_flight_tokens: int = 0
    """Sum of the tokens in flight."""
    sampled: int = 0
    """Tokens sampled by the last output."""
    drafted: bool = False
    """Whether drafts were ever scheduled."""
    stale_drafts: int = 0
    """Drafts of ended lives that were rejected in the present life."""
    scheduled: int = 0
    """Tokens scheduled in all lives."""
    first_prompt: int = 0
    """Prompt tokens computed for the first time."""
    first_output: int = 0
    """Output tokens computed for the first time."""
    rework: dict[str, int] = {}
    """Tokens computed again, by the cause for which their KV was lost."""
    rejected: int = 0
    """Draft tokens rejected."""
    overrun: int = 0
    """Tokens that were in flight when the request stopped, or accepted past the stop."""
    suspense: int = 0
    """Tokens whose work could not be attributed."""
    executed_first: list[tuple[int, int, int]] = []
    """Prompt positions computed for the first time: start, end, number of the life."""
    executed_again: list[tuple[int, int, str]] = []
    """Prompt positions computed again: start, end, cause."""
    invalid_hits: list[tuple[int, int]] = []
    """Positions of local hits on cached blocks without valid KV: start, end."""
    cached_before: list[CachedRange] = []
    """Prompt positions that block events prove to have been in the cache before."""
    cached_in_group: list[GroupBlock] = []
    """The same of blocks of groups of windows and states."""
    settled: bool = False
    """Whether the present prompt or chunk is settled."""
    incomplete: bool = False
    """Whether the first output came before every token of the present prompt or chunk had valid KV."""
    settlements: list[Settlement] = []
    """One settlement for the prompt, or for each chunk of a session."""
    prefill_parts: tuple[int, int] | None = None
    """Microseconds of the cause ``prefill``: the request's own share of its steps, and the rest."""
    decode_parts: tuple[int, int] | None = None
    """The same of the cause ``decode``."""
    output_time: tuple[int, ...] | None = None
    """Microseconds from the first output to the last, by cause (``clocks.py``); None: not known."""
    later_tokens: int = 0
    """Output tokens after the first one, which came in that time."""
    first_token: tuple[int, ...] | None = None
    """Microseconds to the first output, by cause (``clocks.py``); of a session, of its first turn.
    None: there was no output, or the request is for a pooling model."""
    waited_by_cause: tuple[int, ...] | None = None
    """Microseconds to the first admission, by cause (``clocks.py``); None: there was none."""
    queued: tuple[int, ...] | None = None
    """The same of a request with a first output, whose time it is a part of."""
    plan: tuple[int, int] | None = None
    """Planned split: local and external hits of the first admission that ran."""
    reported: tuple[int, int, int] | None = None
    """Local, external and computed tokens of the engine's first report."""
    reports: int = 0
    """Reports of the engine for the present prompt or chunk."""
    reporting: Life | None = None
    """The life whose hits the engine reports: by release, the first that ran or the last before the
    first output."""
    hit_again: int = 0
    """Repeat hits: local hits over positions that had KV before."""
    loaded_again: int = 0
    """Repeat loads: loaded tokens over positions that had KV before."""
    promised: int = 0
    """External tokens promised in all lives."""
    loaded: int = 0
    """External tokens loaded in all lives."""
    voided: dict[str, int] = {}
    """External tokens that failed or were cancelled, by cause."""
    tiered: bool = False
    """Whether the connector reported the tiers of any life's external tokens."""
    sampled_misses: dict[str, int] = {}
    """Of one in sixteen contents, blocks that the first hit did not cover, by what became of each."""
    outputs: int = 0
    """Output tokens of the turns of a session that have ended, and of a request that has."""
    suspect_outputs: dict[str, int] = {}
    """Those of them whose step read KV of older weights, by how much older."""
    sampled_by: list[Sampled] = []
    """Under which weights the outputs were sampled, by position; empty: before the first change."""
    labelled: list[tuple[int, str]] = []
    """From which position on the engine's output calls the weights so; empty: the label stayed."""
    older_hits: dict[str, int] = {}
    """Local hits of all lives on KV of older weights, by how much older."""
    older_loads: dict[str, int] = {}
    """External tokens promised in all lives with KV of older weights, by how much older."""
    older_prompt: dict[str, int] = {}
    """Settled prompt tokens with KV of older weights, by how much older."""
    discarded: dict[str, int] = {}
    """Computed tokens at the end of each life, by the cause of the end."""
    encoder_inputs: list[EncoderInput] = []
    """The encoder inputs, once an event has spoken of one."""
    encoder_read: dict[int, int] = {}
    """The inputs that were read, by their index, and in which life."""
    encoder_computed: int = 0
    """Encoder embeddings that steps computed for the request."""
    encoder_cached: int = 0
    """Encoder embeddings that the encoder cache had when the request first read them, in each life."""
    saved_tokens: int = 0
    """End of the last positions that an observed order of the connector saves."""
    matched_tokens: int = 0
    """The most tokens that a lookup of the connector found, with the local hit below them."""
    admissions: int = 0
    """Lives begun."""
    preemptions: int = 0
    """Preemptions."""
    looked_up_step: int = -1
    """Step of the last local cache lookup; -1: none was seen."""
    looked_up_local: int = 0
    """Tokens that the last local cache lookup hit."""
    asked_from: int = -1
    """The local hit beyond which the connector was asked since the last lookup; -1: it was not asked."""
    more_blocks_percent: int = -1
    """How many percent more blocks would have avoided every preemption for lack of free blocks, rounded
    up; -1: there was none, or it is not known."""
    lines: list[Line] | None = None
    """Lines of the account statement; None: not kept."""
    steady_scheduled: int = -1
    """Scheduled steps up to which a steady account is posted; -1: the account is not steady."""
    steady_delivered: int = -1
    """Delivered steps up to which a steady account is posted; -1: the account is not steady."""

    def __post_init__(self) -> None:
        if self.sequence_tokens == NEW:
            self.sequence_tokens = self.prompt_tokens

    @property
    def promised_by_tier(self) -> dict[str, int]:
        """External tokens promised, by tier, of the lives whose tiers were reported; so the next three."""
        return tokens_by_tier(self.lives, "external") if self.tiered else {}

    @property
    def loaded_by_tier(self) -> dict[str, int]:
        """External tokens loaded, by tier."""
        return tokens_by_tier(self.lives, "loaded") if self.tiered else {}

    @property
    def voided_by_tier(self) -> dict[str, int]:
        """External tokens that failed or were cancelled, by tier."""
        return tokens_by_tier(self.lives, "lost_external") if self.tiered else {}

    @property
    def loaded_again_by_tier(self) -> dict[str, int]:
        """Repeat loads, by tier."""
        return tokens_by_tier(self.lives, "loaded_again") if self.tiered else {}

    def waits(self, until: int) -> Iterator[tuple[int, int]]:
        """Start and end of every time that the request spent without a life.

        ``until`` ends the last wait of an open account. Microseconds since the engine started.
        """
        since, end = self.added_at, self.closed_at if self.closed_at >= 0 else until
        for life in self.lives:
            if life.began_at > since:
                yield since, life.began_at
            since = life.ended_at if life.ended_at >= 0 else end
        if end > since:
            yield since, end

    def waited(self, until: int) -> int:
        """Total waiting time in microseconds."""
        waited = 0
        for start, end in self.waits(until):
            waited += end - start
        return waited

    def freeze(self) -> AccountStatement:
        """The account as it stands now."""
        return AccountStatement(
            request=self.request,
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            sequence_tokens=self.sequence_tokens,
            added_at=self.added_at,
            closed_at=self.closed_at,
            outcome=self.outcome,
            unknown=self.unknown,
            preemptions=self.preemptions,
            computed=self.computed,
            in_flight=self.in_flight_tokens,
            scheduled=self.scheduled,
            first_prompt=self.first_prompt,
            first_output=self.first_output,
            rework=dict(self.rework),
            rejected=self.rejected,
            overrun=self.overrun,
            settlements=list(self.settlements),
            plan=self.plan,
            reported=self.reported,
            hit_again=self.hit_again,
            loaded_again=self.loaded_again,
            promised=self.promised,
            loaded=self.loaded,
            voided=dict(self.voided),
            discarded=dict(self.discarded),
            suspense=self.suspense,
            lives=[life_statement(life) for life in self.lives],
            traceparent=self.traceparent,
            transferred=self.transferred,
            remote_decode=self.remote_decode,
            remote_request=self.remote_request,
            first_token=_named(causes.FIRST_TOKEN, self.first_token),
            queued=_named(causes.QUEUE, self.queued),
            output_time=_named(causes.OUTPUT_TIME, self.output_time),
            later_tokens=self.later_tokens,
        )


def _named(names: Iterable[str], spent: tuple[int, ...] | None) -> dict[str, int] | None:
    """Microseconds by cause."""
    return None if spent is None else dict(zip(names, spent, strict=True))
