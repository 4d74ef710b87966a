"""What the lost work of groups of requests cost: tokens at the price of each engine's model of step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...audit.analysis.costs import REWORK, Costs, priced
from ..reports.costs import CostReport, FirstToken, cost_report, model_row
from .sums import Group, GroupSums, joined, names
from .tables import Facts


def costs_of_groups(
    facts: Facts,
    groups: Mapping[Group, GroupSums],
    columns: Sequence[str],
    where: str,
    gpu_hour: float | None,
) -> dict[Group, CostReport]:
    """What lost work cost, of each group and of all requests as the group ``()``.

    Without ``columns``, of all requests alone. A part of the requests shares its engines' time with the
    others.
    """
    busy_us = sum(engine.busy_us for engine in facts.engines)
    delays: dict[Group, dict[str, FirstToken]] = {}
    for grouped in (columns, ()) if columns else ((),):
        for group, cause, first_token in first_tokens(facts, grouped, where, REWORK):
            delays.setdefault(group, {})[f"{REWORK}/{cause}"] = first_token
    reports = {}
    for group, sums in groups.items():
        if group and not columns:
            continue
        costs = Costs(busy_us=busy_us)
        for engine in facts.engines:
            if engine.journal in sums.tallies:
                costs.merge(priced(sums.tallies[engine.journal], engine.model, 0, engine.connector))
        models = [] if group else [model_row(one.name, one.busy_us, one.model) for one in facts.engines]
        reports[group] = cost_report(costs, models, gpu_hour, delays.get(group, {}))
    return reports


def first_tokens(
    facts: Facts, columns: Sequence[str], where: str, figure: str
) -> Iterator[tuple[Group, str, FirstToken]]:
    """How much later first tokens came, by group and cause of a figure."""
    width = len(columns)
    seconds = "first_token_tokens * prefill_seconds + first_token_waited_microseconds / 1e6"
    selected = [*names(columns), "cause", "count(*)", f"quantile_disc({seconds}, [0.5, 0.95])"]
    for row in facts.rows(
        f"SELECT {', '.join(selected)} FROM {joined(columns, where)} "
        "JOIN (SELECT journal, prefill_seconds FROM engines) USING (journal) "
        f"WHERE figure = '{figure}' AND first_token_tokens IS NOT NULL GROUP BY ALL"
    ):
        cause, requests, quantiles = row[width:]
        yield tuple(map(str, row[:width])), cause, FirstToken(requests, *(quantiles or (None, None)))
