"""Prompt tokens that missed the caches, of groups of requests, by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, Costs, LostWork, plus, priced, seconds
from ...audit.causes import BLOCKS
from ...audit.figures.sums import add_tokens
from ..reports.costs import CostReport, FirstToken, cost_report, model_row
from ..trace.time_series import MOST, TICKS, Series, wider
from .hours import HOUR_CAUSES, rows_of
from .rows import LEVELS, MISSED, NOT_COMPUTED
from .sums import Group, GroupSums, groups, sums_by
from .tables import Facts

# --- What the lost work of groups of requests cost: tokens at the price of each engine's model of step
# time.


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


class Misses(msgspec.Struct):
    """The misses of one group. ``sums`` has its other figures.

    ``tokens``, ``requests``, ``seconds`` and ``first_tokens`` are by cause; seconds are None where the price
    of a token is not known, and missing for tokens that were never computed.
    """

    sums: GroupSums = msgspec.field(default_factory=GroupSums)
    tokens: dict[str, int] = {}
    requests: dict[str, int] = {}
    seconds: dict[str, float | None] = {}
    first_tokens: dict[str, FirstToken] = {}

    @property
    def preempted(self) -> LostWork:
        """Tokens computed again after preemptions for lack of free blocks, without seconds."""
        found = LostWork()
        for tally in self.sums.tallies.values():
            lost = tally.lost.get(f"{REWORK}/{BLOCKS}")
            if lost is not None:
                found.merge(LostWork(sum(lost.tokens.values()), avoidable=dict(lost.avoidable)))
        return found


class Sampled(msgspec.Struct, frozen=True):
    """What became before of the contents that prompts missed, of one block in sixteen.

    ``blocks`` by cause; ``margins``: half the 95 % interval of each cause's share, with requests as the
    independent units; empty where rows of requests were removed.
    """

    blocks: Mapping[str, int] = {}
    margins: Mapping[str, float] = {}

    @property
    def total(self) -> int:
        """All blocks of the sample."""
        return sum(self.blocks.values())

    def share(self, cause: str) -> float | None:
        """A cause's share; None where fewer than :data:`LEAST_SAMPLED` blocks are in the sample."""
        return self.blocks.get(cause, 0) / self.total if self.total >= LEAST_SAMPLED else None


LEAST_SAMPLED = 32
"""Of fewer blocks no share is told."""

_SAMPLED = "figure = 'sampled_misses'"


def sampled_misses(facts: Facts, where: str = "") -> Sampled:
    """The sample of what prompts missed. ``where``: a condition on requests."""
    sums = sums_by(facts, HOUR_CAUSES, ("cause",), ("tokens",), where=where, having=_SAMPLED)
    found = Sampled({str(cause): blocks for (cause,), (blocks,) in sums.items()})
    if facts.gone or not found.total:
        return found
    rows = rows_of(HOUR_CAUSES, {}, where=where)
    margins = {}
    for cause, squares, products, squared_totals in facts.rows(
        "WITH part AS (SELECT journal, request, cause, sum(tokens) AS y "
        f"FROM {rows} WHERE {_SAMPLED} GROUP BY ALL), "
        "whole AS (SELECT journal, request, sum(y) AS m FROM part GROUP BY ALL) "
        "SELECT cause, sum(y * y), sum(y * m), (SELECT sum(m * m) FROM whole) "
        "FROM part JOIN whole USING (journal, request) GROUP BY cause"
    ):
        share = found.blocks[cause] / found.total
        variance = float(squares) - 2 * share * float(products) + share**2 * float(squared_totals)
        margins[str(cause)] = 1.96 * max(0.0, variance) ** 0.5 / found.total
    return Sampled(found.blocks, margins)


def misses_by_group(
    facts: Facts, groups: Mapping[Group, GroupSums], columns: Sequence[str], where: str
) -> dict[Group, Misses]:
    """The misses of each of the ``groups``; without ``columns``, of all requests as the group ``()``."""
    found = {group: Misses(sums) for group, sums in groups.items() if bool(group) is bool(columns)}
    models = {engine.journal: engine.model for engine in facts.engines}
    rows = sums_by(
        facts,
        HOUR_CAUSES,
        ("journal", "cause"),
        ("tokens", "requests"),
        columns=columns,
        where=where,
        having=f"figure = '{MISSED}'",
    )
    for (*key, journal, cause), (tokens, requests) in rows.items():
        misses = found[tuple(key)]
        add_tokens(misses.tokens, cause, tokens)
        add_tokens(misses.requests, cause, requests)
        if cause not in NOT_COMPUTED:
            took = seconds(models[journal], PREFILL, tokens)
            misses.seconds[cause] = plus(misses.seconds.get(cause, 0.0), took)
    for group, cause, first_token in first_tokens(facts, columns, where, MISSED):
        found[group].first_tokens[cause] = first_token
    return found


# --- Curves over time, of each engine: what ran and waited, preemptions, and where prompt tokens came
# from.
#
# Tokens are counted when they were settled, of the requests of the window.

SOURCES = ("local", "external", "computed", "unattained")


def curves(facts: Facts) -> list[Series]:
    """A series for each journal, in the order of their names."""
    found: dict[str, Series] = {}
    _add_activity(facts, found)
    _add_settled(facts, found)
    return [found[journal] for journal in sorted(found)]


def _add_activity(facts: Facts, found: dict[str, Series]) -> None:
    widths = dict(facts.rows("SELECT journal, max(width_microseconds) FROM activity GROUP BY ALL"))
    query = f"SELECT journal, epoch_us(time), {', '.join(LEVELS)}, preemptions FROM activity ORDER BY ALL"
    for journal, start_us, *levels, preemptions in facts.rows(query):
        series = found.get(journal)
        if series is None:
            width = max(1, widths[journal] * TICKS // 1_000_000)
            series = found[journal] = Series(width_ticks=width)
        if None not in levels:
            series.level(start_us / 1e6, dict(zip(LEVELS, levels, strict=True)))
        if preemptions:
            series.count(start_us / 1e6, "preemptions", preemptions)


def _add_settled(facts: Facts, found: dict[str, Series]) -> None:
    """Count prompt tokens in spans of time that a curve of this length would put together anyway."""
    ((first_us, last_us),) = facts.rows(
        f"SELECT epoch_us(min(settled_time)), epoch_us(max(settled_time)) FROM ({_EXTENT})"
    )
    if first_us is None:
        return
    ticks = (last_us - first_us) * TICKS // 1_000_000
    width = 1
    while wider(width) * 4 * MOST < ticks:
        width = wider(width)
    sums = ", ".join(f"sum({source})" for source in SOURCES)
    place = f"epoch_us(settled_time) * {TICKS} // {width * 1_000_000}"
    for journal, at, *tokens in facts.rows(
        f"SELECT journal, {place}, {sums} FROM ({_SETTLED}) GROUP BY ALL ORDER BY ALL"
    ):
        series = found.setdefault(journal, Series())
        for source, amount in zip(SOURCES, tokens, strict=True):
            if amount:
                series.count(at * width / TICKS, source, int(amount))


_COLUMNS = ", ".join(SOURCES)
_ONLY_SUMS = (
    "kept.hours JOIN (SELECT journal, rows_from_time FROM engines) USING (journal) "
    "WHERE hour < rows_from_time"
)
_EXTENT = f"SELECT settled_time FROM requests UNION ALL SELECT hour FROM {_ONLY_SUMS}"
_SETTLED = (
    f"SELECT journal, settled_time, {_COLUMNS} FROM requests WHERE settled_time IS NOT NULL "
    f"UNION ALL SELECT journal, settled_time, {_COLUMNS} FROM chunks "
    "UNION ALL SELECT journal, first_settled_time, "
    f"{', '.join(f'-{source}' for source in SOURCES)} FROM chunks "
    f"UNION ALL SELECT journal, hour, {_COLUMNS} FROM {_ONLY_SUMS}"
)
"""What was settled when: the first chunk of a session has what its row has beyond the later chunks. Of hours
that have only sums, all tokens are placed at the hour in which their requests ended."""
