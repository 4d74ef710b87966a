"""An audit for a person at a terminal: tables of sources and work, findings, what to do next.

Drawn with rich from the data of ``audit_report.py``; no figure is made here. Names from outside
(request ids, paths, messages) are text and never markup. Statements of one request are in
``statement.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ...audit.causes import external_loss, loss
from ...audit.checks.registry import catalogue as invariants
from .audit import AuditReport, DifferenceData, ExternalData, FindingData, PlannedSplit, WorkData

PLAIN_WIDTH = 100
LABEL_WIDTH = 14
"""What a table leaves to words where it is narrow; figures take what they need."""

WIDEST = 10_000
"""Columns where the output is no terminal and COLUMNS says nothing."""

SHOWN_FINDINGS = 10
"""Findings of one invariant that are told; the JSON has them all."""

VERDICTS = {"clean": "bold green", "violated": "bold red", "unknown": "bold yellow"}

_SOURCES = (
    "Each token once, by what gave its KV first: the engine's cache (local), the connector (external), "
    "a computation. Unattained: none, the request ended before."
)
_WORK = "Each scheduled token once. Rework: computed again, because what had been computed was lost."
_TWICE = "A second time: the request had them before, and lost them."


def console(*, stderr: bool = False) -> Console:
    """Where output goes; no colour and a fixed width where nobody looks."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, width=fixed)


def show(*parts: RenderableType) -> None:
    """Print to standard output; without the blanks at line ends where nobody looks.

    Lines are longer than they should be sooner than that a figure is cut.
    """
    out = console()
    out.width = max(out.width, *(_needed(out, part) for part in parts))
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def _needed(out: Console, part: RenderableType) -> int:
    """The width below which a table in it loses figures."""
    if isinstance(part, Group):
        return max((_needed(out, one) for one in part.renderables), default=0)
    if isinstance(part, Padding):
        return _needed(out, part.renderable) + part.left + part.right
    if not isinstance(part, Table):
        return 0
    wide = out.options.update(width=WIDEST)
    widths = []
    for column in part.columns:
        cells = [column.header, *column.cells] if part.show_header else [*column.cells]
        kept = max((Measurement.get(out, wide, cell).maximum for cell in cells), default=0)
        widths.append(kept if column.no_wrap else column.min_width or min(kept, LABEL_WIDTH))
    _, right, _, left = part.padding
    return sum(widths) + len(widths) * (left + right)


# --- the audit --------------------------------------------------------------------------------------


def audit(report: AuditReport) -> Group:
    """Everything that one audit says."""
    counters: tuple[PlannedSplit, list[DifferenceData]] | None = None
    return Group(
        *_blocks(
            _journals(report),
            sources(report, counters),
            work(report.work),
            external(report.external),
            findings(report.violations),
            notes(report.notes),
            verdict(report),
        )
    )


def _blocks(*parts: RenderableType | None) -> Iterator[RenderableType]:
    """Parts with an empty line between them."""
    for place, part in enumerate(p for p in parts if p is not None):
        if place:
            yield Text()
        yield part


def title(text: str, legend: str = "") -> Text:
    """The heading of a block, and below it what its words mean."""
    below = (f"\n{legend}", "dim") if legend else ""
    return Text.assemble((text, "bold"), below)


def _journals(report: AuditReport) -> Group:
    lines: list[RenderableType] = []
    for journal in report.journals:
        name = f"{journal.engine} {journal.version} pid {journal.process_id}"
        lines.append(Text.assemble((name, "bold"), f", {counted(journal.events, 'event')}"))
        lines.append(_indented(Text(journal.path, style="dim", overflow="fold")))
    return Group(*lines)


def figures_table(label: str, *columns: str) -> Table:
    """A table of a label and figures, each column as wide as it must be."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(label, ratio=None, min_width=LABEL_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def sources(report: AuditReport, counters: tuple[PlannedSplit, list[DifferenceData]] | None) -> Group:
    """Settled figures, plan, reports and counters, and every difference by name between them."""
    table = figures_table("tokens", "local", "external", "computed", "unattained", "total", "requests")
    settled = report.totals
    _row(
        table,
        "Ledger, settled",
        (settled.local, settled.external, settled.computed, settled.unattained),
        report.requests - report.unknown,
    )
    rows = [("Plan, at first admission", report.plan, "plan")]
    if report.reported is not None:
        rows.append(("Reported by the engine", report.reported, "reported"))
    named = list(report.differences)
    if counters is not None:
        rows.append(("The engine's counters", counters[0], "counters"))
        named += counters[1]
    for label, plan, key in rows:
        difference_rows(table, [_cells(row) for row in named if row.to == key])
        _row(table, label, (plan.local, plan.external, plan.computed, 0), plan.requests)
    return Group(title("Where prompt tokens came from", _SOURCES), table)


def _row(table: Table, label: str, figures: tuple[int, ...], requests: int) -> None:
    cells = [f"{n:,}" for n in (*figures, sum(figures))]
    cells.append(f"{requests:,}" if requests >= 0 else "")
    table.add_row(label, *cells, style="bold")


def _cells(row: DifferenceData) -> tuple[str, str, tuple[int, ...], int]:
    figures = (row.local, row.external, row.computed, row.unattained)
    return row.cause, row.text, (*figures, sum(figures)), row.requests


def difference_rows(table: Table, rows: Iterable[tuple[str, str, tuple[int, ...], int]]) -> None:
    """The differences between two rows: cause, text, signed figures, and of how many."""
    nothing = True
    for cause, text, figures, count in rows:
        nothing = False
        cells = [f"{n:+,}" if n else "" for n in figures]
        style = "bold red" if cause == "unexplained" else "cyan"
        table.add_row(_indented(Text(text)), *cells, f"{count:,}" if count else "", style=style)
    if nothing:
        table.add_row(_indented(Text("no difference")), style="dim")


def work(work: WorkData) -> Group:
    """Scheduled tokens by what became of them."""
    table = figures_table("tokens", "scheduled", "share")
    rows = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    rows += [(f"rework: {loss(c)}", n) for c, n in work.rework_by_cause.items()]
    rows += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    if work.in_flight:
        rows.append(("in flight", work.in_flight))
    for label, tokens in rows:
        share = percent(tokens / work.scheduled) if work.scheduled else ""
        table.add_row(label, f"{tokens:,}", share if tokens else "")
    summed = sum(tokens for _, tokens in rows)
    table.add_row("sum", f"{summed:,}", "", style="bold")
    if summed != work.scheduled:
        table.add_row("scheduled", f"{work.scheduled:,}", "not the sum", style="bold red")
    return Group(title("What the engine worked on", _WORK), table)


def external(external: ExternalData) -> Group | None:
    """What became of the connector's promises; nothing where there were none."""
    if not (external.promised or external.hit_again or external.loaded_again):
        return None
    table = figures_table("tokens", "")
    table.add_row("promised", f"{external.promised:,}")
    table.add_row("loaded", f"{external.loaded:,}")
    for cause, tokens in external.voided.items():
        table.add_row(f"void: {external_loss(cause)}", f"{tokens:,}")
    table.add_row("of it a second time", f"{external.loaded_again:,}")
    table.add_row("local hits, a second time", f"{external.hit_again:,}")
    return Group(title("What the connector promised, and what came twice", _TWICE), table)


# --- findings ---------------------------------------------------------------------------------------


def findings(found: list[FindingData], most: int = SHOWN_FINDINGS) -> Group | None:
    """Findings by invariant, a sentence each, at ``most`` so many of one."""
    if not found:
        return None
    by_id: dict[str, list[FindingData]] = {}
    for finding in found:
        by_id.setdefault(finding.id, []).append(finding)
    parts: list[RenderableType] = [title("Findings")]
    for id, group in by_id.items():
        wrong = group[0].severity == "violation"
        style = "bold red" if wrong else "bold yellow"
        count = f"  in {len(group):,} requests" if len(group) > 1 else ""
        parts.append(_indented(Text.assemble((group[0].severity, style), "  ", (id, "bold"), count)))
        parts += [_indented(_finding(finding), 4) for finding in group[:most]]
        if len(group) > most:
            more = f"and {len(group) - most:,} more, in the JSON"
            parts.append(_indented(Text(more, style="dim"), 4))
    return Group(*parts)


def _finding(found: FindingData) -> RenderableType:
    head = Text(f"step {found.step}: ", style="dim")
    text = Text.assemble(head, found.message)
    if found.repeats:
        again = f" Seen {found.repeats + 1:,} times, last at step {found.last_step}."
        text.append(again, style="dim")
    if not found.story:
        return text
    return Group(text, *(_hanging(line) for line in found.story))


def _hanging(line: str) -> Padding:
    """A line of a story, whose own indentation its further lines keep."""
    deep = len(line) - len(line.lstrip())
    return Padding(Text(line.lstrip()), (0, 0, 0, 2 + deep), expand=False)


def _indented(part: RenderableType, columns: int = 2) -> Padding:
    return Padding(part, (0, 0, 0, columns), expand=False)


def notes(lines: list[str]) -> Group | None:
    """How it was read, where that matters."""
    if not lines:
        return None
    return Group(title("Notes"), *(_indented(Text(line)) for line in lines))


def verdict(report: AuditReport) -> Text:
    """The last line."""
    wrong = sum(found.severity == "violation" for found in report.violations)
    counts = [counted(report.requests, "request"), counted(wrong, "violation")]
    counts += [counted(report.drift, "drift")] if report.drift else []
    counts += [f"{counted(report.unknown, 'request')} unknown"] if report.unknown else []
    counts += [counted(report.preemptions, "preemption")]
    return Text.assemble((report.verdict, VERDICTS[report.verdict]), f": {', '.join(counts)}")


def percent(share: float) -> str:
    """``41.1 %`` for 0.411."""
    return f"{100 * share:.1f} %"


def counted(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def catalogue() -> Table:
    """Every invariant and its promise."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for row in invariants().values():
        promise = " ".join(row.promise.replace("``", "").split())
        table.add_row(Text(row.id, style="bold"), Text(row.severity, style="dim"), Text(promise))
    return table


# --- progress ---------------------------------------------------------------------------------------


@contextmanager
def progress(before: str, text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, called ``before`` until ``yielded(done, total)`` moves it.

    One plain line where nobody looks. Nothing is drawn before the first move.
    """
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=out, transient=True)
    task = bar.add_task(before, total=None)

    def move(done: int, total: int) -> None:
        if not bar.live.is_started and not done:
            bar.start() if out.is_terminal else out.print(Text(f"{before} ..."))
        if done:
            bar.update(task, description=text, completed=done, total=total)

    try:
        yield move
    finally:
        if bar.live.is_started:
            bar.stop()
