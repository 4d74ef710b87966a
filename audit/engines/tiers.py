"""The tiers that a connector's external tokens come from, as the connector reports them to the engine.

vLLM asks since 0.32, with ``get_external_cache_hit_sources``. An older connector has no such method, and then
nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import events as ev
from ..text import cut_id


def tiers_reported(
    at: int, request: int, step: int, external_tokens: int, answer: Mapping[Any, int]
) -> ev.TiersReported:
    """The event of an answer about ``external_tokens`` tokens of a request."""
    names = [cut_id(str(getattr(tier, "value", tier))) for tier in answer]
    return ev.TiersReported(
        at, request, step, external_tokens, names, [int(each) for each in answer.values()]
    )
