"""A trace on one HTML page that needs no network: style, script and plots are inside the file.

Here: the figures and sentences that the template shows, made from ``html_data.py``. The page itself, with
its headings and legends, is ``templates/report.html.j2``, which escapes every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from ... import __version__
from ...audit.causes import loss
from ...audit.checks.auditor import Found
from ...audit.checks.coverage import drift_words
from ...audit.checks.registry import Reference, catalogue
from ..files import write_whole
from ..templating import environment
from ..trace.time_series import TICKS, Series
from . import charts, costs, turns
from .audit_data import AuditReport, FindingData, share
from .conclusions import SHOWN
from .contents import sentences
from .first_token import FirstTokens, shown
from .html_blocks import block_section
from .html_data import WAITS, PageData, gather
from .summary import COLUMNS, cells
from .terminal import counted, percent

__all__ = ["gather", "html", "save"]

TEMPLATES = Path(__file__).parent / "templates"

SHOWN_FINDINGS = 5
"""Findings of one invariant that the page shows in full."""

SEVERITIES = {"violation": "Violations", "drift": "Drifts"}
"""The heading of the findings of each severity."""

SHOWN_GROUPS = 50
"""The most groups of requests that the page shows."""

VERDICTS = {
    "clean": "Every figure that could be checked is right.",
    "violated": "The engine is wrong: see the findings.",
    "unknown": "No violation was found, but events are missing or the engine raised: see the notes below.",
}
DRIFT = (
    "A drift is a figure that the engine counts by a deliberate but misleading rule. A difference "
    "between two computations of one block is a drift too. A drift does not change the verdict."
)


def save(data: PageData, output: Path) -> None:
    """Write the page, whole or not at all. Raises LedgerError."""
    write_whole(output, html(data))


def html(data: PageData) -> str:
    """Render the page."""
    report = data.report
    findings = _groups(report)
    sources = [(n, getattr(report.totals, n)) for n in ("local", "external", "computed", "unattained")]
    return (
        environment(TEMPLATES)
        .get_template("report.html.j2")
        .render(
            report=report,
            verdict=VERDICTS[report.verdict],
            meaning_of_drift=DRIFT if report.drift else "",
            drifts=drift_words(report.found),
            about=data.about,
            facts=_facts(report),
            contents=[] if report.contents is None else list(sentences(report.contents)),
            tiles=_tiles(report),
            findings=findings,
            kinds=[
                (heading, [group for group in findings if group.severity == severity])
                for severity, heading in SEVERITIES.items()
            ],
            sources=charts.parts(sources),
            misses=_misses(data),
            miss_notes=data.why.notes,
            **_over_time(data.series),
            blocks=block_section(data, _clock),
            turns=None if data.turns is None else turns.answer(data.turns),
            turn_notes=[] if data.turns is None else data.turns.conclusions,
            turn_tables=_turn_tables(data),
            work=_work(report),
            by=_by(data),
            group_columns=["", *COLUMNS],
            groups=[(row.group, *cells(row)) for row in data.groups[:SHOWN_GROUPS]],
            costs=costs.lost_cells(data.costs) if data.costs.rows else [],
            load_heads=["connector", *costs.LOADS],
            loads=costs.load_cells(data.costs),
            models=list(costs.model_lines(data.costs)),
            waits=_waits(data.waits),
            first_token=_first_token(data.first_token),
            preempted=_preempted(data),
            reconciliation=_reconciliation(report),
            journals=_journals(report),
            version=__version__,
        )
    )


def _turn_tables(data: PageData) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Heads and rows of the tables about turns of sessions."""
    if data.turns is None:
        return []
    return [
        (turns.CAUSE_HEADS, list(turns.cause_cells(data.turns))),
        (turns.NUMBER_HEADS, list(turns.number_cells(data.turns))),
    ]


# --- the answer -----------------------------------------------------------------------------------------


def _facts(report: AuditReport) -> list[str]:
    """The conclusions, at most three; where there are fewer, what the trace is of."""
    totals = report.totals
    facts = [*report.conclusions]
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    if hits is not None:
        facts.append(
            f"{percent(hits)} of the {counted(totals.prompt_tokens, 'prompt token')} came from a cache: "
            f"{totals.local:,} local, {totals.external:,} external."
        )
    reported = report.reported
    if reported is not None:
        same = (reported.local, reported.external) == (totals.local, totals.external)
        settled = "the same" if same else f"{totals.local:,} local and {totals.external:,} external tokens"
        facts.append(
            f"The engine reported {reported.local:,} local and {reported.external:,} external tokens; the "
            f"ledger settled {settled}."
        )
    return facts[:SHOWN]


def _by(data: PageData) -> str:
    """The heading of the table of groups."""
    more = f", the first {SHOWN_GROUPS} of {len(data.groups):,}" if len(data.groups) > SHOWN_GROUPS else ""
    return f"Requests by {data.by}{more}"


def _tiles(report: AuditReport) -> list[tuple[str, str]]:
    totals = report.totals
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    rework = share(report.work.rework, report.work.scheduled)
    tiles = [
        (f"{report.requests - report.began_before:,}", "requests"),
        (f"{totals.prompt_tokens:,}", "prompt tokens"),
        ("-" if hits is None else percent(hits), "hit rate"),
        ("-" if rework is None else percent(rework), "rework"),
        (f"{report.preemptions:,}", "preemptions"),
        (f"{report.number('violation'):,}", "violations"),
    ]
    if unknown := report.unknown - report.began_before:
        tiles.append((f"{unknown:,}", "unknown requests"))
    return tiles


# --- findings -------------------------------------------------------------------------------------------


class FindingGroup(NamedTuple):
    """All findings of one invariant, and what the invariant promises."""

    id: str
    anchor: str
    severity: str
    size: str
    shown: Sequence[FindingData]
    more: str
    stop_now: str
    meaning: list[str]
    references: Sequence[Reference]


def _groups(report: AuditReport) -> list[FindingGroup]:
    by_id: dict[str, list[FindingData]] = {}
    for finding in report.violations:
        by_id.setdefault(finding.id, []).append(finding)
    totals = {row.id: row for row in report.found}
    return [_group(totals[id], group) for id, group in by_id.items()]


def _group(total: Found, findings: list[FindingData]) -> FindingGroup:
    invariant, id = catalogue()[total.id], total.id
    shown = min(SHOWN_FINDINGS, len(findings))
    return FindingGroup(
        id=id,
        anchor=id.replace("/", "-"),
        severity=findings[0].severity,
        size=f"{total.number} request{'' if total.findings == 1 else 's'}",
        shown=findings[:shown],
        more=f"{shown} of {total.number} shown" if shown < total.findings or total.at_least else "",
        stop_now=invariant.stop_now,
        meaning=f"{invariant.must_hold}\n\n{invariant.violated_when}".replace("``", "").split("\n\n"),
        references=invariant.references,
    )


# --- charts ---------------------------------------------------------------------------------------------


def _misses(data: PageData) -> list[charts.Bar]:
    return charts.bars(
        [
            (row.text, float(row.tokens), f"{percent(row.share or 0)}  {row.tokens:,}")
            for row in data.why.causes
        ]
    )


def _over_time(series: Series) -> dict[str, Any]:
    """The plots over time by their names in the template; None for a plot without data."""
    plots: dict[str, Any] = dict.fromkeys(("hit_rate", "requests", "preemptions"))
    places = series.counts.keys() | series.levels.keys()
    if not places:
        return {**plots, "interval": ""}
    buckets = range(min(places), max(places) + 1)
    width = series.width_ticks / TICKS
    starts = [_clock(place * width) for place in buckets]
    none: dict[str, int] = {}

    def count(name: str) -> list[int]:
        return [series.counts.get(place, none).get(name, 0) for place in buckets]

    sources = {name: count(name) for name in ("local", "external", "computed", "unattained")}
    settled = [sum(column) for column in zip(*sources.values(), strict=True)]
    if any(settled):
        rates: dict[str, charts.Values] = {
            name: [share(part, whole) for part, whole in zip(sources[name], settled, strict=True)]
            for name in ("local", "external")
        }
        plots["hit_rate"] = charts.over_time("hit rate over time", starts, rates, stacked=True, share=True)
    if series.levels:
        levels: dict[str, charts.Values] = {
            name: [series.levels[place][name] if place in series.levels else None for place in buckets]
            for name in ("running", "waiting")
        }
        plots["requests"] = charts.over_time("requests over time", starts, levels)
    preemptions = count("preemptions")
    if any(preemptions):
        plots["preemptions"] = charts.over_time(
            "preemptions over time", starts, {"preemptions": preemptions}, stacked=True
        )
    return {**plots, "interval": f"An interval is {_length(width)}. Times are UTC."}


def _clock(seconds: float) -> str:
    time = datetime.fromtimestamp(seconds, timezone.utc)
    milliseconds = f".{time.microsecond // 1000:03}" if time.microsecond else ""
    return time.strftime("%Y-%m-%d %H:%M:%S") + milliseconds


def _length(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} milliseconds"
    if seconds < 120:
        return counted(int(seconds), "second")
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _waits(counts: Sequence[int]) -> list[charts.Bar]:
    """A bar for each range of waiting times, up to the longest that any request waited."""
    bounds = [f"{bound:g} s" for bound in WAITS]
    names = [f"below {bounds[0]}", *map("to ".__add__, bounds[1:]), f"longer than {bounds[-1]}"]
    requests = sum(counts)
    if not requests:
        return []
    last = max(place for place, count in enumerate(counts) if count)
    rows = list(zip(names, counts, strict=True))[: last + 1]
    return charts.bars([(name, float(n), f"{percent(n / requests)}  {n:,}") for name, n in rows])


def _first_token(found: FirstTokens) -> list[charts.Bar]:
    """A bar for each cause, of its mean time."""
    means = found.means()
    whole = sum(spent for _, spent in means)
    return charts.bars(
        [(cause, spent, f"{percent(spent / whole)}  {shown(spent)}") for cause, spent in means]
    )


# --- tables ---------------------------------------------------------------------------------------------


def _work(report: AuditReport) -> list[tuple[str, str, str]]:
    work = report.work
    rows = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    rows += [(f"rework: {loss(c)}", n) for c, n in work.rework_by_cause.items()]
    rows += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    rows += [("in flight", work.in_flight)]
    return [(name, f"{tokens:,}", percent(tokens / work.scheduled)) for name, tokens in rows if tokens]


def _preempted(data: PageData) -> list[tuple[str, ...]]:
    return [
        (
            row.request_id,
            f"{row.preemptions:,}",
            f"{row.rework:,}",
            f"{row.prompt_tokens:,}",
            f"{row.waited_seconds:,.1f}",
        )
        for row in data.preempted
    ]


def _reconciliation(report: AuditReport) -> list[tuple[str, ...]]:
    """From the ledger's figures to the engine-reported ones; empty where nothing differs."""
    if not report.differences:
        return []
    settled = report.totals
    rows = [_figures("ledger", settled.local, settled.external, settled.computed, settled.unattained)]
    lines = [("planned", report.plan, "plan")]
    if report.reported is not None:
        lines.append(("reported by the engine", report.reported, "reported"))
    for name, plan, key in lines:
        causes = [row for row in report.differences if row.to == key]
        rows += [_signed(f"+ {r.text}", r.local, r.external, r.computed, r.unattained) for r in causes]
        rows.append(_figures(f"= {name}", plan.local, plan.external, plan.computed, 0))
    return rows


def _figures(name: str, *tokens: int) -> tuple[str, ...]:
    return (name, *(f"{n:,}" for n in tokens))


def _signed(name: str, *tokens: int) -> tuple[str, ...]:
    return (name, *(f"{n:+,}" if n else "" for n in tokens))


def _journals(report: AuditReport) -> list[tuple[str, ...]]:
    return [
        (f"{j.engine} {j.version} pid {j.process_id}", j.verdict, f"{j.events:,}") for j in report.journals
    ]
