"""The board *Compare*: what the engine says of itself beside the ledger, figure by figure."""

from __future__ import annotations

from .panels import AMBER, GOOD_IS_NONE, GREEN, RED, Panel, Query, Row

TITLE = "kvledger: Compare"
UID = "kvledger-compare"
SAYS = "The engine's own counters beside the ledger's figures, every difference named."

NOW = Row(
    "Now",
    (
        Panel(
            "Unexplained",
            "Tokens by which the engine's figures differ from the ledger's without a known cause, and beyond "
            "what was under way around the scrape. Anything but none is a fault of one of the two.",
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
            "Engines read",
            "The share of engines whose own metrics could be read at the last try. An engine without "
            "--engine-url is not among them.",
            "stat",
            (Query("avg(kvledger_reconciliation_up{@engine})", now=True),),
            unit="percentunit",
            width=6,
            height=5,
            steps=((None, RED), (1, GREEN)),
        ),
        Panel(
            "Last read",
            "How long ago the engine's own metrics were last read, the oldest of them.",
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
            "Since when both are counted. The two begin anew when either side restarts.",
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
            "What each of the engine's own counters rose by since the two are compared, what the ledger "
            "holds of the same, and the difference. The causes are below.",
            "table",
            (
                Query("sum by (engine, figure) (kvledger_reconciliation_engine{@engine})", now=True),
                Query("sum by (engine, figure) (kvledger_reconciliation_ledger{@engine})", now=True),
                Query("sum by (engine, figure) (kvledger_reconciliation_drift{@engine})", now=True),
            ),
            unit="locale",
            width=24,
            height=9,
            columns=(
                ("engine", "Engine"),
                ("figure", "Figure"),
                ("Value #A", "The engine says"),
                ("Value #B", "The ledger holds"),
                ("Value #C", "Difference"),
            ),
        ),
    ),
)

OVER_TIME = Row(
    "Over time",
    (
        Panel(
            "Difference by cause",
            "The engine's figure less the ledger's. Named causes are rules of the release (failed loads "
            "counted as external, aborted requests, chunks of a session); only `unexplained` is a fault.",
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
            "Which engine differs without a known cause. Compare its release with the page on releases.",
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
            "What the engine's own counters rose by.",
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
            "What the ledger holds of the same.",
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

PLAN = Row(
    "Plan and settlement",
    (
        Panel(
            "Local tokens: planned, and settled",
            "The plan is the first admission's promise, what vLLM 0.26 and later report; the settlement is "
            "what truly came first.",
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
            unit="cps",
        ),
        Panel(
            "External tokens: planned, and settled",
            "Promised at the first admission, and truly loaded. The gap is what an operator believes the "
            "store served and it did not.",
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
            unit="cps",
        ),
        Panel(
            "Promises below zero",
            "Promises that a release made of fewer than no tokens (vLLM before 0.20 could): its own counters "
            "refuse them or are clamped. None is right.",
            "timeseries",
            (
                Query(
                    "sum by (source) "
                    "(rate(kvledger_planned_negative_tokens_total{@engine}[$__rate_interval]))",
                    "{{source}}",
                ),
            ),
            unit="cps",
        ),
    ),
)

ROWS = (NOW, OVER_TIME, PLAN)
