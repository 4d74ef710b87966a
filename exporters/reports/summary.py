"""Totals of many requests: hit rates, rework, preemptions and waiting, over all of them or by group.

The sums are queries over the rows of requests (:mod:`kvledger.exporters.facts`). The figures are those of
:mod:`kvledger.audit.figures.declared`. Per-request figures are in ``statement.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...audit.causes import FIRST_TOKEN, OUTPUT_TIME, QUEUE
from ...audit.figures.declared import FIGURES
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..answer import DOUBT, Answer, Records, Sum, Table, Words, counted, listed, part_of, share
from . import costs as cost
from .conclusions import conclusions, facts_of_totals
from .conclusions import with_costs as add_costs
from .costs import CostReport, FirstTokens, later_tokens_sentence, queued_sentence

if TYPE_CHECKING:
    from ..facts.sums import GroupSums

ALL = "all requests"


class _SummaryRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group. Figures are tokens except ``requests``, ``unknown``, ``first_tokens``
    (requests with a first output), ``preemptions``, microseconds and shares of 1.

    ``unknown`` requests count in ``requests`` and ``preemptions`` and in no other figure. A share is of the
    figure that the declared one is a part of, and None where the whole is 0. ``wait_seconds`` is the time
    that all its requests spent outside their lives. ``percentiles``: exact ones, by column and percent.
    ``costs`` is None where they were not asked for, or the steps are not known.
    """

    if TYPE_CHECKING:

        def __getattr__(self, field: str) -> Any: ...


_SHOWN = [figure for figure in FIGURES if not figure.sql]

if TYPE_CHECKING:
    SummaryRow = _SummaryRow
else:
    SummaryRow = msgspec.defstruct(
        "SummaryRow",
        [
            ("group", str),
            ("requests", int),
            ("unknown", int),
            ("first_tokens", int),
            *((figure.name, int) for figure in _SHOWN),
            *((f"{figure.name}_share", float | None) for figure in _SHOWN if figure.part_of),
            ("wait_seconds", float),
            ("percentiles", dict[str, dict[str, float | None]], {}),
            ("costs", CostReport | None, None),
            ("conclusions", list[str], []),
        ],
        bases=(_SummaryRow,),
        module=__name__,
        frozen=True,
        kw_only=True,
        omit_defaults=True,
    )
    SummaryRow.__doc__ = _SummaryRow.__doc__


def summary_row(group: str, sums: GroupSums, costs: CostReport | None = None) -> SummaryRow:
    """The sums of a group as a row called ``group``."""
    figures = {figure.name: sums.figures[figure.name] for figure in _SHOWN}
    shares = {
        f"{figure.name}_share": share(figures[figure.name], figures[figure.part_of])
        for figure in _SHOWN
        if figure.part_of
    }
    return SummaryRow(
        group=group,
        requests=sums.figures["requests"],
        unknown=sums.figures["unknown_requests"],
        first_tokens=sums.figures["first_tokens"],
        **figures,
        **shares,
        wait_seconds=sums.waited_us / 1e6,
        percentiles=sums.percentiles,
        costs=costs,
    )


def summarize(
    paths: Sequence[Path],
    by: str = "",
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    with_costs: bool = False,
    gpu_hour: float | None = None,
    where: str = "",
    percentiles: str = "",
    group_costs: bool = True,
) -> list[SummaryRow]:
    """One row per group, most prompt tokens first, then a row of all requests.

    ``by`` is as for :func:`~kvledger.exporters.facts.groups.group_columns`, or "" for no groups; ``where`` is
    an SQL condition on the columns of requests, and ``percentiles`` names some, with commas between them.
    ``with_costs`` adds what lost work cost, without ``group_costs`` to the row of all requests only;
    ``gpu_hour`` is the price of an hour of one engine. Raises :class:`~kvledger.audit.errors.LedgerError`.
    """
    from ..facts.dataset import facts
    from ..facts.groups import group_columns, group_names, percentile_columns
    from ..facts.misses import costs_of_groups
    from ..facts.sums import by_group

    columns, shown = group_columns(by), percentile_columns(percentiles)
    with facts(paths, window=window, run=run) as found:
        group_costs = group_costs and with_costs
        groups = by_group(found, columns, where, shown, group_costs=group_costs)
        costs = {}
        if with_costs and not found.exported:
            costs = costs_of_groups(found, groups, columns if group_costs else (), where, gpu_hour)
    rows = [
        summary_row(group_names(by, group), one, costs.get(group)) for group, one in groups.items() if group
    ]
    rows.sort(key=lambda row: (-row.prompt_tokens, row.group))
    everything = groups[()]
    total = summary_row(ALL, everything, costs.get(()))
    if with_costs:
        concluded = facts_of_totals(everything.totals)
        concluded = concluded if total.costs is None else add_costs(concluded, total.costs)
        total = msgspec.structs.replace(total, conclusions=conclusions(concluded))
    return [*rows, total]


# --- the answer -----------------------------------------------------------------------------------------


def answer(rows: Sequence[SummaryRow]) -> Answer:
    """All requests in a sentence, then a table with a row per group."""
    everything = rows[-1]
    first, *rest = _sentences(everything)
    lost = [] if everything.costs is None else cost.parts(everything.costs)
    return Answer(
        rows,
        [first, *(f"- {each}" for each in everything.conclusions), *rest],
        [table(rows if everything.requests else ()), *lost],
        _records(rows),
    )


def table(rows: Sequence[SummaryRow]) -> Table:
    """A row for each group, and those of all requests below it."""
    shown = "".join(f" | {name}" for row in rows[-1:] for name in percentile_names(row))
    cells = [
        (
            *(row.group, row.requests, row.prompt_tokens, row.local_share, row.external_share),
            *(row.rework_share, row.preemptions, row.wait_seconds, *_percentiles(row)),
        )
        for row in rows
    ]
    if len(rows) > 1 and rows[-1].group == ALL:
        cells[-1] = Sum(cells[-1])
    columns = " | requests | prompt | local:% | external:% | rework:% | preempted | waited, s:,.1f"
    return Table(cells, columns + shown)


def percentile_names(row: SummaryRow) -> list[str]:
    """The names of the percentiles, such as ``missed p95``."""
    return [f"{column} p{share}" for column, found in row.percentiles.items() for share in found]


def _percentiles(row: SummaryRow) -> list[float | None]:
    return [value for found in row.percentiles.values() for value in found.values()]


def _spent(row: SummaryRow, names: Iterable[str]) -> dict[str, int]:
    """Microseconds by cause."""
    return {cause: getattr(row, f"{cause}_microseconds") for cause in names}


def _sentences(row: SummaryRow) -> Iterator[str]:
    requests, preemptions = counted(row.requests, "request"), counted(row.preemptions, "preemption")
    yield f"{requests}, {preemptions}, {row.wait_seconds:,.1f} s spent waiting."
    if row.first_tokens:
        yield FirstTokens(_spent(row, FIRST_TOKEN), row.first_tokens).sentence()
    if row.queued_microseconds:
        yield queued_sentence(_spent(row, QUEUE), row.first_tokens)
    if row.later_tokens:
        yield later_tokens_sentence(_spent(row, OUTPUT_TIME), row.later_tokens)
    if row.prompt_tokens:
        hits = [part_of(getattr(row, name), row.prompt_tokens, name) for name in ("local", "external")]
        yield f"Prefix-cache hits: {listed(hits)} of {counted(row.prompt_tokens, 'prompt token')}."
    if row.scheduled:
        rework = part_of(row.rework, row.scheduled, "rework")
        yield f"Work: {counted(row.scheduled, 'scheduled token')}, {rework}."
    if row.unknown:
        unknown = counted(row.unknown, "request")
        words = f"{unknown} unknown: events are missing, so only requests and preempted include them."
        yield Words(words, DOUBT)


COST_COLUMNS = ("engine_seconds", "lost_seconds", "lost_share", "money")


def _records(rows: Sequence[SummaryRow]) -> Records:
    """All figures; an empty cell for what is not known. Costs are totals of the group."""
    left_out = ("percentiles", "costs", "conclusions")
    names = [name for name in SummaryRow.__struct_fields__ if name not in left_out]
    columns = [*names, *percentile_names(rows[-1]), *(COST_COLUMNS if rows[-1].costs else ())]
    values = (
        [
            *(getattr(row, name) for name in names),
            *_percentiles(row),
            *(getattr(row.costs, name) for name in (COST_COLUMNS if row.costs else ())),
        ]
        for row in rows
    )
    return Records(columns, values)
