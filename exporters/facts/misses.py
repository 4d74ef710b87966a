"""Prompt tokens that missed the caches, of groups of requests, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, LostWork, plus, seconds
from ...audit.causes import BLOCKS
from ...audit.figures.sums import add_tokens
from ..reports.costs import FirstToken
from .costs import first_tokens
from .hours import HOUR_CAUSES
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
