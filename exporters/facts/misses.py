"""Prompt tokens that missed the caches, of groups of requests, by cause."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, LostWork, plus, seconds
from ...audit.causes import BLOCKS
from ...audit.figures.sums import add_tokens
from ..reports.costs import FirstToken
from .costs import first_tokens
from .rows import MISSED, NOT_COMPUTED
from .sums import Group, condition, joined, names
from .tables import Facts


class Misses(msgspec.Struct):
    """The misses of one group. Figures are tokens; ``audited`` and ``unknown`` count requests.

    ``tokens``, ``requests``, ``seconds`` and ``first_tokens`` are by cause; seconds are None where the price
    of a token is not known, and missing for tokens that were never computed. ``preempted``: tokens computed
    again after preemptions for lack of free blocks, without seconds.
    """

    audited: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    missed: int = 0
    scheduled: int = 0
    tokens: dict[str, int] = {}
    requests: dict[str, int] = {}
    seconds: dict[str, float | None] = {}
    first_tokens: dict[str, FirstToken] = {}
    preempted: LostWork = msgspec.field(default_factory=LostWork)


_SUMS = {
    "audited": "count(*) FILTER (unknown IS NULL)",
    "unknown": "count(unknown)",
    "prompt_tokens": "sum(prompt_tokens)",
    "hit": "sum(local) + sum(external)",
    "missed": "sum(missed)",
    "scheduled": "sum(scheduled)",
}


def misses_by_group(facts: Facts, columns: Sequence[str], where: str) -> dict[Group, Misses]:
    """The misses of each group; without ``columns``, of all requests as the group ``()``."""
    width = len(columns)
    query = f"SELECT {', '.join([*columns, *_SUMS.values()])} FROM requests{condition(where)}"
    groups: dict[Group, Misses] = {}
    for row in facts.rows(f"{query} GROUP BY ALL" if columns else query):
        misses = groups.setdefault(tuple(map(str, row[:width])), Misses())
        for name, value in zip(_SUMS, row[width:], strict=True):
            setattr(misses, name, int(value or 0))
    models = {engine.journal: engine.model for engine in facts.engines}
    for row in facts.rows(_query(columns, where, MISSED, "journal, cause")):
        journal, cause, tokens, requests = row[width:]
        misses = groups[tuple(map(str, row[:width]))]
        add_tokens(misses.tokens, cause, int(tokens))
        add_tokens(misses.requests, cause, requests)
        if cause not in NOT_COMPUTED:
            took = seconds(models[journal], PREFILL, int(tokens))
            misses.seconds[cause] = plus(misses.seconds.get(cause, 0.0), took)
    for row in facts.rows(_query(columns, where, REWORK, "cause, more_blocks_percent")):
        cause, percent, tokens, _ = row[width:]
        if cause == BLOCKS:
            avoidable = {} if percent is None else {int(percent): int(tokens)}
            groups[tuple(map(str, row[:width]))].preempted.merge(LostWork(int(tokens), avoidable=avoidable))
    for group, cause, first_token in first_tokens(facts, columns, where, MISSED):
        groups[group].first_tokens[cause] = first_token
    return groups


def _query(columns: Sequence[str], where: str, figure: str, by: str) -> str:
    selected = ", ".join([*names(columns), by, "sum(tokens)", "count(*)"])
    return f"SELECT {selected} FROM {joined(columns, where)} WHERE figure = '{figure}' GROUP BY ALL"
