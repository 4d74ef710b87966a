"""The data of a board's panels, from a Prometheus; variables in queries are replaced as in Grafana."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvledger.audit.errors import LedgerError
from kvledger.dashboards.check import prometheus_url

TIMEOUT_SECONDS = 60.0
POINTS = 240
"""The most points of a series: about one for each second pixel of a panel."""


class Series(NamedTuple):
    """One series: its labels, and its values by Unix time."""

    labels: Mapping[str, str]
    values: Mapping[float, float]


class Span(NamedTuple):
    """The time range of a board: its end in Unix time, its length, and the seconds between two scrapes."""

    end: float
    seconds: float
    interval: float

    @property
    def step(self) -> float:
        """Seconds between two points, a multiple of the scrape interval."""
        return self.interval * max(1, -(-self.seconds // (POINTS * self.interval)))

    @property
    def times(self) -> list[float]:
        """The times of the points: multiples of the step, as Grafana asks for them."""
        first = (self.end - self.seconds) // self.step + 1
        last = self.end // self.step
        return [n * self.step for n in range(int(first), int(last) + 1)]


class Source:
    """A Prometheus server. Raises :class:`LedgerError` if it does not answer or refuses a query."""

    def __init__(self, url: str, span: Span, variables: Mapping[str, str]) -> None:
        self.span = span
        """The range of time that is drawn."""
        self._url = prometheus_url(url)
        """The server's address."""
        rate = max(span.step + span.interval, 4 * span.interval)
        self._variables = {
            "__rate_interval": f"{rate:.0f}s",
            "__range_s": f"{span.seconds:.0f}",
            "__range": f"{span.seconds:.0f}s",
            **variables,
        }
        """What Grafana would put in for its variables."""

    def series(self, target: Mapping[str, Any]) -> list[Series]:
        """The series of one query of a panel."""
        expr = self.substituted(target["expr"])
        if target["instant"]:
            rows = self._ask("query", {"query": expr, "time": f"{self.span.end:.3f}"})
            return [Series(row["metric"], {row["value"][0]: float(row["value"][1])}) for row in rows]
        times = self.span.times
        asked = {"query": expr, "start": times[0], "end": times[-1], "step": self.span.step}
        return [
            Series(row["metric"], {at: float(value) for at, value in row["values"]})
            for row in self._ask("query_range", asked)
        ]

    def substituted(self, expr: str) -> str:
        """Replace the variables of Grafana and of the board, the longest name first."""
        names = "|".join(sorted(map(re.escape, self._variables), key=len, reverse=True))
        return re.sub(rf"\$({names})\b", lambda found: self._variables[found.group(1)], expr)

    def _ask(self, kind: str, parameters: Mapping[str, object]) -> list[Any]:
        address = f"{self._url}/api/v1/{kind}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:
                return list(json.load(response)["data"]["result"])
        except urllib.error.HTTPError as error:
            raise LedgerError(f"{self._url} refuses {parameters['query']}: {_reason(error)}") from error
        except (OSError, ValueError, KeyError) as error:
            raise LedgerError(f"No Prometheus answers at {self._url}: {error}") from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError):
        return str(error)


def legend(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """The name of a series in the legend."""
    pattern = target["legendFormat"]
    if pattern != "__auto":
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found.group(1), ""), pattern)
    return ", ".join(f"{name}={value}" for name, value in labels.items() if name != "__name__") or "Value"


def table(panel: Mapping[str, Any], answers: Sequence[Sequence[Series]]) -> list[dict[str, Any]]:
    """The rows of a table panel: one for each set of labels, after the panel's transformations."""
    several = len(answers) > 1
    merged: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for target, answer in zip(panel["targets"], answers, strict=True):
        column = f"Value #{target['refId']}" if several else "Value"
        for series in answer:
            labels = {name: value for name, value in series.labels.items() if name != "__name__"}
            row = merged.setdefault(tuple(sorted(labels.items())), {**labels})
            row[column] = next(iter(series.values.values()))
    options = {each["id"]: each["options"] for each in panel["transformations"]}
    names = options["filterFieldsByName"]["include"]["names"]
    titles = options["organize"]["renameByName"]
    order = sorted(names, key=options["organize"]["indexByName"].__getitem__)
    by = next(iter(panel["options"]["sortBy"]), None)
    rows = [{name: row.get(name) for name in order} for row in merged.values()]
    if by is not None:
        column = next(name for name in order if titles[name] == by["displayName"])
        rows.sort(key=lambda row: row[column] or 0, reverse=by["desc"])
    return rows
