"""Panels, their queries, and their layout, as Grafana JSON. No metric is named here.

Queries use two abbreviations: ``@sidecar`` stands for the matchers of the board's variables ``job`` and
``instance``, ``@engine`` for these and the variable ``engine``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["stat", "timeseries", "table", "heatmap"]

SIDECAR = 'job=~"$job", instance=~"$instance"'
ENGINE = SIDECAR + ', engine=~"$engine"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID = 24
"""Columns of Grafana's grid."""

GREEN, AMBER, RED, BLUE, GREY, PALE = "#1d7f45", "#d98413", "#c0322b", "#2f6fd0", "#7d8793", "#c3c9cf"
"""The colours of the HTML report."""
TOKENS_PER_SECOND = "si:tokens/s"
Step = tuple[float | None, str]
"""The colour from a value on; the first step has the value None."""

GOOD_IS_NONE: tuple[Step, ...] = ((None, GREEN), (1e-9, RED))
PLAIN: tuple[Step, ...] = ((None, BLUE),)


class Query(NamedTuple):
    """One PromQL expression; ``now`` asks for its value at the end of the time range only."""

    expr: str
    legend: str = ""
    now: bool = False

    @property
    def promql(self) -> str:
        """The expression for Grafana, with Grafana's variables in it."""
        return self.expr.replace("@engine", ENGINE).replace("@sidecar", SIDECAR)


class Panel(NamedTuple):
    """One panel. ``description`` says what it means and what to do; ``unit`` is Grafana's id of a unit.

    ``words`` maps a value to a text and a colour. A table shows its ``columns`` (field, title) and no
    others. ``links`` are (field, title, address).
    """

    title: str
    description: str
    kind: Kind
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    steps: tuple[Step, ...] = PLAIN
    words: Mapping[str, tuple[str, str]] = {}
    stack: Literal["", "normal", "percent"] = ""
    least: float | None = 0
    most: float | None = None
    columns: tuple[tuple[str, str], ...] = ()
    units: Mapping[str, str] = {}
    links: tuple[tuple[str, str, str], ...] = ()
    newest_first: str = ""
    colours: Mapping[str, str] = {}


class PanelRow(NamedTuple):
    """A heading and its panels, from left to right, then down.

    ``collapsed``: only the heading is shown, until a click. Its queries are not run before.
    """

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


def laid_out(rows: Sequence[PanelRow]) -> list[dict[str, Any]]:
    """The panels as Grafana JSON with ids and positions, each row below its heading."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": GRID, "h": 1}
        heading = {"type": "row", "title": row.title, "collapsed": row.collapsed, "gridPos": place}
        within: list[dict[str, Any]] = []
        number += 1
        panels.append({"id": number, **heading, "panels": within})
        top += 1
        bottom = top
        left = lowest = 0
        for panel in row.panels:
            if left + panel.width > GRID:
                top, left, lowest = top + lowest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            number += 1
            (within if row.collapsed else panels).append({"id": number, **_json(panel), "gridPos": place})
            left, lowest = left + panel.width, max(lowest, panel.height)
        top = bottom if row.collapsed else top + lowest
    return panels


def panel_types(rows: Iterable[PanelRow]) -> list[str]:
    """The Grafana panel types that these rows need."""
    return sorted({panel.kind for row in rows for panel in row.panels})


def _json(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "targets": [_target(panel, place, query) for place, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _OPTIONS[panel.kind](panel),
        **({"transformations": _transformations(panel)} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, place: int, query: Query) -> dict[str, Any]:
    target = {
        "refId": chr(ord("A") + place),
        "datasource": DATASOURCE,
        "expr": query.promql,
        "legendFormat": query.legend or "__auto",
        "instant": query.now,
        "range": not query.now,
    }
    if panel.kind in ("table", "heatmap"):
        target["format"] = panel.kind
    return target


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"value": value, "color": colour} for value, colour in panel.steps]
    fixed = panel.kind in ("stat", "table")
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if fixed else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": _mappings(panel.words),
        "links": [],
    }
    if panel.kind == "timeseries":
        defaults["min"] = panel.least
        defaults["max"] = panel.most
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 70 if panel.stack else 10,
            "lineWidth": 0 if panel.stack else 1,  # the line of a zero would lie on top of the stack
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": panel.stack or "none", "group": "A"},
        }
    return {name: value for name, value in defaults.items() if value is not None}


def _mappings(words: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    if not words:
        return []
    shown = {value: {"text": text, "color": colour} for value, (text, colour) in words.items()}
    return [{"type": "value", "options": shown}]


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    by_field: dict[str, list[dict[str, Any]]] = {}
    for series, colour in panel.colours.items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        by_field.setdefault(series, []).append({"id": "color", "value": fixed})
    for column, unit in panel.units.items():
        by_field.setdefault(column, []).append({"id": "unit", "value": unit})
    for column, title, address in panel.links:
        link = [{"title": title, "url": address, "targetBlank": True}]
        by_field.setdefault(column, []).append({"id": "links", "value": link})
    return [
        {"matcher": {"id": "byName", "options": field}, "properties": properties}
        for field, properties in by_field.items()
    ]


def _stat(panel: Panel) -> dict[str, Any]:
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "background" if panel.steps != PLAIN else "value",
        "graphMode": "none",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
    }


def _timeseries(_: Panel) -> dict[str, Any]:
    return {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _table(panel: Panel) -> dict[str, Any]:
    newest = [{"displayName": panel.newest_first, "desc": True}] if panel.newest_first else []
    return {"showHeader": True, "cellHeight": "sm", "sortBy": newest}


def _heatmap(panel: Panel) -> dict[str, Any]:
    return {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5, "fill": "dark-blue"},
        "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
        "cellGap": 1,
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": False},
        "rowsFrame": {"layout": "le"},
        "showValue": "never",
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }


_OPTIONS = {"stat": _stat, "timeseries": _timeseries, "table": _table, "heatmap": _heatmap}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    """One table row for each set of labels; only the panel's columns, in order, under their titles."""
    names = [name for name, _ in panel.columns]
    return [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": names}}},
        {
            "id": "organize",
            "options": {
                "indexByName": {name: place for place, name in enumerate(names)},
                "renameByName": dict(panel.columns),
            },
        },
    ]
