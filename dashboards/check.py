"""Boards and rules held against the metric table, against files, and against a running Prometheus."""

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
from ..exporters.metrics.table import METRICS, Metric
from . import boards, rules
from .panels import Panel

ADDED = ("job", "instance", "le")
"""Labels that a scrape adds, and that of a histogram's buckets."""

VARIABLES = {
    "$__rate_interval": "5m",
    "$__range_s": "86400",
    "$__range": "1d",
    "$job": ".+",
    "$instance": ".+",
    "$engine": ".+",
    "$model_name": ".+",
}
"""What Grafana would put in for *All*, over the last day."""

TIMEOUT_SECONDS = 30.0

_SELECTOR = re.compile(r"\b(kvledger_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")


class Asked(NamedTuple):
    """One expression and where it stands."""

    where: str
    expr: str


class Answer(NamedTuple):
    """How many series came back; ``error`` in Prometheus's words where none could."""

    asked: Asked
    series: int
    error: str = ""


def panels() -> Iterator[tuple[str, Panel]]:
    """Every panel, with its board's title."""
    for board in boards.BOARDS:
        for row in board.ROWS:
            for panel in row.panels:
                yield board.TITLE, panel


def queries() -> Iterator[Asked]:
    """Every query of every panel."""
    for board, panel in panels():
        for query in panel.queries:
            yield Asked(f"{board}, {panel.title}", query.promql)


def rule_expressions() -> Iterator[Asked]:
    """Every rule's."""
    yield from (Asked(row.record, row.expr) for row in rules.RECORDINGS)
    yield from (Asked(row.alert, row.expr) for row in rules.ALERTS)


def faults() -> list[str]:
    """What the boards and rules name that kvledger does not serve; a phrase each."""
    recorded = {row.record for row in rules.RECORDINGS}
    found = []
    for asked in (*queries(), *rule_expressions()):
        found += [f"{asked.where}: {fault}" for fault in _faults(asked.expr, recorded)]
    return found


def _faults(expr: str, recorded: set[str]) -> Iterator[str]:
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
    """Files of ``folder`` that are not what this release would export, or are missing.

    Raises :class:`LedgerError` for what can't be read.
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
    """Run every query and every rule's expression. Raises OSError if nobody answers there."""
    for asked in (*queries(), *rule_expressions()):
        yield _ask(prometheus, asked)


def _ask(prometheus: str, asked: Asked) -> Answer:
    expr = substituted(asked.expr)
    address = f"{prometheus.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return Answer(asked, 0, json.load(error).get("error", str(error)))
    return Answer(asked, len(answer["data"]["result"]))


def substituted(expr: str) -> str:
    """As Prometheus would get it of Grafana."""
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


class Report(NamedTuple):
    """What a check found: a line each, and whether all is well."""

    lines: list[str]
    well: bool


def report(folder: Path | None, form: boards.Form, prometheus: str) -> Report:
    """Check the boards themselves and, where given, the files of ``folder`` and a Prometheus.

    A query that returns no data is named and is no fault: a board may be of more than runs there.
    Raises :class:`LedgerError` if nobody answers at ``prometheus``.
    """
    wrong = faults()
    asked = [*queries(), *rule_expressions()]
    shown = f"{len(boards.BOARDS)} boards, {len(list(panels()))} panels, {len(asked)} expressions"
    lines = [f"{shown}: all that they name is served." if not wrong else f"{shown}.", *wrong]
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
        lines += [f"no data: {answer.asked.where}" for answer in empty]
        lines += [f"refused: {answer.asked.where}: {answer.error}" for answer in failed]
    return Report(lines, not wrong)


def _answers(prometheus: str) -> list[Answer]:
    try:
        return list(ask(prometheus))
    except (OSError, ValueError) as error:
        raise LedgerError(f"No Prometheus answers at {prometheus}: {error}") from error
