"""Plots as inline SVG, small enough to read in the source of a page.

The drawing is stretched to the width there is; words stand beside it as HTML, so they are as large on a
phone as on a desk. Colours are classes, which the page gives for light and dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from math import ceil, log10

Values = Sequence[float | None]


def over_time(
    label: str, starts: Sequence[str], named: dict[str, Values], *, stacked: bool = False, share: bool = False
) -> str:
    """Lines (or areas on each other) of equal length over buckets called ``starts``.

    ``share``: values are parts of 1, told as percent. None leaves a gap.
    """
    series = list(named.items())
    tops = [sum(v or 0 for v in column) for column in zip(*named.values(), strict=True)]
    highest = max(tops if stacked else [v for _, values in series for v in values if v is not None] or [0.0])
    top = 1.0 if share else _round_up(highest)
    drawn: list[str] = []
    base: list[float] = [0.0] * len(starts)
    for place, (_, values) in enumerate(series):
        if stacked:
            above = [low + (value or 0) for low, value in zip(base, values, strict=True)]
            drawn.append(_area(base, above, top, place))
            base = above
        else:
            drawn += (_line(piece, len(starts), top, place) for piece in _pieces(values))
    data = json.dumps({"at": list(starts), "share": share, "of": {name: list(v) for name, v in series}})
    return _figure(label, "".join(drawn), _scale(top, share), _ends(starts), list(named), data)


def bars(label: str, rows: Sequence[tuple[str, float, str]], kind: int = 0) -> str:
    """A horizontal bar a row: its name, its length, and what is said of it."""
    most = max([length for _, length, _ in rows] or [0]) or 1
    lines = "".join(
        f'<div class="bar"><span>{escape(name)}</span><i>{_bar(length / most, kind)}</i>'
        f"<em>{escape(said)}</em></div>"
        for name, length, said in rows
    )
    return f'<div class="bars" role="img" aria-label="{escape(label)}">{lines}</div>'


def _bar(part: float, kind: int) -> str:
    """Nothing for nothing; a hair's breadth at least for something."""
    return f'<b class="k{kind}" style="width:{100 * part:.2f}%"></b>' if part else ""


def parts(label: str, rows: Sequence[tuple[str, int]]) -> str:
    """One bar made of parts, with a legend that tells each."""
    whole = sum(tokens for _, tokens in rows)
    if not whole:
        return '<p class="none">Nothing to show.</p>'
    cut = "".join(
        f'<b class="k{place}" style="width:{100 * tokens / whole:.3f}%" title="{escape(name)}"></b>'
        for place, (name, tokens) in enumerate(rows)
    )
    told = "".join(
        f'<li><i class="k{place}"></i>{escape(name)} <strong>{100 * tokens / whole:.1f} %</strong>'
        f" <small>{tokens:,}</small></li>"
        for place, (name, tokens) in enumerate(rows)
    )
    bar = f'<div class="parts" role="img" aria-label="{escape(label)}">{cut}</div>'
    return f'{bar}<ul class="legend">{told}</ul>'


def _figure(label: str, drawn: str, scale: str, ends: str, names: list[str], data: str) -> str:
    legend = "".join(
        f'<li><i class="k{n}"></i>{escape(name)} <strong></strong></li>' for n, name in enumerate(names)
    )
    return (
        f'<figure><div class="plot" data-plot="{escape(data)}">'
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'{drawn}</svg>{scale}<u hidden></u></div><div class="ends">{ends}</div>'
        f'<ul class="legend">{legend}<li class="when"></li></ul></figure>'
    )


def _pieces(values: Values) -> list[list[tuple[int, float]]]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((place, value))
    return [piece for piece in pieces if piece]


def _x(place: float, count: int) -> float:
    return 1000 * place / max(1, count)


def _line(piece: list[tuple[int, float]], count: int, top: float, kind: int) -> str:
    """Steps: a bucket's value from its start to its end."""
    points = [f"{_x(at, count):.1f},{100 - 100 * value / top:.2f}" for p, value in piece for at in (p, p + 1)]
    return f'<polyline class="k{kind}" points="{" ".join(points)}"/>'


def _area(base: list[float], above: list[float], top: float, kind: int) -> str:
    count = len(base)
    upper = [
        f"{_x(at, count):.1f},{100 - 100 * v / top:.2f}" for p, v in enumerate(above) for at in (p, p + 1)
    ]
    lower = [
        f"{_x(at, count):.1f},{100 - 100 * v / top:.2f}" for p, v in enumerate(base) for at in (p, p + 1)
    ]
    return f'<polygon class="k{kind}" points="{" ".join([*upper, *reversed(lower)])}"/>'


def _scale(top: float, share: bool) -> str:
    def said(value: float) -> str:
        return f"{100 * value:.0f} %" if share else f"{value:,.0f}" if top >= 2 else f"{value:g}"

    return f'<span class="top">{said(top)}</span><span class="half">{said(top / 2)}</span>'


def _ends(starts: Sequence[str]) -> str:
    if not starts:
        return ""
    return f"<span>{escape(starts[0])}</span><span>{escape(starts[-1])}</span>"


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10, 20, ..."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (ceil(log10(value)) - 1)
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)
