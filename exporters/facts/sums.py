"""Sums, percentiles and costs of groups of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...audit.figures.declared import FIGURES
from ...audit.figures.totals import Totals
from ..reports.costs import CostReport, cost_report, model_row
from .costs import Group, GroupCosts, condition, costs_by_group, joined
from .tables import Facts

PERCENTILES = (50, 95, 99)

Percentiles = dict[str, dict[str, float | None]]
"""By column, then by percent."""


class GroupSums(msgspec.Struct):
    """The sums of one group, its waiting time in microseconds, and percentiles of columns.

    ``figures`` are the sums of all columns of figures; ``totals`` has them by cause, too.
    """

    figures: dict[str, int] = {}
    totals: Totals = msgspec.field(default_factory=Totals)
    waited_us: int = 0
    percentiles: Percentiles = {}


def by_group(
    facts: Facts, columns: Sequence[str], where: str = "", percentiles: Sequence[str] = ()
) -> dict[Group, GroupSums]:
    """The sums of each group, and of all requests as the group ``()``, which alone has sums by cause."""
    sums = [figure.sql or f"sum({figure.name})" for figure in FIGURES]
    shares = ", ".join(str(percent / 100) for percent in PERCENTILES)
    quantiles = [f"quantile_disc({column}, [{shares}])" for column in percentiles]
    selected = [*columns, *sums, "sum(waited_microseconds)", *quantiles]
    groups: dict[Group, GroupSums] = {(): GroupSums()}
    for grouped in (columns, ()) if columns else ((),):
        width = len(grouped)
        query = f"SELECT {', '.join([*grouped, *selected[len(columns) :]])} FROM requests{condition(where)}"
        for row in facts.rows(f"{query} GROUP BY ALL" if grouped else query):
            found = GroupSums(waited_us=int(row[width + len(sums)] or 0))
            for figure, value in zip(FIGURES, row[width:], strict=False):
                found.figures[figure.name] = int(value or 0)
                if not figure.causes:
                    setattr(found.totals, figure.name, int(value or 0))
            found.percentiles = _percentiles(percentiles, row[width + len(sums) + 1 :])
            groups[tuple(map(str, row[:width]))] = found
    for figure, cause, tokens in facts.rows(
        f"SELECT figure, cause, sum(tokens) FROM {joined((), where)} "
        f"WHERE figure IN ({_WITH_CAUSES}) GROUP BY ALL"
    ):
        getattr(groups[()].totals, figure)[cause] = int(tokens)
    return groups


_WITH_CAUSES = ", ".join(f"'{figure.name}'" for figure in FIGURES if figure.causes)


def _percentiles(columns: Sequence[str], values: Sequence[Any]) -> Percentiles:
    return {
        column: dict(zip(map(str, PERCENTILES), found or [None] * len(PERCENTILES), strict=True))
        for column, found in zip(columns, values, strict=True)
    }


def costs_of_groups(
    facts: Facts, columns: Sequence[str], where: str, gpu_hour: float | None
) -> dict[Group, CostReport]:
    """What lost work cost, of each group, and of all requests as the group ``()``.

    A part of the requests shares its engines' time with the others.
    """
    busy_us = sum(engine.busy_us for engine in facts.engines)
    found = {(): GroupCosts(), **costs_by_group(facts, (), where)}
    if columns:
        found.update(costs_by_group(facts, columns, where))
    reports = {}
    for group, one in found.items():
        one.costs.busy_us = busy_us
        models = (
            []
            if group
            else [model_row(engine.name, engine.busy_us, engine.model) for engine in facts.engines]
        )
        reports[group] = cost_report(one.costs, models, gpu_hour, one.first_tokens)
    return reports
