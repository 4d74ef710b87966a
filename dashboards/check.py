"""Checks boards and rules: against the metric table, as files, and on a running Prometheus.

What must hold of a board: every query names metrics, labels and label values that kvledger serves; the unit
of a panel is one that its metrics can have; every panel has a title, a description and a query; ids are
unique; panels lie on the grid and on no other panel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode

import msgspec

from ..audit.errors import LedgerError
from ..audit.foreign import Unreadable, parsed
from ..audit.text import printable
from ..exporters.http_client import fetch, shown
from ..exporters.metrics.metric_list import METRICS, Metric
from . import boards, deploy_files

ADDED = ("job", "instance", "le")
"""Labels that a scrape adds, and the label of histogram buckets."""

VARIABLES = {
    "$__rate_interval": "5m",
    "$__range_s": "86400",
    "$__range": "1d",
    "$job": ".+",
    "$instance": ".+",
    "$engine": ".+",
    "$model_name": ".+",
    "$product": ".+",
}
"""The values that Grafana substitutes for *All*, over the last day."""

TIMEOUT_SECONDS = 30.0

_SELECTOR = re.compile(r"\b(kvledger_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")


GRID = 24
"""Columns of Grafana's grid."""

RATES = {"tokens": {"si:tokens/s"}, "seconds": {"s", "percentunit"}}
"""By the unit of a counter: Grafana's units of its rate. Of other counters it is one of events."""
EVENTS = {"cps", "reqps", "short"}
VALUES = {"seconds": {"s"}, "ratio": {"percentunit"}, "bytes": {"bytes"}}
"""By the unit of a metric: Grafana's units of its values. Other metrics count something."""
COUNTS = {"none", "short", "locale"}


class PanelQuery(NamedTuple):
    """One expression, and the panel or rule that contains it."""

    where: str
    expr: str


class Answer(NamedTuple):
    """How many series a query returned; ``error`` is Prometheus's message if it failed."""

    query: PanelQuery
    series: int
    error: str = ""


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every panel, with the title of its board."""
    for name in boards.NAMES:
        board = boards.board(name)
        for _, within in boards.rows(board):
            for panel in within:
                yield board["title"], panel


def queries() -> Iterator[PanelQuery]:
    """Every query of every panel."""
    for title, panel in panels():
        for target in panel["targets"]:
            yield PanelQuery(f"{title}, {panel['title']}", target["expr"])


def rule_expressions() -> Iterator[PanelQuery]:
    """The expression of every rule."""
    for rule in deploy_files.rules():
        yield PanelQuery(rule.get("record") or rule["alert"], rule["expr"])


def faults() -> list[str]:
    """What is wrong with boards and rules."""
    recorded = {rule["record"] for rule in deploy_files.rules() if "record" in rule}
    wrong = [
        f"{query.where}: {fault}"
        for query in (*queries(), *rule_expressions())
        for fault in faults_in(query.expr, recorded)
    ]
    return wrong + [
        f"{board['title']}: {fault}" for board in map(boards.board, boards.NAMES) for fault in misbuilt(board)
    ]


def misbuilt(board: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one board, its queries' names apart."""
    headings = [heading for heading, _ in boards.rows(board)]
    within = [panel for _, panels in boards.rows(board) for panel in panels]
    every = [*headings, *within]
    ids = [panel["id"] for panel in every]
    yield from (f"two panels have the id {each}" for each in sorted(set(ids)) if ids.count(each) > 1)
    for drawn in (board["panels"], *(heading["panels"] for heading in headings)):
        yield from _overlaps(drawn)
    for panel in every:
        if not panel["title"]:
            yield f"panel {panel['id']} has no title"
    for panel in within:
        if not panel.get("description"):
            yield f"{panel['title']} has no description"
        if not panel["targets"]:
            yield f"{panel['title']} has no query"
        unit = panel["fieldConfig"]["defaults"]["unit"]
        own = [prop for each in panel["fieldConfig"]["overrides"] for prop in each["properties"]]
        for target in panel["targets"]:
            fitting = units_of(target["expr"])
            if fitting and unit not in fitting and not any(prop["id"] == "unit" for prop in own):
                yield f"{panel['title']} has the unit {unit}; its metrics have {' or '.join(sorted(fitting))}"


def _overlaps(panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which panels leave the grid, or lie on another one."""
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] < 0 or place["x"] + place["w"] > GRID:
            yield f"{panel['title']} is wider than the board"
        cells = [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        others = {taken[cell] for cell in cells if cell in taken}
        yield from (f"{panel['title']} lies on {other}" for other in sorted(others))
        taken.update(dict.fromkeys(cells, panel["title"]))


def units_of(expr: str) -> set[str]:
    """Grafana's units that the values of an expression can have, by its metrics; empty: of any.

    The first metric says it, and what it is divided by.
    """
    found = [(match.start(), _metric(match[1])) for match in _SELECTOR.finditer(expr)]
    metrics = [(at, metric) for at, metric in found if metric is not None and metric.kind != "info"]
    if not metrics:
        return set()
    first = metrics[0][1]
    divided = [metric for at, metric in metrics[1:] if "/" in re.sub(r'"[^"]*"', "", expr[:at])]
    if divided:
        same = divided[0].unit == first.unit
        return (
            {"percentunit", *(EVENTS if not first.unit else ())} if same else VALUES.get(first.unit, COUNTS)
        )
    if "count(" in expr:
        return COUNTS
    if first.kind == "counter" and "rate(" in expr:
        return RATES.get(first.unit, EVENTS)
    if not first.unit and expr.startswith("avg("):
        return {"percentunit"}
    return VALUES.get(first.unit, COUNTS)


def faults_in(expr: str, recorded: set[str]) -> Iterator[str]:
    """List the names in one expression that are neither served nor ``recorded``."""
    for record in re.findall(r"\b\w+:\w+:\w+", expr):
        if record not in recorded:
            yield f"{record} is not recorded"
    expr = re.sub(r"\b\w+:\w+:\w+", "recorded", expr)
    labels = {*ADDED}
    for name, matchers in _SELECTOR.findall(expr):
        metric = _metric(name)
        if metric is None:
            yield f"{name} is no metric"
            continue
        labels |= {*metric.labels}
        for label, operator, value in _MATCHER.findall(matchers):
            yield from _matcher_faults(name, metric, label, operator, value)
    for group in _GROUPED.findall(re.sub(r"recorded\{[^}]*\}", "recorded", expr)):
        named = {label.strip() for label in group.split(",") if label.strip()}
        if "recorded" not in expr:
            yield from (f"no metric of it has {label}" for label in sorted(named - labels))


def _matcher_faults(name: str, metric: Metric, label: str, operator: str, value: str) -> Iterator[str]:
    if label not in (*metric.labels, *ADDED):
        yield f"{name} has no label {label}"
        return
    words = metric.words.get(label)
    if words is None or "$" in value:
        return
    for word in value.split("|") if "~" in operator else [value]:
        if word not in words:
            yield f"{label} of {name} is never {word!r}"


def _metric(name: str) -> Metric | None:
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        if name in [metric.exposed + suffix for suffix in suffixes]:
            return metric
    return None


def prometheus_url(text: str) -> str:
    """The address of a Prometheus without a slash at its end. Raises :class:`LedgerError` if it is none."""
    if not text.startswith(("http://", "https://")):
        raise LedgerError(f"{text!r} is no URL of a Prometheus; an example is http://127.0.0.1:9090.")
    return text.rstrip("/")


def differing(folder: Path, form: boards.Form) -> list[str]:
    """List the files of ``folder`` that are missing or differ from what this release exports.

    Raises :class:`LedgerError` if the folder can't be read.
    """
    if not folder.is_dir():
        raise LedgerError(f"There is no folder {folder}.")
    try:
        return list(_differing(folder, form))
    except OSError as error:
        raise LedgerError(f"{folder} can't be read: {error.strerror}.") from error


def _differing(folder: Path, form: boards.Form) -> Iterator[str]:
    expected = dict(boards.files(form))
    for name, text in expected.items():
        path = folder / name
        if not path.exists():
            yield f"{name} is missing"
        elif _json(path) != json.loads(text):
            yield f"{name} differs"
    path = folder / deploy_files.FILE
    if path.exists() and path.read_bytes() != deploy_files.SOURCE.read_bytes():
        yield f"{deploy_files.FILE} differs"


def _json(path: Path) -> object:
    try:
        return parsed(path.read_bytes(), Any)
    except Unreadable:
        return None


def ask(prometheus: str) -> Iterator[Answer]:
    """Run every query and every rule's expression. Raises OSError if the server does not answer."""
    url = prometheus_url(prometheus)
    for query in (*queries(), *rule_expressions()):
        yield _ask(url, query)


def _ask(prometheus: str, query: PanelQuery) -> Answer:
    expr = substituted(query.expr)
    address = f"{prometheus}/api/v1/query?{urlencode({'query': expr})}"
    try:
        answer = parsed(fetch(address, TIMEOUT_SECONDS), _Answered)
    except HTTPError as error:
        said = parsed(error.read(MOST_ERROR_BYTES), _Refused).error
        return Answer(query, 0, printable(said or str(error)))
    return Answer(query, len(answer.data.result))


MOST_ERROR_BYTES = 64 << 10


class _Data(msgspec.Struct):
    result: list[msgspec.Raw]


class _Answered(msgspec.Struct):
    data: _Data


class _Refused(msgspec.Struct):
    error: str = ""


def substituted(expr: str) -> str:
    """Replace Grafana's variables, as Grafana does before it asks Prometheus."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


class CheckReport(NamedTuple):
    """The lines of a check, and whether no fault was found."""

    lines: list[str]
    passed: bool


def check(folder: Path | None, form: boards.Form, prometheus: str) -> CheckReport:
    """Check the boards themselves and, if given, the files of ``folder`` and a Prometheus server.

    A query without data is listed but is no fault: a board may cover more than runs in one place.
    Raises :class:`LedgerError` if no Prometheus answers at ``prometheus``.
    """
    wrong = faults()
    count = len([*queries(), *rule_expressions()])
    checked = f"{len(boards.NAMES)} boards, {len(list(panels()))} panels, {count} expressions"
    lines = [f"{checked}: kvledger serves every metric they name." if not wrong else f"{checked}.", *wrong]
    if folder is not None:
        stale = differing(folder, form)
        wrong += stale
        lines += stale or [f"{folder} holds what this release exports."]
    if prometheus:
        answers = _answers(prometheus)
        failed = [answer for answer in answers if answer.error]
        empty = [answer for answer in answers if not answer.series and not answer.error]
        wrong += [answer.error for answer in failed]
        lines.append(f"{len(answers) - len(empty) - len(failed)} of {len(answers)} expressions return data.")
        lines += [f"no data: {answer.query.where}" for answer in empty]
        lines += [f"failed: {answer.query.where}: {answer.error}" for answer in failed]
    return CheckReport(lines, not wrong)


def _answers(prometheus: str) -> list[Answer]:
    try:
        return list(ask(prometheus))
    except (OSError, ValueError, Unreadable) as error:
        raise LedgerError(f"No Prometheus answers at {shown(prometheus)}: {printable(str(error))}") from error
