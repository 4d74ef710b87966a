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
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvledger.audit.catalogue import catalogue as invariants
from kvledger.exporters.audit_report import Difference, External, Finding, Plan, Report, Work

PLAIN_WIDTH = 100
"""Columns where the output is no terminal and COLUMNS says nothing."""

SHOWN_FINDINGS = 5
"""Findings of one invariant that are told in full."""

VERDICTS = {"clean": "bold green", "violated": "bold red", "unknown": "bold yellow"}
CAUSES = {
    "blocks": "preempted for want of blocks",
    "reset": "cache reset while running",
    "full_hit": "full hit, last token again",
    "replay": "replay window",
    "session": "session edited",
    "released": "load failed, looked up anew",
    "load_failed": "load failed",
    "negative_match": "negative match",
    "failed": "load failed",
    "not_planned": "no load names them",
    "never_loaded": "never reported loaded",
    "preempted": "preempted first",
    "finished": "ended first",
    "lost": "lost from sight",
    "unknown": "cause unknown",
}
"""Causes of rework and of void promises, in words."""


def console(*, stderr: bool = False) -> Console:
    """Where output goes; no colour and a fixed width where nobody looks."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, width=fixed)


def show(*parts: RenderableType) -> None:
    """Print to standard output."""
    out = console()
    for part in parts:
        out.print(part)


# --- the audit --------------------------------------------------------------------------------------


def audit(report: Report) -> Group:
    """Everything that one audit says."""
    counters: tuple[Plan, list[Difference]] | None = None
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


def title(text: str) -> Text:
    """The heading of a block."""
    return Text(text, style="bold")


def _journals(report: Report) -> Table:
    grid = Table.grid(padding=(0, 2))
    for journal in report.journals:
        grid.add_row(
            Text(f"{journal.engine} {journal.version} pid {journal.process_id}", style="bold"),
            Text(f"{journal.events:,} events", style="dim"),
            Text(journal.path, style="dim", overflow="fold"),
        )
    return grid


def _figures_table(label: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(label, ratio=None, min_width=24)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def sources(report: Report, counters: tuple[Plan, list[Difference]] | None) -> Group:
    """Settled figures, plan, reports and counters, and every difference by name between them."""
    table = _figures_table(
        "tokens", "local", "external", "computed", "unattained", "total", "requests"
    )
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
        _difference_rows(table, [row for row in named if row.to == key])
        _row(table, label, (plan.local, plan.external, plan.computed, 0), plan.requests)
    return Group(title("Where prompt tokens came from"), table)


def _row(table: Table, label: str, figures: tuple[int, ...], requests: int) -> None:
    cells = [f"{n:,}" for n in (*figures, sum(figures))]
    cells.append(f"{requests:,}" if requests >= 0 else "")
    table.add_row(label, *cells, style="bold")


def _difference_rows(table: Table, differences: Iterable[Difference]) -> None:
    rows = list(differences)
    for row in rows:
        figures = (row.local, row.external, row.computed, row.unattained)
        wrong = row.cause == "unexplained"
        cells = [f"{n:+,}" if n else "" for n in (*figures, sum(figures))]
        table.add_row(
            _indented(Text(row.text)),
            *cells,
            f"{row.requests:,}" if row.requests else "",
            style="bold red" if wrong else "cyan",
        )
    if not rows:
        table.add_row(_indented(Text("no difference")), style="dim")


def work(work: Work) -> Group:
    """Scheduled tokens by what became of them."""
    table = _figures_table("tokens", "scheduled", "share")
    rows = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    rows += [(f"rework: {CAUSES.get(c, c)}", n) for c, n in work.rework_by_cause.items()]
    rows += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    if work.in_flight:
        rows.append(("in flight", work.in_flight))
    for label, tokens in rows:
        share = f"{100 * tokens / work.scheduled:.1f} %" if work.scheduled else ""
        table.add_row(label, f"{tokens:,}", share if tokens else "")
    summed = sum(tokens for _, tokens in rows)
    table.add_row("sum", f"{summed:,}", "", style="bold")
    if summed != work.scheduled:
        table.add_row("scheduled", f"{work.scheduled:,}", "not the sum", style="bold red")
    return Group(title("What the engine worked on"), table)


def external(external: External) -> Group | None:
    """What became of the connector's promises; nothing where there were none."""
    if not (external.promised or external.hit_again or external.loaded_again):
        return None
    table = _figures_table("tokens", "")
    table.add_row("promised", f"{external.promised:,}")
    table.add_row("loaded", f"{external.loaded:,}")
    for cause, tokens in external.voided.items():
        table.add_row(f"void: {CAUSES.get(cause, cause)}", f"{tokens:,}")
    table.add_row("loaded again: had come to be before", f"{external.loaded_again:,}")
    table.add_row("local, hit again: had come to be before", f"{external.hit_again:,}")
    return Group(title("What the connector promised, and what came twice"), table)


# --- findings ---------------------------------------------------------------------------------------


def findings(found: list[Finding]) -> Group | None:
    """Every finding in a sentence, where and how often; only the first few of one invariant."""
    if not found:
        return None
    shown: list[RenderableType] = []
    of_id: dict[str, int] = {}
    for finding in found:
        of_id[finding.id] = of_id.get(finding.id, 0) + 1
        if of_id[finding.id] <= SHOWN_FINDINGS:
            shown.append(_finding(finding))
    for id, times in of_id.items():
        if times > SHOWN_FINDINGS:
            more = f"{id}: {times - SHOWN_FINDINGS:,} more requests; --format json names them all"
            shown.append(_indented(Text(more, style="dim")))
    return Group(title("Findings"), *shown)


def _finding(found: Finding) -> Padding:
    wrong = found.severity == "violation"
    head = Text.assemble(
        (found.severity, "bold red" if wrong else "bold yellow"),
        "  ",
        (found.id, "bold"),
        f"  {found.request or 'engine'}, step {found.step}",
    )
    if found.repeats:
        head.append(f", seen {found.repeats + 1} times, last at step {found.last_step}")
    return _indented(Group(head, _indented(Text(found.message))))


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def notes(lines: list[str]) -> Group | None:
    """How it was read, where that matters."""
    if not lines:
        return None
    return Group(title("Notes"), *(_indented(Text(line)) for line in lines))


def verdict(report: Report) -> Text:
    """The last line."""
    wrong = sum(found.severity == "violation" for found in report.violations)
    counts = [counted(report.requests, "request"), counted(wrong, "violation")]
    counts += [counted(report.drift, "drift")] if report.drift else []
    counts += [f"{counted(report.unknown, 'request')} unknown"] if report.unknown else []
    counts += [counted(report.preemptions, "preemption")]
    return Text.assemble((report.verdict, VERDICTS[report.verdict]), f": {', '.join(counts)}")


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
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error; ``yielded(done, total)`` moves it. Plain lines where nobody looks."""
    out = console(stderr=True)
    if not out.is_terminal:
        out.print(Text(f"{text} ..."))
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
