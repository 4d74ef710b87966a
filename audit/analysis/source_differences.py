"""Explain why the settled tokens, the planned split and the engine-reported tokens differ.

This is a bank reconciliation with three rows of figures. Each step from one row to the next is a list of
differences with causes. A difference is found in one request, by comparing position by position the source
that was planned with the source that the ledger settled. No difference is made up to fit: what no rule
explains is called ``unexplained``.

Signs lead towards the engine: settled + differences = plan, plan + differences = reported. Unknown accounts
are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .. import causes
from ..causes import UNEXPLAINED
from ..figures.sums import Sums
from ..ledger.account import COMPUTED, EXTERNAL, LOCAL, REVOKED, UNATTAINED, Account, Life

_BY_EXTERNAL_LOSS = {
    causes.FAILED: causes.LOAD_FAILED,
    causes.NOT_PLANNED: causes.NEVER_LOADED,
    causes.NEVER_LOADED: causes.NEVER_LOADED,
    causes.PREEMPTED: "preempted_before_load",
}


class Figures(Sums):
    """Prompt tokens by source."""

    local: int = 0
    external: int = 0
    computed: int = 0
    unattained: int = 0

    @property
    def total(self) -> int:
        """Prompt tokens of all sources."""
        return self.local + self.external + self.computed + self.unattained

    def add(self, other: Figures, sign: int = 1) -> None:
        """Add ``other``, or subtract it with ``sign`` -1."""
        self.local += sign * other.local
        self.external += sign * other.external
        self.computed += sign * other.computed
        self.unattained += sign * other.unattained

    def move(self, source: str, to: str, tokens: int) -> None:
        """Move ``tokens`` from one source to another."""
        setattr(self, source, getattr(self, source) - tokens)
        setattr(self, to, getattr(self, to) + tokens)

    def __bool__(self) -> bool:
        return bool(self.local or self.external or self.computed or self.unattained)


class Difference(Sums):
    """The differences of one cause, summed over its requests."""

    requests: int = 0
    figures: Figures = msgspec.field(default_factory=Figures)


Differences = dict[str, Difference]
"""The differences between two rows of figures, by cause."""


class Reconciliation(Sums):
    """Settled, planned and engine-reported prompt tokens of many requests, and their differences."""

    settled: Figures = msgspec.field(default_factory=Figures)
    """Prompt tokens as the ledger settled them."""
    plan: Figures = msgspec.field(default_factory=Figures)
    """Prompt tokens as planned at the first admission that ran."""
    reported: Figures = msgspec.field(default_factory=Figures)
    """Prompt tokens as the engine reported them."""
    reports: int = 0
    """How many requests the engine reported; an engine that reports none is not reconciled."""
    to_plan: Differences = {}
    """Why the planned tokens differ from the settled ones."""
    to_reported: Differences = {}
    """Why the reported tokens differ from the planned ones."""

    def add(self, account: Account) -> None:
        """Reconcile one request."""
        if account.unknown is not None:
            return
        for settlement in account.settlements:
            self.settled.local += settlement.local
            self.settled.external += settlement.external
            self.settled.computed += settlement.computed
            self.settled.unattained += settlement.unattained
        plan = planned(account)
        if plan is not None:
            self.plan.add(plan)
        for cause, figures in between_settled_and_plan(account, plan).items():
            add_difference(self.to_plan, cause, figures)
        reported = None
        if account.reported is not None:
            reported = Figures(*account.reported)
            self.reported.add(reported)
            self.reports += 1
        if reported != plan:
            cause = why_reported(account, plan, reported)
            moved = Figures()
            moved.add(reported or Figures())
            moved.add(plan or Figures(), -1)
            add_difference(self.to_reported, cause, moved)


def add_difference(differences: Differences, cause: str, figures: Figures, requests: int = 1) -> None:
    """Add the difference of one request, or of several."""
    difference = differences.setdefault(cause, Difference())
    difference.requests += requests
    difference.figures.add(figures)


def planned(account: Account) -> Figures | None:
    """The planned split: hits of the first admission that ran; the rest of the prompt was to be computed."""
    if account.plan is None:
        return None
    local, external = account.plan
    return Figures(local, external, _first_prompt_tokens(account) - local - external)


def _first_prompt_tokens(account: Account) -> int:
    """The length of the prompt that was planned: of a session, its first chunk."""
    return account.settlements[0].prompt_tokens if account.settlements else account.prompt_tokens


class ComparedCounter(msgspec.Struct, frozen=True):
    """One of the engine's own counters and the ledger's figure, both since a common baseline.

    ``drift`` is counter minus ledger, by cause; the part without a cause is ``unexplained``.
    """

    figure: str
    counted: float
    ledger: float
    drift: dict[str, float]


class EngineCounters(msgspec.Struct, frozen=True):
    """An engine's own counters and the ledger's figures. Times are Unix seconds; 0.0 means never.

    ``answered``: whether the last scrape of the engine succeeded.
    """

    rows: tuple[ComparedCounter, ...] = ()
    answered: bool = False
    scraped_seconds: float = 0.0
    baseline_seconds: float = 0.0


# --- settled and plan -------------------------------------------------------------------------------


def between_settled_and_plan(account: Account, plan: Figures | None) -> dict[str, Figures]:
    """The differences of one request, by cause."""
    differences: dict[str, Figures] = {}
    for chunk in account.settlements[1:]:
        later = Figures(chunk.local, chunk.external, chunk.computed, chunk.unattained)
        _difference(differences, "session_chunk").add(later, -1)
    if not account.settlements:
        if plan is not None:
            _difference(differences, "unsettled").add(plan)
        return differences
    first = account.settlements[0]
    settled = Figures(first.local, first.external, first.computed, first.unattained)
    if plan is None:
        _difference(differences, "never_ran").add(settled, -1)
    elif plan != settled:
        _compare(account, plan, settled, differences)
    return differences


def _compare(account: Account, plan: Figures, settled: Figures, differences: dict[str, Figures]) -> None:
    """Find, position by position, where the settled source is not the planned one."""
    prompt = _first_prompt_tokens(account)
    left = Figures()
    left.add(plan)
    left.add(settled, -1)
    local, promised = min(plan.local, prompt), plan.local + plan.external
    external = max(local, min(promised, prompt))
    moves: list[tuple[str, str, str, int]] = []
    for low, high, source in (
        (0, local, LOCAL),
        (local, external, EXTERNAL),
        (external, prompt, COMPUTED),
    ):
        for origin, number, tokens in _origins(account, low, high):
            if origin != source:
                moves.append((_why(account, source, origin, number), origin, source, tokens))
    if plan.external < 0:
        moves.append((causes.NEGATIVE_MATCH, COMPUTED, EXTERNAL, plan.external))
    if promised > prompt:
        moves.append(("beyond_prompt", COMPUTED, EXTERNAL, promised - prompt))
    for cause, origin, source, tokens in moves:
        _difference(differences, cause).move(origin, source, tokens)
        left.move(source, origin, tokens)
    if left:
        _difference(differences, UNEXPLAINED).add(left)


def _difference(differences: dict[str, Figures], cause: str) -> Figures:
    return differences.setdefault(cause, Figures())


def _origins(account: Account, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """Yield source, life and length of each range in [low, high); ``unattained`` has life 0."""
    at = low
    for row in account.positions.ranges:
        start, end = max(at, row.start), min(high, row.end)
        if start >= end:
            continue
        if at < start:
            yield UNATTAINED, 0, start - at
        yield UNATTAINED if row.source == REVOKED else row.source, row.life, end - start
        at = end
    if at < high:
        yield UNATTAINED, 0, high - at


def _why(account: Account, source: str, origin: str, number: int) -> str:
    """The cause for positions planned from ``source`` that came from ``origin`` in life ``number``."""
    first = next(life for life in account.lives if life.ran)
    if source == LOCAL and account.invalid_hits:
        return causes.INVALID_HIT
    if origin == UNATTAINED:
        return "ended_early" if account.closed_at >= 0 else UNEXPLAINED
    if number < first.number:
        return "earlier_admission"
    if source == EXTERNAL:
        return _why_void(first)
    if source == LOCAL:
        return "load_failed_below" if causes.LOAD_FAILED in first.rolled_back else UNEXPLAINED
    return "resumed_with_hits" if number > first.number else UNEXPLAINED


def _why_void(life: Life) -> str:
    """Why this life's external tokens were not loaded; unexplained if there are several causes."""
    reasons = {_BY_EXTERNAL_LOSS.get(cause, UNEXPLAINED) for cause in life.voided}
    if causes.LOAD_FAILED in life.rolled_back:
        reasons.add(causes.LOAD_FAILED)
    return reasons.pop() if len(reasons) == 1 else UNEXPLAINED


# --- plan and report ----------------------------------------------------------------------------------


def ended_early(account: Account) -> bool:
    """Whether a request ended before any output, so that its prompt was settled at its end."""
    if account.closed_at < 0 or account.sampled or account.reports or account.incomplete:
        return False
    return any(s.at == account.closed_at for s in account.settlements[:1])


def why_reported(account: Account, plan: Figures | None, reported: Figures | None) -> str:
    """Why the engine's report of a request differs from its planned split."""
    if plan is None:
        return UNEXPLAINED
    if reported is None:
        if account.closed_at < 0:
            return "not_reported_yet"
        return "not_reported" if ended_early(account) else UNEXPLAINED
    first = next(life for life in account.lives if life.ran)
    for life in account.lives:
        if life.number == first.number:
            continue
        whole = reported.total == plan.total
        if whole and (life.local, life.external) == (reported.local, reported.external):
            return "last_admission"
        left = plan.local + plan.external - life.external
        if life.external == reported.external and reported.local in (left, max(0, left)):
            return "mixed_instants"
    return UNEXPLAINED
