"""The data of the HTML report, gathered in one pass over each journal. The page is in ``html_page.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from ...audit.analysis.block_states import BlockUse
from ...audit.analysis.costs import Costs
from ...audit.errors import LedgerError
from ...audit.replay.find import journals_at
from ...audit.replay.journals import Audit, compare_journals
from ...audit.replay.parallel import Run, here
from ...audit.replay.split import split_run
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.groups import check
from ..trace.time_series import Series, together
from . import rollups
from .audit import AuditReport, report
from .block_use import BlockUseReport, as_report
from .conclusions import conclusions, facts_of_audit, with_costs, with_why
from .contents import contents
from .costs import CostReport, cost_report
from .html_about import about
from .html_journal import SHOWN, JournalPageData, MostPreempted, joined_pages, page_of_span
from .miss_tally import Tally
from .rollup_minutes import WAITS
from .summary import Groups, SummaryRow, Sums
from .why import Why, explained

__all__ = ["WAITS", "PageData", "gather"]

LEFT_OUT = (
    "Summed up from rollups, exact to the token. Left out, because no sum has them: the most preempted "
    "requests, the use of blocks, and how much later first tokens came. Curves have at most one value a "
    "minute. For the whole page, read the journals: kvledger report --no-rollups."
)
NO_PAGES = "{} no data for a report: an older kvledger wrote it, and the journal is gone"


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
    left_out: str = ""
    """What the page does not show, because it was made from rollups; "" for a page from journals only."""


def gather(
    paths: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    gpu_hour: float | None = None,
    by: str = "",
    with_rollups: bool = True,
) -> PageData:
    """Read all journals at ``paths``, or their rollups. Raises LedgerError for one that holds none.

    ``by`` names groups of requests, as for :func:`~kvledger.exporters.trace.groups.group_key`.
    """
    check(by)
    places = rollups.journals_and_rollups(paths, by, window) if with_rollups else journals_at(paths)
    whole = partial(_of_journal, window=window, by=by, with_rollups=with_rollups)
    if window.bounded or (with_rollups and any(map(rollups.has_one, places))):
        found = list(run(whole, places))
    else:
        found = list(split_run(run, places, partial(page_of_span, by=by), joined_pages, whole))
    parts = [part for part in found if part is not None]
    without = len(found) - len(parts)
    missing = NO_PAGES.format("1 rollup has" if without == 1 else f"{without:,} rollups have")
    if not parts:
        raise LedgerError(f"{missing}.")
    rolled = any(part.rolled for part in parts)
    tally, costs = Tally(), Costs()
    groups: Groups = {}
    for part in parts:
        for name, sums in part.groups.items():
            groups.setdefault(name, Sums.none()).merge(sums)
        tally.merge(part.tally)
        costs.merge(part.costs)
    lost, why = cost_report(costs, tally.models, gpu_hour), explained(tally, gpu_hour)
    if rolled:
        lost = _without_delays(lost)
    audited = _audited(parts, lost, [missing] if without else [])
    facts = with_costs(with_why(facts_of_audit(audited), why), lost)
    return PageData(
        report=msgspec.structs.replace(audited, conclusions=conclusions(facts)),
        why=why,
        series=together([part.series for part in parts]),
        waits=[sum(counts) for counts in zip(*(part.waits for part in parts), strict=True)],
        preempted=[] if rolled else _most_preempted(parts),
        block_use=None if rolled else _block_use(parts),
        block_series=together([part.block_series for part in parts]),
        costs=lost,
        about=about([part.engine_audit for part in parts]),
        by=by,
        groups=sorted(
            (sums.row(name) for name, sums in groups.items()), key=lambda row: (-row.prompt_tokens, row.group)
        ),
        left_out=LEFT_OUT if rolled else "",
    )


def _audited(parts: Sequence[JournalPageData], lost: CostReport, more_notes: Sequence[str]) -> AuditReport:
    """The audit as data. What was found in blocks is not known of journals that are gone."""
    audit = Audit([part.engine_audit for part in parts])
    there = [part.engine_audit for part in parts if not rollups.is_rollup(part.engine_audit.path)]
    compare_journals(there)
    found = report(audit, lost)
    return msgspec.structs.replace(found, notes=[*found.notes, *more_notes], contents=contents(Audit(there)))


def _without_delays(lost: CostReport) -> CostReport:
    """The costs without delays of first tokens, of which rollups keep a smaller sample than a replay."""
    rows = [
        msgspec.structs.replace(row, first_token_median_seconds=None, first_token_p95_seconds=None)
        for row in lost.rows
    ]
    return msgspec.structs.replace(lost, rows=rows)


def _most_preempted(parts: Sequence[JournalPageData]) -> list[MostPreempted]:
    return sorted((row for part in parts for row in part.preempted), reverse=True)[:SHOWN]


def _block_use(parts: Sequence[JournalPageData]) -> BlockUseReport | None:
    """The use of all blocks; None where no journal has block events."""
    use = BlockUse()
    for part in parts:
        use.merge(part.block_states.use)
    return as_report(use) if any(part.block_states.seen for part in parts) else None


def _of_journal(path: Path, window: Window, by: str, with_rollups: bool) -> JournalPageData | None:
    """The data of one journal or rollup; None for a rollup that holds nothing for a page."""
    rollup = rollups.found(path, by, window) if with_rollups else None
    part = JournalPageData(path, window, by)
    if rollup is not None and rollup.page is not None:
        part.read_rollup(rollup, rollup.page)
    elif rollups.is_rollup(path):
        return None
    else:
        part.read()
    return part
