"""The board *Trust*: can these figures be relied on? Green or red at a glance, then why."""

from __future__ import annotations

from .panels import AMBER, GOOD_IS_NONE, GREEN, RED, Panel, Query, Row

TITLE = "kvledger: Trust"
UID = "kvledger-trust"
SAYS = "Whether cache figures can be trusted: findings, drift, what is unknown, health of the sidecar."

EXPLAIN = "${docs}/${__data.fields.Invariant}"
"""Where a table's invariant is explained."""

AT_A_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Violations",
            "Invariants that were seen broken in the time range, counted once an engine: its accounts are "
            "wrong. Look at the findings below, then `kvledger explain ID`.",
            "stat",
            (
                Query(
                    'count(kvledger_last_violation_timestamp_seconds{@engine, severity="violation"} > '
                    "time() - $__range_s) or 0 * sum(kvledger_build_info{@sidecar})",
                    now=True,
                ),
            ),
            unit="none",
            width=4,
            height=5,
            steps=GOOD_IS_NONE,
            words={"0": ("clean", GREEN)},
        ),
        Panel(
            "Unexplained drift",
            "Tokens by which the engine's own counters differ from the ledger without a known cause. "
            "Needs the sidecar's --engine-url. The board Compare shows which figure.",
            "stat",
            (
                Query(
                    'sum(abs(kvledger_reconciliation_drift{@engine, cause="unexplained"})) or '
                    "0 * sum(kvledger_build_info{@sidecar})",
                    now=True,
                ),
            ),
            width=4,
            height=5,
            steps=GOOD_IS_NONE,
            words={"0": ("none", GREEN)},
        ),
        Panel(
            "Tokens that are unknown",
            "The share of tokens whose requests lost events touched: they were not judged. "
            "Find the gaps below; a full disk and a stopped sidecar are the usual causes.",
            "stat",
            (
                Query(
                    'sum(increase(kvledger_audited_tokens_total{@engine, verdict="unknown"}[$__range])) / '
                    "(sum(increase(kvledger_audited_tokens_total{@engine}[$__range])) > 0) or "
                    "0 * sum(kvledger_build_info{@sidecar})",
                    now=True,
                ),
            ),
            unit="percentunit",
            width=4,
            height=5,
            steps=((None, GREEN), (0.001, AMBER), (0.05, RED)),
        ),
        Panel(
            "Engines observed",
            "Engines under observation now. None is red: nothing is audited, and silence means nothing. "
            "Run `kvledger doctor` in the engine's environment.",
            "stat",
            (Query("sum(kvledger_engine_observed{@engine})", now=True),),
            unit="none",
            width=4,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
        Panel(
            "Journal lag",
            "How far the slowest reading is behind what the engines wrote. Figures are as old as this.",
            "stat",
            (Query("max(kvledger_journal_lag_seconds{@engine})", now=True),),
            unit="s",
            width=4,
            height=5,
            steps=((None, GREEN), (5, AMBER), (30, RED)),
        ),
        Panel(
            "Sidecars up",
            "The share of the chosen sidecars that answer their scrapes.",
            "stat",
            (Query("avg(up{@sidecar})", now=True),),
            unit="percentunit",
            width=4,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
    ),
)

FINDINGS = Row(
    "Findings",
    (
        Panel(
            "Last findings",
            "Invariants that were seen broken, the latest first. A violation means that the engine is wrong; "
            "a drift, that it counts by a rule that misleads. An invariant's name leads to what it promises, "
            "if the variable Explanations holds a sidecar's address that your browser reaches.",
            "table",
            (
                Query(
                    "max by (instance, engine, id, severity) "
                    "(kvledger_last_violation_timestamp_seconds{@engine}) * 1000",
                    now=True,
                ),
            ),
            unit="none",
            width=14,
            height=9,
            columns=(
                ("Value", "Last seen"),
                ("severity", "Severity"),
                ("id", "Invariant"),
                ("engine", "Engine"),
                ("instance", "Sidecar"),
            ),
            units={"Last seen": "dateTimeAsIso"},
            links=(("Invariant", "What it promises", EXPLAIN),),
            newest_first="Last seen",
        ),
        Panel(
            "Findings by invariant",
            "How often a second each invariant was seen broken. A steady line is one fault met again and "
            "again; a step is one request.",
            "timeseries",
            (
                Query(
                    "sum by (id, severity) (rate(kvledger_violations_total{@engine}[$__rate_interval])) > 0 "
                    "or 0 * sum(kvledger_build_info{@sidecar})",
                    "{{severity}} {{id}}",
                ),
            ),
            unit="cps",
            width=10,
            height=9,
        ),
    ),
)

COVERAGE = Row(
    "Coverage",
    (
        Panel(
            "Engines",
            "What is known of every engine: its release, the adapter that observes it and how closely. "
            "An engine that is not here is not audited.",
            "table",
            (
                Query(
                    "max by (instance, engine, product, version, adapter, level, model_name, connector) "
                    "(kvledger_engine_info{@engine}) * on (instance, engine) group_left (state) "
                    "(max by (instance, engine, state) (kvledger_engine_state{@engine} == 1))",
                    now=True,
                ),
            ),
            unit="none",
            width=14,
            height=8,
            columns=(
                ("state", "State"),
                ("engine", "Engine"),
                ("model_name", "Model"),
                ("version", "Release"),
                ("adapter", "Adapter"),
                ("level", "Level"),
                ("connector", "Connector"),
                ("instance", "Sidecar"),
            ),
        ),
        Panel(
            "Audited tokens by verdict",
            "Prompt and output tokens of ended requests: clean, violated, or unknown because events were "
            "lost. No tokens while the engine serves means that nothing is audited.",
            "timeseries",
            (
                Query(
                    "sum by (verdict) (rate(kvledger_audited_tokens_total{@engine}[$__rate_interval]))",
                    "{{verdict}}",
                ),
            ),
            unit="cps",
            width=10,
            stack="normal",
            colours={"clean": GREEN, "violated": RED, "unknown": AMBER},
        ),
    ),
)

HEALTH = Row(
    "Health of the sidecar and the hooks",
    (
        Panel(
            "Journal lag by engine",
            "All that was written until so long ago has been read. Above some seconds the sidecar lacks CPU.",
            "timeseries",
            (Query("max by (instance, engine) (kvledger_journal_lag_seconds{@engine})", "{{engine}}"),),
            unit="s",
        ),
        Panel(
            "Events lost",
            "Gaps in the journals a second, and the events in them where their number is known. The requests "
            "they touched are unknown, never violated.",
            "timeseries",
            (
                Query(
                    "sum by (engine, size) (rate(kvledger_gaps_total{@engine}[$__rate_interval]))",
                    "gaps of {{size}} size, {{engine}}",
                ),
                Query(
                    "sum by (engine) (rate(kvledger_lost_events_total{@engine}[$__rate_interval]))",
                    "events, {{engine}}",
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Failures of hooks and checks",
            "A hook that keeps failing removes itself and the engine runs on unobserved; a check that fails "
            "is a defect of kvledger. Neither harms the engine; please report both.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_hook_failures_total{@engine}[$__rate_interval]))",
                    "hooks, {{engine}}",
                ),
                Query(
                    "sum by (engine) (rate(kvledger_check_failures_total{@engine}[$__rate_interval]))",
                    "checks, {{engine}}",
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Time in hooks",
            "What observing costs the engine's process in a step, from steps that are timed as a sample. An "
            "engine's step takes milliseconds.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_hook_sampled_seconds_total{@engine}[$__rate_interval]))"
                    " / sum by (engine) (rate(kvledger_hook_sampled_steps_total{@engine}[$__rate_interval]))",
                    "{{engine}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Events read",
            "What the hooks tell. A step that equals the one before is only counted, so steady decoding is "
            "nearly silent.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_events_total{@engine}[$__rate_interval]))", "{{engine}}"
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Since the last event",
            "Even an idle engine that is observed tells its state from time to time once it steps; an engine "
            "under load that is silent for long is worth a look.",
            "timeseries",
            (
                Query(
                    "time() - max by (engine) (kvledger_last_event_timestamp_seconds{@engine})", "{{engine}}"
                ),
            ),
            unit="s",
        ),
        Panel(
            "Lost by the sidecar",
            "How often what it knew before a restart was not there: a damaged checkpoint, a segment that was "
            "removed before it was read. No figure is made up for it.",
            "timeseries",
            (
                Query(
                    "sum by (instance, reason) "
                    "(increase(kvledger_sidecar_losses_total{@sidecar}[$__rate_interval]))",
                    "{{reason}}, {{instance}}",
                ),
                Query("sum by (instance) (kvledger_sidecar_unreadable_journals{@sidecar})", "unreadable now"),
            ),
            unit="none",
        ),
        Panel(
            "Age of the checkpoint",
            "How much a restarted sidecar would read again. It grows until the engine begins a new segment.",
            "timeseries",
            (
                Query(
                    "time() - max by (engine) (kvledger_checkpoint_timestamp_seconds{@engine})", "{{engine}}"
                ),
            ),
            unit="s",
        ),
    ),
)

ROWS = (AT_A_GLANCE, FINDINGS, COVERAGE, HEALTH)
