"""Which tier gave the external tokens of a life, as far as the connector reported it.

The connector reports the tiers of a promise as numbers of tokens, not by position. So the tier of a part of a
promise is known only if the whole promise has one tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ..causes import TIER_UNKNOWN
from ..figures.sums import merge_tokens
from .life import Life


def tokens_by_tier(lives: Iterable[Life], part: str) -> dict[str, int]:
    """Tokens by tier of one attribute of lives, such as ``external`` or ``loaded``.

    Lives whose tiers were not reported are left out.
    """
    read = attrgetter(part)
    found: dict[str, int] = {}
    for life in lives:
        if life.tiers:
            merge_tokens(found, _split(life, read(life)))
    return found


def _split(life: Life, tokens: int) -> dict[str, int]:
    """``tokens`` of a life's promise, by tier."""
    if tokens <= 0:
        return {}
    tiers = {tier: count for tier, count in life.tiers.items() if count}
    if sum(tiers.values()) != life.external:
        return {TIER_UNKNOWN: tokens}
    if tokens == life.external:
        return tiers
    return {next(iter(tiers)) if len(tiers) == 1 else TIER_UNKNOWN: tokens}
