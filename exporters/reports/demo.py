"""The demo as a person or a machine sees it. The run itself is in ``audit/demo/run.py``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.causes import DIFFERENCES
from ...audit.demo.injections import INJECTIONS
from ...audit.demo.lookups import COUNTERS, Differences, LookupReport, LookupTotals
from ...audit.demo.run import PREEMPTIONS, Demo
from ...audit.demo.run import run as run_demo
from . import audit, statement, terminal
from .audit import AuditReport, DifferenceData, PlannedSplit

CODES = {"clean": 0, "violated": 1, "unknown": 3}
ENGINE_FAILED = 4

_ASKED = (
    "The counters are vllm:prefix_cache_queries and _hits (local), "
    "vllm:external_prefix_cache_queries and _hits (the connector, asked for the rest)."
)


def show_injections() -> None:
    """Print the defects that can be put back."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for injection in INJECTIONS.values():
        table.add_row(Text(injection.name, style="bold"), Text(injection.summary))
    terminal.show(table)


def run(inject: str | None, folder: Path | None, *, as_json: bool) -> int:
    """Run the demo with a progress bar, print what it gave, and return the exit code."""
    with terminal.progress("vLLM starts", "vLLM serves requests") as progress:
        demo = run_demo(inject, folder, progress)
    report = audit.report(demo.audit)
    if as_json:
        print(audit.as_json(data(demo, report)))
    else:
        terminal.show(Group(*_blocks(demo, report)))
    return exit_code(demo, report)


def exit_code(demo: Demo, report: AuditReport) -> int:
    """The audit's own; with an injection 0 if it was found and 1 if not; 4 if the engine failed."""
    if demo.injection is not None:
        return 0 if demo.defect_found else 1
    return ENGINE_FAILED if demo.failure is not None else CODES[report.verdict]


def data(demo: Demo, report: AuditReport) -> dict[str, object]:
    """The demo as one object: the audit's, and what only the demo knows."""
    found = demo.injection.expected_invariant if demo.injection else None
    counters, named = _counters(demo) or (None, [])
    report_data: dict[str, object] = audit.plain(report)
    return {
        **report_data,
        "engine_counters": audit.plain(counters),
        "engine_counter_differences": audit.plain(named),
        "lookups": _lookups_data(demo.lookups),
        "engine_preemptions": demo.engine_preemptions,
        "engine_failure": demo.failure,
        "engine_refusals": demo.refusals,
        "elapsed_seconds": demo.elapsed_seconds,
        "injection": demo.injection.name if demo.injection else None,
        "expected": found,
        "found": demo.defect_found if demo.injection else None,
        "statement": audit.statement_data(demo.statement) if demo.statement else None,
        "journal": str(demo.journal),
        "log": str(demo.log),
    }


def _counters(demo: Demo) -> tuple[PlannedSplit, list[DifferenceData]] | None:
    """The engine's counters as a row; they do not say of how many requests they are."""
    if demo.counters is None:
        return None
    named = audit.differences(demo.to_counters, "reported", "counters")
    return audit.plan(demo.counters, -1), named


def _lookups_data(lookups: LookupReport) -> dict[str, object]:
    counters = lookups.counters
    steps = (("admitted", "counters", lookups.to_counters), ("counters", "reported", lookups.to_reported))
    return {
        "admitted": audit.plain(lookups.admitted),
        "counters": counters and {name: getattr(counters, name) for name in COUNTERS},
        "reported": audit.plain(lookups.reported),
        "differences": [
            {"from": from_, "to": to, "cause": cause, "text": DIFFERENCES[cause], **audit.plain(asked)}
            for from_, to, step in steps
            for cause, asked in step.items()
        ],
    }


def _blocks(demo: Demo, report: AuditReport) -> Iterator[RenderableType]:
    yield _heading(demo, report)
    yield Text()
    yield terminal.sources(report, _counters(demo))
    yield Text()
    yield terminal.work(report.work)
    for part in (
        _lookups(demo.lookups),
        terminal.external(report.external),
        statement.statement(demo.statement, findings=False) if demo.statement else None,
        terminal.findings(report.violations, most=3),
        terminal.notes([*report.notes, *_refusals(demo), *_preemptions(demo, report)]),
    ):
        if part is not None:
            yield Text()
            yield part
    yield Text()
    yield terminal.verdict(report)
    if demo.injection is not None:
        yield _outcome(demo)
    yield Text()
    yield _next(demo, report)


def _heading(demo: Demo, report: AuditReport) -> Text:
    engine = report.journals[0]
    text = Text.assemble(
        (f"{engine.engine} {engine.version}", "bold"),
        f" served {report.requests} requests with {report.preemptions} preemptions"
        f" in {demo.elapsed_seconds:.0f} s" * bool(demo.elapsed_seconds),
    )
    if demo.injection is not None:
        text.append(f"\nInjected: {demo.injection.name}, {demo.injection.summary}")
    if demo.failure is not None:
        text.append(f"\nThe engine failed: {demo.failure}", style="bold red")
    return text


def _refusals(demo: Demo) -> Iterator[str]:
    for said, times in Counter(demo.refusals).items():
        yield f"the engine's counters refused a figure {times} times: {said}"


def _preemptions(demo: Demo, report: AuditReport) -> Iterator[str]:
    counted, untold = demo.engine_preemptions, demo.unreported_preemptions
    if counted is None or counted == report.preemptions:
        return
    known = counted + untold == report.preemptions
    why = f"it never hears of a request that ends before any output ({untold})"
    yield (
        f"{PREEMPTIONS} counts {counted} of {report.preemptions} preemptions: "
        f"{why if known else 'unexplained'}"
    )


def _lookups(lookups: LookupReport) -> Group | None:
    """What the caches were asked, step by step to what the engine's reports make of it."""
    if lookups.counters is None:
        return None
    table = terminal.figures_table("tokens", "local asked", "found", "external asked", "found", "look-ups")
    _lookup_row(table, "Ledger, every admission", lookups.admitted)
    _lookup_differences(table, lookups.to_counters)
    _lookup_row(table, "The engine's counters", lookups.counters)
    if lookups.reported is not None:
        _lookup_differences(table, lookups.to_reported)
        _lookup_row(table, "Reported by the engine", lookups.reported)
    return Group(terminal.title("What the caches were asked for, and had", _ASKED), table)


def _lookup_row(table: Table, label: str, asked: LookupTotals) -> None:
    cells = [f"{getattr(asked, name):,}" for name in COUNTERS]
    cells.append(f"{asked.lookups:,}" if asked.lookups >= 0 else "")
    table.add_row(label, *cells, style="bold")


def _lookup_differences(table: Table, differences: Differences) -> None:
    rows = (
        (cause, DIFFERENCES[cause], tuple(getattr(asked, name) for name in COUNTERS), abs(asked.lookups))
        for cause, asked in differences.items()
    )
    terminal.difference_rows(table, rows)


def _outcome(demo: Demo) -> Text:
    assert demo.injection is not None
    wanted, name = demo.injection.expected_invariant, demo.injection.name
    if demo.defect_found:
        return Text(f"The injected defect {name} was found: {wanted}", style="bold green")
    return Text(f"The injected defect {name} was not found: no {wanted}", style="bold red")


def _next(demo: Demo, report: AuditReport) -> Group:
    journal = shlex.quote(str(demo.journal))
    commands = [f"kvledger audit {journal}"]
    if demo.statement is not None:
        commands.append(f"kvledger show {journal} {shlex.quote(demo.statement.account.request_id)}")
    ids = list(dict.fromkeys(found.id for found in report.violations))
    commands.append(f"kvledger explain {ids[0]}" if ids else "kvledger demo --inject list")
    lines = [Padding(Text(command, overflow="fold"), (0, 0, 0, 2)) for command in commands]
    return Group(
        Text.assemble(("The journal is in ", "bold"), str(demo.journal)),
        terminal.title("Next"),
        *lines,
    )
