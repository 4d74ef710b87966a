"""A trace on one page: HTML with everything inline, for any browser, a phone's too, without a network.

What it says is gathered in ``gathered.py``, plots are drawn in ``charts.py``, and the page's style and the
little that moves on it are in ``page.css`` and ``page.js``. Names from outside are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from pathlib import Path

from ... import __version__
from ...audit.checks.registry import catalogue
from ..files import whole
from ..trace.time_series import TICKS, Series
from . import charts
from .audit import AuditReport, FindingData, share
from .html_data import WAITS, PageData, gather
from .terminal import CAUSES, counted, percent

__all__ = ["gather", "html", "save"]

TOLD = 5
"""Findings of one invariant that are told in full."""

VERDICTS = {
    "clean": "Every figure that could be checked is right.",
    "violated": "The engine's accounts are wrong: see the findings.",
    "unknown": "Nothing wrong was seen, but events are missing: see the notes.",
}


def save(found: PageData, output: Path) -> None:
    """Write the page, whole or not at all. Raises :class:`LedgerError`."""
    with whole(output) as draft:
        draft.write_text(html(found), encoding="utf-8")


def html(found: PageData) -> str:
    """The page."""
    own = files("kvledger.exporters")
    style, script = (own.joinpath(name).read_text() for name in ("page.css", "page.js"))
    body = "\n".join(_body(found))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>kvledger: {found.report.verdict}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _body(found: PageData) -> Iterator[str]:
    report = found.report
    yield _head(report)
    if report.violations:
        yield _section("Findings", "", _findings(report.violations))
    totals = report.totals
    sources = [(n, getattr(totals, n)) for n in ("local", "external", "computed", "unattained")]
    legend = (
        "Each token once, by what gave its KV first: the engine's cache (local), the connector (external), "
        "a computation. Unattained: none, the request ended before."
    )
    yield _section("Where prompt tokens came from", legend, charts.parts("prompt tokens by source", sources))
    yield _section("Why the others were no hits", _CAUSES_SAY, _why(found))
    yield from _over_time(found.series)
    legend = "Each scheduled token once. Rework: computed again, because what had been computed was lost."
    yield _section("Work and rework", legend, _work(report))
    legend = "Requests by how long they were there without a life, from their arrival to their end."
    yield _section("Waits", legend, _waits(found.waits))
    if found.preempted:
        yield _section("Preempted most", "", _preempted(found))
    yield _section("The engine's own figures", _DIFFERENCES_SAY, _differences(report))
    yield _section("Read from", "", _journals(report))
    if report.violations:
        yield _section("What the findings mean", "", _explained(report.violations))
    yield f"<footer>kvledger {escape(__version__)}</footer>"


_CAUSES_SAY = (
    "Prompt tokens that were computed, each as often as it was, and those that never came to be. "
    "A cause is named where the recorded events prove it."
)
_DIFFERENCES_SAY = (
    "From what the ledger settled to what was planned at the first admission, and on to what the engine "
    "reported, every difference by its cause."
)


def _section(heading: str, legend: str, content: str) -> str:
    below = f'<p class="legend">{escape(legend)}</p>' if legend else ""
    return f"<section><h2>{escape(heading)}</h2>{below}{content}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are escaped; all but the first column are figures."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    opened = f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
    return f"{opened}<tbody>{lines}</tbody></table></div>"


def _head(report: AuditReport) -> str:
    totals = report.totals
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    rework = share(report.work.rework, report.work.scheduled)
    wrong = sum(found.severity == "violation" for found in report.violations)
    tiles = [
        (f"{report.requests:,}", "requests"),
        (f"{totals.prompt_tokens:,}", "prompt tokens"),
        ("-" if hits is None else percent(hits), "of them hits"),
        ("-" if rework is None else percent(rework), "of the work done again"),
        (f"{report.preemptions:,}", "preemptions"),
        (f"{wrong:,}", "violations"),
    ]
    if report.unknown:
        tiles.append((f"{report.unknown:,}", "requests unknown"))
    shown = "".join(f"<li><strong>{figure}</strong>{name}</li>" for figure, name in tiles)
    verdict = escape(report.verdict)
    return (
        f'<header><h1>Trace audit</h1><p class="verdict {verdict}"><b>{verdict}</b> '
        f'{VERDICTS[report.verdict]}</p><ul class="tiles">{shown}</ul></header>'
    )


def _by_id(found: Sequence[FindingData]) -> dict[str, list[FindingData]]:
    by_id: dict[str, list[FindingData]] = {}
    for finding in found:
        by_id.setdefault(finding.id, []).append(finding)
    return by_id


def _anchor(id: str) -> str:
    return escape(id.replace("/", "-"))


def _findings(found: Sequence[FindingData]) -> str:
    parts = []
    for id, group in _by_id(found).items():
        told = "".join(f"<li><small>step {f.step:,}</small> {escape(f.message)}</li>" for f in group[:TOLD])
        if len(group) > TOLD:
            told += f"<li><small>and {len(group) - TOLD:,} more</small></li>"
        kind, size = group[0].severity, counted(len(group), "request")
        parts.append(
            f'<article class="{kind}"><h3><a href="#{_anchor(id)}">{escape(id)}</a> '
            f"<small>{kind}, {size}</small></h3><ul>{told}</ul></article>"
        )
    return "".join(parts)


def _explained(found: Sequence[FindingData]) -> str:
    known = catalogue()
    parts = []
    for id in _by_id(found):
        row = known[id]
        seen = ", ".join(f'<a href="{escape(r.url)}">{escape(r.name)}</a>' for r in row.references)
        text = escape(f"{row.promise}\n\n{row.violated_when}".replace("``", "")).replace("\n\n", "</p><p>")
        told = f"<p>Seen in {seen}.</p>" if seen else ""
        parts.append(f'<article id="{_anchor(id)}"><h3>{escape(id)}</h3><p>{text}</p>{told}</article>')
    return "".join(parts)


def _why(found: PageData) -> str:
    rows = [
        (row.text, float(row.tokens), f"{percent(row.share or 0)}  {row.tokens:,}")
        for row in found.why.causes
    ]
    said = "".join(f'<p class="legend">{escape(note)}</p>' for note in found.why.notes)
    return (charts.bars("why tokens were no hits", rows, 2) if rows else _NOTHING) + said


_NOTHING = '<p class="none">Nothing to show.</p>'


def _over_time(series: Series) -> Iterator[str]:
    places = series.counts.keys() | series.levels.keys()
    if not places:
        return
    buckets = range(min(places), max(places) + 1)
    width = series.width_ticks / TICKS
    starts = [_clock(place * width) for place in buckets]
    none: dict[str, int] = {}

    def count(name: str) -> list[int]:
        return [series.counts.get(place, none).get(name, 0) for place in buckets]

    local, external, computed, unattained = map(count, ("local", "external", "computed", "unattained"))
    wholes = [sum(column) for column in zip(local, external, computed, unattained, strict=True)]
    rates: dict[str, charts.Values] = {
        name: [share(part, whole) for part, whole in zip(parts, wholes, strict=True)]
        for name, parts in (("local", local), ("external", external))
    }
    each = f"A step is {_length(width)}. Times are UTC."
    plot = charts.over_time("hit rate over time", starts, rates, stacked=True, share=True)
    yield _section("Hit rate over time", f"Of the prompt tokens settled then. {each}", plot)
    levels: dict[str, charts.Values] = {
        name: [series.levels[place][name] if place in series.levels else None for place in buckets]
        for name in ("running", "waiting")
    }
    plot = charts.over_time("requests over time", starts, levels)
    yield _section("Running and waiting", f"Requests of all engines at the end of each step. {each}", plot)
    plot = charts.over_time(
        "preemptions over time", starts, {"preemptions": count("preemptions")}, stacked=True
    )
    yield _section("Preemptions", f"As many as there were in each step. {each}", plot)


def _clock(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds, timezone.utc)
    return at.strftime("%Y-%m-%d %H:%M:%S") + (f".{at.microsecond // 1000:03}" if at.microsecond else "")


def _length(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} milliseconds"
    if seconds < 120:
        return counted(int(seconds), "second")
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _work(report: AuditReport) -> str:
    work = report.work
    rows = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    rows += [(f"rework: {CAUSES.get(c, c)}", n) for c, n in work.rework_by_cause.items()]
    rows += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    rows += [("in flight", work.in_flight)] if work.in_flight else []
    told = [(name, f"{n:,}", percent(n / work.scheduled) if work.scheduled else "") for name, n in rows]
    return _table(("", "tokens", "share"), told)


def _waits(counts: Sequence[int]) -> str:
    bounds = [f"{bound:g} s" for bound in WAITS]
    names = [f"below {bounds[0]}", *map("to ".__add__, bounds[1:]), "longer"]
    whole = sum(counts)
    if not whole:
        return _NOTHING
    rows = [(n, float(c), f"{percent(c / whole)}  {c:,}") for n, c in zip(names, counts, strict=True)]
    return charts.bars("requests by wait", rows, 0)


def _preempted(found: PageData) -> str:
    rows = [
        (p.request, f"{p.preemptions:,}", f"{p.rework:,}", f"{p.prompt_tokens:,}", f"{p.waited_seconds:,.1f}")
        for p in found.preempted
    ]
    return _table(("request", "preemptions", "rework", "prompt", "waited, s"), rows, "named")


def _differences(report: AuditReport) -> str:
    settled = report.totals
    rows = [
        _figures("ledger, settled", settled.local, settled.external, settled.computed, settled.unattained)
    ]
    planned = [("plan", report.plan, "plan")]
    if report.reported is not None:
        planned.append(("reported", report.reported, "reported"))
    for name, plan, key in planned:
        named = [row for row in report.differences if row.to == key]
        rows += [_signed(f"+ {r.text}", r.local, r.external, r.computed, r.unattained) for r in named]
        rows += [] if named else [("no difference", "", "", "", "")]
        rows.append(_figures(f"= {name}", plan.local, plan.external, plan.computed, 0))
    return _table(("tokens", "local", "external", "computed", "unattained"), rows, "sums")


def _figures(name: str, *tokens: int) -> tuple[str, ...]:
    return (name, *(f"{n:,}" for n in tokens))


def _signed(name: str, *tokens: int) -> tuple[str, ...]:
    return (name, *(f"{n:+,}" if n else "" for n in tokens))


def _journals(report: AuditReport) -> str:
    rows = [
        (f"{j.engine} {j.version} pid {j.process_id}", j.verdict, f"{j.events:,}") for j in report.journals
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    table = _table(("engine", "verdict", "events"), rows)
    return table + (f'<ul class="notes">{notes}</ul>' if notes else "")
