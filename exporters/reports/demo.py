"""The answer of ``kvledger demo``. The run itself is in ``audit/demo/run.py``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ... import __version__
from ...audit.causes import DIFFERENCES
from ...audit.demo.run import COUNTERS, PREEMPTIONS, Demo, LookupDifferences, LookupReport, LookupTotals
from ...audit.demo.run import run as run_demo
from ...audit.demo.sglang import run as sglang
from ...audit.demo.workload import INJECTIONS
from ..answer import BAD, DIM, GOOD, STRONG, Answer, Lines, Part, Sum, Table, Words, counted, notes
from ..terminal import progress
from . import audit, statement
from .audit import AuditReport, DifferenceData, PlannedSplit

CODES = {"clean": 0, "violated": 1, "unknown": 3}
ENGINE_FAILED = 4

SERVER_FOLDER = "~/kvledger"
"""The example of a folder for a server's journals; every user can write to it."""

_LOOKUPS = (
    "Each admission looks up its tokens in the local prefix cache, and the rest in the connector. The "
    "engine's counters are vllm:prefix_cache_queries and _hits (local), "
    "vllm:external_prefix_cache_queries and _hits (connector)."
)


@dataclass(frozen=True)
class Injection:
    """A planted fault as it is listed. ``level``: the lowest at which one of ``finds`` finds it."""

    name: str
    says: str
    link: str
    finds: tuple[str, ...]
    level: str


def injections() -> Answer:
    """The defects that can be put back."""
    faults = INJECTIONS.values()
    rows = [Injection(each.name, each.says, each.link, each.finds, each.level) for each in faults]
    sentence = f"{len(rows)} defects of released versions can be put back: kvledger demo --inject NAME."
    return Answer(rows, [sentence], [Table(rows, "defect=name | what it is=says")])


def run(inject: str | None, folder: Path | None, *, verbose: bool = False) -> Answer:
    """Run the demo with a progress bar."""
    with progress("vLLM starts", "vLLM serves requests") as move:
        demo = run_demo(inject, folder, move)
    return answer(demo, audit.report(demo.audit), verbose=verbose)


def run_sglang(inject: str | None, folder: Path | None, say: Callable[[str], None]) -> Answer:
    """Run SGLang's engine; ``say`` gets a sentence before anything is fetched."""
    if inject == "list":
        sentence = f"One defect of released versions can be put back: --inject {sglang.DEFECT}."
        return Answer([sglang.DEFECT], [sentence])
    with progress("SGLang starts", "SGLang serves requests"):
        served = sglang.run(inject, folder, say)
    report, totals = audit.report(served.audit), served.audit.totals
    hits = totals.of("local") + totals.of("external")
    told = f"The engine reported {served.told_cached:,} cached tokens to clients"
    ran = f"SGLang {served.release} served {counted(report.requests, 'request')} on this CPU"
    if served.injected:
        found = ", ".join(served.found)
        first = f"The injected defect {sglang.DEFECT} was {f'found: {found}' if found else 'not found'}"
        code = 0 if found else 1
    else:
        first, code = f"{report.verdict}: the KV-cache token figures of this run", CODES[report.verdict]
    sentences = [
        f"{first}.",
        f"{ran}, with {counted(totals.of('preemptions'), 'preemption')}; {totals.of('rework'):,} tokens were "
        "computed again.",
        f"{told}, as the ledger has." if served.told_cached == hits else f"{told}; the ledger has {hits:,}.",
    ]
    findings = audit.findings(report.violations, report.found, most=1, rest="with -v", drifts=False)
    more: dict[str, object] = {"injection": sglang.DEFECT if served.injected else None, "found": served.found}
    more |= {"told_cached_tokens": served.told_cached, "journal": str(served.journal)}
    return Answer(
        served,
        sentences,
        [findings, audit.sources(report, None), Lines([f"  kvledger audit {served.journal}"], "Next")],
        plain=lambda: {**audit.plain(report), **more},
        code=code,
    )


def exit_code(demo: Demo, report: AuditReport) -> int:
    """The audit's exit code; with an injection 0 if the defect was found, else 1; 4 if the engine failed."""
    if demo.injection is not None:
        return 0 if demo.defect_found else 1
    return ENGINE_FAILED if demo.failure is not None else CODES[report.verdict]


def data(demo: Demo, report: AuditReport) -> dict[str, object]:
    """The demo as one object: the audit's fields, and those that only the demo has."""
    expected = demo.injection.finds[0] if demo.injection else None
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
        "expected": expected,
        "found": demo.defect_found if demo.injection else None,
        "statement": statement.plain(demo.statement) if demo.statement else None,
        "journal": str(demo.journal),
        "log": str(demo.log),
    }


def _counters(demo: Demo) -> tuple[PlannedSplit, list[DifferenceData]] | None:
    """The engine's counters as a row. They don't say how many requests they count, hence -1."""
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
            {"from": from_, "to": to, "cause": cause, "text": DIFFERENCES[cause], **audit.plain(totals)}
            for from_, to, step in steps
            for cause, totals in step.items()
        ],
    }


def answer(demo: Demo, report: AuditReport, *, verbose: bool = False) -> Answer:
    """The answer first, then findings and sources, in sixty lines.

    ``verbose`` adds the sentences of drifts, work, lookups and one statement.
    """
    remarks = notes([*report.notes, *_refusals(demo), *_preemptions(demo, report)])
    sources = audit.sources(report, _counters(demo))
    if verbose:
        parts: list[Part] = [audit.findings(report.violations, report.found, most=3), sources]
        parts += [audit.work(report.work), *_lookups(demo.lookups), audit.external(report.external)]
        parts += [] if demo.statement is None else statement.parts(demo.statement)
    else:
        found = audit.findings(report.violations, report.found, most=1, rest="with -v", drifts=False)
        parts = [found, sources]
    return Answer(
        demo,
        list(_sentences(demo, report)),
        [*parts, remarks, _next(demo, report)],
        plain=lambda: data(demo, report),
        code=exit_code(demo, report),
    )


def _sentences(demo: Demo, report: AuditReport) -> Iterator[str]:
    """Whether the injected defect was found, the audit's answer, and how the engine ended."""
    engine = report.journals[0]
    served = f"{engine.engine} {engine.version} served {counted(report.requests, 'request')}"
    if demo.elapsed_seconds:
        served += f" in {demo.elapsed_seconds:.0f} s"
    if demo.injection is not None:
        expected, name = demo.injection.finds[0], demo.injection.name
        if demo.defect_found:
            yield Words(f"The injected defect {name} was found: {expected}", GOOD)
        else:
            yield Words(f"The injected defect {name} was not found: no {expected}", BAD)
        yield f"The defect: {demo.injection.says}."
    yield from audit.sentences(report)
    yield Words(f"{served}.", DIM)
    if demo.failure is not None:
        yield Words(f"The engine failed: {demo.failure}", BAD)


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


def _lookups(lookups: LookupReport) -> Iterator[Table]:
    """Prefix-cache lookups: those of admissions, those counted, and those that the reports imply."""
    if lookups.counters is None:
        return
    rows = [_totals("Ledger, every admission", lookups.admitted), *_differences(lookups.to_counters)]
    rows.append(_totals("The engine's counters", lookups.counters))
    if lookups.reported is not None:
        rows += [*_differences(lookups.to_reported), _totals("Reported by the engine", lookups.reported)]
    columns = "tokens | local queries | hits | external queries | hits | lookups"
    yield Table(rows, columns, "Prefix-cache lookups", f"{_LOOKUPS} {audit.WATERFALL}")


def _totals(label: str, totals: LookupTotals) -> Sum:
    lookups = totals.lookups if totals.lookups >= 0 else ""
    return Sum((label, *(getattr(totals, name) for name in COUNTERS), lookups))


def _differences(step: LookupDifferences) -> Iterator[tuple[object, ...]]:
    for cause, totals in step.items():
        figures = (getattr(totals, name) for name in COUNTERS)
        yield audit.difference(cause, DIFFERENCES[cause], figures, abs(totals.lookups))


def _next(demo: Demo, report: AuditReport) -> Lines:
    """What to type next: about this run, for a server, in a notebook and in CI."""
    journal = shlex.quote(str(demo.journal))
    commands = [*_activation(), f"kvledger audit {journal}"]
    if demo.statement is not None:
        commands.append(f"kvledger show {journal} {shlex.quote(demo.statement.account.request_id)}")
    expected = demo.injection.finds[0] if demo.injection else None
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
    lines = list[str]()
    for heading, words in sections.items():
        lines += [Words(heading, STRONG), *(f"  {line}" for line in words)]
    return Lines(lines)


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
