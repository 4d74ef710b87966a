"""The board *Tokens*: where prompt tokens came from, rework, external tokens, and preemptions."""

from __future__ import annotations

from .panels import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PALE,
    PLAIN,
    RED,
    TOKENS_PER_SECOND,
    Panel,
    PanelRow,
    Query,
)

TITLE = "kvledger: Tokens"
UID = "kvledger-tokens"
DESCRIPTION = "Where prompt tokens came from, counted once per request; rework, external tokens, preemptions."

MODEL = "* on (job, instance, engine) group_left (model_name) kvledger_engine_info{@engine}"
"""Gives every series of an engine the name of its model."""

PROMPT = "kvledger_prompt_tokens_total{@engine}"
HITS = 'kvledger_prompt_tokens_total{@engine, source=~"local|external"}'
WORK = "kvledger_work_tokens_total{@engine}"
REWORK = 'kvledger_work_tokens_total{@engine, kind="rework"}'
SOURCES = {"local": BLUE, "external": AMBER, "computed": GREY, "unattained": PALE}


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


def _median(histogram: str, legend: str) -> Query:
    return Query(
        f"histogram_quantile(0.5, sum by (le) (rate({histogram}_bucket{{@engine}}[$__rate_interval])))",
        legend,
    )


RANGE = PanelRow(
    "In the time range",
    (
        Panel(
            "Tokens audited clean",
            "Trust: share of the tokens of ended requests whose account is clean. The rest is violated, or "
            "unknown because events were lost; the board Trust says why.",
            "stat",
            (
                Query(
                    'sum(increase(kvledger_audited_tokens_total{@engine, verdict="clean"}[$__range])) / '
                    "sum(increase(kvledger_audited_tokens_total{@engine}[$__range]))",
                    now=True,
                ),
            ),
            unit="percentunit",
            width=3,
            height=4,
            steps=((None, RED), (0.95, AMBER), (0.999, GREEN)),
        ),
        Panel(
            "Prompt tokens from a cache",
            "Hit rate: local and external tokens divided by all prompt tokens of ended requests. Each "
            "request is counted once; preemptions do not change the figure.",
            "stat",
            (_share_of_range(HITS, PROMPT),),
            unit="percentunit",
            width=3,
            height=4,
            steps=PLAIN,
        ),
        Panel(
            "Local",
            "Share of prompt tokens that hit the engine's own prefix cache.",
            "stat",
            (_share_of_range('kvledger_prompt_tokens_total{@engine, source="local"}', PROMPT),),
            unit="percentunit",
            width=3,
            height=4,
        ),
        Panel(
            "External",
            "Share of prompt tokens that a KV connector loaded. Promised tokens that were never loaded "
            "are not included.",
            "stat",
            (_share_of_range('kvledger_prompt_tokens_total{@engine, source="external"}', PROMPT),),
            unit="percentunit",
            width=3,
            height=4,
        ),
        Panel(
            "Rework",
            "Share of scheduled tokens whose KV had been computed or loaded before and was lost: the cost "
            "of preemptions, failed loads and cache resets. Above a few percent, add KV-cache blocks or "
            "lower max_num_seqs.",
            "stat",
            (_share_of_range(REWORK, WORK),),
            unit="percentunit",
            width=3,
            height=4,
            steps=((None, GREEN), (0.05, AMBER), (0.2, RED)),
        ),
        Panel(
            "Added seconds per request",
            "Estimated engine seconds of lost work (rework, rejected drafts, overrun), and measured waits "
            "for asynchronous loads, divided by ended requests. Unknown until step times follow a model.",
            "stat",
            (
                Query(
                    "(sum(increase(kvledger_lost_seconds_total{@engine}[$__range])) + "
                    "sum(increase(kvledger_load_wait_seconds_total{@engine}[$__range]))) / "
                    "sum(increase(kvledger_requests_total{@engine}[$__range])) "
                    "and on () max(kvledger_step_model_accepted{@engine}) == 1 or "
                    "0 * sum(kvledger_build_info{@sidecar}) - 1",
                    now=True,
                ),
            ),
            unit="s",
            width=3,
            height=4,
            steps=((None, GREEN), (0.1, AMBER), (1, RED)),
            words={"-1": ("unknown", GREY)},
        ),
        Panel(
            "Promised and not loaded",
            "Share of the external tokens promised by the connector that failed or were cancelled.",
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
            width=3,
            height=4,
            steps=((None, GREEN), (0.01, AMBER), (0.1, RED)),
        ),
        Panel(
            "Preemptions per request",
            "Preemptions divided by ended requests.",
            "stat",
            (
                Query(
                    "sum(increase(kvledger_preemptions_total{@engine}[$__range])) / "
                    "sum(increase(kvledger_requests_total{@engine}[$__range]))",
                    now=True,
                ),
            ),
            width=3,
            height=4,
            steps=((None, GREEN), (0.1, AMBER), (1, RED)),
        ),
    ),
)

PROMPTS = PanelRow(
    "Where prompt tokens came from",
    (
        Panel(
            "Prompt tokens by source",
            "Prompt tokens per second of ended requests, by where their KV first came from: the local "
            "prefix cache, the KV connector (external), or computation. Unattained tokens had no KV when "
            "the request ended, as after an abort.",
            "timeseries",
            (Query(f"sum by (source) (rate({PROMPT}[$__rate_interval]))", "{{source}}"),),
            unit=TOKENS_PER_SECOND,
            stack="normal",
            colours=SOURCES,
        ),
        Panel(
            "Prompt tokens by source, percent",
            "The same figures as percentages.",
            "timeseries",
            (Query(f"sum by (source) (rate({PROMPT}[$__rate_interval]))", "{{source}}"),),
            unit=TOKENS_PER_SECOND,
            stack="percent",
            colours=SOURCES,
        ),
        Panel(
            "Hit rate, settled and planned",
            "Planned: the split of the first admission, which current vLLM releases report. Settled: what "
            "was really hit or loaded. The two differ when loads fail or requests are preempted during "
            "prefill.",
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
            "Settled hit rate of each engine. An engine far below the others has lost its cache or "
            "receives different traffic.",
            "timeseries",
            (_share(HITS, PROMPT, "engine", "{{engine}}"),),
            unit="percentunit",
            width=8,
            most=1,
        ),
        Panel(
            "Hit rate by model",
            "Settled hit rate by served model.",
            "timeseries",
            (_share_by_model(HITS, PROMPT),),
            unit="percentunit",
            width=8,
            most=1,
        ),
        Panel(
            "Cached share of a request's prompt",
            "How many requests had which share of their prompt cached. One group at 0 and one near 1 "
            "means that some traffic shares no prefix; a single group in the middle means that all "
            "requests share a short one.",
            "heatmap",
            (
                Query(
                    "sum by (le) (increase(kvledger_request_cached_ratio_bucket{@engine}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            unit="percentunit",
            width=8,
        ),
        Panel(
            "Hit rate of the engine's lookups",
            "Hit tokens divided by queried tokens of every prefix-cache lookup that the engine counted, "
            "including lookups of resumed requests and of failed admissions. It is not a share of prompt "
            "tokens.",
            "timeseries",
            (
                Query(
                    "sum by (cache) (rate(kvledger_lookup_hit_tokens_total{@engine}[$__rate_interval])) / "
                    "sum by (cache) (rate(kvledger_lookup_queried_tokens_total{@engine}[$__rate_interval]))",
                    "{{cache}}",
                ),
            ),
            unit="percentunit",
            width=12,
            most=1,
        ),
        Panel(
            "What became of the blocks that prompts missed",
            "Of one in sixteen contents, blocks that the first hit of a prompt could have covered and did "
            "not, by what became of them before. Evicted: with more blocks, or if requests that share a "
            "prefix go to one engine, they could be hits. Never seen: no cache could have them.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_sampled_missed_blocks_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            stack="percent",
            width=12,
        ),
    ),
)

EXTERNAL = PanelRow(
    "External tokens and the encoder cache",
    (
        Panel(
            "Promised and loaded",
            "External tokens per second that the connector promised, and that were loaded.",
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
            unit=TOKENS_PER_SECOND,
            width=6,
        ),
        Panel(
            "Failed or cancelled tokens by cause",
            "Promised tokens that failed or were cancelled, by cause: the load failed, no connector "
            "metadata named them, or the request was preempted or ended first. `never_loaded` with a "
            "finding means that stale blocks were read.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_external_voided_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=6,
        ),
        Panel(
            "Wait for remote KV",
            "Total time that a request waited for remote KV, of the requests that waited. Zero means that no "
            "request waited.",
            "timeseries",
            tuple(
                Query(f"{query.expr} >= 0 or 0 * sum(kvledger_build_info{{@sidecar}})", query.legend)
                for query in _quantiles("kvledger_request_remote_wait_seconds")
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Loads: seconds waited and saved",
            "Seconds per second that requests waited for asynchronous loads, beside the estimated engine "
            "time that the loads saved. Waiting above saving means that computing would have been faster.",
            "timeseries",
            (
                Query("sum(rate(kvledger_load_wait_seconds_total{@engine}[$__rate_interval]))", "waited"),
                Query("sum(rate(kvledger_load_saved_seconds_total{@engine}[$__rate_interval]))", "saved"),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Loaded tokens by tier",
            "External tokens per second that were loaded, by the tier that the connector reported. vLLM asks "
            "since 0.32, at first admissions. `kvledger store` says what was stored and never read.",
            "timeseries",
            (
                Query(
                    "sum by (tier) (rate(kvledger_external_loaded_by_tier_tokens_total{@engine}"
                    "[$__rate_interval]))",
                    "{{tier}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            stack="normal",
            width=12,
        ),
        Panel(
            "Encoder embeddings, computed and cached",
            "Embeddings per second of images and other encoder inputs that steps computed, and that the "
            "encoder cache had. Nothing is shown for a model of text.",
            "timeseries",
            (
                Query(
                    "sum(rate(kvledger_encoder_computed_embeddings_total{@engine}[$__rate_interval]))",
                    "computed",
                ),
                Query(
                    "sum(rate(kvledger_encoder_cached_embeddings_total{@engine}[$__rate_interval]))",
                    "cached",
                ),
            ),
            stack="normal",
            width=12,
        ),
    ),
    collapsed=True,
)

WORKED = PanelRow(
    "Work",
    (
        Panel(
            "Scheduled tokens by outcome",
            "First prompt and first output are useful work. Rework, rejected drafts and overrun (tokens "
            "in flight when a request stopped) are overhead.",
            "timeseries",
            (Query(f"sum by (kind) (rate({WORK}[$__rate_interval]))", "{{kind}}"),),
            unit=TOKENS_PER_SECOND,
            stack="normal",
            colours={
                "first_prompt": BLUE,
                "first_output": GREEN,
                "rework": RED,
                "rejected": AMBER,
                "overrun": GREY,
            },
        ),
        Panel(
            "Rework by cause",
            "Why KV was computed a second time. `blocks` means preemption because the pool had no free "
            "blocks.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_rework_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            stack="normal",
        ),
        Panel(
            "Rework by model",
            "Rework divided by all scheduled tokens, by served model.",
            "timeseries",
            (_share_by_model(REWORK, WORK),),
            unit="percentunit",
        ),
        Panel(
            "Discarded tokens by cause",
            "Tokens whose KV was discarded at a preemption, reset or failed load; finished requests are "
            "left out. Repeat hits and repeat loads show how much a later life got back without computing "
            "it.",
            "timeseries",
            (
                Query(
                    'sum by (cause) (rate(kvledger_discarded_tokens_total{@engine, cause!="finished"}'
                    "[$__rate_interval]))",
                    "{{cause}}",
                ),
                Query("sum(rate(kvledger_hit_again_tokens_total{@engine}[$__rate_interval]))", "repeat hits"),
                Query(
                    "sum(rate(kvledger_loaded_again_tokens_total{@engine}[$__rate_interval]))",
                    "repeat loads",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=6,
        ),
        Panel(
            "KV cache in use",
            "Share of the KV cache's blocks that requests hold, at the last census (every 512 steps or "
            "30 s). Near 100 % the engine preempts soon, and rework follows.",
            "timeseries",
            (Query("max by (engine) (kvledger_pool_usage_ratio{@engine})", "{{engine}}"),),
            unit="percentunit",
            width=6,
            most=1,
        ),
        Panel(
            "Lost engine time",
            "Estimated share of engine time that lost work took: computed again, rejected drafts, and "
            "computed past the stop. One line is the median error of the model of step time. All are zero "
            "until step times follow a model.",
            "timeseries",
            (
                Query(
                    "sum by (kind) (rate(kvledger_lost_seconds_total{@engine}[$__rate_interval])) / "
                    "ignoring(kind) group_left "
                    "sum(rate(kvledger_engine_busy_seconds_total{@engine}[$__rate_interval]))",
                    "{{kind}}",
                ),
                Query("max(kvledger_step_model_error_ratio{@engine})", "error of the model"),
            ),
            unit="percentunit",
            width=6,
        ),
        Panel(
            "Rework per request",
            "Share of a request's scheduled tokens that was rework. The 99th percentile shows whether a "
            "few requests pay most of the cost.",
            "timeseries",
            _quantiles("kvledger_request_rework_ratio"),
            unit="percentunit",
            width=6,
        ),
    ),
)

REQUESTS = PanelRow(
    "Requests and preemptions",
    (
        Panel(
            "Preemptions by cause",
            "Preemptions per second: because the pool had no free blocks, or because the prefix cache was "
            "reset.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_preemptions_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="cps",
            width=6,
        ),
        Panel(
            "Preemptions per request, percentiles",
            "How often a request was preempted before it ended.",
            "timeseries",
            _quantiles("kvledger_request_preemptions"),
            unit="none",
            width=6,
        ),
        Panel(
            "Requests by outcome",
            "Ended requests per second. Aborted requests leave part of their prompt unattained.",
            "timeseries",
            (
                Query(
                    "sum by (outcome) (rate(kvledger_requests_total{@engine}[$__rate_interval]))",
                    "{{outcome}}",
                ),
            ),
            unit="reqps",
            width=6,
            stack="normal",
            colours={"stopped": GREEN, "length": BLUE, "aborted": AMBER, "error": RED},
        ),
        Panel(
            "Open requests",
            "Requests in the engine, both running and waiting.",
            "timeseries",
            (Query("sum by (engine) (kvledger_open_requests{@engine})", "{{engine}}"),),
            unit="none",
            width=6,
        ),
        Panel(
            "Time to first token by cause",
            "Mean time from the arrival in the scheduler to the first output. The causes sum to it.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_first_token_seconds_total{@engine}[$__rate_interval])) / "
                    "ignoring (cause) group_left () "
                    "sum(rate(kvledger_first_token_requests_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="s",
            width=12,
            stack="normal",
        ),
        Panel(
            "Time per output token by cause",
            "Mean time per output token after the first, of requests that ended with their last output. The "
            "causes sum to it.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_later_token_seconds_total{@engine}[$__rate_interval])) / "
                    "ignoring (cause) group_left () "
                    "sum(rate(kvledger_later_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="s",
            width=12,
            stack="normal",
        ),
        Panel(
            "Time to first token",
            "Time of a request from its arrival in the scheduler to its first output. vLLM's "
            "`vllm:time_to_first_token_seconds` has the same buckets and also the front end's share.",
            "timeseries",
            _quantiles("kvledger_time_to_first_token_seconds"),
            unit="s",
            width=6,
        ),
        Panel(
            "Time to first token, p95 of each cause",
            "The time of one cause in a request that has any of it. The causes are of different requests, so "
            "they don't sum to the p95 of the whole.",
            "timeseries",
            (
                Query(
                    "histogram_quantile(0.95, sum by (le, cause) "
                    "(rate(kvledger_time_to_first_token_cause_seconds_bucket{@engine}[$__rate_interval]))) "
                    ">= 0",
                    "{{cause}}",
                ),
            ),
            unit="s",
            width=6,
        ),
        Panel(
            "Why requests are queued",
            "Mean time from the arrival to the first admission, by what ended the admissions of the steps "
            "that left the request waiting.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_queued_seconds_total{@engine}[$__rate_interval])) / "
                    "ignoring (cause) group_left () "
                    "sum(rate(kvledger_first_token_requests_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit="s",
            width=6,
            stack="normal",
        ),
        Panel(
            "Time per output token",
            "Time of a request from its first output to its last, divided by its output tokens after the "
            "first.",
            "timeseries",
            _quantiles("kvledger_time_per_output_token_seconds"),
            unit="s",
            width=6,
        ),
    ),
)

BLOCKS = PanelRow(
    "Blocks (engines that record at level blocks)",
    (
        Panel(
            "Blocks by state",
            "Blocks that requests or the connector hold (running), free blocks whose content can be hit "
            "(cached), and free blocks without content (empty). A pool that is nearly all running preempts "
            "soon; a pool with empty blocks evicts nothing.",
            "timeseries",
            (Query("sum by (state) (kvledger_pool_blocks{@engine})", "{{state}}"),),
            unit="none",
            stack="normal",
        ),
        Panel(
            "Evicted blocks",
            "Cached blocks per second whose content was evicted, by whether an admission had hit it. Content "
            "that is evicted before anybody hits it was cached in vain.",
            "timeseries",
            (
                Query(
                    "sum by (hit) (rate(kvledger_evicted_blocks_total{@engine}[$__rate_interval]))",
                    "hit before: {{hit}}",
                ),
            ),
            unit="cps",
            stack="normal",
        ),
        Panel(
            "How long blocks stay, and when they are hit again",
            "Medians: from the caching of content to its eviction, from the last release to the eviction, "
            "and from a release to the next hit. If content is evicted sooner than it is usually hit, more "
            "blocks turn misses into hits: kvledger whatif says how many.",
            "timeseries",
            (
                _median("kvledger_block_lifetime_seconds", "cached to evicted"),
                _median("kvledger_block_idle_seconds", "released to evicted"),
                _median("kvledger_block_reuse_seconds", "released to hit"),
            ),
            unit="s",
        ),
    ),
    collapsed=True,
)

DRAFTS = PanelRow(
    "Speculative decoding",
    (
        Panel(
            "Rejected drafts",
            "Draft tokens per second that the engine computed and then rejected. Zero without speculative "
            "decoding.",
            "timeseries",
            (
                Query(
                    'sum by (engine) (rate(kvledger_work_tokens_total{@engine, kind="rejected"}'
                    "[$__rate_interval]))",
                    "{{engine}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=12,
        ),
        Panel(
            "Rejected share of scheduled tokens",
            "Rejected drafts divided by all scheduled tokens. A large share means that the drafts cost more "
            "than they gain.",
            "timeseries",
            (_share('kvledger_work_tokens_total{@engine, kind="rejected"}', WORK, "engine", "{{engine}}"),),
            unit="percentunit",
            width=12,
        ),
    ),
    collapsed=True,
)

SHARED = 'kvledger_disaggregated_prompt_tokens_total{@engine, role=~"decode|consumer|unknown"'
"""Prompts that stand, or may stand, in the figures of a prefill engine too; the reader closes the brace."""


def _once(by: str, of: str = "") -> str:
    """Prompt tokens per second without those that a prefill engine counts too."""
    source = f', source=~"{of}"' if of else ""
    return (
        f"sum{by}(rate(kvledger_prompt_tokens_total{{@engine{source}}}[$__rate_interval])) - "
        f"sum{by}(rate({SHARED}{source}}}[$__rate_interval]))"
    )


TRANSFERS = PanelRow(
    "Transfers from a prefill engine",
    (
        Panel(
            "Prompt tokens of all engines, each prompt once",
            "Prompt tokens per second by source, without those of decode engines: a prompt of two engines "
            "counts with the sources of its prefill engine. Unknown: prompts of decode engines that a "
            "prefill engine may count too, which is not followed here.",
            "timeseries",
            (
                Query(_once(" by (source) "), "{{source}}"),
                Query(
                    "sum(rate(kvledger_disaggregated_prompt_tokens_total"
                    '{@engine, role="unknown"}[$__rate_interval]))',
                    "unknown",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=8,
            stack="normal",
            colours=SOURCES,
        ),
        Panel(
            "Hit rate, each prompt once",
            "Share of these tokens that a prefix cache or a store had. What a prefill engine handed over is "
            "not a hit.",
            "timeseries",
            (Query(f"({_once('', 'local|external')}) / ({_once('')})", "hit rate"),),
            unit="percentunit",
            width=8,
            most=1,
        ),
        Panel(
            "Transferred prompt tokens",
            "Prompt tokens per second whose KV a prefill engine handed over. They were computed there: a "
            "fleet that adds them to its hits counts each prompt twice.",
            "timeseries",
            (
                Query(
                    "sum by (engine) (rate(kvledger_transferred_prompt_tokens_total{@engine}"
                    "[$__rate_interval]))",
                    "{{engine}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=8,
        ),
    ),
    collapsed=True,
)

GROUPED_PROMPT = 'kvledger_labelled_prompt_tokens_total{@engine, label="group"}'
GROUPED_HITS = 'kvledger_labelled_prompt_tokens_total{@engine, label="group", source=~"local|external"}'

GROUPS = PanelRow(
    "For whom: groups of KVLEDGER_GROUP",
    (
        Panel(
            "Prompt tokens by group",
            "Prompt tokens per second of ended requests, by the group that KVLEDGER_GROUP finds in the "
            "request id. Empty where the engine runs without it.",
            "timeseries",
            (Query(f"sum by (value) (rate({GROUPED_PROMPT}[$__rate_interval]))", "{{value}}"),),
            unit=TOKENS_PER_SECOND,
            width=8,
            stack="normal",
        ),
        Panel(
            "Hit rate by group",
            "Settled hit rate of each group. A group far below the others shares few prefixes, or its "
            "prefixes are evicted by the others.",
            "timeseries",
            (_share(GROUPED_HITS, GROUPED_PROMPT, "value", "{{value}}"),),
            unit="percentunit",
            width=8,
            most=1,
        ),
        Panel(
            "Rework by group",
            "Tokens per second that were computed again, by group: who pays for preemptions, failed loads "
            "and cache resets.",
            "timeseries",
            (
                Query(
                    'sum by (value) (rate(kvledger_labelled_rework_tokens_total{@engine, label="group"}'
                    "[$__rate_interval]))",
                    "{{value}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=8,
        ),
    ),
    collapsed=True,
)


TURN_PROMPT = "kvledger_turn_prompt_tokens_total{@engine}"

TURNS = PanelRow(
    "Turns of sessions",
    (
        Panel(
            "Hit rate of turns",
            "Share of the prompt tokens that turns hit which follow another turn of their session. Growing "
            "chats hit nearly all of them: a fall means that prefixes changed, or that they were evicted. "
            "Level blocks alone has turns.",
            "timeseries",
            (_share("kvledger_turn_hit_tokens_total{@engine}", TURN_PROMPT, "engine", "{{engine}}"),),
            unit="percentunit",
            width=8,
            most=1,
        ),
        Panel(
            "Lost tokens of turns by cause",
            "Tokens per second that the turn before had left and the turn did not hit. `kvledger turns` "
            "names the sessions, and where their prompts part.",
            "timeseries",
            (
                Query(
                    "sum by (cause) (rate(kvledger_turn_lost_tokens_total{@engine}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
            unit=TOKENS_PER_SECOND,
            width=8,
            stack="normal",
        ),
        Panel(
            "Reused of what turns could have reused",
            "Of the tokens that the turn before left in the cache, the share that was not lost.",
            "timeseries",
            (
                Query(
                    "1 - sum by (engine) (rate(kvledger_turn_lost_tokens_total{@engine}"
                    "[$__rate_interval])) / (sum by (engine) (rate("
                    "kvledger_turn_reusable_tokens_total{@engine}[$__rate_interval])) > 0)",
                    "{{engine}}",
                ),
            ),
            unit="percentunit",
            width=8,
            most=1,
        ),
    ),
    collapsed=True,
)


def _by_cause(title: str, description: str, side: str) -> Panel:
    """Tokens per second by cause, of one side of the difference."""
    series = f"kvledger_routing_{side}_tokens_total{{@engine}}"
    return Panel(
        title,
        description,
        "timeseries",
        (
            Query(
                f"sum by (cause) (rate({series}[$__rate_interval])) > 0",
                "{{cause}}",
            ),
        ),
        unit=TOKENS_PER_SECOND,
        width=8,
        stack="normal",
    )


ROUTING = PanelRow(
    "Routing: what KV events promised, and what requests found",
    (
        Panel(
            "Predicted and found",
            "Prompt tokens per second that the KV events of all engines promised when requests arrived, and "
            "the local and loaded external tokens of their first admissions. Needs recorded KV events.",
            "timeseries",
            tuple(
                Query(f"sum(rate(kvledger_routing_{name}_tokens_total{{@engine}}[$__rate_interval]))", name)
                for name in ("predicted", "found")
            ),
            unit=TOKENS_PER_SECOND,
            width=8,
        ),
        _by_cause(
            "Predicted, not found",
            "Why promised tokens were not found. routed-elsewhere: the request went to an engine that had "
            "less. evicted-since: the KV event came after the request. event-lost: it never came.",
            "missed",
        ),
        _by_cause(
            "Found, not predicted",
            "Why found tokens were not promised. stored-since: the KV event came after the request. "
            "event-lost: it never came. external: a connector loaded them.",
            "surplus",
        ),
    ),
    collapsed=True,
)

ROWS = (RANGE, PROMPTS, WORKED, REQUESTS, EXTERNAL, BLOCKS, GROUPS, TURNS, ROUTING, DRAFTS, TRANSFERS)
