"""Why the figures differ: from what was settled to the plan, and on to what the engine reports.

A bank reconciliation. Every step from one row of figures to the next is made of named differences,
each found in one request by comparing position by position what the plan gave a source with the
origin that the ledger holds. Nothing is a remainder made to fit: what no rule names is called
``unexplained``.

A difference is signed towards the engine: settled + differences = plan, plan + differences =
reported. Accounts that are unknown take no part.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .. import causes
from ..causes import UNEXPLAINED
from ..ledger.account import Account, Life
from ..ledger.positions import COMPUTED, EXTERNAL, LOCAL, REVOKED

UNATTAINED = "unattained"
SOURCES = (LOCAL, EXTERNAL, COMPUTED, UNATTAINED)

_BY_EXTERNAL_LOSS = {
    causes.FAILED: causes.LOAD_FAILED,
    causes.NOT_PLANNED: causes.NEVER_LOADED,
    causes.NEVER_LOADED: causes.NEVER_LOADED,
    causes.PREEMPTED: "preempted_before_load",
}


class Figures(msgspec.Struct):
    """Prompt tokens by source."""

    local: int = 0
    external: int = 0
    computed: int = 0
    unattained: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.local + self.external + self.computed + self.unattained

    def add(self, other: Figures, sign: int = 1) -> None:
        """Add ``other``, or with ``sign`` -1 take it away."""
        self.local += sign * other.local
        self.external += sign * other.external
        self.computed += sign * other.computed
        self.unattained += sign * other.unattained

    def move(self, source: str, to: str, tokens: int) -> None:
        """Take ``tokens`` from one source and give them to another."""
        setattr(self, source, getattr(self, source) - tokens)
        setattr(self, to, getattr(self, to) + tokens)

    def __bool__(self) -> bool:
        return bool(self.local or self.external or self.computed or self.unattained)


class Difference(msgspec.Struct):
    """One cause of a difference, over all the requests that it touched."""

    cause: str
    requests: int
    figures: Figures


class Step:
    """The differences between two rows of figures, by cause."""

    def __init__(self) -> None:
        self.differences: dict[str, Difference] = {}

    def add(self, cause: str, figures: Figures, requests: int = 1) -> None:
        """Note a difference."""
        known = self.differences.get(cause)
        if known is None:
            known = self.differences[cause] = Difference(cause, 0, Figures())
        known.requests += requests
        known.figures.add(figures)

    def merge(self, other: Step) -> None:
        """Note all that ``other`` noted."""
        for cause, difference in other.differences.items():
            self.add(cause, difference.figures, difference.requests)


class Reconciliation:
    """Settled figures, plan and reports of many requests, and what lies between them.

    ``reports`` counts the requests that the engine reported; an engine that never does has nothing
    to reconcile there.
    """

    def __init__(self) -> None:
        self.settled = Figures()
        self.plan = Figures()
        self.reported = Figures()
        self.reports = 0
        self.to_plan = Step()
        self.to_reported = Step()

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
            self.to_plan.add(cause, figures)
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
            self.to_reported.add(cause, moved)

    def merge(self, other: Reconciliation) -> None:
        """Take in another engine's."""
        self.settled.add(other.settled)
        self.plan.add(other.plan)
        self.reported.add(other.reported)
        self.reports += other.reports
        self.to_plan.merge(other.to_plan)
        self.to_reported.merge(other.to_reported)


def planned(account: Account) -> Figures | None:
    """The promise of the first admission that ran; the rest of the prompt was to be computed."""
    if account.plan is None:
        return None
    local, external = account.plan
    return Figures(local, external, _first_prompt_tokens(account) - local - external)


def _first_prompt_tokens(account: Account) -> int:
    """The prompt that was planned: a session's first chunk."""
    return account.settlements[0].prompt_tokens if account.settlements else account.prompt_tokens


FIGURES = (
    "prompt_tokens",
    "local_tokens",
    "external_tokens",
    "computed_tokens",
    "cached_tokens",
    "local_queried_tokens",
    "local_hit_tokens",
    "external_queried_tokens",
    "external_hit_tokens",
    "preemptions",
    "requests",
)
"""Figures that an engine's own counters can be compared in."""


class Compared(msgspec.Struct, frozen=True):
    """One of the engine's own counters beside the ledger's figure, both since a common baseline.

    ``drift`` is counted less ledger, by cause; what no cause covers is ``unexplained``.
    """

    figure: str
    counted: float
    ledger: float
    drift: dict[str, float]


class EngineCounters(msgspec.Struct, frozen=True):
    """An engine's own counters beside the ledger's figures. Times are Unix seconds, 0.0 for never.

    ``answered``: whether the last scrape of the engine succeeded.
    """

    rows: tuple[Compared, ...] = ()
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
    """Position by position: what the plan gave one source, and another gave first."""
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
    """Source, life and length of each stretch of [low, high); ``unattained`` has life 0."""
    at = low
    for row in account.positions.ranges:
        start, end = max(at, row.start), min(high, row.end)
        if start >= end:
            continue
        if at < start:
            yield UNATTAINED, 0, start - at
        yield UNATTAINED if row.source is REVOKED else row.source, row.life, end - start
        at = end
    if at < high:
        yield UNATTAINED, 0, high - at


def _why(account: Account, source: str, origin: str, number: int) -> str:
    """Why positions planned from ``source`` have ``origin``, in life ``number``."""
    first = next(life for life in account.lives if life.ran)
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
    """Why this life's promise was not kept. A life with several reasons has no single answer."""
    reasons = {_BY_EXTERNAL_LOSS.get(cause, UNEXPLAINED) for cause in life.voided}
    if causes.LOAD_FAILED in life.rolled_back:
        reasons.add(causes.LOAD_FAILED)
    return reasons.pop() if len(reasons) == 1 else UNEXPLAINED


# --- plan and report ----------------------------------------------------------------------------------


def ended_early(account: Account) -> bool:
    """Whether a request ended before any output: its prompt was settled only by its end."""
    if account.closed_at < 0 or account.sampled or account.reports:
        return False
    return any(s.at == account.closed_at for s in account.settlements[:1])


def why_reported(account: Account, plan: Figures | None, reported: Figures | None) -> str:
    """Why the engine's report of a request is not its plan."""
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
