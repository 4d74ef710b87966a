"""The rules in promtool's unit tests: when an alert fires, and when it does not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests import tools

from kvledger.audit.checks.registry import KINDS, catalogue
from kvledger.dashboards import deploy_files

IDENTITY = 'job="kvledger", instance="a:9464", engine="e"'
HERE = {"job": "kvledger", "instance": "a:9464"}
OF_ENGINE = HERE | {"engine": "e"}
OF_THREAD = HERE | {"thread": "otlp"}
OF_MODEL = {"job": "kvledger", "model_name": "m"}

ALERTS = [rule for rule in deploy_files.rules() if "alert" in rule]

Series = dict[str, str]
"""By series its values, a minute apart, in promtool's notation: start+increment x times."""


class Case:
    """Input series, and the labels with which one alert fires at a minute; None: it does not fire."""

    def __init__(self, alert: str, name: str, series: Series, at: str, fires: list[dict[str, str]]) -> None:
        self.alert = alert
        self.name = name
        self.series = series
        self.at = at
        self.fires = fires

    def __repr__(self) -> str:
        return f"{self.alert}: {self.name}"


def of(metric: str, labels: str = "") -> str:
    return f"{metric}{{{IDENTITY}{', ' + labels if labels else ''}}}"


INFO = 'kvledger_build_info{job="kvledger", instance="a:9464", version="1"}'
LAST = of("kvledger_last_violation_timestamp_seconds", 'id="tokens/negative", severity="violation"')
DRIFT = of("kvledger_last_violation_timestamp_seconds", 'id="tokens/set-once", severity="drift"')
FOUND = OF_ENGINE | {"id": "tokens/negative", "severity": "violation"}

ONE_OF_EACH_KIND = list(
    {row.kind: row for row in catalogue().values() if row.severity == "violation"}.values()
)


def of_id(id: str) -> str:
    return f'id="{id}", severity="violation"'


def hits(local: str) -> Series:
    """Of 100 prompt tokens a minute, those from the local prefix cache."""
    computed = local.replace("60x", "40x").replace("50x", "C").replace("30x", "70x").replace("C", "50x")
    return {
        of("kvledger_engine_info", 'model_name="m"'): "1x1700",
        of("kvledger_prompt_tokens_total", 'source="local"'): local,
        of("kvledger_prompt_tokens_total", 'source="computed"'): computed,
    }


def turn_hits(hit: str) -> Series:
    """Of 100 prompt tokens a minute of turns, those that were hit."""
    return {
        of("kvledger_turn_prompt_tokens_total"): "0+100x1700",
        of("kvledger_turn_hit_tokens_total"): hit,
    }


def preempted(never: str, requests: str) -> Series:
    return {
        of("kvledger_request_preemptions_bucket", 'le="0.0"'): never,
        of("kvledger_request_preemptions_count"): requests,
    }


def first_token(cause: str, seconds: str) -> Series:
    """The time of one cause; ten requests a minute."""
    return {
        of("kvledger_first_token_seconds_total", f'cause="{cause}"'): seconds,
        of("kvledger_first_token_requests_total"): "0+10x40",
    }


def reconciled(cause: str) -> str:
    return of("kvledger_reconciliation_drift", f'figure="local", cause="{cause}"')


def work(rework: str, first: str) -> Series:
    return {
        of("kvledger_work_tokens_total", 'kind="rework"'): rework,
        of("kvledger_work_tokens_total", 'kind="first_prompt"'): first,
    }


def voided(cause: str, tokens: str) -> Series:
    return {
        of("kvledger_external_voided_tokens_total", f'cause="{cause}"'): tokens,
        of("kvledger_external_promised_tokens_total"): "0+100x40",
    }


def audited(unknown: str) -> Series:
    return {
        of("kvledger_audited_tokens_total", 'verdict="unknown"'): unknown,
        of("kvledger_audited_tokens_total", 'verdict="clean"'): "0+100x40",
    }


LOST = of("kvledger_engine_state", 'state="failed"')
DEAD = of("kvledger_engine_state", 'state="dead"')
BLOCKS = of("kvledger_engine_setting", 'setting="blocks"')
CACHING = of("kvledger_engine_setting", 'setting="prefix_caching"')
STOPPED = of("kvledger_engine_state", 'state="stopped"')
SPOKE = of("kvledger_last_event_timestamp_seconds")
OBSERVED = of("kvledger_engine_observed")

LOSSES = 'kvledger_sidecar_losses_total{job="kvledger", instance="a:9464", reason="segment removed"}'
UNREAD = 'kvledger_sidecar_unread_journals{job="kvledger", instance="a:9464"}'
UNREADABLE = 'kvledger_sidecar_unreadable_journals{job="kvledger", instance="a:9464"}'
BEAT = 'kvledger_sidecar_thread_heartbeat_timestamp_seconds{job="kvledger", instance="a:9464", thread="otlp"}'
RESTARTS = 'kvledger_sidecar_thread_restarts_total{job="kvledger", instance="a:9464", thread="otlp"}'

CASES = [
    Case("KvledgerCountsWrong", "seen just now", {LAST: "_x5 290+0x30"}, "6m", [FOUND]),
    Case("KvledgerCountsWrong", "ends by itself", {LAST: "_x5 290+0x30"}, "25m", []),
    Case("KvledgerCountsWrong", "a drift is none", {DRIFT: "_x5 290+0x30"}, "6m", []),
    *(
        Case(
            kind.alert,
            f"{row.id} is of its kind",
            {of("kvledger_last_violation_timestamp_seconds", of_id(row.id)): "_x5 290+0x30"},
            "6m",
            [OF_ENGINE | {"id": row.id, "severity": "violation"}] if row.kind is kind else [],
        )
        for row in ONE_OF_EACH_KIND
        for kind in KINDS
    ),
    Case(
        "KvledgerUnexplainedDrift",
        "for ten minutes",
        {reconciled("unexplained"): "-7+0x30"},
        "12m",
        [OF_ENGINE | {"figure": "local"}],
    ),
    Case("KvledgerUnexplainedDrift", "for a moment", {reconciled("unexplained"): "0x5 7x3 0x20"}, "20m", []),
    Case("KvledgerUnexplainedDrift", "explained", {reconciled("aborted"): "7+0x30"}, "20m", []),
    Case("KvledgerNothingObserved", "none is", {INFO: "1x30", OBSERVED: "0x30"}, "12m", [HERE]),
    Case("KvledgerNothingObserved", "no journal yet", {INFO: "1x30"}, "12m", [HERE | {"version": "1"}]),
    Case("KvledgerNothingObserved", "one is", {INFO: "1x30", OBSERVED: "1x30"}, "12m", []),
    Case(
        "KvledgerNothingObserved",
        "restarted in time",
        {INFO: "1x30", OBSERVED: "1x5 0x5 1x20"},
        "20m",
        [],
    ),
    Case(
        "KvledgerObservationLost",
        "hooks removed",
        {LOST: "1x30", SPOKE: "60x30"},
        "5m",
        [OF_ENGINE | {"state": "failed"}],
    ),
    Case("KvledgerObservationLost", "long ago", {LOST: "1x90", SPOKE: "60x90"}, "80m", []),
    Case("KvledgerObservationLost", "it was shut down", {STOPPED: "1x30", SPOKE: "60x30"}, "5m", []),
    Case(
        "KvledgerContentChanged",
        "a block differs",
        {of("kvledger_content_blocks_total", 'event="differed"'): "0x5 1x5"},
        "7m",
        [OF_ENGINE],
    ),
    Case(
        "KvledgerContentChanged",
        "a load brings other bytes",
        {of("kvledger_content_moved_blocks_total", 'event="loaded_differed"'): "0x5 1x5"},
        "7m",
        [OF_ENGINE],
    ),
    Case(
        "KvledgerContentChanged",
        "all loads are equal",
        {of("kvledger_content_moved_blocks_total", 'event="loaded"'): "0+5x30"},
        "20m",
        [],
    ),
    Case(
        "KvledgerContentChanged",
        "all verified",
        {of("kvledger_content_blocks_total", 'event="verified"'): "0+5x30"},
        "20m",
        [],
    ),
    Case("KvledgerHookFailures", "one", {of("kvledger_hook_failures_total"): "0x5 1x5"}, "7m", [OF_ENGINE]),
    Case("KvledgerHookFailures", "none", {of("kvledger_hook_failures_total"): "0x30"}, "7m", []),
    Case(
        "KvledgerEventsLost",
        "a gap",
        {of("kvledger_gaps_total", 'size="known"'): "0x5 1x5"},
        "7m",
        [OF_ENGINE],
    ),
    Case("KvledgerEventsLost", "none", {of("kvledger_gaps_total", 'size="known"'): "3x30"}, "20m", []),
    Case("KvledgerKVEventsLost", "a gap", {of("kvledger_kv_event_gaps_total"): "0x5 1x5"}, "7m", [OF_ENGINE]),
    Case("KvledgerKVEventsLost", "none", {of("kvledger_kv_event_gaps_total"): "2x30"}, "20m", []),
    Case("KvledgerUnknownTokens", "a tenth", audited("0+11x40"), "30m", [OF_ENGINE]),
    Case("KvledgerUnknownTokens", "a hundredth", audited("0+1x40"), "30m", []),
    Case(
        "KvledgerSidecarLagging", "behind", {of("kvledger_journal_lag_seconds"): "60x20"}, "8m", [OF_ENGINE]
    ),
    Case("KvledgerSidecarLagging", "near", {of("kvledger_journal_lag_seconds"): "2x20"}, "8m", []),
    Case(
        "KvledgerSidecarGone",
        "down",
        {INFO: "1x10", 'up{job="kvledger", instance="a:9464"}': "1x10 0x20"},
        "20m",
        [HERE],
    ),
    Case(
        "KvledgerSidecarGone",
        "something else is down",
        {INFO: "1x30", 'up{job="other", instance="b:80"}': "0x30"},
        "20m",
        [],
    ),
    Case("KvledgerCheckFailures", "one", {of("kvledger_check_failures_total"): "0x5 1x5"}, "7m", [OF_ENGINE]),
    Case(
        "KvledgerSidecarLost", "a segment", {LOSSES: "0x5 1x5"}, "7m", [HERE | {"reason": "segment removed"}]
    ),
    Case("KvledgerSidecarLost", "nothing", {LOSSES: "2x30"}, "20m", []),
    Case("KvledgerJournalUnreadable", "one", {UNREADABLE: "1x20"}, "8m", [HERE]),
    Case("KvledgerJournalUnreadable", "for a moment", {UNREADABLE: "0x5 1x3 0x20"}, "9m", []),
    Case("KvledgerFiguresStandStill", "one", {UNREAD: "0x3 1x20"}, "6m", [HERE]),
    Case("KvledgerFiguresStandStill", "none", {UNREAD: "0x20"}, "6m", []),
    Case("KvledgerFiguresStandStill", "for a moment", {UNREAD: "0x3 1 0x20"}, "6m", []),
    Case("KvledgerSidecarThreadDead", "silent", {BEAT: "0x20"}, "5m", [OF_THREAD]),
    Case("KvledgerSidecarThreadDead", "works", {BEAT: "0+60x20"}, "5m", []),
    Case("KvledgerSidecarThreadDead", "fails again", {RESTARTS: "0+1x20"}, "10m", [OF_THREAD]),
    Case("KvledgerSidecarThreadDead", "failed once", {RESTARTS: "0x3 1x20"}, "10m", []),
    Case("KvledgerCheckFailures", "none", {of("kvledger_check_failures_total"): "0x30"}, "7m", []),
    Case("KvledgerRework", "a third", work("0+50x40", "0+100x40"), "30m", [OF_ENGINE]),
    Case("KvledgerRework", "a tenth", work("0+10x40", "0+90x40"), "30m", []),
    Case("KvledgerRework", "no work at all", work("7x40", "9x40"), "30m", []),
    Case("KvledgerHitShareFell", "to a half of yesterday", hits("0+60x1440 0+30x180"), "26h", [OF_MODEL]),
    Case("KvledgerHitShareFell", "a little", hits("0+60x1440 0+50x180"), "26h", []),
    Case("KvledgerHitShareFell", "no yesterday", hits("0+30x180"), "2h", []),
    Case("KvledgerHitShareDropped", "to a half", hits("0+60x60 0+30x60"), "75m", [OF_MODEL]),
    Case("KvledgerHitShareDropped", "a little", hits("0+60x60 0+45x60"), "75m", []),
    Case("KvledgerHitShareDropped", "it was low", hits("0+3x60 0+1x60"), "75m", []),
    Case(
        "KvledgerSettingChanged",
        "blocks",
        {BLOCKS: "300x20 70x20"},
        "25m",
        [OF_ENGINE | {"setting": "blocks"}],
    ),
    Case("KvledgerSettingChanged", "none", {BLOCKS: "300x40"}, "25m", []),
    Case(
        "KvledgerPrefixCachingOff",
        "off",
        {CACHING: "0x20", OBSERVED: "1x20"},
        "10m",
        [OF_ENGINE | {"setting": "prefix_caching"}],
    ),
    Case("KvledgerPrefixCachingOff", "on", {CACHING: "1x20", OBSERVED: "1x20"}, "10m", []),
    Case(
        "KvledgerPrefixCachingOff", "an engine that is gone", {CACHING: "0x20", OBSERVED: "0x20"}, "10m", []
    ),
    Case(
        "KvledgerEngineDied",
        "killed",
        {DEAD: "0x5 1x20", SPOKE: "60x30"},
        "10m",
        [OF_ENGINE | {"state": "dead"}],
    ),
    Case("KvledgerEngineDied", "another came", {DEAD: "0x5 1 0x20", SPOKE: "60x30"}, "10m", []),
    Case("KvledgerEngineDied", "long ago", {DEAD: "1x90", SPOKE: "60x90"}, "80m", []),
    Case("KvledgerTurnHitShareFell", "to a half", turn_hits("0+80x1440 115200+40x180"), "26h", [OF_ENGINE]),
    Case("KvledgerTurnHitShareFell", "a little", turn_hits("0+80x1440 115200+70x180"), "26h", []),
    Case("KvledgerTurnHitShareFell", "no yesterday", turn_hits("0+40x180"), "2h", []),
    Case("KvledgerPreemptedRequests", "a third", preempted("0+20x40", "0+30x40"), "30m", [OF_ENGINE]),
    Case("KvledgerPreemptedRequests", "a twentieth", preempted("0+19x40", "0+20x40"), "30m", []),
    Case("KvledgerPreemptedRequests", "no requests", preempted("3x40", "9x40"), "30m", []),
    Case(
        "KvledgerFirstTokenSlow",
        "queued for two seconds",
        first_token("queued", "0+20x40"),
        "30m",
        [OF_ENGINE | {"cause": "queued"}],
    ),
    Case("KvledgerFirstTokenSlow", "queued for a tenth", first_token("queued", "0+1x40"), "30m", []),
    Case("KvledgerFirstTokenSlow", "long prefills", first_token("prefill", "0+90x40"), "30m", []),
    Case("KvledgerPromisedTokensVoid", "a tenth", voided("failed", "0+10x40"), "30m", [OF_ENGINE]),
    Case("KvledgerPromisedTokensVoid", "preempted first", voided("preempted", "0+10x40"), "30m", []),
]


def as_tested(case: Case) -> dict[str, Any]:
    """One promtool test: which alerts fire at an instant."""
    (alert,) = [row for row in ALERTS if row["alert"] == case.alert]
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}", alertstate="firing"}}',
                "eval_time": case.at,
                "exp_samples": [
                    {
                        "labels": as_series("ALERTS", labels | identity(alert)),
                        "value": 1,
                    }
                    for labels in case.fires
                ],
            }
        ],
    }


def identity(alert: dict[str, Any]) -> dict[str, str]:
    return {"alertname": alert["alert"], "alertstate": "firing", "severity": alert["labels"]["severity"]}


def as_series(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


@pytest.fixture(scope="module")
def promtool() -> Path:
    return tools.debian("prometheus", "promtool")


def run(promtool: Path, folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    deploy_files.write_rules(folder)
    stated = {"rule_files": [deploy_files.FILE], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.json").write_text(json.dumps(stated))
    return subprocess.run(
        [promtool, "test", "rules", "tests.json"], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.programs
def test_promtool_accepts_the_rule_file(promtool: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", deploy_files.write_rules(tmp_path)], capture_output=True, text=True
    )

    assert 0 == done.returncode, done.stderr
    assert f"{len(deploy_files.rules())} rules found" in done.stdout


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_alert(promtool: Path, tmp_path: Path, case: Case) -> None:
    done = run(promtool, tmp_path, [as_tested(case)])

    assert 0 == done.returncode, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    names = {alert["alert"] for alert in ALERTS}

    assert names == {case.alert for case in CASES if case.fires}
    assert names == {case.alert for case in CASES if not case.fires}


@pytest.mark.programs
def test_hit_rates_are_recorded_by_engine_and_by_model(promtool: Path, tmp_path: Path) -> None:
    series = {
        of("kvledger_engine_info", 'model_name="m"'): "1x20",
        of("kvledger_prompt_tokens_total", 'source="local"'): "0+20x20",
        of("kvledger_prompt_tokens_total", 'source="external"'): "0+10x20",
        of("kvledger_prompt_tokens_total", 'source="computed"'): "0+70x20",
    }
    by_engine = "engine:kvledger_prompt_tokens_cached:ratio_rate5m"
    by_model = "model:kvledger_prompt_tokens_cached:ratio_rate5m"
    asked = [
        (by_engine, as_series(by_engine, OF_ENGINE)),
        (by_model, as_series(by_model, {"job": "kvledger", "model_name": "m"})),
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": f"round({expr}, 0.001)", "eval_time": "15m", "exp_samples": [
                {"labels": labels.partition("{")[1] + labels.partition("{")[2], "value": 0.3}
            ]}
            for expr, labels in asked
        ],
    }  # fmt: skip

    done = run(promtool, tmp_path, [test])

    assert 0 == done.returncode, done.stdout + done.stderr
