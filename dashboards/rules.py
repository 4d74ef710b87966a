"""Recording and alert rules for Prometheus, each alert with what to do about it.

Names of recorded series are ``level:metric:operation``. Alerts fire on findings, on *unexplained* drift, and
on everything that makes an absence of findings meaningless: no engine observed, events lost, a sidecar that
lags or is gone, and on what users feel: fewer hits, preemptions, slow first tokens. Drift with a known cause
fires no alert. ``generated/`` holds the committed
copy, which `make docs` writes.

https://prometheus.io/docs/practices/rules/ and .../alerting/
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from ..audit.checks.kinds import KINDS, Kind
from ..audit.checks.registry import catalogue
from .boards import put

FILE = "kvledger-rules.yaml"
RATE = "5m"


class Recording(NamedTuple):
    """One recorded series."""

    record: str
    expr: str


class Alert(NamedTuple):
    """One alert. ``runbook`` says what the alert means, then what to do."""

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
        "model:kvledger_prompt_tokens_cached:ratio_rate1h",
        "sum by (job, model_name) "
        '(avg_over_time(model:kvledger_prompt_tokens:rate5m{source=~"local|external"}[1h])) / '
        "(sum by (job, model_name) (avg_over_time(model:kvledger_prompt_tokens:rate5m[1h])) > 0)",
    ),
    Recording(
        "engine:kvledger_turn_prompt_tokens_hit:ratio_rate1h",
        f"sum by ({ENGINE}) (rate(kvledger_turn_hit_tokens_total[1h])) / "
        f"(sum by ({ENGINE}) (rate(kvledger_turn_prompt_tokens_total[1h])) > 0)",
    ),
    Recording(
        "engine:kvledger_first_token_seconds:mean_rate5m",
        f"{_rate('kvledger_first_token_seconds_total', 'cause')} / on ({ENGINE}) group_left () "
        f"({_rate('kvledger_first_token_requests_total', '')} > 0)",
    ),
    Recording(
        "engine:kvledger_requests_preempted:ratio_rate5m",
        "1 - "
        + _rate('kvledger_request_preemptions_bucket{le=~"0|0.0"}', "")
        + f" / ({_rate('kvledger_request_preemptions_count', '')} > 0)",
    ),
    Recording(
        "model:kvledger_work_tokens_rework:ratio_rate5m",
        f'sum by (job, model_name) (engine:kvledger_work_tokens:rate5m{{kind="rework"}} {MODEL}) / '
        f"(sum by (job, model_name) (engine:kvledger_work_tokens:rate5m {MODEL}) > 0)",
    ),
)


def _of_kind(kind: Kind) -> Alert:
    """The alert for violations of one kind of invariants, with its words and what stops the harm."""
    rows = [row for row in catalogue().values() if row.kind is kind and row.severity == "violation"]
    ids = "|".join(row.id for row in rows)
    by_stop: dict[str, list[str]] = {}
    for row in rows:
        by_stop.setdefault(row.stop_now, []).append(row.id)
    stops = [f"{', '.join(named)}: {stop}" for stop, named in by_stop.items() if stop]
    if len(by_stop) == 1:
        stops = [stop for stop in by_stop if stop]
    return Alert(
        kind.alert,
        f'time() - kvledger_last_violation_timestamp_seconds{{severity="violation", id=~"{ids}"}} < 900',
        "0m",
        "critical",
        f"{{{{ $labels.engine }}}} {kind.wrong}: {{{{ $labels.id }}}}",
        " ".join([kind.means, *([f"What stops the harm now: {' '.join(stops)}"] if stops else []), _NEXT]),
    )


_NEXT = (
    "Read /findings of the sidecar and run `kvledger explain ID`; `kvledger show JOURNAL REQUEST` prints the "
    "account. docs/detection.md lists which releases have which defect: upgrade, or turn off the feature it "
    "names. The alert ends 15 minutes after the last finding."
)

ALERTS: tuple[Alert, ...] = (
    *map(_of_kind, KINDS),
    Alert(
        "KvledgerUnexplainedDrift",
        f'sum by ({ENGINE}, figure) (abs(kvledger_reconciliation_drift{{cause="unexplained"}})) > 0',
        "10m",
        "warning",
        "{{ $labels.engine }}: {{ $labels.figure }} differs by {{ $value }} tokens without a known cause",
        "The engine's own counter and the ledger differ by more than what was in flight around the "
        "scrape. On the board Compare, see which figure differs and since when. Check that --engine-url "
        "is the URL of the engine that writes this journal, not of a proxy in front of several engines. "
        "If it is, the release counts by a rule that kvledger does not know: keep the journal and report "
        "it.",
    ),
    Alert(
        "KvledgerNothingObserved",
        "sum by (job, instance) (kvledger_engine_observed) == 0 "
        "or kvledger_build_info unless on (job, instance) kvledger_engine_observed",
        "10m",
        "warning",
        "The sidecar {{ $labels.instance }} sees no observed engine",
        "Without an observed engine, an absence of findings proves nothing. Check that KVLEDGER_DIR is "
        "set in the engine's environment and names a folder on the sidecar's volume. Run `kvledger "
        "doctor` in that environment: it checks whether this release can be observed, and prints the "
        "reason if not. The engine's log has one line that begins with kvledger.",
    ),
    Alert(
        "KvledgerObservationLost",
        '(kvledger_engine_state{state=~"detached|failed"} == 1) and on (job, instance, engine) '
        "(time() - kvledger_last_event_timestamp_seconds < 3600)",
        "1m",
        "warning",
        "{{ $labels.engine }} is no longer observed ({{ $labels.state }})",
        "The hooks were removed while the engine ran: an observer kept failing (see the engine's log and "
        "`kvledger_hook_failures_total`), or someone detached kvledger. The engine still serves but is "
        "not audited. Restart it to observe it again, and report a failing hook.",
    ),
    Alert(
        "KvledgerHookFailures",
        f"sum by ({ENGINE}) (increase(kvledger_hook_failures_total[15m])) > 0",
        "0m",
        "warning",
        "Observers failed in {{ $labels.engine }}",
        "An observer raised an exception inside the engine; serving is not affected. The events it should "
        "have emitted are missing, so the accounts of that moment are unknown. After five failures a "
        "hook removes itself and the observation ends. The engine's log has the error: report it with the "
        "vLLM release.",
    ),
    Alert(
        "KvledgerEventsLost",
        f"sum by ({ENGINE}) (increase(kvledger_gaps_total[15m])) > 0",
        "0m",
        "warning",
        "Events of {{ $labels.engine }} were lost",
        "Accounts that were open become unknown, never violated. Usual causes: the journal's volume is "
        "full (its limit must be well above the journal's), the sidecar was down for longer than the "
        "journal keeps segments, or the engine was killed. docs/journal.md lists the reasons.",
    ),
    Alert(
        "KvledgerUnknownTokens",
        "engine:kvledger_audited_tokens_unknown:ratio_rate5m > 0.05",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the tokens of {{ $labels.engine }} are unknown",
        "So many tokens could not be checked that a clean verdict means little. Find the gaps: see "
        "KvledgerEventsLost.",
    ),
    Alert(
        "KvledgerSidecarLagging",
        "kvledger_journal_lag_seconds > 30",
        "5m",
        "warning",
        "The sidecar is {{ $value | humanizeDuration }} behind {{ $labels.engine }}",
        "All figures are this old. The sidecar lacks CPU (docs/performance.md shows what it needs), or "
        "its disk is slow. If the journal's oldest segments are removed before they are read, events are "
        "lost.",
    ),
    Alert(
        "KvledgerSidecarGone",
        "(up == 0) and on (job, instance) last_over_time(kvledger_build_info[1d])",
        "5m",
        "warning",
        "The sidecar {{ $labels.instance }} does not answer",
        "Nothing is lost yet: the journal keeps the engine's events up to its size limit, and the sidecar "
        "resumes where it stopped. It answers no scrape while it catches up. Look at its log and its "
        "memory limit.",
    ),
    Alert(
        "KvledgerSidecarLost",
        "sum by (job, instance, reason) "
        '(increase(kvledger_sidecar_losses_total{reason!="engine forgotten"}[15m])) > 0',
        "0m",
        "warning",
        "The sidecar {{ $labels.instance }} lost state: {{ $labels.reason }}",
        "Counters may have fallen, and the touched accounts are unknown. docs/sidecar.md explains each "
        "reason. If a segment was removed unread, the sidecar was down for too long or the journal's size "
        "limit is too small.",
    ),
    Alert(
        "KvledgerJournalUnreadable",
        "kvledger_sidecar_unreadable_journals > 0",
        "5m",
        "warning",
        "The sidecar {{ $labels.instance }} can't read {{ $value }} journals",
        "The engines that write these journals are not audited. The sidecar's log and its first page show "
        "the reason: often a newer kvledger wrote them, or the sidecar may not read their folder.",
    ),
    Alert(
        "KvledgerFiguresStandStill",
        "kvledger_sidecar_unread_journals > 0",
        "1m",
        "critical",
        "The sidecar {{ $labels.instance }} reads nothing of {{ $value }} live engines",
        "Engines write journals and the sidecar reads nothing of them, so their figures stand still. Their "
        "files were changed, or the sidecar can't follow them: its log and its first page name the journal. "
        "`kvledger audit` on the journal says what is damaged. An engine begins a new segment within a "
        "second where its files were removed or cut; restart the sidecar if the figures do not go on then.",
    ),
    Alert(
        "KvledgerCheckFailures",
        f"sum by ({ENGINE}) (increase(kvledger_check_failures_total[15m])) > 0",
        "0m",
        "info",
        "A check of kvledger itself failed",
        "This is a defect of kvledger: the invariant was not checked there. Keep the journal and report "
        "it with the output of `kvledger audit --debug`.",
    ),
    Alert(
        "KvledgerContentChanged",
        f'sum by ({ENGINE}) (increase(kvledger_content_blocks_total{{event=~"differed|unsealed"}}[15m])) > 0'
        f" or sum by ({ENGINE}) "
        '(increase(kvledger_content_moved_blocks_total{event=~".*_differed"}[15m])) > 0',
        "0m",
        "critical",
        "{{ $labels.engine }} has blocks whose KV is not what was computed",
        "Level content compared blocks with their fingerprints and found other bytes, a hit on a block that "
        "nobody was seen to fill, or a connector's load or store of other bytes: answers may be wrong. "
        "`kvledger audit` names the block, who filled it and who read it (content/changed, "
        "content/unsealed-hit, content/transfer, content/stored).",
    ),
    Alert(
        "KvledgerKVEventsLost",
        f"sum by ({ENGINE}) (increase(kvledger_kv_event_gaps_total[15m])) > 0",
        "0m",
        "warning",
        "Batches of the KV events of {{ $labels.engine }} were lost",
        "The recorder missed batches, and the publisher did not repeat them. A router that reads the same "
        "stream may have missed them too: its index then promises blocks that are gone, or does not know "
        "blocks that are cached. `kvledger audit` names these blocks (events/gap), `kvledger routing` the "
        "tokens. Give the engine a replay_endpoint and record-events --replay, and look at the network.",
    ),
    Alert(
        "KvledgerRework",
        "engine:kvledger_work_tokens_rework:ratio_rate5m > 0.2",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the work of {{ $labels.engine }} is rework",
        "`kvledger incident JOURNALS` names what changed. Tokens are computed again because their KV was "
        "discarded. The board Tokens shows the cause. "
        "`blocks` means preemptions: give the engine more KV-cache blocks, run fewer or shorter sequences "
        "at once, or add a connector that keeps preempted KV. `load_failed` means that the external "
        "store fails.",
    ),
    Alert(
        "KvledgerHitShareFell",
        "model:kvledger_prompt_tokens_cached:ratio_rate1h "
        "< 0.7 * (model:kvledger_prompt_tokens_cached:ratio_rate1h offset 1d > 0.05)",
        "15m",
        "warning",
        "The caches gave {{ $value | humanizePercentage }} of the prompt tokens of {{ $labels.model_name "
        "}} in the last hour, less than 70 % of the same hour yesterday",
        "`kvledger incident JOURNALS --since 1h --against yesterday` names the likeliest cause and what to "
        "run next; `kvledger why --by group` has the causes of the misses, and whose. A smaller pool "
        "evicts more, a new release or connector may hit by another rule, and a prompt that begins with "
        "a time or an id is never hit.",
    ),
    Alert(
        "KvledgerTurnHitShareFell",
        "engine:kvledger_turn_prompt_tokens_hit:ratio_rate1h "
        "< 0.7 * (engine:kvledger_turn_prompt_tokens_hit:ratio_rate1h offset 1d > 0.05)",
        "15m",
        "warning",
        "Turns of sessions on {{ $labels.engine }} hit {{ $value | humanizePercentage }} of their prompt "
        "tokens in the last hour, less than 70 % of the same hour yesterday",
        "`kvledger incident JOURNALS --since 1h --against yesterday` names what changed; `kvledger turns "
        "JOURNALS --since 1h` has the causes, the sessions that lost most, and what would help. `diverged`: "
        "prompts changed near their beginning. `evicted`: turns came back after their blocks were taken. "
        "`answer`: clients send answers back changed.",
    ),
    Alert(
        "KvledgerPreemptedRequests",
        "engine:kvledger_requests_preempted:ratio_rate5m > 0.1",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.engine }} were preempted",
        "`kvledger incident JOURNALS` names what changed; `kvledger summary JOURNALS` says what the "
        "preemptions cost, and how many more blocks would have avoided them. Give the engine more "
        "KV-cache blocks, or let fewer or shorter sequences run at once.",
    ),
    Alert(
        "KvledgerFirstTokenSlow",
        'engine:kvledger_first_token_seconds:mean_rate5m{cause!="prefill"} > 1',
        "15m",
        "warning",
        "Before their first token, requests of {{ $labels.engine }} spend {{ $value | humanizeDuration }}"
        " on average: {{ $labels.cause }}",
        "`kvledger incident JOURNALS` names what changed; `kvledger summary JOURNALS --since 1h` has the "
        "time to first token by cause. `queued`: the engine has more requests than it admits, and "
        "`kvledger_queued_seconds_total` says what ended the admissions. "
        "`preempted` and `prefill_again`: it has too few blocks. `remote_load` and `load_failed`: the "
        "connector's store is slow or fails. `ready`: loads end sooner than steps have room.",
    ),
    Alert(
        "KvledgerPromisedTokensVoid",
        "engine:kvledger_external_voided_tokens:ratio_rate5m > 0.05",
        "15m",
        "warning",
        "{{ $value | humanizePercentage }} of the tokens that the connector promised {{ $labels.engine }} "
        "were not loaded",
        "The connector promises tokens that are then not loaded. They are computed instead or, with the "
        "finding connector/promise-not-loaded, read from stale blocks. Check the store's health, and the "
        "connector's release in docs/detection.md.",
    ),
)


def text() -> str:
    """The rule file, as YAML."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Made by `kvledger dashboards rules`; do not edit."
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
    """Write the rule file into ``folder``, which is created."""
    return put(folder, FILE, text())


def markdown() -> str:
    """docs/alerts.md."""
    lines = [
        "# Alerts",
        "",
        "Made by `make docs`; do not edit.",
        "",
        "`kvledger dashboards rules DIR` writes them, with the recording rules, as one file for",
        "Prometheus's `rule_files`. Each alert's `description` holds the same text as below.",
    ]
    for alert in ALERTS:
        delay = "at once" if alert.wait == "0m" else f"after {alert.wait}"
        lines += ["", f"## {alert.alert}", "", f"*{alert.severity}*, {delay}, while `{alert.expr}`.", ""]
        lines.append(alert.runbook)
    lines += ["", "## Recorded series", "", "| series | expression |", "|---|---|"]
    lines += [f"| `{row.record}` | `{row.expr.replace('|', chr(92) + '|')}` |" for row in RECORDINGS]
    return "\n".join(lines) + "\n"
