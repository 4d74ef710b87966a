"""The board *Trust*: can the figures be relied on? Green or red first, then the reasons."""

from __future__ import annotations

from .panels import (
    AMBER,
    GOOD_IS_NONE,
    GREEN,
    RED,
    TOKENS_PER_SECOND,
    Panel,
    PanelRow,
    Query,
)

TITLE = "kvledger: Trust"
UID = "kvledger-trust"
DESCRIPTION = "Whether the figures can be trusted: findings, drift, unknown tokens, health of the sidecar."

EXPLAIN = "${docs}/${__data.fields.Invariant}"
"""The address that explains the invariant of a table row."""

AT_A_GLANCE = PanelRow(
    "At a glance",
    (
        Panel(
            "Violations",
            "Invariants violated in the time range, counted once per engine. The engine's accounting is "
            "wrong. Look at the findings below, then run `kvledger explain ID`.",
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
            "Needs the sidecar's --engine-url. The board Compare shows which figure differs.",
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
            "Unknown tokens",
            "Share of tokens of requests that could not be checked because events were lost. Look for "
            "gaps below; the usual causes are a full disk and a stopped sidecar.",
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
            "Engines under observation now. 0 means that nothing is audited, so an absence of findings "
            "proves nothing. Run `kvledger doctor` in the engine's environment.",
            "stat",
            (Query("sum(kvledger_engine_observed{@engine})", now=True),),
            unit="none",
            width=4,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
        Panel(
            "Journal lag",
            "How far the sidecar is behind the events that the engines wrote, for the slowest journal. "
            "All figures are this old.",
            "stat",
            (Query("max(kvledger_journal_lag_seconds{@engine})", now=True),),
            unit="s",
            width=4,
            height=5,
            steps=((None, GREEN), (5, AMBER), (30, RED)),
        ),
        Panel(
            "Sidecars up",
            "Share of the selected sidecars that answer their scrapes.",
            "stat",
            (Query("avg(up{@sidecar})", now=True),),
            unit="percentunit",
            width=4,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
    ),
)

FINDINGS = PanelRow(
    "Findings",
    (
        Panel(
            "Last findings",
            "Violated invariants, latest first. A violation means that the engine is wrong; a drift means "
            "that it counts by a deliberate but misleading rule, or that two computations of one block "
            "differ. The invariant's name links to its explanation if the variable Explanations holds a "
            "sidecar address that your browser reaches.",
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
            "Findings per second of each invariant. A steady line is one fault that repeats; a single "
            "step is one request.",
            "timeseries",
            (
                Query(
                    "sum by (id, severity) (rate(kvledger_violations_total{@engine}[$__rate_interval])) > 0 "
                    "or (label_replace(0 * sum(kvledger_build_info{@sidecar}), "
                    '"severity", "no findings", "", "") unless on () '
                    "sum(rate(kvledger_violations_total{@engine}[$__rate_interval])) > 0)",
                    "{{severity}} {{id}}",
                ),
            ),
            unit="cps",
            width=10,
            height=9,
        ),
    ),
)

COVERAGE = PanelRow(
    "Coverage",
    (
        Panel(
            "Engines",
            "Every known engine: its release, the adapter that observes it, and the level of detail. An "
            "engine that is missing here is not audited.",
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
            unit=TOKENS_PER_SECOND,
            width=10,
            stack="normal",
            colours={"clean": GREEN, "violated": RED, "unknown": AMBER},
        ),
    ),
)

WEIGHTS = PanelRow(
    "Weights",
    (
        Panel(
            "Output tokens over older KV",
            "Share of output tokens whose step read KV of older weights than its own. They are those of no "
            "model. 0 is right for a trainer that resets the prefix cache after each change.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_suspect_output_tokens_total{@engine}[$__rate_interval]))"
                    " / (sum by (engine) "
                    "(rate(kvledger_output_tokens_total{@engine}[$__rate_interval])) > 0)",
                    "{{engine}}",
                ),
            ),
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Changes of weights",
            "Changes per second, by how they are known. A possible change is a call that may have changed "
            "weights; level content tells.",
            "timeseries",
            (
                Query(
                    "sum by (kind) (rate(kvledger_weights_changes_total{@engine}[$__rate_interval]))",
                    "{{kind}}",
                ),
            ),
            unit="cps",
            width=12,
        ),
    ),
)

HEALTH = PanelRow(
    "Health of the sidecar and the hooks",
    (
        Panel(
            "Journal lag by engine",
            "Age of the oldest event that has not been read. More than a few seconds means that the "
            "sidecar lacks CPU.",
            "timeseries",
            (Query("max by (instance, engine) (kvledger_journal_lag_seconds{@engine})", "{{engine}}"),),
            unit="s",
            width=6,
        ),
        Panel(
            "Events lost",
            "Gaps in the journals per second, and the lost events of the gaps whose size is known. The "
            "touched requests become unknown, never violated.",
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
            width=6,
        ),
        Panel(
            "Failures of hooks and checks",
            "A hook that keeps failing removes itself, and the engine runs on unobserved. A failing check "
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
            width=6,
        ),
        Panel(
            "Time in hooks",
            "Time that the hooks take per engine step, measured on a sample of steps. An engine step "
            "takes milliseconds.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_hook_sampled_seconds_total{@engine}[$__rate_interval]))"
                    " / (sum by (engine) "
                    "(rate(kvledger_hook_sampled_steps_total{@engine}[$__rate_interval])) > 0)",
                    "{{engine}}",
                ),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Events read",
            "Events per second that the hooks emit. An unchanged step is only counted, so steady decoding "
            "emits almost nothing.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_events_total{@engine}[$__rate_interval]))", "{{engine}}"
                ),
            ),
            unit="cps",
            width=6,
        ),
        Panel(
            "Time since the last event",
            "An observed engine that steps emits its state periodically, even when idle. Check an engine "
            "that is under load and emits nothing for long.",
            "timeseries",
            (
                Query(
                    "time() - max by (engine) (kvledger_last_event_timestamp_seconds{@engine})", "{{engine}}"
                ),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "State lost by the sidecar",
            "How often the sidecar lost state: a damaged checkpoint, or a segment that was removed before "
            "it was read. No figure is invented for it.",
            "timeseries",
            (
                Query(
                    "sum by (instance, reason) "
                    "(increase(kvledger_sidecar_losses_total{@sidecar}[$__rate_interval]))",
                    "{{reason}}, {{instance}}",
                ),
                Query("sum by (instance) (kvledger_sidecar_unreadable_journals{@sidecar})", "unreadable now"),
                Query("sum by (instance) (kvledger_sidecar_unread_journals{@sidecar})", "live and not read"),
            ),
            unit="none",
            width=6,
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
            width=6,
        ),
    ),
)


def _other_kv(title: str, description: str, series: str) -> Panel:
    """How many blocks of a counter had other KV in the time range."""
    return Panel(
        title,
        description,
        "stat",
        (Query(f"sum(increase({series}[$__range]))", now=True),),
        unit="none",
        width=6,
        steps=GOOD_IS_NONE,
        words={"0": ("none", GREEN)},
    )


CONTENTS = PanelRow(
    "Contents (engines that record at level content)",
    (
        _other_kv(
            "Hit blocks with other KV",
            "Hit blocks whose bytes were not those that were sealed, or that nobody was seen to fill, in the "
            "time range. `kvledger audit` names the block and both requests.",
            'kvledger_content_blocks_total{@engine, event=~"differed|unsealed"}',
        ),
        Panel(
            "Blocks sealed, verified and scrubbed",
            "Blocks per second whose bytes were fingerprinted: when they are full, when requests hit them, "
            "and now and then at rest.",
            "timeseries",
            (
                Query(
                    "sum by (event) (rate(kvledger_content_blocks_total{@engine}[$__rate_interval]))",
                    "{{event}}",
                ),
            ),
            unit="cps",
            width=9,
        ),
        Panel(
            "Time of the checks",
            "Share of the time in which steps waited for the fingerprints. KVLEDGER_CONTENT_SHARE lowers it.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_content_seconds_total{@engine}[$__rate_interval]))",
                    "{{engine}}",
                ),
            ),
            unit="percentunit",
            width=9,
        ),
        _other_kv(
            "Moved blocks with other KV",
            "Blocks that a connector loaded with other bytes than were stored, or was handed with other "
            "bytes than were sealed, in the time range. `kvledger audit` names the layers and both requests.",
            'kvledger_content_moved_blocks_total{@engine, event=~".*_differed"}',
        ),
        Panel(
            "Blocks moved by connectors",
            "Blocks per second that a connector stored and loaded, by what the comparison of both ends "
            "showed. Blocks are not compared if another engine may have stored them, or if nobody saw the "
            "store.",
            "timeseries",
            (
                Query(
                    "sum by (event) (rate(kvledger_content_moved_blocks_total{@engine}[$__rate_interval]))",
                    "{{event}}",
                ),
            ),
            unit="cps",
            width=18,
        ),
    ),
    collapsed=True,
)

KV_EVENTS = PanelRow(
    "KV events (engines that publish them, with a recording)",
    (
        Panel(
            "Lost batches of KV events",
            "Batches in the time range that were not received and that nobody repeated. A router that reads "
            "the same stream has a wrong index from then on; `kvledger audit` names the blocks in them.",
            "stat",
            (Query("sum(increase(kvledger_kv_event_lost_batches_total{@engine}[$__range]))", now=True),),
            unit="none",
            width=6,
            steps=GOOD_IS_NONE,
            words={"0": ("none", GREEN)},
        ),
        Panel(
            "Announced changes",
            "Stored and removed blocks, and clearings of the cache, that engines announced per second.",
            "timeseries",
            (
                Query(
                    "sum by (kind) (rate(kvledger_kv_event_blocks_total{@engine}[$__rate_interval]))",
                    "{{kind}}",
                ),
            ),
            unit="cps",
            width=9,
        ),
        Panel(
            "Changes announced, and not compared",
            "Changes of the caches per second that a KV event announced, and those that could not be "
            "compared: outside the recording or the journal, or too many. Differences are findings.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_kv_event_agreed_changes_total{@engine}"
                    "[$__rate_interval]))",
                    "announced, {{engine}}",
                ),
                Query(
                    "sum by (engine) (rate(kvledger_kv_event_not_compared_total{@engine}[$__rate_interval]))",
                    "not compared, {{engine}}",
                ),
            ),
            unit="cps",
            width=9,
        ),
    ),
    collapsed=True,
)

ROWS = (AT_A_GLANCE, FINDINGS, COVERAGE, WEIGHTS, CONTENTS, KV_EVENTS, HEALTH)
