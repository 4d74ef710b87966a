"""The board *Compare*: the engine's own counters and the ledger's figures, side by side."""

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

TITLE = "kvledger: Compare"
UID = "kvledger-compare"
DESCRIPTION = "The engine's own counters and the ledger's figures, with the cause of every difference."

NOW = PanelRow(
    "Now",
    (
        Panel(
            "Unexplained",
            "Tokens by which the engine's counters differ from the ledger without a known cause, beyond "
            "what was in flight around the scrape. Anything above 0 is a fault of the engine or of "
            "kvledger.",
            "stat",
            (
                Query(
                    'sum(abs(kvledger_reconciliation_drift{@engine, cause="unexplained"}))',
                    now=True,
                ),
            ),
            width=6,
            height=5,
            steps=GOOD_IS_NONE,
            words={"0": ("none", GREEN)},
        ),
        Panel(
            "Engines scraped",
            "Share of engines whose own metrics could be scraped last time. Engines without --engine-url "
            "are not counted.",
            "stat",
            (Query("avg(kvledger_reconciliation_up{@engine})", now=True),),
            unit="percentunit",
            width=6,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
        Panel(
            "Last scrape",
            "Age of the oldest last scrape of an engine's own metrics.",
            "stat",
            (
                Query(
                    "max(time() - kvledger_reconciliation_scrape_timestamp_seconds{@engine})",
                    now=True,
                ),
            ),
            unit="s",
            width=6,
            height=5,
            steps=((None, GREEN), (60, AMBER), (300, RED)),
        ),
        Panel(
            "Compared since",
            "How long the comparison has been running. It restarts when the engine or the sidecar restarts.",
            "stat",
            (
                Query(
                    "time() - max(kvledger_reconciliation_baseline_timestamp_seconds{@engine})",
                    now=True,
                ),
            ),
            unit="s",
            width=6,
            height=5,
        ),
        Panel(
            "Figure by figure",
            "For each of the engine's counters: its increase since the comparison began, the ledger's "
            "increase, the difference, and the part of it without a known cause. The causes are below.",
            "table",
            (
                Query("sum by (engine, figure) (kvledger_reconciliation_engine{@engine})", now=True),
                Query("sum by (engine, figure) (kvledger_reconciliation_ledger{@engine})", now=True),
                Query("sum by (engine, figure) (kvledger_reconciliation_drift{@engine})", now=True),
                Query(
                    'sum by (engine, figure) (kvledger_reconciliation_drift{@engine, cause="unexplained"})',
                    now=True,
                ),
            ),
            unit="locale",
            width=24,
            height=9,
            columns=(
                ("engine", "Engine"),
                ("figure", "Figure"),
                ("Value #A", "Engine"),
                ("Value #B", "Ledger"),
                ("Value #C", "Difference"),
                ("Value #D", "Unexplained"),
            ),
        ),
    ),
)

OVER_TIME = PanelRow(
    "Over time",
    (
        Panel(
            "Difference by cause",
            "The engine's figure minus the ledger's. Named causes are known rules of the release (failed "
            "loads counted as external, aborted requests, session chunks); only `unexplained` is a fault.",
            "timeseries",
            (
                Query(
                    "sum by (figure, cause) (kvledger_reconciliation_drift{@engine}) != 0 or "
                    "0 * sum by (figure) (kvledger_reconciliation_engine{@engine})",
                    "{{figure}}: {{cause}}",
                ),
            ),
            unit="locale",
            width=12,
            height=9,
            least=None,
        ),
        Panel(
            "Unexplained by engine",
            "Which engine differs without a known cause. Look up its release in docs/releases.md.",
            "timeseries",
            (
                Query(
                    'sum by (engine, figure) (kvledger_reconciliation_drift{@engine, cause="unexplained"})',
                    "{{engine}}: {{figure}}",
                ),
            ),
            unit="locale",
            width=12,
            height=9,
            least=None,
        ),
        Panel(
            "The engine's figures",
            "Increase of the engine's own counters.",
            "timeseries",
            (
                Query(
                    "sum by (engine, figure) (kvledger_reconciliation_engine{@engine})",
                    "{{engine}}: {{figure}}",
                ),
            ),
            unit="locale",
            width=12,
            height=9,
        ),
        Panel(
            "The ledger's figures",
            "Increase of the ledger's figures for the same counters.",
            "timeseries",
            (
                Query(
                    "sum by (engine, figure) (kvledger_reconciliation_ledger{@engine})",
                    "{{engine}}: {{figure}}",
                ),
            ),
            unit="locale",
            width=12,
            height=9,
        ),
    ),
)

PLAN = PanelRow(
    "Plan and settlement",
    (
        Panel(
            "Local tokens, planned and settled",
            "Planned: the local hit of the first admission, which current vLLM releases report. Settled: "
            "what was really hit first.",
            "timeseries",
            (
                Query(
                    'sum(rate(kvledger_planned_prompt_tokens_total{@engine, source="local"}'
                    "[$__rate_interval]))",
                    "planned",
                ),
                Query(
                    'sum(rate(kvledger_prompt_tokens_total{@engine, source="local"}[$__rate_interval]))',
                    "settled",
                ),
            ),
            unit=TOKENS_PER_SECOND,
        ),
        Panel(
            "External tokens, planned and settled",
            "Planned: promised at the first admission. Settled: really loaded. The gap is what the "
            "engine's metrics credit to the store although the store did not deliver it.",
            "timeseries",
            (
                Query(
                    'sum(rate(kvledger_planned_prompt_tokens_total{@engine, source="external"}'
                    "[$__rate_interval]))",
                    "planned",
                ),
                Query(
                    'sum(rate(kvledger_prompt_tokens_total{@engine, source="external"}[$__rate_interval]))',
                    "settled",
                ),
            ),
            unit=TOKENS_PER_SECOND,
        ),
        Panel(
            "Negative planned tokens",
            "Planned splits with a negative figure, which vLLM before 0.20 could produce; its own "
            "counters reject or clamp them. Any value is a fault.",
            "timeseries",
            (
                Query(
                    "sum by (source) "
                    "(rate(kvledger_planned_negative_tokens_total{@engine}[$__rate_interval]))",
                    "{{source}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
        ),
    ),
)

ROWS = (NOW, OVER_TIME, PLAN)
