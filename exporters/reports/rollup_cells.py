"""Sums of the requests that ended in one minute, as rollups keep them: additive, and exact.

A cell holds what ``summary`` and ``why`` add up for a request. The sum of the cells of some minutes equals
what a replay adds up for the requests that ended in them. Only the delays of first tokens are a sample.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...audit.analysis.costs import (
    REWORK,
    Costs,
    CostTally,
    Delays,
    Loads,
    LostTokens,
    LostWork,
    PricedDelays,
    add_avoidable,
    priced,
)
from ...audit.analysis.step_model import StepModel
from ...audit.causes import BLOCKS
from ...audit.ledger.account import Account
from ...audit.ledger.totals import Totals, merge_tokens
from .miss_tally import Tally

MOST_DELAYS = 32
"""Delays that a cell keeps for one cause."""

Key = str
"""The hour of arrival since 1970 and the outcome, with a space between."""


class Delayed(msgspec.Struct):
    """Delays of first tokens: (tokens, microseconds, requests that the row stands for)."""

    requests: int = 0
    rows: list[tuple[int, int, int]] = []

    def take(self, delays: Delays) -> None:
        """Take all delays of a tally."""
        weight = delays.sample.weight
        more = [(tokens, us, weight) for _, tokens, us in delays.sample.rows]
        self.requests, self.rows = self.requests + delays.requests, _thinned([*self.rows, *more])

    def merge(self, more: Delayed) -> None:
        """Add the delays of another cell."""
        self.requests, self.rows = self.requests + more.requests, _thinned([*self.rows, *more.rows])

    def seconds(self, price: float | None) -> PricedDelays:
        """The delays with the ``price`` of a prefill token."""
        if price is None:
            return PricedDelays(requests=self.requests)
        priced = [(tokens * price + us / 1e6, weight) for tokens, us, weight in self.rows]
        return PricedDelays(requests=self.requests, seconds=priced)


def _thinned(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Every second row with twice the weight, until there are few; the last of an odd number stays."""
    while len(rows) > MOST_DELAYS:
        rows = [
            (tokens, us, weight + (rows[place + 1][2] if place + 1 < len(rows) else 0))
            for place, (tokens, us, weight) in list(enumerate(rows))[::2]
        ]
    return rows


class Misses(msgspec.Struct):
    """Cache misses of some requests, as :class:`~.miss_tally.Tally` adds them up."""

    audited: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    no_hit: int = 0
    tokens: dict[str, int] = {}
    requests: dict[str, int] = {}
    computed: dict[str, int] = {}
    early: dict[str, Delayed] = {}

    def take(self, tally: Tally) -> None:
        """Take everything from a tally of accounts."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        for name in TABLES:
            merge_tokens(getattr(self, name), getattr(tally, name))
        for cause, delays in tally.early.items():
            self.early.setdefault(cause, Delayed()).take(delays)

    def merge(self, more: Misses) -> None:
        """Add the misses of another cell."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(more, name))
        for name in TABLES:
            merge_tokens(getattr(self, name), getattr(more, name))
        for cause, delays in more.early.items():
            self.early.setdefault(cause, Delayed()).merge(delays)

    def give(self, tally: Tally) -> None:
        """Add the counts, without the delays, to a tally that is not priced yet."""
        for name in COUNTS:
            setattr(tally, name, getattr(tally, name) + getattr(self, name))
        for name in TABLES:
            getattr(tally, name).update(getattr(self, name))

    def give_delays(self, tally: Tally, price: float | None) -> None:
        """Add the delays, with the ``price`` of a prefill token, to a priced tally."""
        for cause, delays in self.early.items():
            tally.delays.setdefault(cause, PricedDelays()).merge(delays.seconds(price))


COUNTS = ("audited", "unknown", "prompt_tokens", "hit", "no_hit")
TABLES = ("tokens", "requests", "computed")


class Lost(msgspec.Struct):
    """Lost work of one kind and cause."""

    tokens: dict[str, int] = {}
    requests: int = 0
    delays: Delayed = msgspec.field(default_factory=Delayed)
    avoidable: dict[int, int] = {}


class Cell(msgspec.Struct):
    """The sums of some requests of one engine."""

    totals: Totals = msgspec.field(default_factory=Totals)
    waited: int = 0
    lost: dict[str, Lost] = {}
    loads: Loads = msgspec.field(default_factory=Loads)
    misses: Misses = msgspec.field(default_factory=Misses)

    def take(self, accounts: Iterable[Account], until: int, block_size: int) -> None:
        """Add accounts; an open one counts as waiting ``until`` now."""
        misses, costs = Tally(), CostTally()
        for account in accounts:
            self.totals.add(account)
            if account.unknown is None:
                self.waited += account.waited(until)
            costs.add(account)
            misses.add(account, block_size)
        self.misses.take(misses)
        self._take_costs(costs)

    def _take_costs(self, tally: CostTally) -> None:
        for key, row in tally.lost.items():
            lost = self.lost.setdefault(key, Lost())
            merge_tokens(lost.tokens, row.tokens)
            lost.requests += row.requests
            lost.delays.take(row.delays)
            add_avoidable(lost.avoidable, row.avoidable)
        self.loads.merge(tally.loads)

    def merge(self, more: Cell) -> None:
        """Add the sums of another cell."""
        self.totals.merge(more.totals)
        self.waited += more.waited
        self.misses.merge(more.misses)
        self.loads.merge(more.loads)
        for key, row in more.lost.items():
            lost = self.lost.setdefault(key, Lost())
            merge_tokens(lost.tokens, row.tokens)
            lost.requests += row.requests
            lost.delays.merge(row.delays)
            add_avoidable(lost.avoidable, row.avoidable)

    def give_work(self, tally: Tally) -> None:
        """Add the scheduled tokens, and those that preemptions for lack of free blocks made rework."""
        tally.scheduled += self.totals.scheduled
        lost = self.lost.get(f"{REWORK}/{BLOCKS}")
        if lost is not None:
            tally.preempted.merge(LostWork(sum(lost.tokens.values()), avoidable=lost.avoidable))

    def costs(self, model: StepModel, connector: str) -> Costs:
        """Lost work and loads in seconds, without the engine's time."""
        lost = {
            key: LostTokens(dict(row.tokens), row.requests, avoidable=dict(row.avoidable))
            for key, row in self.lost.items()
        }
        costs = priced(CostTally(lost, self.loads), model, 0, connector)
        for key, row in self.lost.items():
            costs.lost[key].delays = row.delays.seconds(model.prefill_seconds)
        return costs


Cells = dict[Key, Cell]


def merge_cells(into: Cells, more: Cells) -> None:
    """Add cells to cells of the same keys."""
    for key, cell in more.items():
        into.setdefault(key, Cell()).merge(cell)
