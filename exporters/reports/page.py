"""The report of a trace: the audit and everything that other commands say of it, with charts, for one page.

:func:`gather` asks the facts once for each part; :func:`answer` makes the parts. How a page looks is in
``exporters/writers.py`` and its template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...audit.analysis.block_states import STATES, BlockUse
from ...audit.checks.coverage import drift_words
from ...audit.checks.registry import catalogue
from ...audit.events import Setting
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import Audit, compare_journals
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ...audit.text import utc
from .. import writers
from ..answer import (
    Answer,
    Bars,
    Lines,
    Part,
    Plot,
    Split,
    Table,
    Tiles,
    counted,
    milliseconds,
    percent,
    share,
)
from ..files import write_whole
from ..trace.time_series import TICKS, Series, together
from . import audit, block_use, costs, turns, why
from .audit import AuditReport, report
from .conclusions import SHOWN as SHOWN_CONCLUSIONS
from .conclusions import conclusions, facts_of_audit, with_costs, with_why
from .contents import sentences as content_sentences
from .costs import FirstTokens
from .summary import SummaryRow, summary_row
from .summary import table as groups_table

if TYPE_CHECKING:
    from ..facts.tables import Facts

WAITS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds between the bars of the distribution of waits."""

SHOWN = 12
"""How many of the most preempted requests are shown."""

SHOWN_FINDINGS = 5
"""Findings of one invariant that the page shows in full."""

SHOWN_GROUPS = 50
"""The most groups of requests that the page shows."""

VERDICTS = {
    "clean": "Every figure that could be checked is right.",
    "violated": "The engine is wrong: see the findings.",
    "unknown": "No violation was found, but events are missing or the engine raised: see the notes below.",
}


class MostPreempted(msgspec.Struct, frozen=True, array_like=True):
    """One of the most preempted requests; ``rework`` is in tokens."""

    preemptions: int
    rework: int
    request_id: str
    engine: str
    prompt_tokens: int
    waited_seconds: float


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """What the report shows. ``waits`` counts requests between the bounds of :data:`WAITS`."""

    report: AuditReport
    why: why.Why
    series: Series
    waits: list[int]
    first_token: FirstTokens
    preempted: list[MostPreempted]
    costs: costs.CostReport
    block_use: block_use.BlockUseReport | None
    turns: turns.Turns | None
    block_series: Series
    about: list[tuple[str, str]] = []
    """The header: model, release and so on."""
    by: str = ""
    """What the requests are grouped by; "": there are no groups."""
    groups: list[SummaryRow] = []
    """Most prompt tokens first."""


def gather(
    paths: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    gpu_hour: float | None = None,
    by: str = "",
) -> PageData:
    """Read all journals at ``paths``. Raises LedgerError for one that holds none.

    ``by`` names groups of requests, as for :func:`~kvledger.exporters.facts.groups.group_columns`.
    """
    from ..facts.blocks import USE_QUERY, summed
    from ..facts.dataset import facts
    from ..facts.groups import group_columns, group_names
    from ..facts.misses import costs_of_groups, curves, misses_by_group, sampled_misses
    from ..facts.replayed import Wanted
    from ..facts.sums import by_group

    columns, wanted = group_columns(by), Wanted(audit=True, activity=True, turns=True)
    with facts(paths, window=window, run=run, wanted=wanted) as found:
        groups = by_group(found, columns)
        lost = costs_of_groups(found, groups, (), "", gpu_hour)[()]
        misses = misses_by_group(found, groups, (), "")[()]
        misses_why = why.explained(misses, sampled_misses(found), found.engines, gpu_hour)
        compare_journals(found.audits)
        audited = report(Audit(found.audits), lost)
        concluded = conclusions(with_costs(with_why(facts_of_audit(audited), misses_why), lost))
        rows = [summary_row(group_names(by, name), group) for name, group in groups.items() if name]
        uses, states = summed(found.rows(USE_QUERY))
        return PageData(
            report=msgspec.structs.replace(audited, conclusions=concluded),
            why=misses_why,
            series=together(curves(found)),
            waits=_waits(found),
            first_token=FirstTokens.of(groups[()].figures),
            preempted=_most_preempted(found),
            block_use=None if not uses else block_use.as_report(sum(uses, BlockUse())),
            turns=turns.turns_of_facts(found),
            block_series=together(states),
            costs=lost,
            about=about(found.audits),
            by=by,
            groups=sorted(rows, key=lambda row: (-row.prompt_tokens, row.group)),
        )


def _waits(found: Facts) -> list[int]:
    """Requests between the bounds of :data:`WAITS`."""
    below = " ".join(
        f"WHEN waited_microseconds < {round(bound * 1e6)} THEN {place}" for place, bound in enumerate(WAITS)
    )
    query = (
        f"SELECT CASE {below} ELSE {len(WAITS)} END AS place, count(*) FROM requests "
        "WHERE unknown IS NULL GROUP BY place"
    )
    waits = [0] * (len(WAITS) + 1)
    for at, requests in found.rows(query):
        waits[at] = requests
    return waits


def _most_preempted(found: Facts) -> list[MostPreempted]:
    prompt = "coalesce(prompt_tokens, sequence_tokens - output_tokens)"
    columns = f"preemptions, rework, request_id, engine, {prompt}, waited_microseconds"
    some = "FROM requests WHERE unknown IS NULL AND preemptions > 0"
    # The twelfth number of preemptions is found first, so that the ids of few requests are read.
    twelfth = f"SELECT min(preemptions) FROM (SELECT preemptions {some} ORDER BY 1 DESC LIMIT {SHOWN})"
    rows = found.rows(
        f"SELECT {columns} {some} AND preemptions >= ({twelfth}) ORDER BY ALL DESC LIMIT {SHOWN}"
    )
    return [msgspec.convert([*figures, waited_us / 1e6], MostPreempted) for *figures, waited_us in rows]


# --- what the trace is of -------------------------------------------------------------------------------

SHOWN_VALUES = 3
"""How many different values a line names."""

SETTINGS = {
    "block_size": "block size {}",
    "blocks": "{:,} blocks",
    "max_batched_tokens": "{:,} tokens a step",
    "max_running": "{:,} running requests",
    "policy": "policy {}",
    "workers": "{} workers",
}
"""Settings of the configuration that are shown, where they are known."""


def about(engine_audits: Sequence[EngineAudit]) -> list[tuple[str, str]]:
    """The lines of the header, each with its name. A line without a value is left out."""
    lines = {
        "Model": _values(audit.model for audit in engine_audits),
        "Release": _values(_release(audit) for audit in engine_audits),
        "Connector": _values(audit.connector for audit in engine_audits if audit.connector != "none"),
        "Configuration": _values(", ".join(_configuration(audit)) for audit in engine_audits),
        "Range": _range(engine_audits),
        "Engines": counted(len({audit.name for audit in engine_audits}), "engine"),
    }
    return [(name, value) for name, value in lines.items() if value]


def _release(audit: EngineAudit) -> str:
    return f"{audit.engine.engine} {audit.engine.version}, level {audit.engine.level}" if audit.engine else ""


def _configuration(audit: EngineAudit) -> Iterator[str]:
    settings: dict[str, Setting] = audit.engine.configuration if audit.engine else {}
    for name, text in SETTINGS.items():
        value = settings.get(name)
        if value and not (name == "workers" and value == 1):
            yield text.format(value)
    if settings.get("prefix_caching") is False:
        yield "no prefix caching"
    if settings.get("asynchronous"):
        yield "async scheduling"


def _range(engine_audits: Sequence[EngineAudit]) -> str:
    """First and last event of all engines, in UTC."""
    known = [audit for audit in engine_audits if audit.began_seconds is not None]
    if not known:
        return ""
    first = min(audit.created for audit in known)
    last = max((audit.began_seconds or 0.0) + audit.last_at / 1e6 for audit in known)
    return f"{utc(first)} to {utc(last)}"


def _values(values: Iterable[str]) -> str:
    """The different values, the first few of many."""
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - SHOWN_VALUES} more" if len(found) > SHOWN_VALUES else ""
    return "; ".join(found[:SHOWN_VALUES]) + more


# --- the answer -----------------------------------------------------------------------------------------


def save(data: PageData, output: Path) -> None:
    """Write the page, whole or not at all. Raises LedgerError."""
    write_whole(output, html(data))


def html(data: PageData) -> str:
    """The page."""
    title = ", ".join(filter(None, (data.report.verdict, drift_words(data.report.found))))
    return writers.page(answer(data), "Trace audit", title)


def answer(data: PageData) -> Answer:
    """The verdict and what it covers, the most important figures, and all that has something to show."""
    report, interval = (
        data.report,
        f"An interval is {_length(data.series.width_ticks / TICKS)}. Times are UTC.",
    )
    drifts = drift_words(report.found)
    verdict = ". ".join(filter(None, (report.examined, drifts, VERDICTS[report.verdict])))
    work = audit.work(report.work)
    parts: list[Part] = [
        Table(data.about, " | "),
        Tiles(_tiles(report), ""),
        Split(_sources(report), "Where prompt tokens came from", audit.SOURCES),
        *_rates(data.series, interval),
        Lines(_conclusions(report), "Conclusions"),
        *costs.parts(data.costs),
        _misses(data),
        Lines(data.why.notes),
        *_requests(data.series, interval),
        *([] if data.turns is None else _turns(data.turns)),
        *([] if data.block_use is None else _blocks(data, interval)),
        work._replace(title="Work and rework"),
        groups_table(data.groups[:SHOWN_GROUPS])._replace(title=_by(data)),
        *_findings(report),
        _first_token(data.first_token),
        _waits_of(data.waits),
        Table(
            data.preempted,
            "request=request_id | preemptions | rework | prompt=prompt_tokens | "
            "waited, s=waited_seconds:,.1f",
            "Most preempted requests",
        ),
        _reconciliation(report),
        Table(_journals(report), "engine | verdict | events", "Journals read"),
        Lines([*report.notes, *([report.coverage.limits] if report.coverage.limits else [])]),
        *_meanings(report),
    ]
    more = [audit.DRIFT] if report.drift else []
    said = [] if report.contents is None else content_sentences(report.contents)
    return Answer(report, [verdict, *more, *said], parts)


def _conclusions(report: AuditReport) -> list[str]:
    """The conclusions, at most three; where there are fewer, what the trace is of."""
    totals, reported = report.totals, report.reported
    lines = [*report.conclusions]
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    if hits is not None:
        lines.append(
            f"{percent(hits)} of the {counted(totals.prompt_tokens, 'prompt token')} came from a cache: "
            f"{totals.local:,} local, {totals.external:,} external."
        )
    if reported is not None:
        same = (reported.local, reported.external) == (totals.local, totals.external)
        settled = "the same" if same else f"{totals.local:,} local and {totals.external:,} external tokens"
        lines.append(
            f"The engine reported {reported.local:,} local and {reported.external:,} external tokens; the "
            f"ledger settled {settled}."
        )
    return lines[:SHOWN_CONCLUSIONS]


def _by(data: PageData) -> str:
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


def _sources(report: AuditReport) -> list[tuple[str, int]]:
    totals = report.totals
    named = [(name, getattr(totals, name)) for name in ("local", "external", "computed", "unattained")]
    return named if totals.prompt_tokens else []


# --- findings -------------------------------------------------------------------------------------------


def _findings(report: AuditReport) -> Iterator[Lines]:
    """Violations, and drifts."""
    for severity, heading in (("violation", "Violations"), ("drift", "Drifts")):
        rows = [row for row in report.violations if row.severity == severity]
        yield audit.findings(rows, report.found, most=SHOWN_FINDINGS)._replace(title=heading)


def _meanings(report: AuditReport) -> Iterator[Lines]:
    """What each invariant with findings promises, and where it was seen broken."""
    for group in audit.by_invariant(report.violations):
        invariant = catalogue()[group[0].id]
        texts = f"{invariant.must_hold}\n\n{invariant.violated_when}".replace("``", "").split("\n\n")
        seen = [f"{each.name}: {each.url}" for each in invariant.references]
        yield Lines([*texts, *(f"Seen in {each}" for each in seen)], invariant.id, anchor=invariant.id)


# --- charts and tables ----------------------------------------------------------------------------------


def _turns(found: turns.Turns) -> list[Part]:
    return [Lines([turns.sentence(found), *found.conclusions], "Turns of sessions"), *turns.tables(found)]


def _misses(data: PageData) -> Bars:
    rows = [(r.text, float(r.tokens), f"{percent(r.share or 0)}  {r.tokens:,}") for r in data.why.causes]
    return Bars(rows, "Why prompt tokens missed the cache", why.LEGEND)


def _buckets(series: Series) -> tuple[range, list[str]]:
    """The buckets of a series, and when each begins."""
    places = series.counts.keys() | series.levels.keys()
    buckets = range(min(places), max(places) + 1) if places else range(0)
    return buckets, [_clock(place * series.width_ticks / TICKS) for place in buckets]


def _counts(series: Series, name: str) -> list[int]:
    return [series.counts.get(place, {}).get(name, 0) for place in _buckets(series)[0]]


def _rates(series: Series, interval: str) -> Iterator[Plot]:
    """The hit rate over time."""
    sources = [_counts(series, name) for name in ("local", "external", "computed", "unattained")]
    settled = [sum(column) for column in zip(*sources, strict=True)]
    if any(settled):
        rates = [[share(*pair) for pair in zip(of, settled, strict=True)] for of in sources[:2]]
        named = dict(zip(("local", "external"), rates, strict=True))
        legend = f"Share of the prompt tokens settled in each interval. {interval}"
        yield Plot(named, _buckets(series)[1], "Hit rate over time", legend, stacked=True, share=True)


def _requests(series: Series, interval: str) -> Iterator[Plot]:
    """Running and waiting requests, and preemptions."""
    buckets, starts = _buckets(series)
    if series.levels:
        levels = {
            name: [series.levels[place][name] if place in series.levels else None for place in buckets]
            for name in ("running", "waiting")
        }
        legend = f"Requests of all engines at the end of each interval. {interval}"
        yield Plot(levels, starts, "Running and waiting", legend)
    preemptions = _counts(series, "preemptions")
    if any(preemptions):
        legend = f"Number of preemptions in each interval. {interval}"
        yield Plot({"preemptions": preemptions}, starts, "Preemptions", legend, stacked=True)


def _blocks(data: PageData, interval: str) -> Iterator[Part]:
    """How blocks were used, for journals of level ``blocks``."""
    assert data.block_use is not None
    series = data.block_series
    buckets, starts = _buckets(series)
    yield Lines(list(block_use.facts(data.block_use)), "Blocks")
    levels = [series.levels.get(place) for place in buckets]
    if any(levels):
        parts = {
            name: [
                share(level[name], sum(level[state] for state in STATES)) if level else None
                for level in levels
            ]
            for name in ("running", "cached")
        }
        legend = f"{block_use.LEGEND} {interval}"
        yield Plot(parts, starts, "Blocks by state over time", legend, stacked=True, share=True)
    evicted = _counts(series, "evicted")
    if any(evicted):
        yield Plot({"evicted": evicted}, starts, "Evicted blocks over time", interval, stacked=True)
    yield block_use.spreads(data.block_use)


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


def _waits_of(counts: Sequence[int]) -> Bars:
    """A bar for each range of waiting times, up to the longest that any request waited."""
    bounds = [f"{bound:g} s" for bound in WAITS]
    names = [f"below {bounds[0]}", *map("to ".__add__, bounds[1:]), f"longer than {bounds[-1]}"]
    requests = sum(counts)
    last = max((place for place, count in enumerate(counts) if count), default=-1)
    rows = list(zip(names, counts, strict=True))[: last + 1]
    return Bars(
        [(name, float(n), f"{percent(n / requests)}  {n:,}") for name, n in rows],
        "Waits",
        "Requests by time spent waiting: from arrival to end, without the time in which they were admitted.",
    )


def _first_token(found: FirstTokens) -> Bars:
    """A bar for each cause, of its mean time."""
    means = found.means()
    whole = sum(spent for _, spent in means)
    return Bars(
        [(cause, spent, f"{percent(spent / whole)}  {milliseconds(spent)}") for cause, spent in means],
        "Time to first token",
        "Mean time from the arrival in the scheduler to the first output, by cause. The causes sum to it.",
    )


def _reconciliation(report: AuditReport) -> Table:
    """From the ledger's figures to the engine-reported ones; empty where nothing differs."""
    table = audit.sources(report, None)
    rows = table.rows if report.differences else ()
    return table._replace(rows=rows, title="Ledger and engine-reported figures", legend=audit.WATERFALL)


def _journals(report: AuditReport) -> list[tuple[str, str, int]]:
    return [(f"{j.engine} {j.version} pid {j.process_id}", j.verdict, j.events) for j in report.journals]
