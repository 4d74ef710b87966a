"""An audit for a continuous-integration system: GitHub's annotations, or SARIF 2.1.0.

GitHub shows ten annotations of a kind per step, so there is one per invariant, with its first finding. SARIF
has a result per finding. Formats:
https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions and
https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ... import __version__
from ...audit.checks.findings import Found
from ...audit.checks.registry import catalogue
from .audit_data import AuditReport, FindingData, plain
from .audit_text import counts, verdict

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_GITHUB = {"violation": "error", "drift": "notice"}
_SARIF = {"violation": "error", "drift": "note"}


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


# --- SARIF ------------------------------------------------------------------------------------------


def sarif(report: AuditReport, journals: dict[str, str]) -> dict[str, Any]:
    """A SARIF log with one result per finding. ``journals``: the path of each engine's journal."""
    ids = list(dict.fromkeys(finding.id for finding in report.violations))
    run = {
        "tool": {
            "driver": {
                "name": "kvledger",
                "version": __version__,
                "rules": [_rule(id) for id in ids],
            }
        },
        "properties": {
            "verdict": report.verdict,
            "examined": report.examined,
            "requests": report.requests,
            "found": plain(report.found),
            "notes": report.notes,
        },
        "results": [_result(finding, ids.index(finding.id), journals) for finding in report.violations],
    }
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(id: str) -> dict[str, Any]:
    invariant = catalogue()[id]
    references = "\n".join(f"- [{each.name}]({each.url})" for each in invariant.references)
    text = f"{invariant.must_hold}\n\n{invariant.violated_when}".strip()
    return {
        "id": id,
        "shortDescription": {"text": invariant.must_hold},
        "help": {"text": text, "markdown": f"{text}\n\n{references}".strip()},
        "defaultConfiguration": {"level": _SARIF[invariant.severity]},
    }


def _result(finding: FindingData, rule: int, journals: dict[str, str]) -> dict[str, Any]:
    where = [part for part in (finding.engine, finding.request) if part]
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": _SARIF[finding.severity],
        "message": {"text": "\n".join(filter(None, [finding.message, *finding.story, finding.stop_now]))},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(journals.get(finding.engine, "journal"))}
                },
                "logicalLocations": [{"fullyQualifiedName": "/".join(where), "kind": "object"}],
            }
        ],
        "occurrenceCount": 1 + finding.repeats,
        "properties": {"step": finding.step, "life": finding.life, "figures": plain(finding.figures)},
    }


def _uri(path: str) -> str:
    """A path below the working folder as a relative URI, as code scanning wants it; else a file URI."""
    if "://" in path:
        return path
    absolute = Path(os.path.abspath(path))
    try:
        return absolute.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return absolute.as_uri()


def paths_of(engines: Iterable[Any]) -> dict[str, str]:
    """The path of each engine's journal, by the engine's name in findings."""
    return {engine.name: str(engine.path) for engine in engines}
