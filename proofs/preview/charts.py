"""Time series and heatmaps as SVG shapes in a box of 1000 by 1000, which the page stretches to the panel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from . import units
from .data import Series, Span

SIDE = 1000.0
CLASSIC = (
    "#7EB26D",
    "#EAB839",
    "#6ED0E0",
    "#EF843C",
    "#E24D42",
    "#1F78C1",
    "#BA43A9",
    "#705DA0",
    "#508642",
    "#CCA300",
)
"""The first colours of Grafana's classic palette."""

_SPACINGS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


class Tick(NamedTuple):
    """A label of an axis and its place, in percent from the left or from the top."""

    text: str
    percent: float


class Line(NamedTuple):
    """One series of a chart: its legend, colour and shapes."""

    name: str
    colour: str
    last: str
    most: str
    stroke: str
    area: str


class Cell(NamedTuple):
    """One cell of a heatmap."""

    x: float
    y: float
    width: float
    height: float
    strength: float


class Axis(NamedTuple):
    """The range of values of a chart."""

    low: float
    high: float

    def y(self, value: float) -> float:
        """The place of a value in the box."""
        return SIDE * (1 - (min(max(value, self.low), self.high) - self.low) / (self.high - self.low))


def value_ticks(axis: Axis, unit: str) -> list[Tick]:
    """About four round values."""
    raw = (axis.high - axis.low) / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * min((1.0, 2.0, 2.5, 5.0, 10.0), key=lambda each: abs(each * size - raw))
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    return [Tick(units.text(n * step, unit), axis.y(n * step) / SIDE * 100) for n in range(first, last + 1)]


def time_ticks(span: Span) -> list[Tick]:
    """About five round times, in UTC."""
    step = next((each for each in _SPACINGS if span.seconds / each <= 6), _SPACINGS[-1])
    begin = span.end - span.seconds
    pattern = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%m/%d"
    times = range(math.ceil(begin / step) * step, int(span.end) + 1, step)
    return [
        Tick(datetime.fromtimestamp(at, timezone.utc).strftime(pattern), (at - begin) / span.seconds * 100)
        for at in times
        if at - begin < 0.93 * span.seconds
    ]


def lines(
    panel: Mapping[str, Any], named: Sequence[tuple[str, Series]], span: Span
) -> tuple[Axis, list[Line]]:
    """The shapes of a time-series panel, stacked as the panel says."""
    defaults = panel["fieldConfig"]["defaults"]
    stacking = defaults["custom"]["stacking"]["mode"]
    drawn = [(name, _finite(series.values)) for name, series in named]
    bands = _stacked([values for _, values in drawn], stacking)
    axis = _axis(defaults, [value for band in bands for pair in band.values() for value in pair], stacking)
    unit = defaults["unit"]
    result = []
    for place, ((name, values), band) in enumerate(zip(drawn, bands, strict=True)):
        runs = list(_runs(band, span, axis))
        line = Line(
            name,
            _colour(panel, name, place),
            units.text(values[max(values)], unit) if values else "",
            units.text(max(values.values()), unit) if values else "",
            " ".join(_stroke([(x, top) for x, _, top in run]) for run in runs),
            " ".join(_area(run) for run in runs if len(run) > 1),
        )
        result.append(line)
    return axis, result


def _finite(values: Mapping[float, float]) -> dict[float, float]:
    return {at: value for at, value in values.items() if math.isfinite(value)}


def _stacked(rows: Sequence[Mapping[float, float]], stacking: str) -> list[dict[float, tuple[float, float]]]:
    """The lower and the upper edge of each series, by time."""
    if stacking == "none":
        return [{at: (0.0, value) for at, value in row.items()} for row in rows]
    whole = {at: sum(row.get(at, 0.0) for row in rows) for row in rows for at in row}
    below: dict[float, float] = {}
    bands = []
    for row in rows:
        band = {}
        for at, value in row.items():
            if stacking == "percent":
                value = value / whole[at] if whole[at] else 0.0
            low = below.get(at, 0.0)
            below[at] = low + value
            band[at] = (low, low + value)
        bands.append(band)
    return bands


def _axis(defaults: Mapping[str, Any], values: Sequence[float], stacking: str) -> Axis:
    if stacking == "percent":
        return Axis(0.0, 1.0)
    low = defaults.get("min", min(values, default=0.0))
    high = defaults.get("max", max(values, default=0.0) * 1.05)
    return Axis(low, high if high > low else low + 1.0)


def _runs(
    band: Mapping[float, tuple[float, float]], span: Span, axis: Axis
) -> Iterator[list[tuple[float, float, float]]]:
    """The points of a series without a hole in them: x, lower and upper edge."""
    run: list[tuple[float, float, float]] = []
    before = -math.inf
    for at in sorted(band):
        if at - before > 1.5 * span.step and run:
            yield run
            run = []
        low, high = band[at]
        x = SIDE * (at - (span.end - span.seconds)) / span.seconds
        run.append((min(max(x, 0.0), SIDE), axis.y(low), axis.y(high)))
        before = at
    if run:
        yield run


def _stroke(points: Sequence[tuple[float, float]]) -> str:
    """A path; a single point is a line without length, which a round cap shows."""
    first, *others = [f"{x:.1f} {y:.1f}" for x, y in points]
    return f"M{first}L" + "L".join(others or [first])


def _area(run: Sequence[tuple[float, float, float]]) -> str:
    edge = [(x, top) for x, _, top in run] + [(x, low) for x, low, _ in reversed(run)]
    return _stroke(edge) + "Z"


def _colour(panel: Mapping[str, Any], name: str, place: int) -> str:
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == name:
            for prop in override["properties"]:
                if prop["id"] == "color":
                    return str(prop["value"]["fixedColor"])
    return CLASSIC[place % len(CLASSIC)]


def cells(series: Sequence[Series], span: Span, unit: str) -> tuple[list[Cell], list[Tick]]:
    """The cells of a heatmap of cumulative buckets, and the upper bounds of its rows."""
    rows = sorted(((float(one.labels["le"]), _finite(one.values)) for one in series), key=lambda row: row[0])
    counts: dict[tuple[float, int], float] = {}
    for place, (_, values) in enumerate(rows):
        for at, value in values.items():
            own = value - (rows[place - 1][1].get(at, 0.0) if place else 0.0)
            if own > 1e-9:
                counts[at, place] = own
    if not counts:
        return [], []
    most, height = max(counts.values()), SIDE / len(rows)
    width = SIDE * span.step / span.seconds
    begin = span.end - span.seconds
    made = [
        Cell(
            max(0.0, SIDE * (at - begin) / span.seconds - width),
            SIDE - (place + 1) * height,
            width,
            height,
            round(0.15 + 0.85 * math.sqrt(own / most), 3),
        )
        for (at, place), own in counts.items()
    ]
    every = max(1, -(-len(rows) // 5))
    ticks = [
        Tick(units.text(bound, unit), 100 - 100 * (place + 0.5) / len(rows))
        for place, (bound, _) in enumerate(rows)
        if place % every == 0
    ]
    return made, ticks
