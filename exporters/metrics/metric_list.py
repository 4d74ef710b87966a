"""The one metric table: name, unit, kind, help, labels, reader. Every exporter is derived from it.

A reader takes the audits of the followed engines and returns samples; the readers are in ``values.py``.
Exporters call :func:`collect`. `make docs` writes docs/reference/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from typing import Literal, NamedTuple

from ...audit.checks.registry import catalogue
from ...audit.figures.declared import FIGURES, OTHER
from ...audit.figures.figure import MICROSECONDS, Counter, Figure, Histogram
from ...audit.hooks import TIMED_STEPS
from ...audit.ledger.weights_postings import CHANGES
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.metrics_state import (
    REWORK,
    ROLES,
    SHARES,
    STAY_SECONDS,
    TIMES,
    VERDICTS,
    WAIT_SECONDS,
    Distribution,
)
from . import values as read
from .values import MetricReader, MetricSample

Kind = Literal["counter", "gauge", "histogram", "info"]

SUMMED: tuple[Kind, ...] = ("counter", "histogram")
"""Kinds whose values are summed over all engines of a name, those that are gone included."""

SUFFIXES: dict[Kind, str] = {"counter": "_total", "gauge": "", "histogram": "", "info": "_info"}


class Metric(NamedTuple):
    """One metric. A counter is exposed with the suffix ``_total``, an info metric with ``_info``.

    ``words``: the possible values of a label, if they are a closed set; each has a series from the start.
    ``bounds``: the upper bounds of a histogram's buckets, without infinity. ``combine``: makes one value of
    the gauges of two engines that have one name and run side by side.
    """

    name: str
    unit: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: MetricReader
    words: Mapping[str, Sequence[str]] = {}
    bounds: tuple[float, ...] = ()
    combine: Callable[[float, float], float] = max

    @property
    def exposed(self) -> str:
        """The name as a scrape shows it."""
        return self.name + SUFFIXES[self.kind]


class Group(NamedTuple):
    """Metrics of one subject, with an introduction for the page."""

    title: str
    description: str
    metrics: tuple[Metric, ...]


ENGINE = ("engine",)
TOKENS = "tokens"
IDS = tuple(catalogue())


def of_figures(group: str) -> tuple[Metric, ...]:
    """The counters and histograms that the figures of a request declare for a group of this page."""
    counters: dict[Counter, list[Figure]] = {}
    histograms: dict[Histogram, list[Figure]] = {}
    for figure in FIGURES:
        for counter in figure.counters:
            if counter.group == group:
                counters.setdefault(counter, []).append(figure)
        if figure.histogram is not None and figure.histogram.group == group:
            histograms.setdefault(figure.histogram, []).append(figure)
    return (
        *(_of_figures(counter, figures) for counter, figures in counters.items()),
        *(_by_request(histogram, figures) for histogram, figures in histograms.items()),
    )


def _words(figures: Sequence[Figure]) -> tuple[str, ...]:
    """The names of figures as values of a label."""
    return tuple(figure.name.removesuffix(f"_{MICROSECONDS}") for figure in figures)


def _by_request(histogram: Histogram, figures: Sequence[Figure]) -> Metric:
    """One histogram: of one figure, or of several that a label tells apart."""
    words = _words(figures) if histogram.label else ()
    series: list[tuple[str, ...]] = [(word,) for word in words] or [()]
    reader = read.spreads({labels: figure.name for labels, figure in zip(series, figures, strict=True)})
    labels = (*ENGINE, histogram.label) if histogram.label else ENGINE
    return Metric(
        histogram.name,
        "seconds",
        "histogram",
        histogram.help,
        labels,
        reader,
        {histogram.label: words} if words else {},
        histogram.bounds,
    )


def _of_figures(counter: Counter, figures: Sequence[Figure]) -> Metric:
    """One counter: of one figure, of one by cause, or of several that a label tells apart.

    Microseconds become seconds.
    """
    names = tuple(figure.name for figure in figures)
    words: tuple[str, ...] = ()
    unit, scale = ("seconds", 1_000_000) if figures[0].unit == MICROSECONDS else (figures[0].unit, 1)
    reader = read.value(lambda engine_audit: engine_audit.closed.of(names[0]))
    if counter.by_cause:
        words = (*figures[0].causes, OTHER)
        reader = read.values(words, lambda engine_audit: getattr(engine_audit.closed, names[0]))
    elif counter.label:
        words = _words(figures)
        reader = read.values(
            words,
            lambda engine_audit: {
                word: engine_audit.closed.of(name) for word, name in zip(words, names, strict=True)
            },
            scale,
        )
    labels = (*ENGINE, counter.label) if counter.label else ENGINE
    closed = {counter.label: words} if words else {}
    return Metric(counter.name, unit, "counter", counter.help, labels, reader, closed)


GROUPS: tuple[Group, ...] = (
    Group(
        "Prompts",
        "Where the KV of prompt tokens came from. `kvledger_prompt_tokens_total` counts each request "
        "once; a preemption, a resumption or a second lookup never changes it.",
        (
            *of_figures("Prompts"),
            Metric(
                "kvledger_planned_prompt_tokens",
                TOKENS,
                "counter",
                "Prompt tokens by the planned split of the first scheduled admission, which current "
                "vLLM releases report.",
                (*ENGINE, "source"),
                read.values(read.PLANNED, lambda engine_audit: engine_audit.metrics.planned),
                {"source": read.PLANNED},
            ),
            Metric(
                "kvledger_planned_negative_tokens",
                TOKENS,
                "counter",
                "How far planned figures were below zero. No other metric includes these tokens, so no "
                "counter falls.",
                (*ENGINE, "source"),
                read.values(read.PLANNED, lambda engine_audit: engine_audit.metrics.planned_negative),
                {"source": read.PLANNED},
            ),
        ),
    ),
    Group(
        "For whom",
        "The same figures of the ended requests that have a label: `label` is `lora` (the adapter's name), "
        "`group` (what `KVLEDGER_GROUP` found in the request id), `priority` (not 0) or `salt` (the keyed "
        "hash of the cache salt; `KVLEDGER_EVENTS_KEY` makes it the same in all processes), and `value` its "
        "value. An engine has at most 64 values of a label; requests with further ones are `other`. A "
        "request with two labels is counted for each, so don't add labels up.",
        (
            Metric(
                "kvledger_labelled_requests",
                "requests",
                "counter",
                "Ended requests with a label.",
                (*ENGINE, "label", "value"),
                read.labelled(lambda totals: totals.requests),
            ),
            Metric(
                "kvledger_labelled_prompt_tokens",
                TOKENS,
                "counter",
                "Prompt tokens of requests with a label, by where their KV first came from.",
                (*ENGINE, "label", "value", "source"),
                read.engines(read.labelled_prompt_tokens),
            ),
            Metric(
                "kvledger_labelled_rework_tokens",
                TOKENS,
                "counter",
                "Tokens of requests with a label that were computed again because their KV was lost.",
                (*ENGINE, "label", "value"),
                read.labelled(lambda totals: sum(totals.rework.values())),
            ),
        ),
    ),
    Group(
        "Work",
        "What the engine scheduled, by outcome. The kinds of `kvledger_work_tokens_total` sum to all "
        "scheduled tokens; `kvledger_rework_tokens_total` splits its kind `rework` by cause.",
        of_figures("Work"),
    ),
    Group(
        "Seconds",
        "What lost work took of the engine's time, and what loads saved. Engine time and waiting are "
        "measured from the recorded events; the other seconds are estimates by a model of step time over "
        "prefill tokens, decoding requests, draft tokens and context, and stay at zero until a model is "
        "accepted. The model's error is beside them ([how](../analysis.md#what-lost-work-costs)).",
        (
            Metric(
                "kvledger_engine_busy_seconds",
                "seconds",
                "counter",
                "Time of all steps of the engine, without the time in which no request ran.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.step_times.busy_us / 1e6),
            ),
            Metric(
                "kvledger_lost_seconds",
                "seconds",
                "counter",
                "Estimate of the engine time of lost work, by kind: computed again, rejected drafts, and "
                "computed past the stop.",
                (*ENGINE, "kind"),
                read.engines(read.lost_seconds),
                {"kind": read.LOST},
            ),
            Metric(
                "kvledger_load_wait_seconds",
                "seconds",
                "counter",
                "Time that requests waited for asynchronous loads, from the admission to the end of the "
                "load.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.cost_counters.load_wait_us / 1e6),
            ),
            Metric(
                "kvledger_load_saved_seconds",
                "seconds",
                "counter",
                "Estimate of the engine time that computing the loaded external tokens would have taken.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.cost_counters.saved_us / 1e6),
            ),
            Metric(
                "kvledger_step_model_error_ratio",
                "ratio",
                "gauge",
                "Median relative error of the model of step time on held-out steps.",
                ENGINE,
                read.engines(read.model_error),
            ),
            Metric(
                "kvledger_step_model_accepted",
                "",
                "gauge",
                "1 if step times follow a model well enough to estimate seconds, else 0.",
                ENGINE,
                read.value(lambda engine_audit: float(not engine_audit.cost_counters.model.refused)),
            ),
        ),
    ),
    Group(
        "Turns",
        "Turns of sessions that follow another turn on the same engine, when they have ended. Level `blocks` "
        "alone has them ([turns](../turns.md)). The share of hits is the figure to alert on.",
        (
            Metric(
                "kvledger_turns",
                "turns",
                "counter",
                "Turns of sessions that follow another turn.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.turns.turns),
            ),
            Metric(
                "kvledger_turn_prompt_tokens",
                TOKENS,
                "counter",
                "Prompt tokens of these turns.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.turns.prompt_tokens),
            ),
            Metric(
                "kvledger_turn_hit_tokens",
                TOKENS,
                "counter",
                "Local and external tokens that their first admissions hit.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.turns.hit),
            ),
            Metric(
                "kvledger_turn_reusable_tokens",
                TOKENS,
                "counter",
                "Tokens that the turns before left, below the last token of the prompt.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.turns.reusable),
            ),
            Metric(
                "kvledger_turn_lost_tokens",
                TOKENS,
                "counter",
                "Reusable tokens that were not hit, by cause.",
                (*ENGINE, "cause"),
                read.engines(read.turn_losses),
                {"cause": read.TURN_LOSSES_HERE},
            ),
        ),
    ),
    Group(
        "First tokens",
        "The time from the arrival of a request in the scheduler to its first output. Each microsecond has "
        "one cause, so the causes sum to it. The front end's share is not in it: vLLM's "
        "`vllm:time_to_first_token_seconds` begins when the front end receives the request.",
        of_figures("First tokens"),
    ),
    Group(
        "Later tokens",
        "The time from the first output of a request to its last. Each microsecond has one cause. Divided by "
        "the tokens it is the time per output token. Sessions and aborted requests are not in it.",
        of_figures("Later tokens"),
    ),
    Group(
        "Weights",
        "Changes of weights while the engine ran, and tokens that were read or sampled over KV of older "
        "weights ([training](../rl.md)). A change is *declared* by a call whose purpose it is, or *detected* "
        "by a digest. *Possible*: a call that may have changed weights; *equal*: a digest says that it did "
        "not; *labelled*: only the caller's label changed.",
        (
            Metric(
                "kvledger_weights_changes",
                "",
                "counter",
                "Changes of weights, and calls that may be one, by kind.",
                (*ENGINE, "kind"),
                read.values(CHANGES, lambda engine_audit: engine_audit.auditor.ledger.sums.weights_changes),
                {"kind": CHANGES},
            ),
            *of_figures("Weights"),
        ),
    ),
    Group(
        "Encoder cache",
        "Where the encoder outputs of multimodal requests came from, in embeddings, as vLLM sizes its "
        "encoder cache. A request that is looked up again after a preemption counts again.",
        of_figures("Encoder cache"),
    ),
    Group(
        "External tokens",
        "What the connector promised, and what was loaded: promised = loaded + failed or cancelled "
        "(voided). Tokens that a prefill engine handed over were computed there. A fleet that adds "
        "them to its hits counts each prompt twice, so they are counted separately as transferred, and all "
        "prompt tokens of such requests by the engine's role ([each prompt "
        "once](../sidecar.md#prefill-and-decode-engines)). Since 0.32 vLLM asks the connector which tier "
        "(`host`, `disk`, `p2p`) the tokens of a first admission come from: `*_by_tier` count those. Tokens "
        "of older releases and of admissions after a preemption are in none of them. "
        "`kvledger_engine_info` has the `connector`.",
        (
            *of_figures("External tokens"),
            Metric(
                "kvledger_transferred_prompt_tokens",
                TOKENS,
                "counter",
                "The part of `kvledger_prompt_tokens_total` with source `external` that a prefill engine "
                "handed over.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.transferred_tokens),
            ),
            Metric(
                "kvledger_disaggregated_prompt_tokens",
                TOKENS,
                "counter",
                "The part of `kvledger_prompt_tokens_total` of requests whose prompt two engines share, by "
                "the role of this engine. Without the roles `decode` and `consumer` each prompt counts once; "
                "whether a prefill engine has those of the role `unknown` too is not known.",
                (*ENGINE, "role", "source"),
                read.engines(read.disaggregated),
                {"role": ROLES, "source": read.SOURCES},
            ),
        ),
    ),
    Group(
        "Lookups",
        "Prefix-cache lookups as the engine itself counted them, at the time of the lookup. Lookups "
        "of resumed requests are included (`vllm:prefix_cache_*` leave them out). An engine that runs "
        "without statistics counts none.",
        (
            Metric(
                "kvledger_lookups",
                "",
                "counter",
                "Lookups that the engine counted, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.lookups),
                {"cache": read.CACHES},
            ),
            Metric(
                "kvledger_lookup_queried_tokens",
                TOKENS,
                "counter",
                "Tokens that were looked up, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.queried),
                {"cache": read.CACHES},
            ),
            Metric(
                "kvledger_lookup_hit_tokens",
                TOKENS,
                "counter",
                "Tokens that a lookup hit, by cache.",
                (*ENGINE, "cache"),
                read.lookups(lambda asked: asked.hit),
                {"cache": read.CACHES},
            ),
        ),
    ),
    Group(
        "Requests",
        "A request is counted when it ends. The histograms leave unknown requests out. Their buckets "
        "carry the latest request as an exemplar, with the caller's trace id if the engine received "
        "one.",
        (
            Metric(
                "kvledger_requests",
                "",
                "counter",
                "Ended requests, by verdict and outcome.",
                (*ENGINE, "verdict", "outcome"),
                read.engines(read.requests),
                {"verdict": VERDICTS, "outcome": read.OUTCOMES},
            ),
            Metric(
                "kvledger_open_requests",
                "",
                "gauge",
                "Requests in the engine, running and waiting.",
                ENGINE,
                read.value(lambda engine_audit: len(engine_audit.auditor.ledger.open)),
                combine=add,
            ),
            Metric(
                "kvledger_pool_usage_ratio",
                "ratio",
                "gauge",
                "Share of the KV cache's blocks that requests hold, at the last census, which is taken every "
                "512 steps or 30 seconds.",
                ENGINE,
                read.engines(read.pool_usage),
            ),
            Metric(
                "kvledger_preemptions",
                "",
                "counter",
                "Preemptions by cause, counted as they happen.",
                (*ENGINE, "cause"),
                read.values(read.PREEMPTIONS, lambda engine_audit: engine_audit.metrics.preemptions),
                {"cause": read.PREEMPTIONS},
            ),
            Metric(
                "kvledger_request_cached_ratio",
                "ratio",
                "histogram",
                "Share of a request's prompt tokens that were local or external.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.cached_share),
                bounds=SHARES,
            ),
            Metric(
                "kvledger_request_rework_ratio",
                "ratio",
                "histogram",
                "Share of a request's scheduled tokens that was rework.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.rework_share),
                bounds=REWORK,
            ),
            Metric(
                "kvledger_request_preemptions",
                "",
                "histogram",
                "Number of preemptions of a request.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.preempted),
                bounds=TIMES,
            ),
            Metric(
                "kvledger_request_remote_wait_seconds",
                "seconds",
                "histogram",
                "Total time that a request waited for remote KV, of the requests that waited.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.remote_wait),
                bounds=WAIT_SECONDS,
            ),
        ),
    ),
    Group(
        "Findings",
        "Every invariant of [the catalogue](invariants.md) has a series from the start. A *violation* "
        "means that the engine is wrong; a *drift* means that it counts by a deliberate but "
        "misleading rule, that two computations of one block differ, or that the caller chose it.",
        (
            Metric(
                "kvledger_violations",
                "",
                "counter",
                "Number of times that an invariant was violated.",
                (*ENGINE, "id", "severity"),
                read.violations,
                {"id": IDS, "severity": ("violation", "drift")},
            ),
            Metric(
                "kvledger_last_violation_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time at which an invariant was last violated; no series if it never was.",
                (*ENGINE, "id", "severity"),
                read.engines(read.last_violations),
            ),
        ),
    ),
    Group(
        "Coverage",
        "Whether an absence of findings means anything. Only a `live` engine is observed. `detached` "
        "and `failed` engines may still serve; `stopped` engines ended in an orderly way, `dead` ones "
        "did not. Tokens of requests that were touched by lost events are `unknown`.",
        (
            Metric(
                "kvledger_engine_observed",
                "",
                "gauge",
                "1 while the engine is under observation, else 0.",
                ENGINE,
                read.value(lambda engine_audit: float(read.state(engine_audit) == "live")),
            ),
            Metric(
                "kvledger_engine_state",
                "",
                "gauge",
                "1 for the engine's present state of observation, 0 for the other states.",
                (*ENGINE, "state"),
                read.engines(read.states),
                {"state": read.STATES},
            ),
            Metric(
                "kvledger_engine_setting",
                "",
                "gauge",
                "Settings of the engine that decide what its cache holds and how many requests run: "
                f"{', '.join(f'`{name}`' for name in read.SETTINGS)}. `prefix_caching` is 1 if it is on. A "
                "setting that the engine does not have has no series.",
                (*ENGINE, "setting"),
                read.engines(read.settings),
            ),
            Metric(
                "kvledger_audited_tokens",
                TOKENS,
                "counter",
                "Prompt and output tokens of ended requests, by verdict.",
                (*ENGINE, "verdict"),
                read.values(VERDICTS, lambda engine_audit: engine_audit.metrics.sequence_tokens),
                {"verdict": VERDICTS},
            ),
            Metric(
                "kvledger_journal_lag_seconds",
                "seconds",
                "gauge",
                "Everything that the engine wrote up to this many seconds ago has been read; 0 once the "
                "engine is gone.",
                ENGINE,
                read.engines(read.lag),
            ),
            Metric(
                "kvledger_events",
                "",
                "counter",
                "Events read from the engine's journal.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.journal.events),
            ),
            Metric(
                "kvledger_last_event_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time of the last event that was read.",
                ENGINE,
                read.value(read.last_event),
            ),
            Metric(
                "kvledger_gaps",
                "",
                "counter",
                "Number of gaps in the journal, by whether the number of lost events is known.",
                (*ENGINE, "size"),
                read.values(read.GAP_SIZES, read.gaps),
                {"size": read.GAP_SIZES},
            ),
            Metric(
                "kvledger_lost_events",
                "",
                "counter",
                "Events lost in gaps of known size.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.lost_events),
            ),
            Metric(
                "kvledger_removed_events",
                "",
                "counter",
                "Events that rotation removed before anybody read the journal. No other figure has them.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.auditor.ledger.sums.removed_events),
            ),
            Metric(
                "kvledger_hook_failures",
                "",
                "counter",
                "Number of exceptions that observers raised in the engine.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.auditor.ledger.sums.hook_failures),
            ),
            Metric(
                "kvledger_hook_sampled_seconds",
                "seconds",
                "counter",
                f"Time in hooks during the timed steps, a few in every {TIMED_STEPS}.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.hook_us / 1e6),
            ),
            Metric(
                "kvledger_hook_sampled_steps",
                "",
                "counter",
                "Number of timed steps.",
                ENGINE,
                read.value(lambda engine_audit: engine_audit.metrics.hook_steps),
            ),
            Metric(
                "kvledger_check_failures",
                "",
                "counter",
                "Number of times that a check itself failed, which is a defect of kvledger.",
                ENGINE,
                read.value(lambda engine_audit: sum(engine_audit.auditor.findings.check_failures.values())),
            ),
            Metric(
                "kvledger_checkpoint_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time at which the engine's audit was last saved; no series if it never was.",
                ENGINE,
                read.engines(read.checkpoint),
            ),
            Metric(
                "kvledger_unnamed_journals",
                "",
                "gauge",
                "Journals without the event that names their engine; no other metric includes them.",
                (),
                read.unnamed,
            ),
        ),
    ),
    Group(
        "Contents",
        "What became of the KV in the blocks. Only engines that record at level `content` have these series "
        "([contents](../content.md)).",
        (
            Metric(
                "kvledger_content_blocks",
                "blocks",
                "counter",
                "Blocks by what happened to their contents: sealed when full, verified at a hit, scrubbed at "
                "rest, differed from the seal, unsealed (hit and never seen filled), not_compared at a hit.",
                (*ENGINE, "event"),
                read.engines(read.content_blocks),
            ),
            Metric(
                "kvledger_content_moved_blocks",
                "blocks",
                "counter",
                "Blocks that a connector moved: stored, loaded (with the bytes that were stored), "
                "loaded_differed (with other bytes), not_compared; stored_differed are those of the stored "
                "blocks whose bytes were not those that were sealed.",
                (*ENGINE, "event"),
                read.engines(read.content_transfers),
            ),
            Metric(
                "kvledger_content_verified_tokens",
                TOKENS,
                "counter",
                "Tokens of hit blocks that held the bytes that were sealed.",
                ENGINE,
                read.content_sum("tokens"),
            ),
            Metric(
                "kvledger_content_bytes",
                "bytes",
                "counter",
                "Bytes of blocks that were read to seal, verify or scrub them.",
                ENGINE,
                read.content_sum("bytes"),
            ),
            Metric(
                "kvledger_content_seconds",
                "seconds",
                "counter",
                "Time that the model runners' steps waited for the checks of contents.",
                ENGINE,
                read.content_sum("microseconds", 1e6),
            ),
        ),
    ),
    Group(
        "Blocks",
        "How the block pools are used. Only engines that record at level `blocks` have these series "
        "([blocks](../blocks.md)).",
        (
            Metric(
                "kvledger_pool_blocks",
                "blocks",
                "gauge",
                "Blocks by state: running (held by requests or the connector), cached (free, and the content "
                "can be hit), empty (free without content), unknown.",
                (*ENGINE, "state"),
                read.engines(read.block_states),
                combine=add,
            ),
            Metric(
                "kvledger_evicted_blocks",
                "blocks",
                "counter",
                "Cached blocks whose content was evicted, by whether an admission had hit it: yes or no.",
                (*ENGINE, "hit"),
                read.engines(read.evicted_blocks),
            ),
            Metric(
                "kvledger_allocated_blocks",
                "blocks",
                "counter",
                "Blocks that the pool allocated.",
                ENGINE,
                read.block_count("allocated"),
            ),
            Metric(
                "kvledger_hit_blocks",
                "blocks",
                "counter",
                "Blocks that admissions hit.",
                ENGINE,
                read.block_count("hits"),
            ),
            Metric(
                "kvledger_block_lifetime_seconds",
                "seconds",
                "histogram",
                "Time that evicted content had been in its block, from its caching to its eviction.",
                ENGINE,
                read.block_times("block_lifetime"),
                bounds=STAY_SECONDS,
            ),
            Metric(
                "kvledger_block_idle_seconds",
                "seconds",
                "histogram",
                "Time that evicted content had not been held, from the last release to the eviction.",
                ENGINE,
                read.block_times("block_idle"),
                bounds=STAY_SECONDS,
            ),
            Metric(
                "kvledger_block_reuse_seconds",
                "seconds",
                "histogram",
                "Time from a block's release to the next hit, for hits of blocks that no request held.",
                ENGINE,
                read.block_times("block_reuse"),
                bounds=STAY_SECONDS,
            ),
        ),
    ),
    Group(
        "KV events",
        "What an engine announced to routers, beside what its cache did. Only engines that record at level "
        "`blocks` and publish KV events, with `KVLEDGER_EVENTS_KEY` and `kvledger journals record-events`, "
        "have these series ([KV events and routing](../routing.md)). Differences are findings `events/...`.",
        (
            Metric(
                "kvledger_kv_event_batches",
                "batches",
                "counter",
                "Batches of KV events that were received, each once.",
                ENGINE,
                read.kv_event_count("batches"),
            ),
            Metric(
                "kvledger_kv_event_blocks",
                "blocks",
                "counter",
                "What the KV events announced: stored and removed blocks, and clearings of the cache.",
                (*ENGINE, "kind"),
                read.kv_events(read.announced),
            ),
            Metric(
                "kvledger_kv_event_gaps",
                "",
                "counter",
                "Gaps in the numbers of the batches that nobody repeated within 15 seconds.",
                ENGINE,
                read.kv_event_count("gaps"),
            ),
            Metric(
                "kvledger_kv_event_lost_batches",
                "batches",
                "counter",
                "Batches in these gaps.",
                ENGINE,
                read.kv_event_count("lost_batches"),
            ),
            Metric(
                "kvledger_kv_event_agreed_changes",
                "",
                "counter",
                "Changes of the prefix cache that a KV event announced.",
                ENGINE,
                read.kv_event_count("agreed"),
            ),
            Metric(
                "kvledger_kv_event_not_compared",
                "",
                "counter",
                "Changes and KV events without a counterpart that could not be judged: outside the recording "
                "or the journal, or too many to keep.",
                ENGINE,
                read.kv_event_count("not_compared"),
            ),
            Metric(
                "kvledger_routed_requests",
                "requests",
                "counter",
                "Ended requests whose tokens were predicted from the KV events of all engines.",
                ENGINE,
                read.kv_event_count("routed"),
            ),
            Metric(
                "kvledger_routing_predicted_tokens",
                TOKENS,
                "counter",
                "Prompt tokens that the KV events promised when the request arrived, of the engine that had "
                "most. Predicted less found = missed less surplus.",
                ENGINE,
                read.kv_event_count("predicted"),
            ),
            Metric(
                "kvledger_routing_found_tokens",
                TOKENS,
                "counter",
                "Local and loaded external tokens of the first admissions of the same requests.",
                ENGINE,
                read.kv_event_count("found"),
            ),
            Metric(
                "kvledger_routing_missed_tokens",
                TOKENS,
                "counter",
                "Predicted tokens that were not found, by cause.",
                (*ENGINE, "cause"),
                read.routing_causes("missed"),
            ),
            Metric(
                "kvledger_routing_surplus_tokens",
                TOKENS,
                "counter",
                "Found tokens that were not predicted, by cause.",
                (*ENGINE, "cause"),
                read.routing_causes("surplus"),
            ),
            Metric(
                "kvledger_routing_not_compared",
                "",
                "counter",
                "Ended requests whose prediction the sidecar no longer knows: too many changes came since "
                "they arrived, or it was restarted.",
                ENGINE,
                read.kv_event_count("not_routed"),
            ),
        ),
    ),
    Group(
        "Reconciliation",
        "The engine's own counters and the ledger's figures since a common baseline, if the sidecar "
        "scrapes the engine's metrics ([reconciliation](../reconciliation.md)). `figure` names a "
        "counter. Only the cause `unexplained` is worth an alert.",
        (
            Metric(
                "kvledger_reconciliation_engine",
                "",
                "gauge",
                "Increase of the engine's own counter.",
                (*ENGINE, "figure"),
                read.engine_counters("counted"),
                combine=add,
            ),
            Metric(
                "kvledger_reconciliation_ledger",
                "",
                "gauge",
                "Increase of the ledger's figure.",
                (*ENGINE, "figure"),
                read.engine_counters("ledger"),
                combine=add,
            ),
            Metric(
                "kvledger_reconciliation_drift",
                "",
                "gauge",
                "The engine's figure minus the ledger's, by cause.",
                (*ENGINE, "figure", "cause"),
                read.engines(read.drift),
                combine=add,
            ),
            Metric(
                "kvledger_reconciliation_up",
                "",
                "gauge",
                "1 if the last scrape of the engine's own metrics succeeded, else 0.",
                ENGINE,
                read.reconciled("answered"),
                combine=min,
            ),
            Metric(
                "kvledger_reconciliation_scrape_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time of the last scrape of the engine's own metrics.",
                ENGINE,
                read.reconciled("scraped_seconds"),
                combine=min,
            ),
            Metric(
                "kvledger_reconciliation_baseline_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time at which the comparison began.",
                ENGINE,
                read.reconciled("baseline_seconds"),
                combine=min,
            ),
        ),
    ),
    Group(
        "The sidecar",
        "The state of `kvledger serve` itself. [What each loss means](../sidecar.md#after-a-restart).",
        (
            Metric(
                "kvledger_sidecar_losses",
                "",
                "counter",
                "How often the sidecar lost state or unread events, by reason. No figure is invented for a "
                "loss.",
                ("reason",),
                read.losses,
                {"reason": read.LOSS_REASONS},
            ),
            Metric(
                "kvledger_sidecar_unreadable_journals",
                "",
                "gauge",
                "Journals that can't be read now; the sidecar's log and first page show the reason.",
                (),
                read.health("unreadable"),
            ),
            Metric(
                "kvledger_sidecar_unread_journals",
                "",
                "gauge",
                "Journals that live engines write and of which nothing was read for a minute: their figures "
                "stand still.",
                (),
                read.health("unread"),
            ),
            Metric(
                "kvledger_sidecar_catch_up_seconds",
                "seconds",
                "gauge",
                "Time that this sidecar read journals before it first answered.",
                (),
                read.health("caught_up_seconds"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_bytes",
                "bytes",
                "gauge",
                "Size of the last checkpoint.",
                (),
                read.health("save_bytes"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_seconds",
                "seconds",
                "gauge",
                "Time that the last checkpoint took to write.",
                (),
                read.health("save_seconds"),
            ),
            Metric(
                "kvledger_sidecar_checkpoint_failures",
                "",
                "gauge",
                "Checkpoints that could not be written since this sidecar started.",
                (),
                read.health("save_failures"),
            ),
            Metric(
                "kvledger_sidecar_thread_heartbeat_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time at which a thread of this sidecar last worked as it should. One that stops makes "
                "`/-/healthy` 503.",
                ("thread",),
                read.threads("beat_at"),
            ),
            Metric(
                "kvledger_sidecar_thread_restarts",
                "",
                "counter",
                "How often a thread of this sidecar failed and began again.",
                ("thread",),
                read.threads("restarts"),
            ),
            Metric(
                "kvledger_sidecar_compacted_timestamp_seconds",
                "seconds",
                "gauge",
                "Unix time at which this sidecar last compacted the journals; 0: it has not yet.",
                (),
                read.health("compacted_at"),
            ),
            Metric(
                "kvledger_sidecar_compact_seconds",
                "seconds",
                "gauge",
                "Time that the last compaction took, also one that failed.",
                (),
                read.health("compact_seconds"),
            ),
            Metric(
                "kvledger_sidecar_compact_failures",
                "",
                "gauge",
                "Compactions that failed since this sidecar started.",
                (),
                read.health("compact_failures"),
            ),
        ),
    ),
    Group(
        "Labels of engines",
        "To join these figures with the engine's own, group by `engine_index` and the labels that "
        "your scrape adds (pod, instance): vLLM calls that index `engine`. `model_name` is the served "
        "name; of a local path, only the last part.",
        (
            Metric(
                "kvledger_engine",
                "",
                "info",
                "The observed engines, including those that are gone.",
                (*ENGINE, *read.ENGINE_LABELS),
                read.engines(read.engine),
            ),
            Metric(
                "kvledger_build",
                "",
                "info",
                "The version of kvledger that serves these metrics.",
                ("version",),
                read.build,
            ),
        ),
    ),
)

METRICS: tuple[Metric, ...] = tuple(metric for group in GROUPS for metric in group.metrics)


def collect(audits: Sequence[FollowedAudit]) -> list[tuple[Metric, list[MetricSample]]]:
    """Every metric with its present samples; journals of one engine name share one sample.

    Counters and histograms of such journals are summed and count since the earlier start. Gauges are those
    of the engines that were not replaced, combined as the metric says. An info metric has one sample per
    name: the last engine's.
    """
    current = read.current(audits)
    return [
        (metric, merged(metric, metric.read(audits if metric.kind in SUMMED else current)))
        for metric in METRICS
    ]


def merged(metric: Metric, samples: Iterable[MetricSample]) -> list[MetricSample]:
    """One sample for each set of labels."""
    by_labels: dict[tuple[str, ...], MetricSample] = {}
    for sample in samples:
        key = sample.labels[:1] if metric.kind == "info" else sample.labels
        earlier = by_labels.get(key)
        if earlier is not None and metric.kind in SUMMED:
            sample = _summed(earlier, sample)
        elif earlier is not None and metric.kind == "gauge":
            sample = sample._replace(value=metric.combine(_number(earlier), _number(sample)))
        by_labels[key] = sample
    return list(by_labels.values())


def _number(sample: MetricSample) -> float:
    assert not isinstance(sample.value, Distribution)
    return sample.value


def _summed(one: MetricSample, other: MetricSample) -> MetricSample:
    created = min(one.created, other.created)
    if isinstance(one.value, Distribution) and isinstance(other.value, Distribution):
        both = Distribution.over(one.value.bounds)
        both.merge(one.value)
        both.merge(other.value)
        return MetricSample(one.labels, both, created)
    total = round(_number(one) + _number(other), 6)  # seconds are whole microseconds; a float sum might fall
    return MetricSample(one.labels, total, created, other.exemplar or one.exemplar)


# --- the page -------------------------------------------------------------------------------------------

HEAD = """# Metrics

Made by `python -m kvledger.exporters.metrics.metric_list`; do not edit.

`kvledger serve PATH` serves these at `/metrics`. `engine` is `MODEL / engine N`: N is the data-parallel rank,
or the lowest free number if another live engine of the model has that one; with `KVLEDGER_NAME`, `on NAME`
follows. A restarted engine continues the series of the engine before it. `kvledger_engine_info` has the
release, the process id and, as `name`, what findings and other commands call the engine. If several engines
have one label, counters and histograms are the sums over all of them. A gauge leaves out engines that were
replaced by a later one. If several are left,
`kvledger_open_requests` and the figures of the reconciliation are sums, and other gauges the largest value;
of the times and the success of scrapes, it is the smallest.

Unless a line says otherwise, tokens and requests are counted when the request ends. Requests that were
touched by lost events appear only in `kvledger_requests_total` and `kvledger_audited_tokens_total`, with the
verdict `unknown`. If the values of a label are a closed set, each value has a series from the start, at zero;
`other` stands for a value that this release does not know. No label holds a request id; exemplars do, in
the OpenMetrics format.
"""


def markdown() -> str:
    """docs/reference/metrics.md."""
    lines = [HEAD.rstrip("\n")]
    for group in GROUPS:
        lines += ["", f"## {group.title}", "", group.description, ""]
        lines += ["| name | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
        for metric in group.metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.exposed}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
        for metric in group.metrics:
            for label, words in metric.words.items():
                values = "every id of the catalogue" if words is IDS else ", ".join(f"`{w}`" for w in words)
                lines += ["", f"`{metric.exposed}`: `{label}` is {values}."]
            if metric.bounds:
                bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
                lines += ["", f"`{metric.exposed}`: buckets up to {bounds}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
