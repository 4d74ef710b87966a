"""Boards drawn with the data of a Prometheus on one HTML page, without Grafana.

Each panel of the committed JSON keeps its place on the grid, its queries, unit, thresholds and legend. A
collapsed row without data is left out.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from kvledger.audit.errors import LedgerError
from kvledger.dashboards import boards as committed
from kvledger.exporters.templating import environment

from . import charts, units
from .data import Series, Source, Span, legend, table

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

CELL, GAP, ROW_HEADING, BOARD_HEADING = 30, 8, 46, 112
"""Pixels: a unit of Grafana's grid, the gap between two, a row's heading, and a board's.

A board's heading has room for one more line of text than it needs on a wide page."""

BROWSER_SECONDS = 120.0


class Box(NamedTuple):
    """One panel as the template draws it; ``empty`` if its queries return nothing."""

    panel: Mapping[str, Any]
    top: int
    empty: bool
    drawing: Mapping[str, Any]


class Row(NamedTuple):
    """A heading and its panels; ``units`` is the height in units of the grid."""

    title: str
    boxes: Sequence[Box]
    units: int


class Board(NamedTuple):
    """A board with its data; ``hidden`` are the titles of rows that have none."""

    title: str
    description: str
    rows: Sequence[Row]
    hidden: Sequence[str]

    @property
    def pixels(self) -> int:
        """The height on the page."""
        return BOARD_HEADING + sum(ROW_HEADING + row.units * (CELL + GAP) for row in self.rows)


def gather(chosen: Sequence[str], prometheus: str, span: Span) -> list[Board]:
    """Ask for the data of these boards, or of all. Raises :class:`LedgerError`."""
    return [_board(committed.board(name), prometheus, span) for name in chosen or committed.NAMES]


def save(boards: Sequence[Board], span: Span, output: Path, width: int) -> None:
    """Write a page, or a picture of it as a browser shows it. Raises :class:`LedgerError`."""
    text = html(boards, span)
    if output.suffix != ".png":
        committed.put(output.parent, output.name, text)
        return
    with tempfile.TemporaryDirectory() as folder:
        page = committed.put(Path(folder), "page.html", text)
        picture = Path(folder) / "page.png"
        photograph(page, picture, width, sum(board.pixels for board in boards))
        try:
            shutil.copyfile(picture, output)
        except OSError as error:
            raise LedgerError(f"{output} can't be written: {error.strerror}.") from error


def html(boards: Sequence[Board], span: Span) -> str:
    """The page. It loads nothing from a network."""
    begin, end = (datetime.fromtimestamp(at, timezone.utc) for at in (span.end - span.seconds, span.end))
    return (
        environment(Path(__file__).parent)
        .get_template("page.html.j2")
        .render(boards=boards, begin=begin, end=end, ticks=charts.time_ticks(span), cell=CELL, gap=GAP)
    )


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """Let a browser draw a page. Raises :class:`LedgerError` if there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise LedgerError(f"A picture needs {' or '.join(BROWSERS)}; write a page: -o page.html")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}"]
    command = [browser, *flags, f"--screenshot={picture}", page.as_uri()]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=BROWSER_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise LedgerError(f"{browser} made no picture: {error}") from error


def _board(board: Mapping[str, Any], prometheus: str, span: Span) -> Board:
    variables = {each["name"]: each.get("allValue") or ".+" for each in board["templating"]["list"]}
    docs = next(each["query"] for each in board["templating"]["list"] if each["name"] == "docs")
    source = Source(prometheus, span, variables)
    rows, hidden = [], []
    for heading, panels in committed.rows(board):
        top = heading["gridPos"]["y"] + 1
        boxes = [_box(panel, top, source, docs) for panel in panels]
        if heading["collapsed"] and not any(_counts(box) for box in boxes):
            hidden.append(heading["title"])
            continue
        bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        rows.append(Row(heading["title"], boxes, bottom - top))
    return Board(board["title"], board["description"], rows, hidden)


def _counts(box: Box) -> bool:
    """Whether a panel shows any value but zero."""
    return bool(box.drawing.get("nonzero"))


def nonzero(answers: Sequence[Sequence[Series]]) -> bool:
    """Whether any value is a number other than zero; 0 / 0 is no number."""
    values = (value for answer in answers for one in answer for value in one.values.values())
    return any(value and not math.isnan(value) for value in values)


def _box(panel: Mapping[str, Any], top: int, source: Source, docs: str) -> Box:
    answers = [source.series(target) for target in panel["targets"]]
    drawing = _DRAWN[panel["type"]](panel, answers, source.span)
    drawing["docs"] = docs
    drawing["nonzero"] = nonzero(answers)
    return Box(panel, top, not any(answers), drawing)


def _stat(panel: Mapping[str, Any], answers: Sequence[Sequence[Series]], _: Span) -> dict[str, Any]:
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for answer in answers for one in answer for value in one.values.values()]
    if not values:
        return {}
    text, colour = units.text(values[-1], defaults["unit"]), _step(defaults, values[-1])
    for mapping in defaults["mappings"]:
        word = mapping["options"].get(units.number(values[-1]))
        if word:
            text, colour = word["text"], word["color"]
    return {"text": text, "colour": colour, "filled": panel["options"]["colorMode"] == "background"}


def _step(defaults: Mapping[str, Any], value: float) -> str:
    """The colour of the last threshold that is not above the value; NaN is above none."""
    steps = defaults["thresholds"]["steps"]
    return str([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])


def _timeseries(panel: Mapping[str, Any], answers: Sequence[Sequence[Series]], span: Span) -> dict[str, Any]:
    named = [
        (legend(target, one.labels), one)
        for target, answer in zip(panel["targets"], answers, strict=True)
        for one in answer
    ]
    axis, lines = charts.lines(panel, named, span)
    defaults = panel["fieldConfig"]["defaults"]
    percent = defaults["custom"]["stacking"]["mode"] == "percent"
    ticks = charts.value_ticks(axis, "percentunit" if percent else defaults["unit"])
    custom = defaults["custom"]
    opacity, width = custom["fillOpacity"] / 100, 1.5 * custom["lineWidth"]
    return {"lines": lines, "values": ticks, "opacity": opacity, "width": width}


def _heatmap(panel: Mapping[str, Any], answers: Sequence[Sequence[Series]], span: Span) -> dict[str, Any]:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    made, ticks = charts.cells([one for answer in answers for one in answer], span, unit)
    return {"cells": made, "values": ticks}


def _table(panel: Mapping[str, Any], answers: Sequence[Sequence[Series]], _: Span) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {}
    for override in panel["fieldConfig"]["overrides"]:
        column = settings.setdefault(override["matcher"]["options"], {})
        column |= {prop["id"]: prop["value"] for prop in override["properties"]}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    organize = next(each for each in panel["transformations"] if each["id"] == "organize")
    titles = organize["options"]["renameByName"]
    rows = [
        [_cell(value, settings.get(titles.get(name, name), {}), unit) for name, value in row.items()]
        for row in table(panel, answers)
    ]
    return {"titles": list(titles.values()), "rows": rows}


def _cell(value: object, setting: Mapping[str, Any], unit: str) -> tuple[str, str]:
    """The text of a cell, and its link with the place of the value left open."""
    if isinstance(value, float):
        return units.text(value, setting.get("unit", unit)), ""
    links = setting.get("links")
    return str("" if value is None else value), str(links[0]["url"]) if links else ""


_DRAWN = {"stat": _stat, "timeseries": _timeseries, "heatmap": _heatmap, "table": _table}
