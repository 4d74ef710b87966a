"""Charts as data: shapes in a box of 1000 by 100, and their texts.

``templates/charts.html.j2`` turns these into inline SVG and HTML. The SVG is stretched to the width of the
page; texts are HTML outside the SVG, so they have the same size on a phone and on a desk. A colour is a class
``k0``, ``k1``, ..., which the style sheet defines for light and dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil, log10
from typing import NamedTuple

Values = Sequence[float | None]


class Shape(NamedTuple):
    """One SVG element (``polygon`` or ``polyline``) with the colour of its series."""

    element: str
    color: int
    points: str


class Plot(NamedTuple):
    """Series over time. ``data`` is JSON for ``report.js``, which shows the values under the pointer."""

    label: str
    shapes: list[Shape]
    names: list[str]
    top: str
    half: str
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
    series = list(named.items())
    sums = [sum(v or 0 for v in column) for column in zip(*named.values(), strict=True)]
    highest = max(sums if stacked else [v for _, values in series for v in values if v is not None] or [0.0])
    top = 1.0 if share else _round_up(highest)
    shapes: list[Shape] = []
    base: list[float] = [0.0] * len(starts)
    for color, (_, values) in enumerate(series):
        if stacked:
            above = [low + (value or 0) for low, value in zip(base, values, strict=True)]
            shapes.append(_area(base, above, top, color))
            base = above
        else:
            shapes += (_line(piece, len(starts), top, color) for piece in _pieces(values))
    return Plot(
        label=label,
        shapes=shapes,
        names=[name for name, _ in series],
        top=_scale_text(top, top, share),
        half=_scale_text(top / 2, top, share),
        first=starts[0] if starts else "",
        last=starts[-1] if starts else "",
        data=json.dumps({"at": list(starts), "share": share, "of": {name: list(v) for name, v in series}}),
    )


def bars(rows: Sequence[tuple[str, float, str]]) -> list[Bar]:
    """A bar for each row of name, length and text."""
    longest = max([length for _, length, _ in rows] or [0]) or 1
    return [Bar(name, 100 * length / longest, text) for name, length, text in rows]


def parts(rows: Sequence[tuple[str, int]]) -> list[Part]:
    """One bar split by the tokens of each row; empty where no row has any."""
    whole = sum(tokens for _, tokens in rows)
    return [Part(name, 100 * tokens / whole, tokens) for name, tokens in rows] if whole else []


def _pieces(values: Values) -> list[list[tuple[int, float]]]:
    """Split a series at its gaps."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((place, value))
    return [piece for piece in pieces if piece]


def _line(piece: list[tuple[int, float]], count: int, top: float, color: int) -> Shape:
    return Shape("polyline", color, " ".join(_stairs(piece, count, top)))


def _area(base: list[float], above: list[float], top: float, color: int) -> Shape:
    upper = _stairs(list(enumerate(above)), len(base), top)
    lower = _stairs(list(enumerate(base)), len(base), top)
    return Shape("polygon", color, " ".join([*upper, *reversed(lower)]))


def _stairs(values: list[tuple[int, float]], count: int, top: float) -> list[str]:
    """Two points a bucket: a value holds from the bucket's start to its end."""
    width = 1000 / max(1, count)
    return [
        f"{width * edge:.1f},{100 - 100 * value / top:.2f}"
        for place, value in values
        for edge in (place, place + 1)
    ]


def _scale_text(value: float, top: float, share: bool) -> str:
    if share:
        return f"{100 * value:.0f} %"
    return f"{value:,.0f}" if top >= 2 else f"{value:g}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10, 20, ..."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (ceil(log10(value)) - 1)
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)
