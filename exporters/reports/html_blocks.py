"""The part of the HTML report about blocks, for journals of level ``blocks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...audit.analysis.block_states import STATES
from ..trace.time_series import TICKS
from . import charts
from .audit_data import share
from .block_use import facts, spread_rows
from .html_data import PageData


class BlockSection(NamedTuple):
    """What the section shows; a plot is None without data."""

    facts: list[str]
    states: charts.Plot | None
    evictions: charts.Plot | None
    spreads: list[tuple[str, ...]]


def block_section(data: PageData, clock: Callable[[float], str]) -> BlockSection | None:
    """The section; None where no journal has block events. ``clock`` writes a Unix time."""
    if data.block_use is None:
        return None
    series = data.block_series
    places = series.counts.keys() | series.levels.keys()
    buckets = range(min(places), max(places) + 1) if places else range(0)
    starts = [clock(place * series.width_ticks / TICKS) for place in buckets]
    levels = [series.levels.get(place) for place in buckets]
    parts: dict[str, charts.Values] = {
        name: [
            share(level[name], sum(level[state] for state in STATES)) if level else None for level in levels
        ]
        for name in ("running", "cached")
    }
    evicted = [series.counts.get(place, {}).get("evicted", 0) for place in buckets]
    return BlockSection(
        facts=list(facts(data.block_use)),
        states=charts.over_time("blocks by state over time", starts, parts, stacked=True, share=True)
        if any(levels)
        else None,
        evictions=charts.over_time("evicted blocks over time", starts, {"evicted": evicted}, stacked=True)
        if any(evicted)
        else None,
        spreads=spread_rows(data.block_use),
    )
