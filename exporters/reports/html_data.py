"""The data of the HTML report, gathered in one pass over each journal. The page is in ``html_page.py``."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...audit import events as ev
from ...audit.analysis.block_states import STATES, BlockStates, BlockUse, Occupancy
from ...audit.analysis.costs import Costs
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import Audit, each_batch
from ...audit.replay.parallel import Run, here
from ...audit.replay.window_start import skip_to_window
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.groups import check, group_key
from ..trace.request_counts import RequestCounts
from ..trace.time_series import Series, together
from .audit import AuditReport, report
from .block_use import BlockUseReport, as_report
from .conclusions import conclusions, facts_of_audit, with_costs, with_why
from .costs import CostReport, cost_report
from .html_about import about
from .miss_tally import Tally, block_size
from .summary import Groups, SummaryRow, Sums
from .why import Why, explained, remark

WAITS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds between the bars of the distribution of waits."""

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


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """What the report shows. ``waits`` counts requests between the bounds of :data:`WAITS`."""

    report: AuditReport
    why: Why
    series: Series
    waits: list[int]
    preempted: list[MostPreempted]
    costs: CostReport
    block_use: BlockUseReport | None
    block_series: Series
    about: list[tuple[str, str]] = []
    """The header: model, release and so on."""
    by: str = ""
    """What the requests are grouped by; "": there are no groups."""
    groups: list[SummaryRow] = []
    """Most prompt tokens first."""


class JournalPageData:
    """The data of one journal."""

    def __init__(self, path: Path, window: Window, by: str = "") -> None:
        self.by = by
        self.groups: Groups = {}
        self.engine_audit = EngineAudit(path, keep=True, window=window, with_metrics=False, with_costs=True)
        self.costs = Costs()
        self.tally = Tally()
        self.series = Series()
        self.waits = [0] * (len(WAITS) + 1)
        self.preempted: list[MostPreempted] = []
        self.block_states = BlockStates()
        self.block_series = Series()

    def read(self) -> None:
        """Replay the journal."""
        engine_audit, counts = self.engine_audit, RequestCounts()
        key = group_key(self.by, engine_audit)
        for batch in each_batch(engine_audit, skip_to_window(engine_audit)):
            began = engine_audit.began_seconds or 0.0
            for event in batch.events:
                if counts.feed(event):
                    self._add_levels(began, event, counts)
                occupancy = self.block_states.feed(event)
                if occupancy is not None:
                    self._add_occupancy(began, occupancy)
            for account in batch.accounts:
                self._add(account, engine_audit.last_at)
                if self.by:
                    sums = self.groups.setdefault(key(account), Sums.none())
                    sums.add(account, engine_audit.last_at)
        remark(self.tally, engine_audit)
        model = engine_audit.step_model()
        self.costs = engine_audit.costs(model)
        self.tally.price(engine_audit, model)

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
            for source in ("local", "external", "computed", "unattained"):
                self.series.count(wall, source, getattr(settlement, source))
        waited = account.waited(last) / 1e6
        self.waits[bisect_right(WAITS, waited)] += 1
        if account.preemptions:
            row = MostPreempted(
                preemptions=account.preemptions,
                rework=sum(account.rework.values()),
                request_id=account.request_id,
                engine=self.engine_audit.name,
                prompt_tokens=account.prompt_tokens,
                waited_seconds=waited,
            )
            heapq.heappush(self.preempted, row)
            if len(self.preempted) > SHOWN:
                heapq.heappop(self.preempted)


def gather(
    paths: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    gpu_hour: float | None = None,
    by: str = "",
) -> PageData:
    """Read all journals at ``paths``. Raises LedgerError for one that holds none.

    ``by`` names groups of requests, as for :func:`~kvledger.exporters.trace.groups.group_key`.
    """
    check(by)
    parts = list(run(partial(_of_journal, window=window, by=by), journals_at(paths)))
    tally, costs = Tally(), Costs()
    groups: Groups = {}
    for part in parts:
        for name, sums in part.groups.items():
            groups.setdefault(name, Sums.none()).merge(sums)
        tally.merge(part.tally)
        costs.merge(part.costs)
    lost, why = cost_report(costs, tally.models, gpu_hour), explained(tally, gpu_hour)
    audited = report(Audit([part.engine_audit for part in parts]), lost)
    facts = with_costs(with_why(facts_of_audit(audited), why), lost)
    return PageData(
        report=msgspec.structs.replace(audited, conclusions=conclusions(facts)),
        why=why,
        series=together([part.series for part in parts]),
        waits=[sum(counts) for counts in zip(*(part.waits for part in parts), strict=True)],
        preempted=sorted((row for part in parts for row in part.preempted), reverse=True)[:SHOWN],
        block_use=_block_use(parts),
        block_series=together([part.block_series for part in parts]),
        costs=lost,
        about=about([part.engine_audit for part in parts]),
        by=by,
        groups=sorted(
            (sums.row(name) for name, sums in groups.items()), key=lambda row: (-row.prompt_tokens, row.group)
        ),
    )


def _block_use(parts: Sequence[JournalPageData]) -> BlockUseReport | None:
    """The use of all blocks; None where no journal has block events."""
    use = BlockUse()
    for part in parts:
        use.merge(part.block_states.use)
    return as_report(use) if any(part.block_states.seen for part in parts) else None


def _of_journal(path: Path, window: Window, by: str) -> JournalPageData:
    part = JournalPageData(path, window, by)
    part.read()
    return part
