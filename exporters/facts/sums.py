"""Sums of groups of requests: figures, waiting, percentiles, and lost work by engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, CostTally, Loads, LostTokens
from ...audit.figures.declared import FIGURES
from ...audit.figures.sums import Sums
from ...audit.figures.totals import Totals
from .hours import HOUR_CAUSES, HOURS, LOST, Hourly, hours_of, lost_columns, rows_of
from .schema import LOAD_COLUMNS
from .tables import REST, Facts

PERCENTILES = (50, 95, 99)

Percentiles = dict[str, dict[str, float | None]]
"""By column, then by percent."""

Group = tuple[str, ...]
"""The values of the columns that requests are grouped by; empty: all requests."""


class GroupSums(Sums):
    """The sums of one group.

    ``figures`` are the sums of all columns of figures; ``totals`` has those of all requests by cause, too.
    ``tallies``: lost work and loads in tokens, by journal.
    """

    figures: dict[str, int] = {}
    totals: Totals = msgspec.field(default_factory=Totals)
    waited_us: int = 0
    missed: int = 0
    """Prompt tokens that missed the caches."""
    tallies: dict[str, CostTally] = {}
    percentiles: Percentiles = {}


def by_group(
    facts: Facts,
    columns: Sequence[str],
    where: str = "",
    percentiles: Sequence[str] = (),
    *,
    group_costs: bool = False,
) -> dict[Group, GroupSums]:
    """The sums of each group, and of all requests as the group ``()``, which alone has sums by cause.

    ``columns`` and ``where`` are SQL over ``requests``. Only with ``group_costs`` groups have their rework in
    ``tallies``.
    """
    groups: dict[Group, GroupSums] = {(): GroupSums()}
    found = sums_by(facts, HOURS, ("journal",), _NAMES, columns=columns, where=where)
    for (*group, journal), values in found.items():
        for name in {(), tuple(group)}:
            groups.setdefault(name, GroupSums()).merge(_sums(journal, values))
    for figure in FIGURES:
        if not figure.causes:
            setattr(groups[()].totals, figure.name, groups[()].figures.get(figure.name, 0))
    _add_causes(facts, groups, where)
    if columns and group_costs:
        _add_rework(facts, groups, columns, where)
    if percentiles:
        facts.need_rows("--percentiles")
        for grouped in {tuple(columns), ()}:
            _add_percentiles(facts, groups, grouped, where, percentiles)
    for one in groups.values():
        one.figures = {figure.name: one.figures.get(figure.name, 0) for figure in FIGURES}
    return groups


Key = tuple[Any, ...]


def sums_by(
    facts: Facts,
    table: Hourly,
    keys: Sequence[str],
    names: Sequence[str],
    *,
    columns: Sequence[str] = (),
    where: str = "",
    having: str = "",
) -> dict[Key, list[int]]:
    """Sums of a table, by the group of their request and by expressions over the table's own columns.

    ``columns`` and ``where`` are expressions over requests, ``having`` one over the table's rows. Hours of
    which sums are kept are answered from these where they know the columns, and all others from rows.
    """
    summed = facts.summed(columns, where)
    sql = {one.column.name: one.sql for one in table.sums}
    grouped = dict(zip(groups(columns), columns, strict=True))
    clause = f" WHERE {having}" if having else ""
    rows = rows_of(table, grouped, REST if summed else "", where)
    asked = [(rows, [sql[name] for name in names])]
    if summed:
        asked.append((hours_of(table, grouped, where), [f"sum({name})" for name in names]))
    parts = [
        f"SELECT {', '.join((*grouped, *keys, *sums))} FROM {rows}{clause} GROUP BY ALL"
        for rows, sums in asked
    ]
    found: dict[Key, list[int]] = {}
    width = len(columns)
    for row in facts.rows(" UNION ALL ".join(parts)):
        key = (*map(str, row[:width]), *row[width : width + len(keys)])
        values = [int(value or 0) for value in row[width + len(keys) :]]
        before = found.get(key)
        found[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]
    return found


def groups(columns: Sequence[str]) -> list[str]:
    """What the columns of groups are called in SQL."""
    return [f"g{place}" for place in range(len(columns))]


# --- requests -------------------------------------------------------------------------------------------

_LOADS = tuple(column.name for column in LOAD_COLUMNS)
_NAMES = (
    *(figure.name for figure in FIGURES),
    "waited_microseconds",
    "missed",
    *_LOADS,
    *(name for lost in LOST for name in lost_columns(lost)),
)


def _sums(journal: str, values: Sequence[int]) -> GroupSums:
    """The sums of :data:`_NAMES` of one journal."""
    of = dict(zip(_NAMES, values, strict=True))
    tally = CostTally(loads=Loads(*(of[name] for name in _LOADS)))
    for lost in LOST:
        key, computed_as = lost
        tokens, requests = (of[name] for name in lost_columns(lost))
        if tokens:
            tally.merge(CostTally({key: LostTokens({computed_as: tokens}, requests)}))
    return GroupSums(
        figures={figure.name: of[figure.name] for figure in FIGURES},
        waited_us=of["waited_microseconds"],
        missed=of["missed"],
        tallies={journal: tally},
    )


# --- causes ---------------------------------------------------------------------------------------------

_WITH_CAUSES = ", ".join(f"'{figure.name}'" for figure in FIGURES if figure.causes)
_BY_CAUSE = ("journal", "figure", "cause", "more_blocks_percent")


def _add_causes(facts: Facts, groups: dict[Group, GroupSums], where: str) -> None:
    everything = groups[()]
    found = sums_by(
        facts,
        HOUR_CAUSES,
        _BY_CAUSE,
        ("tokens", "requests"),
        where=where,
        having=f"figure IN ({_WITH_CAUSES})",
    )
    for (journal, figure, cause, percent), (tokens, requests) in found.items():
        everything.totals.merge(Totals(**{figure: {cause: tokens}}))  # type: ignore[arg-type]
        if figure == REWORK:
            everything.merge(_rework(journal, cause, percent, tokens, requests))


def _add_rework(facts: Facts, groups: dict[Group, GroupSums], columns: Sequence[str], where: str) -> None:
    found = sums_by(
        facts,
        HOUR_CAUSES,
        _BY_CAUSE,
        ("tokens", "requests"),
        columns=columns,
        where=where,
        having=f"figure = '{REWORK}'",
    )
    for (*group, journal, _, cause, percent), (tokens, requests) in found.items():
        groups[tuple(group)].merge(_rework(journal, cause, percent, tokens, requests))


def _rework(journal: str, cause: str, percent: int | None, tokens: int, requests: int) -> GroupSums:
    avoidable = {} if percent is None else {percent: tokens}
    lost = LostTokens({PREFILL: tokens}, requests, avoidable=avoidable)
    return GroupSums(tallies={journal: CostTally({f"{REWORK}/{cause}": lost})})


# --- percentiles ----------------------------------------------------------------------------------------


def _add_percentiles(
    facts: Facts,
    groups: dict[Group, GroupSums],
    columns: Sequence[str],
    where: str,
    percentiles: Sequence[str],
) -> None:
    shares = ", ".join(str(percent / 100) for percent in PERCENTILES)
    selected = [*columns, *(f"quantile_disc({column}, [{shares}])" for column in percentiles)]
    query = f"SELECT {', '.join(selected)} FROM requests" + (f" WHERE ({where})" if where else "")
    for row in facts.rows(f"{query} GROUP BY ALL" if columns else query):
        groups[tuple(map(str, row[: len(columns)]))].percentiles = {
            column: dict(zip(map(str, PERCENTILES), found or [None] * len(PERCENTILES), strict=True))
            for column, found in zip(percentiles, row[len(columns) :], strict=True)
        }
