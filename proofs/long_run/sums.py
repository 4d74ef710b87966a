"""Compares the sums of a long run: those of the engines, the sidecar, Prometheus and the kept rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from proofs.long_run.engine import Emitted
from tests.serving.processes import Prometheus

Counters = Mapping[tuple[str, str], float]
"""The value of each counter of engines, by its name and its labels in order."""


class Figure(NamedTuple):
    """One sum: from the engines, as a query, and by its keys in the summary, which are added up."""

    name: str
    emitted: Callable[[Emitted], int]
    query: str
    summary: Sequence[str] = ()


def _prompt(source: str) -> str:
    return f'sum(kvledger_prompt_tokens_total{{source="{source}"}})'


FIGURES = (
    Figure("requests", lambda one: one.requests, "sum(kvledger_requests_total)", ("requests",)),
    Figure(
        "requests that ended before a kill",
        lambda one: one.ended_requests,
        'sum(kvledger_requests_total{verdict!="unknown"})',
    ),
    Figure(
        "prompt tokens",
        lambda one: one.prompt_tokens,
        "sum(kvledger_prompt_tokens_total)",
        ("prompt_tokens",),
    ),
    Figure("local", lambda one: one.totals.local, _prompt("local"), ("local",)),
    Figure("external", lambda one: one.totals.external, _prompt("external"), ("external",)),
    Figure("computed", lambda one: one.totals.computed, _prompt("computed"), ("computed",)),
    Figure("unattained", lambda one: one.totals.unattained, _prompt("unattained"), ("unattained",)),
    Figure(
        "prompt and output tokens",
        lambda one: one.prompt_tokens + one.output_tokens,
        'sum(kvledger_audited_tokens_total{verdict="clean"})',
    ),
    Figure(
        "scheduled tokens",
        lambda one: one.totals.scheduled,
        "sum(kvledger_work_tokens_total)",
        ("scheduled",),
    ),
    Figure(
        "rework tokens",
        lambda one: sum(one.totals.rework.values()),
        "sum(kvledger_rework_tokens_total)",
        ("rework",),
    ),
    Figure(
        "rejected drafts",
        lambda one: one.totals.rejected,
        'sum(kvledger_work_tokens_total{kind="rejected"})',
        ("rejected",),
    ),
    Figure(
        "promised external tokens",
        lambda one: one.totals.promised,
        "sum(kvledger_external_promised_tokens_total)",
        ("promised",),
    ),
    Figure(
        "loaded external tokens",
        lambda one: one.totals.loaded,
        "sum(kvledger_external_loaded_tokens_total)",
        ("loaded",),
    ),
    Figure(
        "preemptions",
        lambda one: one.preemptions,
        "sum(kvledger_preemptions_total)",
        ("preemptions",),
    ),
    Figure("events", lambda one: one.events, "sum(kvledger_events_total)"),
)


class Sums(NamedTuple):
    """One figure, four times. ``kept`` is None for a figure that the summary does not have."""

    name: str
    emitted: int
    prometheus: int
    kept: int | None

    @property
    def equal(self) -> bool:
        """Whether the figures are equal to the digit."""
        return self.emitted == self.prometheus and self.kept in (None, self.emitted)


def sums(emitted: Sequence[Emitted], prometheus: Prometheus, journals: Path) -> list[Sums]:
    """Every figure of the run."""
    summary = summarized(journals)
    return [
        Sums(
            figure.name,
            sum(map(figure.emitted, emitted)),
            int(prometheus.value(figure.query) or 0),
            sum(summary[key] for key in figure.summary) if figure.summary else None,
        )
        for figure in FIGURES
    ]


def summarized(journals: Path) -> dict[str, int]:
    """What `kvledger summary` prints, from the kept rows and from the journals that are left."""
    command = [sys.executable, "-m", "kvledger", "summary", str(journals), "--format", "json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, int] = json.loads(ran.stdout)[-1]
    return found


_SAMPLE = re.compile(r"^(kvledger_\w+_total)\{(.*engine=.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def served(text: str) -> dict[tuple[str, str], float]:
    """The counters of engines on the sidecar's page."""
    return {
        (name, _labels(dict(_LABEL.findall(labels)))): float(value)
        for name, labels, value in _SAMPLE.findall(text)
    }


def held(prometheus: Prometheus) -> dict[tuple[str, str], float]:
    """The counters of engines in Prometheus."""
    return {
        (labels.pop("__name__"), _labels(labels)): value
        for labels, value in prometheus.series('{__name__=~"kvledger_.+_total", engine!="", job="kvledger"}')
    }


def resets(prometheus: Prometheus, counters: Counters, seconds: float) -> int:
    """How often a counter of an engine fell."""
    names = sorted({name for name, _ in counters})
    query = 'sum(resets({}{{engine!=""}}[{:.0f}s]))'
    return sum(int(prometheus.value(query.format(name, seconds)) or 0) for name in names)


def _labels(labels: Mapping[str, str]) -> str:
    kept = {name: value for name, value in labels.items() if name not in ("job", "instance")}
    return ",".join(f"{name}={value}" for name, value in sorted(kept.items()))
