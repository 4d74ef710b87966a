"""An audit as GitHub's annotations.

GitHub shows ten of a kind per step, so there is one per invariant, with its first finding. Format:
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...audit.checks.auditor import Found
from .audit_data import AuditReport, FindingData
from .audit_text import counts, verdict

_GITHUB = {"violation": "error", "drift": "notice"}


def github(report: AuditReport) -> str:
    """Workflow commands, one line each: the verdict first, then one per invariant, violations first."""
    return "\n".join(_commands(report))


def _commands(report: AuditReport) -> Iterator[str]:
    level = {"clean": "notice", "violated": "error", "unknown": "warning"}[report.verdict]
    yield _command(level, f"kvledger: {report.verdict}", _answer(report))
    totals = {row.id: row for row in report.found}
    for findings in _by_invariant(report):
        message = _message(findings, totals[findings[0].id])
        yield _command(_GITHUB[findings[0].severity], findings[0].id, message)


def _answer(report: AuditReport) -> str:
    answer = f"{verdict(report).plain}. {counts(report)}"
    return ". ".join([answer, *report.notes]) if report.verdict == "unknown" else answer


def _command(level: str, title: str, message: str) -> str:
    data = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    of_title = title.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={of_title}::{data}"


def _by_invariant(report: AuditReport) -> list[list[FindingData]]:
    """Findings by invariant, violations before drifts, in the order in which they were found."""
    groups: dict[str, list[FindingData]] = {}
    for finding in report.violations:
        groups.setdefault(finding.id, []).append(finding)
    return sorted(groups.values(), key=lambda group: group[0].severity == "drift")


def _message(findings: list[FindingData], total: Found) -> str:
    """The first finding of an invariant, how many there are, and what stops the harm."""
    first = findings[0]
    times = f" ({total.number} findings)" if total.findings > 1 or total.at_least else ""
    stop = f" What stops the harm now: {first.stop_now}" if first.stop_now else ""
    return f"step {first.step}: {first.message}{times}{stop}"
