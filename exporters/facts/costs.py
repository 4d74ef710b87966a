"""What the lost work of groups of requests cost: tokens at the price of each engine's model of step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...audit.analysis.costs import REWORK, Costs, priced
from ..reports.costs import CostReport, FirstToken, cost_report, model_row
from .hours import HOUR_CAUSES, rows_of
from .sums import Group, GroupSums, groups, sums_by
from .tables import Facts


def costs_of_groups(
    facts: Facts,
    found: Mapping[Group, GroupSums],
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
    for group, sums in found.items():
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
    """How much later first tokens came, by group and cause of a figure.

    Where rows of the window were removed, only how many requests are concerned.
    """
    is_figure = f"figure = '{figure}'"
    if facts.gone:
        found = sums_by(
            facts,
            HOUR_CAUSES,
            ("cause",),
            ("first_token_requests",),
            columns=columns,
            where=where,
            having=is_figure,
        )
        yield from ((key[:-1], key[-1], FirstToken(number)) for key, (number,) in found.items() if number)
        return
    named = dict(zip(groups(columns), columns, strict=True))
    seconds = "first_token_tokens * prefill_seconds + first_token_waited_microseconds / 1e6"
    selected = [*named, "cause", "count(*)", f"quantile_disc({seconds}, [0.5, 0.95])"]
    for row in facts.rows(
        f"SELECT {', '.join(selected)} FROM {rows_of(HOUR_CAUSES, named, where=where)} "
        "JOIN (SELECT journal, prefill_seconds FROM engines) USING (journal) "
        f"WHERE {is_figure} AND first_token_tokens IS NOT NULL GROUP BY ALL"
    ):
        cause, requests, quantiles = row[len(named) :]
        yield tuple(map(str, row[: len(named)])), cause, FirstToken(requests, *(quantiles or (None, None)))
