"""The data of the HTML report: one query of the facts for each part. The page is in ``html_page.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...audit.analysis.block_states import BlockUse
from ...audit.replay.journals import Audit, compare_journals
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.time_series import Series, together
from .audit_data import AuditReport, report
from .block_use import BlockUseReport, as_report
from .conclusions import conclusions, facts_of_audit, with_costs, with_why
from .costs import CostReport
from .first_token import FirstTokens
from .html_about import about
from .summary import SummaryRow, summary_row
from .turns import Turns, turns_of_facts
from .why import Why, explained

if TYPE_CHECKING:
    from ..facts.tables import Facts

WAITS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds between the bars of the distribution of waits."""

SHOWN = 12
"""How many of the most preempted requests are shown."""


class MostPreempted(msgspec.Struct, frozen=True, array_like=True):
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
    first_token: FirstTokens
    preempted: list[MostPreempted]
    costs: CostReport
    block_use: BlockUseReport | None
    turns: Turns | None
    block_series: Series
    about: list[tuple[str, str]] = []
    """The header: model, release and so on."""
    by: str = ""
    """What the requests are grouped by; "": there are no groups."""
    groups: list[SummaryRow] = []
    """Most prompt tokens first."""


def gather(
    paths: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    gpu_hour: float | None = None,
    by: str = "",
) -> PageData:
    """Read all journals at ``paths``. Raises LedgerError for one that holds none.

    ``by`` names groups of requests, as for :func:`~kvledger.exporters.facts.groups.group_columns`.
    """
    from ..facts.blocks import USE_QUERY, summed
    from ..facts.costs import costs_of_groups
    from ..facts.curves import curves
    from ..facts.dataset import facts
    from ..facts.groups import group_columns, group_names
    from ..facts.misses import misses_by_group, sampled_misses
    from ..facts.replayed import Wanted
    from ..facts.sums import by_group

    columns, wanted = group_columns(by), Wanted(audit=True, activity=True, turns=True)
    with facts(paths, window=window, run=run, wanted=wanted) as found:
        groups = by_group(found, columns)
        lost = costs_of_groups(found, groups, (), "", gpu_hour)[()]
        misses = misses_by_group(found, groups, (), "")[()]
        why = explained(misses, sampled_misses(found), found.engines, gpu_hour)
        compare_journals(found.audits)
        audited = report(Audit(found.audits), lost)
        concluded = conclusions(with_costs(with_why(facts_of_audit(audited), why), lost))
        rows = [summary_row(group_names(by, name), group) for name, group in groups.items() if name]
        uses, states = summed(found.rows(USE_QUERY))
        return PageData(
            report=msgspec.structs.replace(audited, conclusions=concluded),
            why=why,
            series=together(curves(found)),
            waits=_waits(found),
            first_token=FirstTokens.of(groups[()].figures),
            preempted=_most_preempted(found),
            block_use=None if not uses else as_report(sum(uses, BlockUse())),
            turns=turns_of_facts(found),
            block_series=together(states),
            costs=lost,
            about=about(found.audits),
            by=by,
            groups=sorted(rows, key=lambda row: (-row.prompt_tokens, row.group)),
        )


def _waits(found: Facts) -> list[int]:
    """Requests between the bounds of :data:`WAITS`."""
    below = " ".join(
        f"WHEN waited_microseconds < {round(bound * 1e6)} THEN {place}" for place, bound in enumerate(WAITS)
    )
    query = (
        f"SELECT CASE {below} ELSE {len(WAITS)} END AS place, count(*) FROM requests "
        "WHERE unknown IS NULL GROUP BY place"
    )
    waits = [0] * (len(WAITS) + 1)
    for at, requests in found.rows(query):
        waits[at] = requests
    return waits


def _most_preempted(found: Facts) -> list[MostPreempted]:
    prompt = "coalesce(prompt_tokens, sequence_tokens - output_tokens)"
    columns = f"preemptions, rework, request_id, engine, {prompt}, waited_microseconds"
    some = "FROM requests WHERE unknown IS NULL AND preemptions > 0"
    # The twelfth number of preemptions is found first, so that the ids of few requests are read.
    twelfth = f"SELECT min(preemptions) FROM (SELECT preemptions {some} ORDER BY 1 DESC LIMIT {SHOWN})"
    rows = found.rows(
        f"SELECT {columns} {some} AND preemptions >= ({twelfth}) ORDER BY ALL DESC LIMIT {SHOWN}"
    )
    return [msgspec.convert([*figures, waited_us / 1e6], MostPreempted) for *figures, waited_us in rows]
