"""Prompt tokens that missed the caches, of groups of requests, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, LostWork, plus, seconds
from ...audit.causes import BLOCKS
from ...audit.figures.sums import add_tokens
from ..reports.costs import FirstToken
from .costs import first_tokens
from .hours import HOUR_CAUSES, rows_of
from .rows import MISSED, NOT_COMPUTED
from .sums import Group, GroupSums, sums_by
from .tables import Facts


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
