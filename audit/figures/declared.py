"""The figures of a request, each declared once.

To add a figure: let the ledger post it to a slot of the account, and add a line here. Every output has it
then: sums and checkpoints, metrics, tables and docs/reference/tables.md, JSON and CSV, and ``diff``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .. import causes
from ..causes import BEGAN_BEFORE
from ..ledger.account import Account
from ..ledger.weights import outputs_of, suspect_of
from .figure import MICROSECONDS, Counter, Figure, Histogram, Item, Known, Settled, Slot, Unknown, Whole

OTHER = "other"
"""Stands for a cause that this release does not know."""

PROMPTS = Counter(
    "kvledger_prompt_tokens",
    "Prompts",
    "Prompt tokens by where their KV first came from, counted once per request.",
    "source",
)
FIRST_TOKEN = Counter(
    "kvledger_first_token_seconds",
    "First tokens",
    "Time from the arrival of requests in the scheduler to their first output, by cause.",
    "cause",
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""The bounds of ``vllm:time_to_first_token_seconds``, so that the two can be compared."""

OUTPUT_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""The bounds of ``vllm:request_time_per_output_token_seconds``."""

FIRST_TOKENS = Histogram(
    "kvledger_time_to_first_token_seconds",
    "First tokens",
    "Time from a request's arrival in the scheduler to its first output.",
    FIRST_TOKEN_SECONDS,
)
FIRST_TOKEN_CAUSES = Histogram(
    "kvledger_time_to_first_token_cause_seconds",
    "First tokens",
    "The part of that time with one cause, of the requests that have any.",
    FIRST_TOKEN_SECONDS,
    "cause",
)
OUTPUT_TOKENS = Histogram(
    "kvledger_time_per_output_token_seconds",
    "Later tokens",
    "Time from a request's first output to its last, divided by the output tokens after the first.",
    OUTPUT_TOKEN_SECONDS,
)
QUEUE = Counter(
    "kvledger_queued_seconds",
    "First tokens",
    "The part `queued` of that time, by what ended the admissions of the steps that left requests waiting.",
    "cause",
)
PREFILL_PARTS = Counter(
    "kvledger_prefill_seconds",
    "First tokens",
    "The part `prefill` of that time, by whose tokens the steps had: a share by tokens, no measurement.",
    "share",
)
OUTPUT_TIME = Counter(
    "kvledger_later_token_seconds",
    "Later tokens",
    "Time from the first output of requests to their last, by cause.",
    "cause",
)
DECODE_PARTS = Counter(
    "kvledger_decode_seconds",
    "Later tokens",
    "The part `decode` of that time, by whose tokens the steps had: a share by tokens, no measurement.",
    "share",
)
WORK = Counter("kvledger_work_tokens", "Work", "Scheduled tokens by outcome.", "kind")


def _in_flight(account: Account) -> int:
    if not account.in_flight:
        return 0
    return sum(each.tokens - each.posted for each in account.in_flight if not each.overrun)


def _plan_computed(account: Account) -> int | None:
    """The rest of the prompt that was planned: of a session, of its first chunk."""
    if account.plan is None:
        return None
    prompt = account.settlements[0].prompt_tokens if account.settlements else account.prompt_tokens
    local, external = account.plan
    return prompt - local - external


def _hits(account: Account) -> int:
    hits = 0
    for life in account.lives:
        if life.local > 0:
            hits += life.local
    return hits


def _alone(name: str, group: str, help: str) -> tuple[Counter, ...]:
    return (Counter(f"kvledger_{name}_tokens", group, help),)


def _by_cause(name: str, group: str, help: str) -> Counter:
    return Counter(f"kvledger_{name}_tokens", group, help, "cause", by_cause=True)


def _by_tier(name: str, help: str) -> Counter:
    return Counter(f"kvledger_{name}_by_tier_tokens", "External tokens", help, "tier", by_cause=True)


def _by_cause_of_time(
    slot: str,
    whole: str,
    counter: Counter,
    words: Mapping[str, str],
    histogram: Histogram | None = None,
) -> tuple[Figure, ...]:
    """The parts of a time, each with one cause, as the account has them in ``slot``."""
    return tuple(
        Figure(
            f"{cause}_microseconds",
            text,
            Item(slot, place),
            MICROSECONDS,
            part_of=whole,
            counters=(counter,),
            histogram=histogram,
        )
        for place, (cause, text) in enumerate(words.items())
    )


FIGURES: tuple[Figure, ...] = (
    Figure("requests", "requests", lambda _: 1, "requests", of_unknown=True, sql="count(*)"),
    Figure(
        "unknown_requests",
        "requests whose account is unknown; no figure of tokens includes them",
        Unknown(),
        "requests",
        of_unknown=True,
        sql="count(unknown)",
    ),
    Figure(
        "began_before",
        "unknown requests that began before the first kept segment of a rotated journal: no loss",
        Unknown(BEGAN_BEFORE),
        "requests",
        of_unknown=True,
        sql=f"count(*) FILTER (unknown = '{BEGAN_BEFORE}')",
    ),
    Figure("preemptions", "number of preemptions", Slot("preemptions"), "preemptions", of_unknown=True),
    # the prompt, by where its KV first came from
    Figure("prompt_tokens", "settled prompt tokens; of a session, all chunks", Settled("new_tokens")),
    Figure(
        "local",
        "prompt tokens that hit the local prefix cache first",
        Settled("local"),
        part_of="prompt_tokens",
        counters=(PROMPTS,),
    ),
    Figure(
        "external",
        "prompt tokens that the KV connector loaded first",
        Settled("external"),
        part_of="prompt_tokens",
        counters=(PROMPTS,),
    ),
    Figure(
        "computed",
        "prompt tokens that were computed first",
        Settled("computed"),
        part_of="prompt_tokens",
        counters=(PROMPTS,),
    ),
    Figure(
        "unattained",
        "prompt tokens that had no KV when the request ended",
        Settled("unattained"),
        part_of="prompt_tokens",
        counters=(PROMPTS,),
    ),
    Figure(
        "invalid_hits",
        "unattained tokens that the engine hit in cached blocks without valid KV",
        Settled("invalid_hits"),
        part_of="prompt_tokens",
    ),
    Figure(
        "plan_requests",
        "requests with a planned split",
        Known("plan"),
        "requests",
        sql="count(plan_local)",
    ),
    Figure("plan_local", "local hit planned at the first admission that was scheduled", Item("plan", 0)),
    Figure(
        "plan_external",
        "external tokens promised at the first admission that was scheduled",
        Item("plan", 1),
    ),
    Figure("plan_computed", "tokens that were to be computed after that admission", _plan_computed),
    Figure(
        "reports",
        "requests whose sources the engine reported",
        Known("reported"),
        "requests",
        sql="count(reported_local)",
    ),
    Figure("reported_local", "local tokens, reported by the engine", Item("reported", 0)),
    Figure("reported_external", "external tokens, reported by the engine", Item("reported", 1)),
    Figure("reported_computed", "computed tokens, reported by the engine", Item("reported", 2)),
    # the work
    Figure("scheduled", "scheduled tokens; those with a part of it sum to it", Slot("scheduled")),
    Figure(
        "first_prompt",
        "prompt tokens computed for the first time",
        Slot("first_prompt"),
        part_of="scheduled",
        counters=(WORK,),
    ),
    Figure(
        "first_output",
        "output tokens computed for the first time",
        Slot("first_output"),
        part_of="scheduled",
        counters=(WORK,),
    ),
    Figure(
        "rework",
        "tokens computed again because their KV was lost",
        Slot("rework"),
        causes=causes.REWORK,
        part_of="scheduled",
        counters=(
            WORK,
            _by_cause("rework", "Work", "Tokens computed again, by the cause that lost their KV."),
        ),
    ),
    Figure("rejected", "rejected draft tokens", Slot("rejected"), part_of="scheduled", counters=(WORK,)),
    Figure(
        "overrun",
        "tokens in flight at the request's stop, or computed past its sequence",
        Slot("overrun"),
        part_of="scheduled",
        counters=(WORK,),
    ),
    Figure("in_flight", "scheduled tokens whose output has not come", _in_flight, part_of="scheduled"),
    Figure(
        "discarded",
        "tokens whose KV was discarded at the end of a life",
        Slot("discarded"),
        causes=causes.DISCARDS,
        counters=(
            _by_cause(
                "discarded",
                "Work",
                "Tokens whose KV was discarded at the end of a life, by cause. A life lasts from an "
                "admission to the next preemption or the end.",
            ),
        ),
    ),
    Figure(
        "hit_again",
        "repeat hits: local hits on positions whose KV an earlier life had",
        Slot("hit_again"),
        counters=_alone(
            "hit_again",
            "Work",
            "Repeat hits: local hits of a later life on positions whose KV an earlier life already had.",
        ),
    ),
    Figure(
        "loaded_again",
        "repeat loads: loads for positions whose KV an earlier life had",
        Slot("loaded_again"),
        counters=_alone(
            "loaded_again",
            "Work",
            "Repeat loads: external loads of a later life for positions whose KV an earlier life already "
            "had.",
        ),
    ),
    # the time to the first output; its parts sum to it
    Figure(
        "first_tokens",
        "requests with a first output, of sessions their first turn",
        Known("first_token"),
        "requests",
        sql="count(first_token_microseconds)",
        counters=(
            Counter("kvledger_first_token_requests", "First tokens", "Requests that had a first output."),
        ),
    ),
    Figure(
        "first_token_microseconds",
        "from the request's arrival in the scheduler to its first output; of a session, of its first turn",
        Whole("first_token"),
        MICROSECONDS,
        per="first_tokens",
        histogram=FIRST_TOKENS,
    ),
    *_by_cause_of_time(
        "first_token", "first_token_microseconds", FIRST_TOKEN, causes.FIRST_TOKEN, FIRST_TOKEN_CAUSES
    ),
    *_by_cause_of_time("queued", "queued_microseconds", QUEUE, causes.QUEUE),
    *_by_cause_of_time("prefill_parts", "prefill_microseconds", PREFILL_PARTS, causes.PREFILL_PARTS),
    # the time from the first output to the last; its parts sum to it
    Figure(
        "later_tokens",
        "output tokens after the first one, of requests that ended with their last output",
        Slot("later_tokens"),
        counters=_alone(
            "later",
            "Later tokens",
            "Output tokens after the first one, of requests that ended with their last output.",
        ),
    ),
    Figure(
        "later_tokens_microseconds",
        "from the request's first output to its last; null for sessions and requests that were aborted",
        Whole("output_time"),
        MICROSECONDS,
        per="later_tokens",
        histogram=OUTPUT_TOKENS,
    ),
    *_by_cause_of_time("output_time", "later_tokens_microseconds", OUTPUT_TIME, causes.OUTPUT_TIME),
    *_by_cause_of_time("decode_parts", "decode_microseconds", DECODE_PARTS, causes.DECODE_PARTS),
    # what the connector promised
    Figure(
        "promised",
        "external tokens promised by the connector, over all lives",
        Slot("promised"),
        counters=_alone(
            "external_promised",
            "External tokens",
            "External tokens that the connector promised, summed over all admissions.",
        ),
    ),
    Figure(
        "loaded",
        "promised tokens that were loaded",
        Slot("loaded"),
        part_of="promised",
        counters=_alone("external_loaded", "External tokens", "External tokens that were loaded."),
    ),
    Figure(
        "voided",
        "promised tokens that failed or were cancelled",
        Slot("voided"),
        causes=(
            causes.FAILED,
            causes.NOT_PLANNED,
            causes.NEVER_LOADED,
            causes.PREEMPTED,
            causes.FINISHED,
        ),
        part_of="promised",
        counters=(
            _by_cause(
                "external_voided",
                "External tokens",
                "External tokens that were promised and failed or were cancelled, by cause.",
            ),
        ),
    ),
    Figure(
        "promised_by_tier",
        "of these, tokens whose tier was asked for",
        Slot("promised_by_tier", when="tiered"),
        causes=tuple(causes.TIERS),
        part_of="promised",
        counters=(
            _by_tier(
                "external_promised",
                "External tokens that the connector promised, by the tier that it reported.",
            ),
        ),
    ),
    Figure(
        "loaded_by_tier",
        "loaded tokens whose tier was asked for",
        Slot("loaded_by_tier", when="tiered"),
        causes=tuple(causes.TIERS),
        part_of="loaded",
        counters=(
            _by_tier(
                "external_loaded",
                "External tokens that were loaded, by the tier that the connector reported.",
            ),
        ),
    ),
    Figure(
        "voided_by_tier",
        "tokens that failed or were cancelled and whose tier was asked for",
        Slot("voided_by_tier", when="tiered"),
        causes=tuple(causes.TIERS),
        part_of="voided",
        counters=(
            _by_tier(
                "external_voided",
                "External tokens that failed or were cancelled, by the tier that the connector reported.",
            ),
        ),
    ),
    Figure(
        "loaded_again_by_tier",
        "repeat loads whose tier was asked for",
        Slot("loaded_again_by_tier", when="tiered"),
        causes=tuple(causes.TIERS),
        part_of="loaded_again",
        counters=(_by_tier("loaded_again", "Repeat loads, by the tier that the connector reported."),),
    ),
    # the encoder outputs that the prompt's inputs needed
    Figure(
        "encoder_computed",
        "encoder embeddings that were computed for the request",
        Slot("encoder_computed"),
        "embeddings",
        counters=(
            Counter(
                "kvledger_encoder_computed_embeddings",
                "Encoder cache",
                "Encoder embeddings that steps computed.",
            ),
        ),
    ),
    Figure(
        "encoder_cached",
        "encoder embeddings that the encoder cache had when the request first read them, in each life",
        Slot("encoder_cached"),
        "embeddings",
        counters=(
            Counter(
                "kvledger_encoder_cached_embeddings",
                "Encoder cache",
                "Encoder embeddings that the encoder cache had for a request.",
            ),
        ),
    ),
    # the weights that KV was computed under, once they have changed
    Figure(
        "output_tokens",
        "output tokens, without those past a stop",
        outputs_of,
        counters=_alone("output", "Weights", "Output tokens, without those past a stop."),
    ),
    Figure(
        "suspect_outputs",
        "of these, tokens of steps that read KV of older weights",
        suspect_of,
        causes=tuple(causes.OLDER),
        part_of="output_tokens",
        counters=(
            _by_cause(
                "suspect_output",
                "Weights",
                "Output tokens of steps that read KV of older weights, by how much older.",
            ),
        ),
    ),
    Figure(
        "hits",
        "local hits of all lives",
        _hits,
        counters=_alone("hit", "Weights", "Local hits of all admissions."),
    ),
    Figure(
        "older_hits",
        "of these, hits on KV of older weights",
        Slot("older_hits"),
        causes=tuple(causes.OLDER),
        part_of="hits",
        counters=(
            _by_cause("older_hit", "Weights", "Local hits on KV of older weights, by how much older."),
        ),
    ),
    Figure(
        "older_loads",
        "promised tokens with KV of older weights",
        Slot("older_loads"),
        causes=tuple(causes.OLDER),
        counters=(
            _by_cause(
                "older_load",
                "Weights",
                "Promised external tokens with KV of older weights, by how old.",
            ),
        ),
    ),
    Figure(
        "older_prompt",
        "settled prompt tokens with KV of older weights",
        Slot("older_prompt"),
        causes=tuple(causes.OLDER),
        counters=(
            _by_cause(
                "older_prompt",
                "Weights",
                "Settled prompt tokens with KV of older weights, by how old.",
            ),
        ),
    ),
    # a sample of what prompts missed
    Figure(
        "sampled_misses",
        "of the blocks that a first hit could have covered and did not, those in a sample of one in sixteen "
        "contents",
        Slot("sampled_misses"),
        "blocks",
        causes=tuple(causes.SAMPLED_MISSES),
        counters=(
            Counter(
                "kvledger_sampled_missed_blocks",
                "Prompts",
                "Blocks that the first hit of a prompt could have covered and did not, of one in sixteen "
                "contents, by what became of the content before.",
                "cause",
                by_cause=True,
            ),
        ),
    ),
)
"""In the order in which outputs show them."""

BY_NAME = {figure.name: figure for figure in FIGURES}


def parts_of(whole: str, counter: Counter | None = None) -> tuple[str, ...]:
    """The names of the figures that are parts of another one; those of a ``counter``, if it is given."""
    return tuple(
        figure.name
        for figure in FIGURES
        if figure.part_of == whole and (counter is None or counter in figure.counters)
    )
