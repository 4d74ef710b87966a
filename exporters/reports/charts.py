"""Charts as data. ``templates/charts.html.j2`` and ``report.js`` draw them when a browser opens the page.

A colour is a class ``k0``, ``k1``, ..., which the style sheet defines for light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

Values = Sequence[float | None]


class Plot(NamedTuple):
    """Series over time. ``data`` is JSON for ``report.js``."""

    label: str
    names: list[str]
    first: str
    last: str
    data: str


class Bar(NamedTuple):
    """One horizontal bar: its name, its width in percent of the longest bar, and the text behind it."""

    name: str
    percent: float
    text: str


class Part(NamedTuple):
    """One part of a bar that is split by source; ``percent`` is of the whole bar."""

    name: str
    percent: float
    tokens: int


def over_time(
    label: str, starts: Sequence[str], named: dict[str, Values], *, stacked: bool = False, share: bool = False
) -> Plot:
    """Plot series of equal length over buckets that begin at ``starts``.

    ``stacked`` draws areas on top of each other, else lines. ``share``: values are parts of 1, shown as
    percent. None leaves a gap.
    """
    of = {name: list(values) for name, values in named.items()}
    data = json.dumps({"at": list(starts), "stacked": stacked, "share": share, "of": of})
    first, last = (starts[0], starts[-1]) if starts else ("", "")
    return Plot(label, list(named), first, last, data)


def bars(rows: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """A bar for each row of name, length and text."""
    longest = max([length for _, length, _ in rows] or [0]) or 1
    return [Bar(name, 100 * length / longest, text) for name, length, text in rows]


def parts(rows: Sequence[tuple[str, int]]) -> list[Part]:
    """One bar split by the tokens of each row; empty where no row has any."""
    whole = sum(tokens for _, tokens in rows)
    return [Part(name, 100 * tokens / whole, tokens) for name, tokens in rows] if whole else []
