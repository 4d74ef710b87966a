"""Recording and alert rules for Prometheus, each alert with what to do about it.

Names of recorded series are ``level:metric:operation``. An alert stays quiet over what is named or
may be: it fires on findings, on *unexplained* drift, and on whatever makes silence worthless.
``python -m kvledger.dashboards.rules`` prints the file; ``generated/`` holds it, committed.

https://prometheus.io/docs/practices/rules/ and .../alerting/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from .boards import put

FILE = "kvledger-rules.yaml"
RATE = "5m"


class Recording(NamedTuple):
    """One recorded series."""

    record: str
    expr: str


class Alert(NamedTuple):
    """One alert. ``runbook`` is read at night: what it means, then what to do."""

    alert: str
    expr: str
    wait: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    runbook: str


def _rate(metric: str, by: str, level: str = "job, instance, engine") -> str:
    return f"sum by ({level}{', ' + by if by else ''}) (rate({metric}[{RATE}]))"


ENGINE = "job, instance, engine"
MODEL = "* on (job, instance, engine) group_left (model_name) kvledger_engine_info"

RECORDINGS: tuple[Recording, ...] = (
    Recording("engine:kvledger_prompt_tokens:rate5m", _rate("kvledger_prompt_tokens_total", "source")),
    Recording(
        "engine:kvledger_prompt_tokens_cached:ratio_rate5m",
        f'sum by ({ENGINE}) (engine:kvledger_prompt_tokens:rate5m{{source=~"local|external"}}) / '
        f"(sum by ({ENGINE}) (engine:kvledger_prompt_tokens:rate5m) > 0)",
    ),
    Recording("engine:kvledger_work_tokens:rate5m", _rate("kvledger_work_tokens_total", "kind")),
    Recording(
        "engine:kvledger_work_tokens_rework:ratio_rate5m",
        f'sum by ({ENGINE}) (engine:kvledger_work_tokens:rate5m{{kind="rework"}}) / '
        f"(sum by ({ENGINE}) (engine:kvledger_work_tokens:rate5m) > 0)",
    ),
    Recording(
        "engine:kvledger_external_voided_tokens:ratio_rate5m",
        _rate('kvledger_external_voided_tokens_total{cause=~"failed|not_planned|never_loaded"}', "")
        + f" / ({_rate('kvledger_external_promised_tokens_total', '')} > 0)",
    ),
    Recording(
        "engine:kvledger_audited_tokens_unknown:ratio_rate5m",
        _rate('kvledger_audited_tokens_total{verdict="unknown"}', "")
        + f" / ({_rate('kvledger_audited_tokens_total', '')} > 0)",
    ),
    Recording(
        "model:kvledger_prompt_tokens:rate5m",
        f"sum by (job, model_name, source) (engine:kvledger_prompt_tokens:rate5m {MODEL})",
    ),
    Recording(
        "model:kvledger_prompt_tokens_cached:ratio_rate5m",
        'sum by (job, model_name) (model:kvledger_prompt_tokens:rate5m{source=~"local|external"}) / '
        "(sum by (job, model_name) (model:kvledger_prompt_tokens:rate5m) > 0)",
    ),
    Recording(
        "model:kvledger_work_tokens_rework:ratio_rate5m",
        f'sum by (job, model_name) (engine:kvledger_work_tokens:rate5m{{kind="rework"}} {MODEL}) / '
        f"(sum by (job, model_name) (engine:kvledger_work_tokens:rate5m {MODEL}) > 0)",
    ),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "KvledgerViolation",
        'time() - kvledger_last_violation_timestamp_seconds{severity="violation"} < 900',
        "0m",
        "critical",
        "{{ $labels.engine }} broke {{ $labels.id }}",
        "The engine's accounts are wrong, and with some invariants its answers may be. Read /findings of "
        "the sidecar and `kvledger explain ID`; `kvledger show JOURNAL REQUEST` prints the account. "
        "docs/detection.md says which releases have which fault: upgrade, or turn off what it names. "
        "The alert ends 15 minutes after the last sight.",
    ),
    Alert(
        "KvledgerUnexplainedDrift",
        f'sum by ({ENGINE}, figure) (abs(kvledger_reconciliation_drift{{cause="unexplained"}})) > 0',
        "10m",
        "warning",
        "{{ $labels.engine }}: {{ $labels.figure }} is {{ $value }} tokens off without a known cause",
        "The engine's own counter and the ledger part, beyond what was under way around the scrape. Look "
        "at the board Compare: which figure, and since when. Check that --engine-url names the engine whose "
        "journal this is, and no proxy before several. If it does, the release counts by a rule that is not "
        "known here: keep the journal and report it.",
    ),
    Alert(
        "KvledgerNothingObserved",
        "sum by (job, instance) (kvledger_engine_observed) == 0 "
        "or kvledger_build_info unless on (job, instance) kvledger_engine_observed",
        "10m",
        "warning",
        "No engine is observed beside {{ $labels.instance }}",
        "Silence means nothing here. Is KVLEDGER_DIR set in the engine's environment, and the same volume as "
        "the sidecar's? Run `kvledger doctor` there: it says whether this release and environment would be "
        "observed, and why not. The engine's log has one line that begins with kvledger.",
    ),
    Alert(
        "KvledgerObservationLost",
        '(kvledger_engine_state{state=~"detached|failed"} == 1) and on (job, instance, engine) '
        "(time() - kvledger_last_event_timestamp_seconds < 3600)",
        "1m",
        "warning",
        "{{ $labels.engine }} is no longer observed ({{ $labels.state }})",
        "The hooks were removed while the engine ran: an observer kept failing (see the engine's log, "
        "`kvledger_hook_failures_total`), or somebody detached it. The engine serves on, unaudited. "
        "Restart it to be observed again, and report a failing hook.",
    ),
    Alert(
        "KvledgerHookFailures",
        f"sum by ({ENGINE}) (increase(kvledger_hook_failures_total[15m])) > 0",
        "0m",
        "warning",
        "Observers failed in {{ $labels.engine }}",
        "An observer raised inside the engine; serving is not touched. What it should have seen is missing, "
        "so that accounts of that moment are unknown. After five failures a hook removes itself and the "
        "observation ends. The engine's log has the error: report it with the release.",
    ),
    Alert(
        "KvledgerEventsLost",
        f"sum by ({ENGINE}) (increase(kvledger_gaps_total[15m])) > 0",
        "0m",
        "warning",
        "Events of {{ $labels.engine }} were lost",
        "The accounts that were open are unknown, never violated. Usual causes: the journal's volume is full "
        "(its limit is to be well above the journal's), the sidecar was away for longer than the journal "
        "reaches back, or the engine was killed. docs/journal.md has the table of reasons.",
    ),
    Alert(
        "KvledgerUnknownTokens",
        "engine:kvledger_audited_tokens_unknown:ratio_rate5m > 0.05",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the tokens of {{ $labels.engine }} are unknown",
        "So large a share was not judged that a clean verdict says little. Find the gaps: see "
        "KvledgerEventsLost.",
    ),
    Alert(
        "KvledgerSidecarLagging",
        "kvledger_journal_lag_seconds > 30",
        "5m",
        "warning",
        "The sidecar is {{ $value | humanizeDuration }} behind {{ $labels.engine }}",
        "Figures are as old as that. The sidecar lacks CPU (docs/performance.md says what it needs), or its "
        "disk is slow. If the journal's oldest segments go before they are read, events are lost.",
    ),
    Alert(
        "KvledgerSidecarGone",
        "(up == 0) and on (job, instance) last_over_time(kvledger_build_info[1d])",
        "5m",
        "warning",
        "The sidecar {{ $labels.instance }} does not answer",
        "Nothing is lost yet: the journal keeps what the engine tells, up to its bound, and the sidecar goes "
        "on where it was. It answers no scrape while it catches up. Look at its log and its memory limit.",
    ),
    Alert(
        "KvledgerSidecarLost",
        "sum by (job, instance, reason) (increase(kvledger_sidecar_losses_total[15m])) > 0",
        "0m",
        "warning",
        "The sidecar {{ $labels.instance }} lost what it knew: {{ $labels.reason }}",
        "Counters may have fallen, and the accounts touched are unknown. docs/sidecar.md has a line for each "
        "reason. A segment that was removed unread: the sidecar was away for too long, or the journal's "
        "bound is too small.",
    ),
    Alert(
        "KvledgerJournalUnreadable",
        "kvledger_sidecar_unreadable_journals > 0",
        "5m",
        "warning",
        "{{ $value }} journals beside {{ $labels.instance }} can't be read",
        "The engines that write them are not audited. The sidecar's log and its first page say why: often "
        "a newer kvledger wrote them, or their folder may not be read.",
    ),
    Alert(
        "KvledgerCheckFailures",
        f"sum by ({ENGINE}) (increase(kvledger_check_failures_total[15m])) > 0",
        "0m",
        "info",
        "A check of kvledger itself failed",
        "A defect of kvledger: the invariant was not judged there. Keep the journal and report it with the "
        "output of `kvledger audit --debug`.",
    ),
    Alert(
        "KvledgerRework",
        "engine:kvledger_work_tokens_rework:ratio_rate5m > 0.2",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the work of {{ $labels.engine }} is rework",
        "Tokens are computed again because their KV was given up. By cause `blocks` (the board Tokens has "
        "it): preemptions, so give it more blocks, fewer sequences at once or shorter ones, or a connector "
        "that keeps what preemption drops. By `load_failed`: the store fails.",
    ),
    Alert(
        "KvledgerPromisedTokensVoid",
        "engine:kvledger_external_voided_tokens:ratio_rate5m > 0.05",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of what the connector promised {{ $labels.engine }} did not come",
        "The connector promises tokens that are then not loaded: each is computed after all, or, with a "
        "finding connector/promise-not-loaded, read stale. Look at the store's health and at the connector's "
        "release in docs/detection.md.",
    ),
)


def text() -> str:
    """The rule file, as YAML."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Made by `python -m kvledger.dashboards.rules`; do not edit."
    yield "groups:"
    yield "  - name: kvledger.recordings"
    yield "    rules:"
    for recording in RECORDINGS:
        yield f"      - record: {recording.record}"
        yield f"        expr: {json.dumps(recording.expr)}"
    yield "  - name: kvledger.alerts"
    yield "    rules:"
    for alert in ALERTS:
        yield f"      - alert: {alert.alert}"
        yield f"        expr: {json.dumps(alert.expr)}"
        yield f"        for: {alert.wait}"
        yield "        labels:"
        yield f"          severity: {alert.severity}"
        yield "        annotations:"
        yield f"          summary: {json.dumps(alert.summary)}"
        yield f"          description: {json.dumps(alert.runbook)}"


def write(folder: Path) -> Path:
    """Write the rule file into ``folder``, which is made."""
    return put(folder, FILE, text())


def markdown() -> str:
    """docs/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "Made by `python -m kvledger.dashboards.rules --markdown`; do not edit.",
        "",
        "`kvledger dashboards rules DIR` writes them, with the recording rules, as one file for",
        "Prometheus's `rule_files`. What each means and what to do stands in its `description` too.",
    ]
    for alert in ALERTS:
        held = "at once" if alert.wait == "0m" else f"after {alert.wait}"
        lines += ["", f"## {alert.alert}", "", f"*{alert.severity}*, {held}, while `{alert.expr}`.", ""]
        lines.append(alert.runbook)
    lines += ["", "## Recorded series", "", "| series | is |", "|---|---|"]
    lines += [f"| `{row.record}` | `{row.expr.replace('|', chr(92) + '|')}` |" for row in RECORDINGS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown() if sys.argv[1:] == ["--markdown"] else text(), end="")
