"""An audit as data: what ``--format json`` prints, and what ``audit_text.py`` makes an answer of.

Plain structs, made from :class:`~kvledger.audit.replay.journals.Audit` in one go. New fields
are appended, and none is removed or renamed. Figures are tokens of prompts or of work unless the field says
requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...audit.analysis.source_differences import Differences, Figures, Reconciliation
from ...audit.causes import DIFFERENCES
from ...audit.checks.auditor import Found
from ...audit.checks.coverage import Coverage, count_words, verdict_words
from ...audit.checks.registry import Figure, Violation, catalogue
from ...audit.figures.declared import FIGURES as DECLARED
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import Audit
from ...audit.text import utc
from ..answer import made
from .contents import ContentsData, contents
from .costs import CostReport
from .weights import WeightsData, weights


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
