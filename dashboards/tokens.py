"""The board *Tokens*: where prompt tokens came from, what was done twice, and what preemption costs."""

from __future__ import annotations

from .panels import AMBER, BLUE, GREEN, PLAIN, RED, Panel, Query, Row

TITLE = "kvledger: Tokens"
UID = "kvledger-tokens"
SAYS = "Where prompt tokens came from, settled once a request; rework, external tokens, preemptions."

MODEL = "* on (job, instance, engine) group_left (model_name) kvledger_engine_info{@engine}"
"""Gives every series of an engine the name of its model."""

PROMPT = "kvledger_prompt_tokens_total{@engine}"
HITS = 'kvledger_prompt_tokens_total{@engine, source=~"local|external"}'
WORK = "kvledger_work_tokens_total{@engine}"
REWORK = 'kvledger_work_tokens_total{@engine, kind="rework"}'
SOURCES = {"local": GREEN, "external": BLUE, "computed": AMBER, "unattained": "text"}


def _share_of_range(part: str, whole: str) -> Query:
    return Query(f"sum(increase({part}[$__range])) / sum(increase({whole}[$__range]))", now=True)


def _share(part: str, whole: str, by: str, legend: str) -> Query:
    return Query(
        f"sum by ({by}) (rate({part}[$__rate_interval])) / sum by ({by}) (rate({whole}[$__rate_interval]))",
        legend,
    )


def _share_by_model(part: str, whole: str) -> Query:
    return Query(
        f"sum by (model_name) (rate({part}[$__rate_interval]) {MODEL}) / "
        f"sum by (model_name) (rate({whole}[$__rate_interval]) {MODEL})",
        "{{model_name}}",
    )


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({quantile}, "
            f"sum by (le) (rate({histogram}_bucket{{@engine}}[$__rate_interval])))",
            f"p{100 * quantile:g}",
        )
        for quantile in (0.5, 0.95, 0.99)
    )


RANGE = Row(
    "In the time range",
    (
        Panel(
            "Prompt tokens from a cache",
            "Local and external hits over all prompt tokens of requests that ended: the hit rate that is "
            "settled once a request and that no preemption changes.",
            "stat",
            (_share_of_range(HITS, PROMPT),),
            unit="percentunit",
            width=4,
            height=4,
            steps=PLAIN,
        ),
        Panel(
            "Local",
            "Prompt tokens found in the engine's own prefix cache, over all.",
            "stat",
            (_share_of_range('kvledger_prompt_tokens_total{@engine, source="local"}', PROMPT),),
            unit="percentunit",
            width=4,
            height=4,
        ),
        Panel(
            "External",
            "Prompt tokens that a connector loaded, over all; promised ones that never came are not in it.",
            "stat",
            (_share_of_range('kvledger_prompt_tokens_total{@engine, source="external"}', PROMPT),),
            unit="percentunit",
            width=4,
            height=4,
        ),
        Panel(
            "Rework",
            "Scheduled tokens whose KV had come to be before, over all that was scheduled: what preemptions, "
            "failed loads and resets cost. Above some per cent, add blocks or lower the number of sequences.",
            "stat",
            (_share_of_range(REWORK, WORK),),
            unit="percentunit",
            width=4,
            height=4,
            steps=((None, GREEN), (0.05, AMBER), (0.2, RED)),
        ),
        Panel(
            "Promised and not loaded",
            "External tokens that were promised and did not come, over all that were promised.",
            "stat",
            (
                Query(
                    "sum(increase(kvledger_external_voided_tokens_total{@engine}[$__range])) / "
                    "(sum(increase(kvledger_external_promised_tokens_total{@engine}[$__range])) > 0) or "
                    "0 * sum(kvledger_build_info{@sidecar})",
                    now=True,
                ),
            ),
            unit="percentunit",
            width=4,
            height=4,
            steps=((None, GREEN), (0.01, AMBER), (0.1, RED)),
        ),
        Panel(
            "Preemptions a request",
            "Preemptions over requests that ended.",
            "stat",
            (
                Query(
                    "sum(increase(kvledger_preemptions_total{@engine}[$__range])) / "
                    "sum(increase(kvledger_requests_total{@engine}[$__range]))",
                    now=True,
                ),
            ),
            width=4,
            height=4,
            steps=((None, GREEN), (0.1, AMBER), (1, RED)),
        ),
    ),
)

PROMPTS = Row(
    "Where prompt tokens came from",
    (
        Panel(
            "Prompt tokens by source",
            "Tokens a second of requests that ended, by where their KV first came from: the engine's own "
            "cache, a connector, or computed. Unattained ones never came to be, as of aborted requests.",
            "timeseries",
            (Query(f"sum by (source) (rate({PROMPT}[$__rate_interval]))", "{{source}}"),),
            unit="cps",
            stack="normal",
            colours=SOURCES,
        ),
        Panel(
            "Prompt tokens by source, shares",
            "The same, as shares of the whole.",
            "timeseries",
            (Query(f"sum by (source) (rate({PROMPT}[$__rate_interval]))", "{{source}}"),),
            unit="cps",
            stack="percent",
            colours=SOURCES,
        ),
        Panel(
            "Hit rate: settled, and as planned",
            "Planned is the promise of the first admission, which recent releases of vLLM report; settled is "
            "what truly came. Where they part, loads failed or requests were preempted in their prefill.",
            "timeseries",
            (
                Query(
                    f"sum(rate({HITS}[$__rate_interval])) / sum(rate({PROMPT}[$__rate_interval]))", "settled"
                ),
                Query(
                    'sum(rate(kvledger_planned_prompt_tokens_total{@engine, source=~"local|external"}'
                    "[$__rate_interval])) / "
                    "sum(rate(kvledger_planned_prompt_tokens_total{@engine}[$__rate_interval]))",
                    "planned",
                ),
            ),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Hit rate by engine",
            "Local and external hits over prompt tokens, settled. One engine below its peers has lost its "
            "cache or gets other traffic.",
            "timeseries",
            (_share(HITS, PROMPT, "engine", "{{engine}}"),),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Hit rate by model",
            "Local and external hits over prompt tokens, settled, by the model served.",
            "timeseries",
            (_share_by_model(HITS, PROMPT),),
            unit="percentunit",
            most=1,
        ),
        Panel(
            "Cached share of a request's prompt",
            "How many requests found which share of their prompt in a cache: two crowds, at 0 and near 1, "
            "have another remedy than one in the middle.",
            "heatmap",
            (
                Query(
                    "sum by (le) (increase(kvledger_request_cached_ratio_bucket{@engine}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Look-ups: hit rate as the engine counts",
            "Hits over queried tokens of every look-up, those of resumed requests and of attempts that led "
            "to nothing included, where the engine counts them. Not a share of prompts.",
            "timeseries",
            (
                Query(
                    "sum by (cache) (rate(kvledger_lookup_hit_tokens_total{@engine}[$__rate_interval])) / "
                    "sum by (cache) (rate(kvledger_lookup_queried_tokens_total{@engine}[$__rate_interval]))",
                    "{{cache}}",
                ),
            ),
            unit="percentunit",
            most=1,
        ),
    ),
)

EXTERNAL = Row(
    "External tokens",
    (
        Panel(
            "Promised and loaded",
            "External tokens a second that the connector promised, and those that came.",
            "timeseries",
            (
                Query(
                    "sum(rate(kvledger_external_promised_tokens_total{@engine}[$__rate_interval]))",
                    "promised",
                ),
                Query(
                    "sum(rate(kvledger_external_loaded_tokens_total{@engine}[$__rate_interval]))", "loaded"
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Voided, by cause",
            "Promised tokens that did not come: the load failed, no plan named them, the request was "
            "preempted or ended first. `never_loaded` with a finding means that stale blocks were read.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_external_voided_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="cps",
            stack="normal",
        ),
        Panel(
            "Wait for remote KV",
            "How long requests that waited for a load waited in all. No line: none waited.",
            "timeseries",
            _quantiles("kvledger_request_remote_wait_seconds"),
            unit="s",
        ),
    ),
)

WORKED = Row(
    "Work",
    (
        Panel(
            "Scheduled tokens by what became of them",
            "First prompt and first output are what was asked for; rework, rejected drafts and what was in "
            "flight when a request stopped (overrun) came on top.",
            "timeseries",
            (Query(f"sum by (kind) (rate({WORK}[$__rate_interval]))", "{{kind}}"),),
            unit="cps",
            stack="normal",
            colours={"rework": RED, "first_prompt": BLUE, "first_output": GREEN, "rejected": AMBER},
        ),
        Panel(
            "Rework by cause",
            "Why KV that had come to be was computed again: `blocks` is preemption for want of blocks.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_rework_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="cps",
            stack="normal",
        ),
        Panel(
            "Rework by model",
            "Rework over all scheduled tokens, by the model served.",
            "timeseries",
            (_share_by_model(REWORK, WORK),),
            unit="percentunit",
        ),
        Panel(
            "Given up, by cause",
            "Tokens whose KV was given up with a life of their request; those of finished requests are left "
            "out. What later lives find or load again is saved rework.",
            "timeseries",
            (
                Query(
                    'sum by (cause) (rate(kvledger_discarded_tokens_total{@engine, cause!="finished"}'
                    "[$__rate_interval]))",
                    "given up: {{cause}}",
                ),
                Query("sum(rate(kvledger_hit_again_tokens_total{@engine}[$__rate_interval]))", "hit again"),
                Query(
                    "sum(rate(kvledger_loaded_again_tokens_total{@engine}[$__rate_interval]))",
                    "loaded again",
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Rework of a request",
            "The share of a request's scheduled tokens that was rework. The 99th percentile shows whether a "
            "few requests pay for all.",
            "timeseries",
            _quantiles("kvledger_request_rework_ratio"),
            unit="percentunit",
        ),
    ),
)

REQUESTS = Row(
    "Requests and preemptions",
    (
        Panel(
            "Preemptions by cause",
            "Preemptions a second, as they happen: for want of blocks, or by a reset of the cache.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_preemptions_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Preemptions of a request",
            "How often a request was preempted before it ended.",
            "timeseries",
            _quantiles("kvledger_request_preemptions"),
            unit="none",
        ),
        Panel(
            "Requests by outcome",
            "Requests that ended a second. Aborted ones leave part of their prompt unattained.",
            "timeseries",
            (
                Query(
                    "sum by (outcome) (rate(kvledger_requests_total{@engine}[$__rate_interval]))",
                    "{{outcome}}",
                ),
            ),
            unit="reqps",
            stack="normal",
        ),
        Panel(
            "Open requests",
            "Requests in the engine, waiting ones included.",
            "timeseries",
            (Query("sum by (engine) (kvledger_open_requests{@engine})", "{{engine}}"),),
            unit="none",
        ),
    ),
)

ROWS = (RANGE, PROMPTS, EXTERNAL, WORKED, REQUESTS)
