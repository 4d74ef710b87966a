"""The data of the HTML report of one journal, from a replay, or from its rollup and a replay of the rest."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...audit import events as ev
from ...audit.analysis.block_states import STATES, BlockStates, Occupancy
from ...audit.analysis.costs import Costs, CostTally, priced
from ...audit.ledger.account import Account
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import ReplayedBatch, each_batch
from ...audit.replay.split import Piece, Span, SpanAudit, joined
from ...audit.replay.window_start import skip_to_window
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.groups import group_key
from ..trace.request_counts import RequestCounts
from ..trace.time_series import MINUTE_TICKS, Series
from . import rollups
from .miss_tally import Tally, block_size
from .rollup_cells import Cells
from .rollup_minutes import SOURCES, WAITS, Minute, wait_place
from .rollup_pages import Page
from .summary import Groups, Sums
from .why import remark

SHOWN = 12
"""How many of the most preempted requests are shown."""


class MostPreempted(msgspec.Struct, frozen=True, order=True):
    """One of the most preempted requests; ``rework`` is in tokens."""

    preemptions: int
    rework: int
    request_id: str
    engine: str
    prompt_tokens: int
    waited_seconds: float


class JournalPageData:
    """The data of one journal."""

    def __init__(self, path: Path, window: Window, by: str = "") -> None:
        self.by = by
        self.groups: Groups = {}
        self.engine_audit = EngineAudit(path, keep=True, window=window, with_metrics=False, with_costs=True)
        self.costs = Costs()
        self.rolled = False
        """Whether sums come from a rollup; then there are no blocks and no most preempted requests."""
        self.rest = CostTally()
        """Costs of the requests that ended after the rollup."""
        self.tally = Tally()
        self.series = Series()
        self.waits = [0] * (len(WAITS) + 1)
        self.preempted: list[MostPreempted] = []
        self.block_states = BlockStates()
        self.block_series = Series()

    def read(self) -> None:
        """Replay the journal."""
        engine_audit = self.engine_audit
        self._feed(each_batch(engine_audit, skip_to_window(engine_audit)), RequestCounts())
        self.price()

    def price(self) -> None:
        """Turn tokens into seconds, at the end of the journal."""
        engine_audit = self.engine_audit
        remark(self.tally, engine_audit)
        model = engine_audit.step_model()
        self.costs = engine_audit.costs(model)
        self.tally.price(engine_audit, model)

    def read_span(self, span: Span) -> PageOfSpan:
        """Replay a part of the journal. Nothing is priced."""
        part, counts = SpanAudit(self.engine_audit, span), RequestCounts()
        begin: CountsState = (0, [])
        for events, accounts, counted in part.batches():
            if counted:
                self._feed([ReplayedBatch(events, [], accounts)], counts)
            else:
                for event in events:
                    counts.feed(event)
                begin = counts.state
        return PageOfSpan(Piece(self.engine_audit, part.begin, part.end), self, begin, counts.state)

    def add(self, later: JournalPageData) -> None:
        """Add the sums of a later part of the same journal."""
        for name, sums in later.groups.items():
            self.groups.setdefault(name, Sums.none()).merge(sums)
        self.tally.merge(later.tally)
        self.series.follow(later.series)
        self.waits = [one + more for one, more in zip(self.waits, later.waits, strict=True)]
        self.preempted = heapq.nlargest(SHOWN, [*self.preempted, *later.preempted])

    def read_rollup(self, rollup: rollups.Rollup, page: Page) -> None:
        """Take the sums of the rollup, and replay what the journal has beyond it."""
        path, window = self.engine_audit.path, self.engine_audit.window
        gone, self.rolled = rollups.is_rollup(path), True
        cells = rollup.within(path, window)
        engine_audit = self.engine_audit = rollup.audit(path, window, sums_only=gone)
        minutes = list(page.minutes(window, gone=gone, until_seconds=rollup.until_seconds))
        totals = Totals()
        for cell in cells.values():
            totals.merge(cell.totals)
        page.begin(engine_audit, window, [minute for _, minute in minutes], totals, gone=gone)
        self.series = Series(width_ticks=MINUTE_TICKS)
        for place, minute in minutes:
            self._add_minute(60.0 * place, minute)
        if not gone:
            self._feed(each_batch(engine_audit, rollup.position), page.counts())
        self._add_cells(cells)

    def _add_minute(self, wall: float, minute: Minute) -> None:
        if minute.levels is not None:
            self.series.level(wall, dict(zip(("running", "waiting"), minute.levels, strict=True)))
        if minute.preemptions:
            self.series.count(wall, "preemptions", minute.preemptions)
        for settled, tokens in minute.settled.items():
            for source, some in zip(SOURCES, tokens, strict=True):
                self.series.count(60.0 * settled, source, some)
        for place, requests in minute.waits.items():
            self.waits[place] += requests

    def _add_cells(self, cells: Cells) -> None:
        """Add misses, costs and groups, and price them."""
        engine_audit, tally = self.engine_audit, self.tally
        remark(tally, engine_audit)
        model = engine_audit.step_model()
        self.costs = priced(self.rest, model, engine_audit.step_times.busy_us, engine_audit.connector)
        for key, cell in cells.items():
            cell.give_work(tally)
            cell.misses.give(tally)
            self.costs.merge(cell.costs(model, engine_audit.connector))
            if self.by:
                group = rollups.group_of(self.by, key, engine_audit)
                sums = self.groups.setdefault(group, Sums.none())
                sums.merge(Sums(cell.totals, cell.waited))
        tally.price(engine_audit, model)

    def _feed(self, batches: Iterable[ReplayedBatch], counts: RequestCounts) -> None:
        engine_audit = self.engine_audit
        key = group_key(self.by, engine_audit)
        for batch in batches:
            began = engine_audit.began_seconds or 0.0
            for event in batch.events:
                if counts.feed(event):
                    self._add_levels(began, event, counts)
                occupancy = None if self.rolled else self.block_states.feed(event)
                if occupancy is not None:
                    self._add_occupancy(began, occupancy)
            for account in batch.accounts:
                self._add(account, engine_audit.last_at)
                if self.by:
                    sums = self.groups.setdefault(key(account), Sums.none())
                    sums.add(account, engine_audit.last_at)

    def _add_levels(self, began: float, event: ev.Event, counts: RequestCounts) -> None:
        wall = began + event.at / 1e6
        if not self.engine_audit.window.holds(wall):
            return
        self.series.level(wall, {"running": counts.running, "waiting": counts.waiting})
        if isinstance(event, ev.Preempted):
            self.series.count(wall, "preemptions")

    def _add_occupancy(self, began: float, now: Occupancy) -> None:
        wall = began + now.at / 1e6
        if self.engine_audit.window.holds(wall):
            self.block_series.level(wall, {name: getattr(now, name) for name in STATES})
            self.block_series.count(wall, "evicted", now.evicted)

    def _add(self, account: Account, last: int) -> None:
        self.tally.add(account, block_size(self.engine_audit))
        if account.unknown is not None:
            return
        began = self.engine_audit.began_seconds or 0.0
        for settlement in account.settlements:
            wall = began + settlement.at / 1e6
            for source in SOURCES:
                self.series.count(wall, source, getattr(settlement, source))
        self.waits[wait_place(account, last)] += 1
        if self.rolled:
            self.rest.add(account)
        elif account.preemptions:
            row = MostPreempted(
                preemptions=account.preemptions,
                rework=sum(account.rework.values()),
                request_id=account.request_id,
                engine=self.engine_audit.name,
                prompt_tokens=account.prompt_tokens,
                waited_seconds=account.waited(last) / 1e6,
            )
            heapq.heappush(self.preempted, row)
            if len(self.preempted) > SHOWN:
                heapq.heappop(self.preempted)


CountsState = tuple[int, list[int]]
"""See :attr:`~kvledger.exporters.trace.request_counts.RequestCounts.state`."""


class PageOfSpan(NamedTuple):
    """The data of one span of a journal, and the requests in the engine at its beginning and end."""

    piece: Piece
    data: JournalPageData
    begin: CountsState
    end: CountsState


def page_of_span(span: Span, by: str) -> PageOfSpan:
    """Read one span."""
    return JournalPageData(span.path, EVERYTHING, by).read_span(span)


def joined_pages(spans: Sequence[PageOfSpan]) -> JournalPageData | None:
    """The data of the whole journal; None if the spans do not fit."""
    if any(before.end != after.begin for before, after in pairwise(spans)):
        return None
    engine_audit = joined([span.piece for span in spans])
    if engine_audit is None:
        return None
    whole = spans[0].data
    for span in spans[1:]:
        whole.add(span.data)
    whole.engine_audit = engine_audit
    whole.price()
    return whole
