"""What the lost work of groups of requests cost, from rows: tokens in SQL, prices by each engine's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...audit.analysis.costs import (
    DECODE,
    DRAFT,
    OVERRUN,
    PREFILL,
    REJECTED,
    REWORK,
    Costs,
    CostTally,
    Loads,
    LostTokens,
    priced,
)
from ..reports.costs import FirstToken
from .schema import LOAD_COLUMNS
from .tables import Facts

Group = tuple[str, ...]
"""The values of the columns that requests are grouped by; empty: all requests."""


class GroupCosts(msgspec.Struct):
    """The costs of one group, and how much later first tokens came, by kind and cause of the lost work."""

    costs: Costs = msgspec.field(default_factory=Costs)
    first_tokens: dict[str, FirstToken] = {}


def costs_by_group(facts: Facts, columns: Sequence[str], where: str) -> dict[Group, GroupCosts]:
    """The costs of each group; ``columns`` and ``where`` are SQL over ``requests``."""
    tallies: dict[Group, dict[str, CostTally]] = {}
    width = len(columns)

    def tally(row: tuple[object, ...]) -> CostTally:
        group, journal = tuple(map(str, row[:width])), str(row[width])
        return tallies.setdefault(group, {}).setdefault(journal, CostTally())

    for row in facts.rows(_of_requests(columns, where)):
        found, rest = tally(row), row[width + 1 :]
        for key, kind, (tokens, requests) in zip(
            (REJECTED, OVERRUN, OVERRUN),
            (DRAFT, DECODE, PREFILL),
            (rest[0:2], rest[2:4], rest[4:6]),
            strict=True,
        ):
            if tokens:
                found.merge(CostTally({key: LostTokens({kind: int(tokens)}, requests)}))
        found.loads.merge(Loads(*(int(sum_ or 0) for sum_ in rest[6:])))
    for row in facts.rows(_of_rework(columns, where)):
        cause, percent, tokens, requests = row[width + 1 :]
        avoidable = {} if percent is None else {int(percent): int(tokens)}
        lost = LostTokens({PREFILL: int(tokens)}, requests, avoidable=avoidable)
        tally(row).merge(CostTally({f"{REWORK}/{cause}": lost}))
    found_costs: dict[Group, GroupCosts] = {}
    for group, by_journal in tallies.items():
        sums = found_costs.setdefault(group, GroupCosts())
        for engine in facts.engines:
            if engine.journal in by_journal:
                sums.costs.merge(priced(by_journal[engine.journal], engine.model, 0, engine.connector))
    for group, cause, first_token in first_tokens(facts, columns, where, REWORK):
        found_costs[group].first_tokens[f"{REWORK}/{cause}"] = first_token
    return found_costs


def first_tokens(
    facts: Facts, columns: Sequence[str], where: str, figure: str
) -> Iterator[tuple[Group, str, FirstToken]]:
    """How much later first tokens came, by group and cause of a figure."""
    width = len(columns)
    for row in facts.rows(delays(columns, where, figure)):
        cause, requests, quantiles = row[width:]
        yield tuple(map(str, row[:width])), cause, FirstToken(requests, *(quantiles or (None, None)))


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


def _of_requests(columns: Sequence[str], where: str) -> str:
    decoded = "output_tokens > 0"
    sums = [
        "sum(rejected)",
        "count(*) FILTER (rejected > 0)",
        *(
            text
            for late in (decoded, f"NOT ({decoded})")
            for text in (f"sum(overrun) FILTER ({late})", f"count(*) FILTER (overrun > 0 AND {late})")
        ),
        *(f"sum({column.name})" for column in LOAD_COLUMNS),
    ]
    return f"SELECT {', '.join([*columns, 'journal', *sums])} FROM requests{condition(where)} GROUP BY ALL"


def _of_rework(columns: Sequence[str], where: str) -> str:
    selected = [*names(columns), "journal", "cause", "more_blocks_percent", "sum(tokens)", "count(*)"]
    return (
        f"SELECT {', '.join(selected)} FROM {joined(columns, where)} WHERE figure = '{REWORK}' GROUP BY ALL"
    )


def delays(columns: Sequence[str], where: str, figure: str) -> str:
    """A query of how much later first tokens came, by group and cause: requests, and median with p95."""
    seconds = "first_token_tokens * prefill_seconds + first_token_waited_microseconds / 1e6"
    selected = [*names(columns), "cause", "count(*)", f"quantile_disc({seconds}, [0.5, 0.95])"]
    return (
        f"SELECT {', '.join(selected)} FROM {joined(columns, where)} "
        "JOIN (SELECT journal, prefill_seconds FROM engines) USING (journal) "
        f"WHERE figure = '{figure}' AND first_token_tokens IS NOT NULL GROUP BY ALL"
    )
