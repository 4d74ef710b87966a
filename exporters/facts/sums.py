"""Sums of groups of requests: figures, waiting, percentiles, and lost work by engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...audit.analysis.costs import (
    DECODE,
    DRAFT,
    OVERRUN,
    PREFILL,
    REJECTED,
    REWORK,
    CostTally,
    Loads,
    LostTokens,
)
from ...audit.figures.declared import FIGURES
from ...audit.figures.sums import Sums
from ...audit.figures.totals import Totals
from .schema import LOAD_COLUMNS
from .tables import Facts

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
    width = len(columns)
    for row in facts.rows(_of_requests(columns, where)):
        group, journal = tuple(map(str, row[:width])), str(row[width])
        for name in {(), group}:
            groups.setdefault(name, GroupSums()).merge(_sums(journal, row[width + 1 :]))
    for figure in FIGURES:
        if not figure.causes:
            setattr(groups[()].totals, figure.name, groups[()].figures.get(figure.name, 0))
    _add_causes(facts, groups, where)
    if columns and group_costs:
        _add_rework(facts, groups, columns, where)
    for grouped in (columns, ()) if percentiles else ():
        _add_percentiles(facts, groups, grouped, where, percentiles)
    for one in groups.values():
        one.figures = {figure.name: one.figures.get(figure.name, 0) for figure in FIGURES}
    return groups


def joined(columns: Sequence[str], where: str) -> str:
    """``causes``, joined with the requests if their columns are needed."""
    if not columns and not where:
        return "causes"
    chosen = ["journal", "request", *(f"{column} AS g{place}" for place, column in enumerate(columns))]
    return (
        f"causes JOIN (SELECT {', '.join(chosen)} FROM requests{condition(where)}) USING (journal, request)"
    )


def condition(where: str) -> str:
    """A condition on requests as a clause."""
    return f" WHERE ({where})" if where else ""


def names(columns: Sequence[str]) -> list[str]:
    """The names of the groups' columns in :func:`joined`."""
    return [f"g{place}" for place in range(len(columns))]


# --- requests -------------------------------------------------------------------------------------------

_FIGURES = [figure.sql or f"sum({figure.name})" for figure in FIGURES]
_LATE = "output_tokens > 0"
"""Whether tokens past the stop of a request were computed by decoding."""

_LOST = {
    (REJECTED, DRAFT): ("rejected", "true"),
    (OVERRUN, DECODE): ("overrun", _LATE),
    (OVERRUN, PREFILL): ("overrun", f"NOT ({_LATE})"),
}
"""By lost work and what it was computed as: the column that has its tokens, and for which requests."""


def _of_requests(columns: Sequence[str], where: str) -> str:
    lost = [
        text
        for column, which in _LOST.values()
        for text in (f"sum({column}) FILTER ({which})", f"count(*) FILTER ({column} > 0 AND {which})")
    ]
    loads = [f"sum({column.name})" for column in LOAD_COLUMNS]
    selected = [*columns, "journal", *_FIGURES, "sum(waited_microseconds)", "sum(missed)", *lost, *loads]
    return f"SELECT {', '.join(selected)} FROM requests{condition(where)} GROUP BY ALL"


def _sums(journal: str, row: Sequence[Any]) -> GroupSums:
    """One row of :func:`_of_requests`, behind the group and the journal."""
    values = [int(value or 0) for value in row]
    figures = dict(zip((figure.name for figure in FIGURES), values, strict=False))
    waited_us, missed, *rest = values[len(FIGURES) :]
    tally = CostTally(loads=Loads(*rest[2 * len(_LOST) :]))
    for place, (key, computed_as) in enumerate(_LOST):
        tokens, requests = rest[2 * place : 2 * place + 2]
        if tokens:
            tally.merge(CostTally({key: LostTokens({computed_as: tokens}, requests)}))
    return GroupSums(figures=figures, waited_us=waited_us, missed=missed, tallies={journal: tally})


# --- causes ---------------------------------------------------------------------------------------------

_WITH_CAUSES = ", ".join(f"'{figure.name}'" for figure in FIGURES if figure.causes)
_BY_CAUSE = "journal, figure, cause, more_blocks_percent, sum(tokens), count(*)"


def _add_causes(facts: Facts, groups: dict[Group, GroupSums], where: str) -> None:
    everything = groups[()]
    for journal, figure, cause, percent, tokens, requests in facts.rows(
        f"SELECT {_BY_CAUSE} FROM {joined((), where)} WHERE figure IN ({_WITH_CAUSES}) GROUP BY ALL"
    ):
        everything.totals.merge(Totals(**{figure: {cause: int(tokens)}}))
        if figure == REWORK:
            everything.merge(_rework(journal, cause, percent, int(tokens), requests))


def _add_rework(facts: Facts, groups: dict[Group, GroupSums], columns: Sequence[str], where: str) -> None:
    width = len(columns)
    selected = ", ".join([*names(columns), _BY_CAUSE])
    for row in facts.rows(
        f"SELECT {selected} FROM {joined(columns, where)} WHERE figure = '{REWORK}' GROUP BY ALL"
    ):
        journal, _, cause, percent, tokens, requests = row[width:]
        groups[tuple(map(str, row[:width]))].merge(_rework(journal, cause, percent, int(tokens), requests))


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
    query = f"SELECT {', '.join(selected)} FROM requests{condition(where)}"
    for row in facts.rows(f"{query} GROUP BY ALL" if columns else query):
        groups[tuple(map(str, row[: len(columns)]))].percentiles = {
            column: dict(zip(map(str, PERCENTILES), found or [None] * len(PERCENTILES), strict=True))
            for column, found in zip(percentiles, row[len(columns) :], strict=True)
        }
