"""An audit for a person at a terminal: the verdict and its reasons, then tables of sources and work.

Drawn from the data of ``audit_data.py``; no figure is made here. Account statements of one request are in
``statement.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.causes import external_loss, loss
from ...audit.checks.auditor import Found
from . import contents, costs, weights
from .audit_data import AuditReport, DifferenceData, ExternalData, FindingData, PlannedSplit, WorkData
from .terminal import (
    VERDICTS,
    blocks,
    bullets,
    counted,
    figures_table,
    indented,
    listed,
    notes,
    part_of,
    percent,
    title,
)

SHOWN_FINDINGS = 10
"""Findings of one invariant that are printed in full with ``--verbose``; the JSON has all."""

WATERFALL = "Indented rows lead from the line above to the line below."

_SOURCES = (
    "Each prompt token is counted once, by where its KV first came from: the local prefix cache, the KV "
    "connector (external), or computation. Unattained tokens had no KV when the request ended."
)
_WORK = "Each scheduled token is counted once. Rework is computed again because its KV was lost."
_EXTERNAL = "Repeat hits and repeat loads are tokens whose KV the request had before and lost."
_DRIFT = (
    "A drift is a figure that the engine counts by a deliberate but misleading rule, a difference between "
    "two computations of one block, or what follows from a choice of the caller; the verdict stays clean."
)

Counters = tuple[PlannedSplit, list[DifferenceData]]
"""The engine's own counters as a row, and what leads to it."""


class WaterfallRow(NamedTuple):
    """One named difference: its cause, the cause in words, signed figures, and its number of requests."""

    cause: str
    text: str
    figures: tuple[int, ...]
    requests: int


def render(report: AuditReport, *, verbose: bool = False) -> Group:
    """The audit: the answer first, then findings and sources; ``verbose`` adds work and connector tables."""
    if not verbose:
        return blocks(
            Group(answer(report), _journals_read(report)),
            findings(report.violations, report.found, most=1, rest="with -v"),
            notes(report.notes),
            sources(report, None),
            Text("More tables: -v. All figures: --format json.", style="dim"),
        )
    return blocks(
        Group(answer(report), _journals_read(report)),
        findings(report.violations, report.found),
        notes(report.notes),
        sources(report, None),
        work(report.work),
        None if report.costs is None else costs.render(report.costs),
        external(report.external),
        journals(report),
    )


# --- the answer -------------------------------------------------------------------------------------


def answer(report: AuditReport) -> Group:
    """The verdict, why it is not clean, and where prompt tokens and work went, a line each."""
    return Group(*_answer(report))


def _answer(report: AuditReport) -> Iterator[Text]:
    yield verdict(report)
    yield Text(counts(report))
    yield from bullets(report.conclusions)
    if report.drift:
        yield Text(f"{_DRIFT} `kvledger explain drift` has an example.")
    if doubtful := report.unknown - report.began_before:
        lost = "Events are missing, so no figure below includes"
        yield Text(f"{lost} {counted(doubtful, 'request')}.", style="yellow")
    totals = report.totals
    if totals.prompt_tokens:
        sources = [
            part_of(totals.local, totals.prompt_tokens, "local"),
            part_of(totals.external, totals.prompt_tokens, "external"),
            f"{totals.computed:,} computed",
        ]
        sources += [f"{totals.unattained:,} unattained"] if totals.unattained else []
        if totals.invalid_hits:
            sources[-1] += f" ({counted(totals.invalid_hits, 'invalid hit')})"
        yield Text(f"{counted(totals.prompt_tokens, 'prompt token')}: {', '.join(sources)}.")
    if report.work.scheduled:
        scheduled = counted(report.work.scheduled, "scheduled token")
        yield Text(f"{scheduled}: {part_of(report.work.rework, report.work.scheduled, 'rework')}.")
    if report.contents is not None:
        yield from map(Text, contents.sentences(report.contents))
    if report.weights is not None:
        yield from map(Text, weights.sentences(report.weights))


def _journals_read(report: AuditReport) -> Text:
    events = counted(sum(journal.events for journal in report.journals), "event")
    journals = counted(len(report.journals), "journal")
    engines = dict.fromkeys(f"{journal.engine} {journal.version}" for journal in report.journals)
    read = f"Read {events} in {journals} of {listed(list(engines))}."
    return Text("\n".join(filter(None, (read, report.coverage.limits))), style="dim")


def verdict(report: AuditReport) -> Text:
    """The first line: the verdict and what it covers."""
    return Text.assemble((report.verdict, VERDICTS[report.verdict]), report.examined[len(report.verdict) :])


def counts(report: AuditReport) -> str:
    """The second line: how many requests, violations and drifts there are."""
    unknown = report.unknown - report.began_before
    parts = [counted(report.requests - report.began_before, "request"), report.counts]
    parts += [f"{counted(unknown, 'request')} unknown"] if unknown else []
    return ", ".join([*parts, counted(report.preemptions, "preemption")])


def journals(report: AuditReport) -> Group:
    """Which journals were read, with their paths."""
    lines: list[RenderableType] = [title("Journals")]
    for journal in report.journals:
        name = f"{journal.engine} {journal.version} pid {journal.process_id}"
        lines.append(indented(Text.assemble((name, "bold"), f", {counted(journal.events, 'event')}")))
        lines.append(indented(Text(journal.path, style="dim", overflow="fold"), 4))
    return Group(*lines)


# --- tables -----------------------------------------------------------------------------------------


def sources(report: AuditReport, counters: Counters | None) -> Group | None:
    """Prompt tokens as settled, planned, reported and counted, and every named difference between them."""
    if not report.totals.prompt_tokens:
        return None
    table = figures_table("tokens", "local", "external", "computed", "unattained", "total", "requests")
    settled = report.totals
    _figures_row(
        table,
        "Ledger, settled",
        (settled.local, settled.external, settled.computed, settled.unattained),
        report.requests - report.unknown,
    )
    rows = [("Planned, at first admission", report.plan, "plan")]
    if report.reported is not None:
        rows.append(("Reported by the engine", report.reported, "reported"))
    differences = list(report.differences)
    if counters is not None:
        rows.append(("The engine's counters", counters[0], "counters"))
        differences += counters[1]
    for label, split, key in rows:
        waterfall_rows(table, [_waterfall_row(row) for row in differences if row.to == key])
        _figures_row(table, label, (split.local, split.external, split.computed, 0), split.requests)
    legend = f"{_SOURCES}\n{WATERFALL}" if differences else _SOURCES
    return Group(title("Where prompt tokens came from", legend), table)


def _figures_row(table: Table, label: str, figures: tuple[int, ...], requests: int) -> None:
    cells = [f"{n:,}" for n in (*figures, sum(figures))]
    cells.append(f"{requests:,}" if requests >= 0 else "")
    table.add_row(label, *cells, style="bold")


def _waterfall_row(row: DifferenceData) -> WaterfallRow:
    figures = (row.local, row.external, row.computed, row.unattained)
    return WaterfallRow(row.cause, row.text, (*figures, sum(figures)), row.requests)


def waterfall_rows(table: Table, rows: Iterable[WaterfallRow]) -> None:
    """Add the indented rows that lead from one row of figures to the next."""
    for row in rows:
        cells = [f"{n:+,}" if n else "" for n in row.figures]
        style = "bold red" if row.cause == "unexplained" else "cyan"
        table.add_row(
            indented(Text(row.text)), *cells, f"{row.requests:,}" if row.requests else "", style=style
        )


def work(work: WorkData) -> Group | None:
    """Scheduled tokens by what became of them; None where nothing was scheduled."""
    if not work.scheduled:
        return None
    table = figures_table("tokens", "scheduled", "share")
    rows = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    rows += [(f"rework: {loss(c)}", n) for c, n in work.rework_by_cause.items()]
    rows += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    rows.append(("in flight", work.in_flight))
    for label, tokens in rows:
        if tokens:
            table.add_row(label, f"{tokens:,}", percent(tokens / work.scheduled))
    total = sum(tokens for _, tokens in rows)
    table.add_row("sum", f"{total:,}", "", style="bold")
    if total != work.scheduled:
        table.add_row("scheduled", f"{work.scheduled:,}", "not the sum", style="bold red")
    return Group(title("What the engine worked on", _WORK), table)


def external(external: ExternalData) -> Group | None:
    """Promised, loaded and failed tokens, repeat hits and repeat loads; None if there are none of these."""
    rows = [("promised", external.promised), ("loaded", external.loaded)]
    rows += [
        (f"failed or cancelled: {external_loss(cause)}", tokens) for cause, tokens in external.voided.items()
    ]
    rows += [("repeat loads", external.loaded_again), ("repeat hits, local", external.hit_again)]
    if not any(tokens for _, tokens in rows):
        return None
    table = figures_table("tokens", "")
    for label, tokens in rows:
        if tokens:
            table.add_row(label, f"{tokens:,}")
    return Group(title("What the connector promised and what was hit or loaded twice", _EXTERNAL), table)


# --- findings ---------------------------------------------------------------------------------------


def findings(
    rows: Sequence[FindingData],
    found: Sequence[Found] = (),
    *,
    most: int = SHOWN_FINDINGS,
    rest: str = "in the JSON",
    drifts: bool = True,
) -> Group | None:
    """Findings by invariant, violations first, a sentence each; ``most`` per invariant.

    ``found`` has how many there are, where ``rows`` may lack some. ``rest`` says where more are.
    Without ``drifts``, the drifts of an invariant have one line, no sentence.
    """
    if not rows:
        return None
    by_id: dict[str, list[FindingData]] = {}
    for finding in sorted(rows, key=lambda finding: finding.severity == "drift"):
        by_id.setdefault(finding.id, []).append(finding)
    parts: list[RenderableType] = [title("Findings")]
    totals = {row.id: row for row in found}
    for id, group in by_id.items():
        style = "bold red" if group[0].severity == "violation" else "bold yellow"
        total = totals.get(id)
        sizes = [_group_size(group, total)] if len(group) > 1 or (total and total.is_cut) else []
        if total is not None and total.tokens and total.severity == "violation":
            sizes.append(counted(total.tokens, "token"))
        heading = Text.assemble((group[0].severity, style), "  ", (id, "bold"))
        parts.append(indented(heading.append(f"  {', '.join(sizes)}" if sizes else "")))
        if group[0].severity == "drift" and not drifts:
            continue
        parts += [indented(_finding(finding), 4) for finding in group[:most]]
        if len(group) > most or (total and total.is_cut):
            parts.append(indented(Text(_more(group, most, total, rest), style="dim"), 4))
        if group[0].stop_now:
            parts.append(indented(Text(f"What stops the harm now: {group[0].stop_now}", style="bold"), 4))
    return Group(*parts)


def _group_size(group: Sequence[FindingData], total: Found | None) -> str:
    """In how many requests an invariant was violated, or how often if no requests are concerned."""
    number = f"{len(group):,}" if total is None else total.number
    return f"in {number} requests" if any(row.request for row in group) else f"{number} times"


def _more(group: Sequence[FindingData], most: int, total: Found | None, rest: str) -> str:
    """How many more findings there are, and how many of them a list has at all."""
    if total is None or not total.is_cut:
        return f"and {len(group) - most:,} more, {rest}"
    return f"{min(most, len(group)):,} of {total.number} shown; {len(group):,} are listed {rest}"


def _finding(finding: FindingData) -> RenderableType:
    when = f"{finding.when}, step {finding.step}: " if finding.when else f"step {finding.step}: "
    text = Text.assemble((when, "dim"), finding.message)
    if finding.repeats:
        repeats = f" Seen {finding.repeats + 1:,} times, last at step {finding.last_step}."
        text.append(repeats, style="dim")
    if not finding.story:
        return text
    return Group(text, *(_story_line(line) for line in finding.story))


def _story_line(line: str) -> Padding:
    """A line of a story; its wrapped lines keep its indentation."""
    depth = len(line) - len(line.lstrip())
    return indented(Text(line.lstrip()), 2 + depth)
