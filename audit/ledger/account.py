"""The accounts: what one request's KV tokens came from, what was done, and what became of them.

Positions are kept as intervals (:class:`Spans`) with a high-water mark, never one by one. Accounts
are mutable, for the ledger's hot loop alone; what leaves the ledger is frozen (:class:`Statement`,
:class:`Settlement`, :class:`Line`). Only ``ledger.py`` posts.

Two questions are kept apart:

- *Where did this position's KV come from?* The first valid origin wins, once.
- *Had it come to be before?* Then executing its position again is rework, with the cause for which
  the KV was last lost.

They differ after a failed load: what was executed above it had come to be, but was not valid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ..causes import UNKNOWN

LOCAL = "local"
EXTERNAL = "external"
COMPUTED = "computed"
REVOKED = "revoked"


class Span:
    """Positions [start, end) whose KV came to be from ``source`` in life ``life``.

    ``again``: they had come to be before, without a valid origin.
    """

    __slots__ = ("again", "end", "life", "source", "start")

    def __init__(self, start: int, end: int, source: str, life: int, again: bool = False) -> None:
        self.start = start
        self.end = end
        self.source = source
        self.life = life
        self.again = again

    def continues(self, last: Span) -> bool:
        """Whether this and ``last`` are one span."""
        return (
            last.end == self.start
            and last.source is self.source
            and last.life == self.life
            and last.again == self.again
        )


class Spans:
    """Which positions' KV has come to be, and where from. Disjoint, sorted by position."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[Span] = []

    def fill(self, start: int, end: int, source: str, life: int) -> list[tuple[int, int]]:
        """Give every position of [start, end) without a valid origin this one.

        Returns the intervals that had never come to be before; revoked positions get the new
        origin and are not among them.
        """
        if start >= end:
            return []
        rows = self.rows
        if not rows or rows[-1].end <= start:
            self._append(start, end, source, life)
            return [(start, end)]
        gaps: list[tuple[int, int]] = []
        kept: list[Span] = []
        at = start
        for row in rows:
            if row.end <= start or row.start >= end:
                if row.start >= end and at < end:
                    gaps.append((at, end))
                    kept.append(Span(at, end, source, life))
                    at = end
                kept.append(row)
                continue
            if at < row.start:
                gaps.append((at, row.start))
                kept.append(Span(at, row.start, source, life))
            if row.source is REVOKED:
                low, high = max(start, row.start), min(end, row.end)
                for piece in ((row.start, low), (high, row.end)):
                    if piece[0] < piece[1]:
                        kept.append(Span(*piece, REVOKED, row.life))
                kept.append(Span(low, high, source, life, again=True))
                kept.sort(key=_start)
            else:
                kept.append(row)
            at = max(at, row.end)
        if at < end:
            gaps.append((at, end))
            kept.append(Span(at, end, source, life))
        self.rows = _joined(kept)
        return gaps

    def revoke(self, start: int, life: int) -> None:
        """Positions from ``start`` up got no valid KV in life ``life``.

        What was executed there stays reached (to do it again is rework); hits and loads that were
        not valid never came to be.
        """
        kept: list[Span] = []
        for row in self.rows:
            if row.life != life or row.end <= start:
                kept.append(row)
                continue
            if row.start < start:
                kept.append(Span(row.start, start, row.source, life, row.again))
            if row.source in (COMPUTED, REVOKED) or row.again:
                kept.append(Span(max(start, row.start), row.end, REVOKED, life))
        self.rows = kept

    def withdraw(self, start: int, end: int, life: int) -> int:
        """What life ``life`` had from outside in [start, end) never came to be; how many tokens."""
        kept: list[Span] = []
        tokens = 0
        for row in self.rows:
            low, high = max(start, row.start), min(end, row.end)
            if row.source is not EXTERNAL or row.life != life or low >= high:
                kept.append(row)
                continue
            tokens += high - low
            for piece in ((row.start, low), (high, row.end)):
                if piece[0] < piece[1]:
                    kept.append(Span(*piece, row.source, life, row.again))
        self.rows = kept
        return tokens

    def truncate(self, end: int) -> None:
        """Forget positions from ``end`` up: other tokens stand there now."""
        self.rows = [row for row in self.rows if row.start < end]
        if self.rows and self.rows[-1].end > end:
            self.rows[-1].end = end

    def tally(self, start: int, end: int) -> dict[str, int]:
        """Tokens by origin within [start, end); ``unattained`` is counted from the gaps."""
        tokens = {LOCAL: 0, EXTERNAL: 0, COMPUTED: 0, "unattained": 0}
        at = start
        for row in self.rows:
            low, high = max(at, row.start), min(end, row.end)
            if low >= high:
                continue
            tokens["unattained"] += low - at
            tokens["unattained" if row.source is REVOKED else row.source] += high - low
            at = high
        tokens["unattained"] += max(0, end - at)
        return tokens

    @property
    def end(self) -> int:
        """One above the highest position whose KV ever came to be."""
        return self.rows[-1].end if self.rows else 0

    def _append(self, start: int, end: int, source: str, life: int) -> None:
        row = Span(start, end, source, life)
        if self.rows and row.continues(self.rows[-1]):
            self.rows[-1].end = end
        else:
            self.rows.append(row)


def _start(row: Span) -> int:
    return row.start


def _joined(rows: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for row in rows:
        if joined and row.continues(joined[-1]):
            joined[-1].end = row.end
        else:
            joined.append(row)
    return joined


class Losses:
    """For which cause each position's KV last ceased to be. Newest first, older ones pruned."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, str]] = []

    def add(self, start: int, end: int, cause: str) -> None:
        """KV of [start, end) ceased to be."""
        if start < end:
            older = [row for row in self.rows if row[0] < start or row[1] > end]
            self.rows = [(start, end, cause), *older]

    def split(self, pieces: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
        """``pieces`` by the cause of their last loss; ``unknown`` where none is known."""
        found: list[tuple[int, int, str]] = []
        for low, high, cause in [*self.rows, (0, 1 << 62, UNKNOWN)]:
            rest: list[tuple[int, int]] = []
            for start, end in pieces:
                first, last = max(start, low), min(end, high)
                if first >= last:
                    rest.append((start, end))
                    continue
                found.append((first, last, cause))
                rest += [p for p in ((start, first), (last, end)) if p[0] < p[1]]
            pieces = rest
        return found


class InFlight:
    """Positions [start, start + tokens) of one scheduled step whose output has not come."""

    __slots__ = ("drafts", "invalid_from", "life", "overrun", "start", "tokens")

    def __init__(self, start: int, tokens: int, drafts: int, life: Life) -> None:
        self.start = start
        self.tokens = tokens
        self.drafts = drafts
        self.life = life
        self.overrun = False
        self.invalid_from = -1


class Life:
    """From an admission to the next preemption, total load failure, or end."""

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
        "load_ended_at",
        "loaded",
        "local",
        "missing_blocks",
        "number",
        "pending_end",
        "pending_start",
        "ran",
        "rejected",
        "rolled_back",
        "scheduled",
        "voided",
        "voids",
    )

    def __init__(self, number: int, local: int, external: int, asynchronous: bool) -> None:
        self.number = number
        self.local = local
        self.external = external
        self.asynchronous = asynchronous
        self.pending_start = local
        self.pending_end = local + max(0, external)
        self.missing_blocks: list[int] = []
        self.loaded = 0
        self.voided: dict[str, int] = {}
        # The same by position; and where a failed load left nothing valid from, -1 where none did.
        self.voids: list[tuple[int, int, str]] = []
        self.invalid_from = -1
        self.scheduled = 0
        self.rejected = 0
        self.rolled_back: dict[str, int] = {}
        self.discarded = 0
        self.ran = False
        self.delivered = False
        self.began_at = 0
        self.began_step = 0
        self.ended_at = -1
        self.ended_by = ""
        self.load_ended_at = -1

    @property
    def pending(self) -> int:
        """Promised tokens of which it is not yet known whether they came."""
        return self.pending_end - self.pending_start


class Settlement(msgspec.Struct, frozen=True):
    """Where the tokens of one prompt (or one session chunk) came from; said once, never changed.

    ``local + external + computed + unattained == prompt_tokens - carried``, by counting each.
    """

    prompt_tokens: int
    carried: int
    local: int
    external: int
    computed: int
    unattained: int
    at: int
    step: int


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


class Statement(msgspec.Struct, frozen=True):
    """One request's account, frozen. All counts are tokens but ``preemptions``."""

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

    @property
    def settled(self) -> Settlement | None:
        """The first (for all but sessions: the only) settlement."""
        return self.settlements[0] if self.settlements else None


class Lost(NamedTuple):
    """Positions [start, end) whose KV was in the cache under the same hash, and had left it.

    ``left`` and ``came_back`` are steps; it came back (-1: it did not) before this request filled it
    again. ``how``: ``evicted``, or ``reset``.
    """

    start: int
    end: int
    left: int
    came_back: int
    how: str


class Line(NamedTuple):
    """One posting on a statement. ``balance`` is the life's computed tokens after it.

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


class Account:
    """Everything the ledger holds of one request. Written by the ledger alone."""

    __slots__ = (
        "added_at",
        "admissions",
        "carried",
        "closed_at",
        "computed",
        "discarded",
        "drafted",
        "executed_again",
        "executed_first",
        "first_output",
        "first_prompt",
        "hit_again",
        "in_flight",
        "in_flight_tokens",
        "life",
        "lines",
        "lives",
        "loaded",
        "loaded_again",
        "looked_up_local",
        "looked_up_step",
        "losses",
        "lost",
        "matched_external",
        "outcome",
        "overrun",
        "plan",
        "pooling",
        "preemptions",
        "promised",
        "prompt_tokens",
        "rejected",
        "reported",
        "reporting",
        "reports",
        "request",
        "request_id",
        "resumable",
        "rework",
        "sampled",
        "saved_tokens",
        "scheduled",
        "sequence_tokens",
        "settled",
        "settlements",
        "spans",
        "steady_delivered",
        "steady_scheduled",
        "suspense",
        "traceparent",
        "transferred",
        "unknown",
        "voided",
    )

    def __init__(self, request: int, request_id: str, prompt_tokens: int, at: int) -> None:
        self.request = request
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.sequence_tokens = prompt_tokens
        self.carried = 0
        self.added_at = at
        self.closed_at = -1
        self.outcome = ""
        self.unknown: str | None = None
        self.pooling = False
        self.resumable = False
        self.traceparent: str | None = None
        self.transferred = False

        self.spans = Spans()
        self.losses = Losses()
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.computed = 0
        self.in_flight: deque[InFlight] = deque()
        self.in_flight_tokens = 0
        self.sampled = 0
        self.drafted = False

        self.scheduled = 0
        self.first_prompt = 0
        self.first_output = 0
        self.rework: dict[str, int] = {}
        self.rejected = 0
        self.overrun = 0
        self.suspense = 0
        # Of the prompt alone, by position: executed first, in which life; executed again, for which cause.
        self.executed_first: list[tuple[int, int, int]] = []
        self.executed_again: list[tuple[int, int, str]] = []
        # What block events prove to have been in the cache once, of the prompt.
        self.lost: list[Lost] = []

        self.settled = False
        self.settlements: list[Settlement] = []
        self.plan: tuple[int, int] | None = None
        self.reported: tuple[int, int, int] | None = None
        self.reports = 0
        # The life whose hits the engine reports: the first that ran, or the last before the first
        # output, as its version has it.
        self.reporting: Life | None = None
        self.hit_again = 0
        self.loaded_again = 0
        self.promised = 0
        self.loaded = 0
        self.voided: dict[str, int] = {}
        self.discarded: dict[str, int] = {}
        # How far the connector was seen to order the sequence to be saved.
        self.saved_tokens = 0

        self.admissions = 0
        self.preemptions = 0
        self.looked_up_step = -1
        self.looked_up_local = 0
        self.matched_external: int | None = 0
        self.lines: list[Line] | None = None
        # The ledger's counts of steps and outputs up to which a steady account is posted; else -1.
        self.steady_scheduled = -1
        self.steady_delivered = -1

    def waits(self, until: int) -> Iterator[tuple[int, int]]:
        """Every stretch in which it was there and had no life; while it is open, ``until``.

        Microseconds since the engine started.
        """
        since, end = self.added_at, self.closed_at if self.closed_at >= 0 else until
        for life in self.lives:
            if life.began_at > since:
                yield since, life.began_at
            since = life.ended_at if life.ended_at >= 0 else end
        if end > since:
            yield since, end

    def waited(self, until: int) -> int:
        """All of :meth:`waits`, in microseconds."""
        return sum(end - start for start, end in self.waits(until))

    def freeze(self) -> Statement:
        """The account as it stands now."""
        return Statement(
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
            lives=[_life_statement(life) for life in self.lives],
        )


def _life_statement(life: Life) -> LifeStatement:
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
