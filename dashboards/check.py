"""Checks boards and rules against the metric table, exported files, and a running Prometheus."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..audit.errors import LedgerError
from ..exporters.metrics.metric_list import METRICS, Metric
from . import boards, rules
from .panels import Panel
from .preview_data import prometheus_url

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
}
"""The values that Grafana substitutes for *All*, over the last day."""

TIMEOUT_SECONDS = 30.0

_SELECTOR = re.compile(r"\b(kvledger_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")


class PanelQuery(NamedTuple):
    """One expression, and the panel or rule that contains it."""

    where: str
    expr: str


class Answer(NamedTuple):
    """How many series a query returned; ``error`` is Prometheus's message if it failed."""

    query: PanelQuery
    series: int
    error: str = ""


def panels() -> Iterator[tuple[str, Panel]]:
    """Every panel, with the title of its board."""
    for board in boards.BOARDS:
        for row in board.ROWS:
            for panel in row.panels:
                yield board.TITLE, panel


def queries() -> Iterator[PanelQuery]:
    """Every query of every panel."""
    for board, panel in panels():
        for query in panel.queries:
            yield PanelQuery(f"{board}, {panel.title}", query.promql)


def rule_expressions() -> Iterator[PanelQuery]:
    """The expression of every rule."""
    yield from (PanelQuery(row.record, row.expr) for row in rules.RECORDINGS)
    yield from (PanelQuery(row.alert, row.expr) for row in rules.ALERTS)


def faults() -> list[str]:
    """List the metrics, labels and label values in boards and rules that kvledger does not serve."""
    recorded = {row.record for row in rules.RECORDINGS}
    return [
        f"{query.where}: {fault}"
        for query in (*queries(), *rule_expressions())
        for fault in faults_in(query.expr, recorded)
    ]


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
    path = folder / rules.FILE
    if path.exists() and path.read_bytes() != rules.text().encode():
        yield f"{rules.FILE} differs"


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def ask(prometheus: str) -> Iterator[Answer]:
    """Run every query and every rule's expression. Raises OSError if the server does not answer."""
    url = prometheus_url(prometheus)
    for query in (*queries(), *rule_expressions()):
        yield _ask(url, query)


def _ask(prometheus: str, query: PanelQuery) -> Answer:
    expr = substituted(query.expr)
    address = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return Answer(query, 0, json.load(error).get("error", str(error)))
    return Answer(query, len(answer["data"]["result"]))


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
    checked = f"{len(boards.BOARDS)} boards, {len(list(panels()))} panels, {count} expressions"
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
    except (OSError, ValueError) as error:
        raise LedgerError(f"No Prometheus answers at {prometheus}: {error}") from error
