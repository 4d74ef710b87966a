"""What ``kvledger demo`` prints, for a person or as JSON. The run itself is in ``audit/demo/run.py``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...audit.causes import DIFFERENCES
from ...audit.demo.injections import INJECTIONS
from ...audit.demo.lookups import COUNTERS, Differences, LookupReport, LookupTotals
from ...audit.demo.run import PREEMPTIONS, Demo
from ...audit.demo.run import run as run_demo
from . import audit_data, audit_text, statement, terminal
from .audit_data import AuditReport, DifferenceData, PlannedSplit

CODES = {"clean": 0, "violated": 1, "unknown": 3}
ENGINE_FAILED = 4

SERVER_FOLDER = "~/kvledger"
"""The example of a folder for a server's journals; every user can write to it."""

_LOOKUPS = (
    "Each admission looks up its tokens in the local prefix cache, and the rest in the connector. The "
    "engine's counters are vllm:prefix_cache_queries and _hits (local), "
    "vllm:external_prefix_cache_queries and _hits (connector)."
)


def show_injections() -> None:
    """Print the defects that can be put back."""
    table = terminal.plain_table()
    for injection in INJECTIONS.values():
        table.add_row(Text(injection.name, style="bold"), Text(injection.summary))
    terminal.show(table)


def run(inject: str | None, folder: Path | None, *, as_json: bool, verbose: bool = False) -> int:
    """Run the demo with a progress bar, print its result, and return the exit code."""
    with terminal.progress("vLLM starts", "vLLM serves requests") as progress:
        demo = run_demo(inject, folder, progress)
    report = audit_data.report(demo.audit)
    if as_json:
        print(audit_data.as_json(data(demo, report)))
    else:
        terminal.show(render(demo, report, verbose=verbose))
    return exit_code(demo, report)


def exit_code(demo: Demo, report: AuditReport) -> int:
    """The audit's exit code; with an injection 0 if the defect was found, else 1; 4 if the engine failed."""
    if demo.injection is not None:
        return 0 if demo.defect_found else 1
    return ENGINE_FAILED if demo.failure is not None else CODES[report.verdict]


def data(demo: Demo, report: AuditReport) -> dict[str, object]:
    """The demo as one object: the audit's fields, and those that only the demo has."""
    expected = demo.injection.expected_invariant if demo.injection else None
    counters, named = _counters(demo) or (None, [])
    report_data: dict[str, object] = audit_data.plain(report)
    return {
        **report_data,
        "engine_counters": audit_data.plain(counters),
        "engine_counter_differences": audit_data.plain(named),
        "lookups": _lookups_data(demo.lookups),
        "engine_preemptions": demo.engine_preemptions,
        "engine_failure": demo.failure,
        "engine_refusals": demo.refusals,
        "elapsed_seconds": demo.elapsed_seconds,
        "injection": demo.injection.name if demo.injection else None,
        "expected": expected,
        "found": demo.defect_found if demo.injection else None,
        "statement": audit_data.statement_data(demo.statement) if demo.statement else None,
        "journal": str(demo.journal),
        "log": str(demo.log),
    }


def _counters(demo: Demo) -> tuple[PlannedSplit, list[DifferenceData]] | None:
    """The engine's counters as a row. They don't say how many requests they count, hence -1."""
    if demo.counters is None:
        return None
    named = audit_data.differences(demo.to_counters, "reported", "counters")
    return audit_data.plan(demo.counters, -1), named


def _lookups_data(lookups: LookupReport) -> dict[str, object]:
    counters = lookups.counters
    steps = (("admitted", "counters", lookups.to_counters), ("counters", "reported", lookups.to_reported))
    return {
        "admitted": audit_data.plain(lookups.admitted),
        "counters": counters and {name: getattr(counters, name) for name in COUNTERS},
        "reported": audit_data.plain(lookups.reported),
        "differences": [
            {"from": from_, "to": to, "cause": cause, "text": DIFFERENCES[cause], **audit_data.plain(totals)}
            for from_, to, step in steps
            for cause, totals in step.items()
        ],
    }


def render(demo: Demo, report: AuditReport, *, verbose: bool = False) -> Group:
    """The answer first, then findings and sources, in sixty lines.

    ``verbose`` adds the sentences of drifts, work, lookups and one statement.
    """
    remarks = terminal.notes([*report.notes, *_refusals(demo), *_preemptions(demo, report)])
    sources = audit_text.sources(report, _counters(demo))
    if not verbose:
        rest = audit_text.findings(report.violations, report.found, most=1, rest="with -v", drifts=False)
        return terminal.blocks(_answer(demo, report), rest, sources, remarks, _next(demo, report))
    return terminal.blocks(
        _answer(demo, report),
        audit_text.findings(report.violations, report.found, most=3),
        sources,
        audit_text.work(report.work),
        _lookups(demo.lookups),
        audit_text.external(report.external),
        statement.render(demo.statement, findings=False) if demo.statement else None,
        remarks,
        _next(demo, report),
    )


def _answer(demo: Demo, report: AuditReport) -> Group:
    """Whether the injected defect was found, the audit's answer, and how the engine ended."""
    engine = report.journals[0]
    served = f"{engine.engine} {engine.version} served {terminal.counted(report.requests, 'request')}"
    if demo.elapsed_seconds:
        served += f" in {demo.elapsed_seconds:.0f} s"
    lines: list[RenderableType] = []
    if demo.injection is not None:
        lines += [_outcome(demo), Text(f"The defect: {demo.injection.summary}.")]
    lines += [audit_text.answer(report), Text(f"{served}.", style="dim")]
    if demo.failure is not None:
        lines.append(Text(f"The engine failed: {demo.failure}", style="bold red"))
    return Group(*lines)


def _outcome(demo: Demo) -> Text:
    assert demo.injection is not None
    expected, name = demo.injection.expected_invariant, demo.injection.name
    if demo.defect_found:
        return Text(f"The injected defect {name} was found: {expected}", style="bold green")
    return Text(f"The injected defect {name} was not found: no {expected}", style="bold red")


def _refusals(demo: Demo) -> Iterator[str]:
    for message, times in Counter(demo.refusals).items():
        yield f"the engine's counters rejected a figure {times} times: {message}"


def _preemptions(demo: Demo, report: AuditReport) -> Iterator[str]:
    counted, unreported = demo.engine_preemptions, demo.unreported_preemptions
    if counted is None or counted == report.preemptions:
        return
    explained = counted + unreported == report.preemptions
    why = f"the counter misses requests that end before any output ({unreported})"
    yield (
        f"{PREEMPTIONS} counts {counted} of {report.preemptions} preemptions: "
        f"{why if explained else 'unexplained'}"
    )


def _lookups(lookups: LookupReport) -> Group | None:
    """Prefix-cache lookups: those of admissions, those counted, and those that the reports imply."""
    if lookups.counters is None:
        return None
    table = terminal.figures_table("tokens", "local queries", "hits", "external queries", "hits", "lookups")
    _lookup_row(table, "Ledger, every admission", lookups.admitted)
    _lookup_differences(table, lookups.to_counters)
    _lookup_row(table, "The engine's counters", lookups.counters)
    if lookups.reported is not None:
        _lookup_differences(table, lookups.to_reported)
        _lookup_row(table, "Reported by the engine", lookups.reported)
    return Group(terminal.title("Prefix-cache lookups", f"{_LOOKUPS}\n{audit_text.WATERFALL}"), table)


def _lookup_row(table: Table, label: str, totals: LookupTotals) -> None:
    cells = [f"{getattr(totals, name):,}" for name in COUNTERS]
    cells.append(f"{totals.lookups:,}" if totals.lookups >= 0 else "")
    table.add_row(label, *cells, style="bold")


def _lookup_differences(table: Table, differences: Differences) -> None:
    audit_text.waterfall_rows(
        table,
        (
            audit_text.WaterfallRow(
                cause,
                DIFFERENCES[cause],
                tuple(getattr(totals, name) for name in COUNTERS),
                abs(totals.lookups),
            )
            for cause, totals in differences.items()
        ),
    )


def _next(demo: Demo, report: AuditReport) -> Group:
    """What to type next: about this run, for a server, in a notebook and in CI."""
    journal = shlex.quote(str(demo.journal))
    commands = [*_activation(), f"kvledger audit {journal}"]
    if demo.statement is not None:
        commands.append(f"kvledger show {journal} {shlex.quote(demo.statement.account.request_id)}")
    expected = demo.injection.expected_invariant if demo.injection else None
    found = min(
        report.violations,
        key=lambda one: (one.id != expected, one.severity != "violation"),
        default=None,
    )
    commands.append("kvledger demo --inject list" if found is None else f"kvledger explain {found.id}")
    sections = {
        "Next: read this run": commands,
        "Your server, in the environment of vLLM": [
            f"pip install {_requirement()}",
            f"KVLEDGER_DIR={SERVER_FOLDER} vllm serve MODEL",
            f"kvledger audit {SERVER_FOLDER}",
        ],
        "In a notebook": [
            "%load_ext kvledger",
            "%%audit llm  # at the top of a cell that calls llm.generate",
        ],
        "In CI": ["pytest --kvledger  # docs/ci.md has a job to copy"],
    }
    lines: list[RenderableType] = []
    for heading, words in sections.items():
        lines.append(terminal.title(heading))
        lines += [terminal.indented(Text(line, overflow="fold")) for line in words]
    return Group(*lines)


def _activation() -> list[str]:
    """The command after which the shell finds ``kvledger``; none if it finds it now."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("kvledger") or not script.exists():
        return []
    return [f". {shlex.quote(os.path.relpath(script))}"]


def _requirement() -> str:
    """What to give to pip: the checkout that runs now, or else this version."""
    checkout = Path(__file__).resolve().parents[2]
    return (
        shlex.quote(str(checkout)) if (checkout / "pyproject.toml").exists() else f"kvledger=={__version__}"
    )
