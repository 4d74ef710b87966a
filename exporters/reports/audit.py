"""An audit as data, and as an answer: the verdict and its reasons, then findings, sources, work.

The data are plain structs, which ``--format json`` prints, made from
:class:`~kvledger.audit.replay.journals.Audit` in one go. New fields are appended, and none is removed or
renamed. Figures are tokens of prompts or of work unless the field says requests. The answer is made of them.
Account statements of one request are in ``statement.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ...audit.analysis.source_differences import Differences, Figures, Reconciliation
from ...audit.causes import DIFFERENCES, external_loss, loss
from ...audit.checks.auditor import Found
from ...audit.checks.coverage import Coverage, count_words, verdict_words
from ...audit.checks.registry import Figure, Violation, catalogue
from ...audit.figures.declared import FIGURES as DECLARED
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import Audit
from ...audit.text import utc
from ..answer import (
    BAD,
    DIM,
    DOUBT,
    Answer,
    Lines,
    Part,
    Sum,
    Table,
    Words,
    counted,
    listed,
    made,
    notes,
    of_fields,
    part_of,
    share,
    signed,
)
from . import contents as found_contents
from . import costs as lost_costs
from .contents import ContentsData, WeightsData, contents, weights
from .costs import CostReport


class JournalData(msgspec.Struct, frozen=True, kw_only=True):
    """One journal that was read. ``stopped`` is None where the journal has no end of observation."""

    path: str
    engine: str
    version: str
    adapter: str
    process_id: int
    stopped: str | None
    events: int
    verdict: str
    notes: list[str]
    level: str


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by source. ``invalid_hits`` are a part of ``unattained``."""

    prompt_tokens: int
    local: int
    external: int
    computed: int
    unattained: int
    invalid_hits: int


class PlannedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens as planned at the first admission that ran, or as the engine reported or counted them."""

    requests: int
    prompt_tokens: int
    local: int
    external: int
    computed: int


class DifferenceData(msgspec.Struct, frozen=True, kw_only=True):
    """One named part of the difference between two rows. Signed: ``from`` + all differences = ``to``."""

    from_: str = msgspec.field(name="from")
    to: str
    cause: str
    text: str
    requests: int
    local: int
    external: int
    computed: int
    unattained: int


class WorkData(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduled tokens by what became of them; they sum to ``scheduled``."""

    scheduled: int
    first_prompt: int
    first_output: int
    rework: int
    rework_by_cause: dict[str, int]
    rejected: int
    overrun: int
    in_flight: int


class ExternalData(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the promised external tokens, and repeat hits and repeat loads (``*_again``)."""

    promised: int
    loaded: int
    voided: dict[str, int]
    hit_again: int
    loaded_again: int


class FindingData(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; ``at_seconds`` counts from the start of its engine's observation.

    ``when`` is the same time in UTC; "" where no engine was seen to start.
    """

    id: str
    severity: str
    engine: str
    request: str | None
    life: int | None
    step: int
    at_seconds: float
    message: str
    figures: dict[str, Figure]
    references: list[str]
    repeats: int
    last_step: int
    story: list[str] = []
    when: str = ""
    stop_now: str = ""
    """What stops the harm; "" if only a figure is wrong."""
    tenant: str = ""
    session: str = ""
    tokens: int | None = None
    """How many tokens it was about when it was first found; None: the finding says no number."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole audit. ``violations`` lists findings; ``found`` has how many there are, listed or not.
    ``drift`` says how many are drifts.

    ``unknown`` counts the requests with missing events; no other figure includes them. ``began_before`` of
    them began before the first kept segment of a rotated journal, and do not make the verdict unknown.
    ``reported`` is None where the engine does not report the sources of a prompt.
    """

    verdict: str
    requests: int
    unknown: int
    drift: int
    preemptions: int
    totals: PromptTokens
    plan: PlannedSplit
    reported: PlannedSplit | None
    differences: list[DifferenceData]
    work: WorkData
    external: ExternalData
    violations: list[FindingData]
    journals: list[JournalData]
    notes: list[str]
    began_before: int
    costs: CostReport | None = None
    """What lost work cost; None if the audit was made without costs."""
    conclusions: list[str] = []
    figures: dict[str, int] = {}
    """Every declared figure, summed over the requests."""
    contents: ContentsData | None = None
    """What was found out about the KV in the blocks; None below level ``content``."""

    weights: WeightsData | None = None
    """Changes of weights, and what was read after them; None if there were none."""

    found: list[Found] = []
    """Each invariant with findings, and how many; exact also where ``violations`` does not list them all."""
    coverage: Coverage = Coverage()
    """What was examined in all journals, and what was not."""
    examined: str = ""
    """The verdict with what it covers, as every command prints it."""

    @property
    def counts(self) -> str:
        """How many violations and drifts there are, in words."""
        return count_words(self.found)

    def number(self, severity: str) -> int:
        """How many violations, or drifts, there are, listed or not."""
        return sum(row.findings for row in self.found if row.severity == severity)


def report(audit: Audit, costs: CostReport | None = None) -> AuditReport:
    """The audit as data."""
    totals, reconciliation = audit.totals, audit.reconciliation
    violations = [
        finding(violation, engine_audit.began_seconds)
        for engine_audit in audit.engines
        for violation in engine_audit.violations
    ]
    found, examined = audit.found, audit.coverage
    return AuditReport(
        verdict=audit.verdict,
        requests=totals.requests,
        unknown=totals.unknown_requests,
        drift=sum(row.findings for row in found if row.severity == "drift"),
        preemptions=totals.preemptions,
        totals=made(PromptTokens, totals),
        plan=plan(reconciliation.plan, totals.plan_requests),
        reported=reported(reconciliation),
        differences=[
            *differences(reconciliation.to_plan, "settled", "plan"),
            *(differences(reconciliation.to_reported, "plan", "reported") if reconciliation.reports else ()),
        ],
        work=made(WorkData, totals, rework=sum(totals.rework.values()), rework_by_cause=totals.rework),
        external=made(ExternalData, totals),
        violations=violations,
        journals=[_journal(engine_audit) for engine_audit in audit.engines],
        notes=audit.notes,
        began_before=totals.began_before,
        costs=costs,
        contents=contents(audit),
        weights=weights(audit),
        figures={figure.name: totals.of(figure.name) for figure in DECLARED},
        found=found,
        coverage=examined,
        examined=verdict_words(audit.verdict, examined),
    )


def plan(figures: Figures, requests: int) -> PlannedSplit:
    """Figures as a planned, reported or counted row, which have no unattained part."""
    return made(PlannedSplit, figures, requests=requests, prompt_tokens=figures.total)


def reported(reconciliation: Reconciliation) -> PlannedSplit | None:
    """What the engine reported of its requests' prompts; None if it never did."""
    if not reconciliation.reports:
        return None
    return plan(reconciliation.reported, reconciliation.reports)


def differences(by_cause: Differences, from_: str, to: str) -> list[DifferenceData]:
    """The named differences between two rows, most requests first."""
    rows = [
        made(
            DifferenceData,
            row.figures,
            from_=from_,
            to=to,
            cause=cause,
            text=DIFFERENCES[cause],
            requests=row.requests,
        )
        for cause, row in by_cause.items()
    ]
    order = list(DIFFERENCES)
    return sorted(rows, key=lambda row: (-row.requests, order.index(row.cause)))


def finding(violation: Violation, began_seconds: float | None) -> FindingData:
    """A violation or a drift as data. ``began_seconds``: Unix time from which its journal's times count."""
    return made(
        FindingData,
        violation,
        at_seconds=violation.at / 1e6,
        references=[reference.url for reference in violation.references],
        when="" if began_seconds is None else utc(began_seconds + violation.at / 1e6, milliseconds=True),
        stop_now=catalogue()[violation.id].stop_now,
    )


def _journal(engine_audit: EngineAudit) -> JournalData:
    engine = engine_audit.engine
    return JournalData(
        path=str(engine_audit.path),
        engine=engine.engine if engine else "",
        version=engine.version if engine else "",
        adapter=engine.adapter if engine else "",
        process_id=engine.process_id if engine else -1,
        stopped=engine_audit.auditor.ledger.stopped,
        events=engine_audit.journal.events,
        verdict=engine_audit.verdict,
        notes=engine_audit.all_notes,
        level=engine.level if engine else "",
    )


def plain(data: object) -> Any:
    """Structs as dicts and lists."""
    return msgspec.to_builtins(data)


FINDING_COLUMNS = (
    "id", "severity", "engine", "request", "life", "step", "at_seconds", "repeats", "last_step", "message",
    "when", "tenant", "session", "stop_now", "tokens"
)  # fmt: skip

SHOWN_FINDINGS = 10
"""Findings of one invariant that are printed in full with ``--verbose``; the JSON has all."""

WATERFALL = "Indented rows lead from the line above to the line below."

SOURCES = (
    "Each prompt token is counted once, by where its KV first came from: the local prefix cache, the KV "
    "connector (external), or computation. Unattained tokens had no KV when the request ended."
)
_WORK = "Each scheduled token is counted once. Rework is computed again because its KV was lost."
_EXTERNAL = "Repeat hits and repeat loads are tokens whose KV the request had before and lost."
DRIFT = (
    "A drift is a figure that the engine counts by a deliberate but misleading rule, a difference between "
    "two computations of one block, or what follows from a choice of the caller; the verdict stays clean."
)

Counters = tuple[PlannedSplit, list[DifferenceData]]
"""The engine's own counters as a row, and what leads to it."""


# --- the answer -----------------------------------------------------------------------------------------


def answer(report: AuditReport, *, verbose: bool = False) -> Answer:
    """The verdict first, then findings and sources; ``verbose`` adds work and connector tables."""
    most, rest = (SHOWN_FINDINGS, "in the JSON") if verbose else (1, "with -v")
    found = findings(report.violations, report.found, most=most, rest=rest)
    parts: list[Part] = [found, notes(report.notes), sources(report, None)]
    if verbose:
        lost = [] if report.costs is None else lost_costs.parts(report.costs)
        parts += [work(report.work), *lost, external(report.external), journals(report)]
    else:
        parts.append(Lines([Words("More tables: -v. All figures: --format json.", DIM)]))
    return Answer(
        report,
        [*sentences(report), *_journals_read(report)],
        parts,
        of_fields(FINDING_COLUMNS, report.violations),
        others={"github": lambda: github(report)},
    )


def sentences(report: AuditReport) -> Iterator[str]:
    """The verdict, why it is not clean, and where prompt tokens and work went, a line each."""
    yield report.examined
    yield counts(report)
    yield from (f"- {each}" for each in report.conclusions)
    if report.drift:
        yield f"{DRIFT} `kvledger explain drift` has an example."
    if doubtful := report.unknown - report.began_before:
        lost = "Events are missing, so no figure below includes"
        yield Words(f"{lost} {counted(doubtful, 'request')}.", DOUBT)
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
        yield f"{counted(totals.prompt_tokens, 'prompt token')}: {', '.join(sources)}."
    if report.work.scheduled:
        scheduled = counted(report.work.scheduled, "scheduled token")
        yield f"{scheduled}: {part_of(report.work.rework, report.work.scheduled, 'rework')}."
    if report.contents is not None:
        yield from found_contents.sentences(report.contents)
    if report.weights is not None:
        yield from found_contents.weights_sentences(report.weights)


def _journals_read(report: AuditReport) -> Iterator[str]:
    events = counted(sum(journal.events for journal in report.journals), "event")
    engines = dict.fromkeys(f"{journal.engine} {journal.version}" for journal in report.journals)
    yield Words(
        f"Read {events} in {counted(len(report.journals), 'journal')} of {listed(list(engines))}.", DIM
    )
    if report.coverage.limits:
        yield Words(report.coverage.limits, DIM)


def counts(report: AuditReport) -> str:
    """The second line: how many requests, violations and drifts there are."""
    unknown = report.unknown - report.began_before
    parts = [counted(report.requests - report.began_before, "request"), report.counts]
    parts += [f"{counted(unknown, 'request')} unknown"] if unknown else []
    return ", ".join([*parts, counted(report.preemptions, "preemption")])


def journals(report: AuditReport) -> Lines:
    """Which journals were read, with their paths."""
    lines = []
    for journal in report.journals:
        name = f"{journal.engine} {journal.version} pid {journal.process_id}"
        lines += [f"  {name}, {counted(journal.events, 'event')}", f"    {journal.path}"]
    return Lines(lines, "Journals")


# --- tables ---------------------------------------------------------------------------------------------


def sources(report: AuditReport, counters: Counters | None) -> Table:
    """Prompt tokens as settled, planned, reported and counted, and every named difference between them."""
    splits = [("Planned, at first admission", report.plan, "plan")]
    if report.reported is not None:
        splits.append(("Reported by the engine", report.reported, "reported"))
    differences = list(report.differences)
    if counters is not None:
        splits.append(("The engine's counters", counters[0], "counters"))
        differences += counters[1]
    settled, rows = report.totals, list[tuple[Any, ...]]()
    figures = (settled.local, settled.external, settled.computed, settled.unattained)
    rows.append(Sum(("Ledger, settled", *figures, sum(figures), report.requests - report.unknown)))
    for label, split, key in splits:
        for row in differences:
            if row.to == key:
                figures = (row.local, row.external, row.computed, row.unattained)
                rows.append(difference(row.cause, row.text, (*figures, sum(figures)), row.requests))
        figures = (split.local, split.external, split.computed, 0)
        requests = split.requests if split.requests >= 0 else ""
        rows.append(Sum((label, *figures, sum(figures), requests)))
    return Table(
        rows if settled.prompt_tokens else (),
        "tokens | local | external | computed | unattained | total | requests",
        "Where prompt tokens came from",
        f"{SOURCES} {WATERFALL}" if differences else SOURCES,
    )


def difference(cause: str, text: str, figures: Iterable[int], requests: int) -> tuple[Any, ...]:
    """The row of one named difference, which leads from one row of figures to the next."""
    label = Words(f"  {text}", BAD) if cause == "unexplained" else f"  {text}"
    return (label, *map(signed, figures), requests or "")


def work(work: WorkData) -> Table:
    """Scheduled tokens by what became of them."""
    named = [("first prompt", work.first_prompt), ("first output", work.first_output)]
    named += [(f"rework: {loss(c)}", n) for c, n in work.rework_by_cause.items()]
    named += [("rejected drafts", work.rejected), ("overrun past the stop", work.overrun)]
    named.append(("in flight", work.in_flight))
    total = sum(tokens for _, tokens in named)
    rows: list[tuple[Any, ...]] = [
        (label, tokens, share(tokens, work.scheduled)) for label, tokens in named if tokens
    ]
    rows.append(Sum(("sum", total)))
    if total != work.scheduled:
        rows.append((Words("scheduled, which is not the sum", BAD), work.scheduled))
    head = "tokens | scheduled | share:%"
    return Table(rows if work.scheduled else (), head, "What the engine worked on", _WORK)


def external(external: ExternalData) -> Table:
    """Promised, loaded and failed tokens, repeat hits and repeat loads."""
    rows = [("promised", external.promised), ("loaded", external.loaded)]
    rows += [(f"failed or cancelled: {external_loss(cause)}", n) for cause, n in external.voided.items()]
    rows += [("repeat loads", external.loaded_again), ("repeat hits, local", external.hit_again)]
    title = "What the connector promised and what was hit or loaded twice"
    return Table([row for row in rows if row[1]], "tokens | ", title, _EXTERNAL)


# --- findings -------------------------------------------------------------------------------------------


def findings(
    rows: Sequence[FindingData],
    found: Sequence[Found] = (),
    *,
    most: int = SHOWN_FINDINGS,
    rest: str = "in the JSON",
    drifts: bool = True,
) -> Lines:
    """Findings by invariant, violations first, a sentence each; ``most`` per invariant.

    ``found`` has how many there are, where ``rows`` may lack some. ``rest`` says where more are.
    Without ``drifts``, the drifts of an invariant have one line, no sentence.
    """
    lines, totals = list[str](), {row.id: row for row in found}
    for group in by_invariant(rows):
        first, total = group[0], totals.get(group[0].id)
        sizes = [_group_size(group, total)] if len(group) > 1 or (total and total.is_cut) else []
        if total is not None and total.tokens and total.severity == "violation":
            sizes.append(counted(total.tokens, "token"))
        lines.append("  ".join(["", first.severity, first.id, *([", ".join(sizes)] if sizes else [])]))
        if first.severity == "drift" and not drifts:
            continue
        for each in group[:most]:
            lines += _finding(each)
        if len(group) > most or (total and total.is_cut):
            lines.append(Words(f"    {_more(group, most, total, rest)}", DIM))
        if first.stop_now:
            lines.append(f"    What stops the harm now: {first.stop_now}")
    return Lines(lines, "Findings")


def by_invariant(rows: Iterable[FindingData]) -> list[list[FindingData]]:
    """Findings by invariant, violations before drifts, in the order in which they were found."""
    groups: dict[str, list[FindingData]] = {}
    for finding in rows:
        groups.setdefault(finding.id, []).append(finding)
    return sorted(groups.values(), key=lambda group: group[0].severity == "drift")


def _group_size(group: Sequence[FindingData], total: Found | None) -> str:
    """In how many requests an invariant was violated, or how often if no requests are concerned."""
    number = f"{len(group):,}" if total is None else total.number
    return f"in {number} requests" if any(row.request for row in group) else f"{number} times"


def _more(group: Sequence[FindingData], most: int, total: Found | None, rest: str) -> str:
    """How many more findings there are, and how many of them a list has at all."""
    if total is None or not total.is_cut:
        return f"and {len(group) - most:,} more, {rest}"
    return f"{min(most, len(group)):,} of {total.number} shown; {len(group):,} are listed {rest}"


def _finding(finding: FindingData) -> Iterator[str]:
    when = f"{finding.when}, step {finding.step}: " if finding.when else f"step {finding.step}: "
    repeats = (
        f" Seen {finding.repeats + 1:,} times, last at step {finding.last_step}." if finding.repeats else ""
    )
    yield f"    {when}{finding.message}{repeats}"
    yield from (f"      {line}" for line in finding.story)


# --- GitHub's annotations -------------------------------------------------------------------------------

_GITHUB = {"violation": "error", "drift": "notice"}


def github(report: AuditReport) -> str:
    """Workflow commands, one line each: the verdict first, then one per invariant, violations first.

    GitHub shows ten of a kind per step, so there is one per invariant, with its first finding. Format:
    https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions.
    """
    level = {"clean": "notice", "violated": "error", "unknown": "warning"}[report.verdict]
    answer = f"{report.examined}. {counts(report)}"
    whole = ". ".join([answer, *report.notes]) if report.verdict == "unknown" else answer
    lines, totals = (
        [_command(level, f"kvledger: {report.verdict}", whole)],
        {row.id: row for row in report.found},
    )
    for findings in by_invariant(report.violations):
        first, total = findings[0], totals[findings[0].id]
        times = f" ({total.number} findings)" if total.findings > 1 or total.at_least else ""
        stop = f" What stops the harm now: {first.stop_now}" if first.stop_now else ""
        message = f"step {first.step}: {first.message}{times}{stop}"
        lines.append(_command(_GITHUB[first.severity], first.id, message))
    return "\n".join(lines)


def _command(level: str, title: str, message: str) -> str:
    data = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    of_title = title.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={of_title}::{data}"
