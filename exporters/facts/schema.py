"""The columns of the facts: what a row of each table holds.

The figures of ``requests`` are those of :mod:`kvledger.audit.figures.declared`. ``rows.py`` makes the rows of
requests, ``../trace/tables.py`` those of the other tables of an export.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ...audit.causes import OTHER_ENGINE, TURN_LOSSES
from ...audit.figures.declared import FIGURES
from ...audit.figures.figure import LABELS, TOKENS, is_number

Kind = Literal["text", "count", "seconds", "time", "counts", "distribution"]
"""``counts``: a list of integers. ``distribution``: how often each number was seen."""

Value = str | int | float | None
Row = tuple[Value, ...]
Rows = list[Row]


class Column(NamedTuple):
    """One column. Counts are tokens unless ``description`` names another unit. Any value may be null."""

    name: str
    kind: Kind
    description: str


ENGINE = Column("engine", "text", "the engine's name, as in findings")
JOURNAL = Column("journal", "text", "the journal's name; with `request` it names one request")
REQUEST = Column("request", "count", "the number of the request in its journal")
REQUEST_ID = Column("request_id", "text", "vLLM's request id")
ENDED = Column("closed_time", "time", "when the request ended, in UTC; null while it is open")

FIGURE_COLUMNS = tuple(
    Column(
        figure.name,
        "count",
        figure.text
        + (f"; a part of `{figure.part_of}`" if figure.part_of else "")
        + ("; `causes` has them by cause" if figure.causes else "")
        + (f"; in {figure.unit}" if figure.unit not in (TOKENS, figure.name) else ""),
    )
    for figure in FIGURES
    if not figure.sql
)
"""One for each figure of a request. A figure is null where the request has none or its account is unknown."""

LOAD_COLUMNS = (
    Column("asynchronous_loads", "count", "number of asynchronous loads whose end is known"),
    Column("load_waited_microseconds", "count", "microseconds that the request waited for them"),
    Column("asynchronous_tokens", "count", "external tokens that they loaded"),
    Column("synchronous_tokens", "count", "external tokens that were loaded within a step"),
    Column("not_saved_tokens", "count", "promised tokens that were computed, because their load failed"),
    Column("load_vain_microseconds", "count", "microseconds waited for loads that loaded no token"),
)
"""The fields of :class:`~kvledger.audit.analysis.costs.Loads`, in their order."""

LABEL_COLUMNS = tuple(
    Column(label.column, "count" if is_number(label) else "text", label.text) for label in LABELS
)

REQUESTS = (
    ENGINE,
    JOURNAL,
    REQUEST,
    REQUEST_ID,
    Column("outcome", "text", "how the request ended; null while it is open"),
    Column("unknown", "text", "why nothing is known of the request; all figures are null then"),
    Column("verdict", "text", "clean, violated or unknown; null where the rows were made without checks"),
    Column("added_time", "time", "when the scheduler received the request, in UTC"),
    ENDED,
    Column("settled_time", "time", "when the sources of the prompt tokens were settled for the first time"),
    Column("first_output_time", "time", "when the first output came; null if none did or it is not known"),
    *FIGURE_COLUMNS,
    Column(
        "missed",
        "count",
        "prompt tokens that missed the caches: each time they were computed, and once more if they had no KV "
        "at the end; `causes` has them by cause",
    ),
    Column("sequence_tokens", "count", "prompt and output tokens"),
    *LOAD_COLUMNS,
    Column("lives", "count", "number of lives; a life lasts from an admission to a preemption or the end"),
    Column(
        "waited_microseconds",
        "count",
        "microseconds between lives and before the first one, up to the end or the present",
    ),
    Column("model", "text", "the model that the engine serves"),
    Column("began_time", "time", "the engine's second 0, in UTC"),
    Column("data_parallel_rank", "count", "number of the engine's data-parallel rank"),
    *LABEL_COLUMNS,
    Column(
        "weights",
        "count",
        "version of the weights under which the first output was sampled, counted from 0 by changes of the "
        "model and its adapters; null: there was no output, or it is not known",
    ),
    Column(
        "tiers",
        "text",
        "the tiers that the connector reported for the external tokens, with commas between them; null: it "
        "was not asked, or it is not known",
    ),
)

CAUSES = (
    ENGINE,
    JOURNAL,
    REQUEST,
    ENDED,
    Column("figure", "text", "a figure that has causes, such as rework or voided; or missed"),
    Column("cause", "text", "the cause, as `kvledger explain` lists them"),
    Column("tokens", "count", "tokens of this cause"),
    Column(
        "first_token_tokens",
        "count",
        "those of them that were computed before the first output, so that it came later; null if none was, "
        "or if it is not known",
    ),
    Column(
        "first_token_waited_microseconds",
        "count",
        "microseconds that the first output waited after preemptions; null where no delay is known",
    ),
    Column(
        "more_blocks_percent",
        "count",
        "how many percent more blocks would have avoided the preemptions; null: not known, or another cause",
    ),
)

CHUNKS = (
    ENGINE,
    JOURNAL,
    REQUEST,
    ENDED,
    Column("first_settled_time", "time", "when the session's first chunk was settled, in UTC"),
    Column("settled_time", "time", "when the sources of this chunk were settled, in UTC"),
    Column("local", "count", "its tokens that hit the local prefix cache first"),
    Column("external", "count", "its tokens that the KV connector loaded first"),
    Column("computed", "count", "its tokens that were computed first"),
    Column("unattained", "count", "its tokens that had no KV when the request ended"),
)
"""Chunks of a session after its first one. Its row of ``requests`` has the sums over all chunks."""

DIFFERENCES = (
    ENGINE,
    JOURNAL,
    REQUEST,
    ENDED,
    Column("step", "text", "to_plan: from settled to planned tokens; to_reported: from planned to reported"),
    Column("cause", "text", "why the figures differ, as `kvledger explain` lists them"),
    Column("local", "count", "by how much the local tokens change in this step"),
    Column("external", "count", "by how much the external tokens change"),
    Column("computed", "count", "by how much the computed tokens change"),
    Column("unattained", "count", "by how much the unattained tokens change"),
)

ACTIVITY = (
    ENGINE,
    JOURNAL,
    Column("time", "time", "when this span of time begins, in UTC"),
    Column("width_microseconds", "count", "its length in microseconds"),
    Column("running", "count", "requests that ran at its end; null: nothing changed in it"),
    Column("waiting", "count", "requests in the engine that did not run at its end"),
    Column("preemptions", "count", "number of preemptions in it"),
    Column("resets", "count", "number of resets of the prefix cache in it"),
)

FINDINGS = (
    ENGINE,
    JOURNAL,
    Column("id", "text", "the invariant, as `kvledger explain` lists them"),
    Column("severity", "text", "violation or drift"),
    Column("request_id", "text", "vLLM's request id; null if no single request is concerned"),
    Column("life", "count", "number of the request's life"),
    Column("step", "count", "step in which the finding was first seen"),
    Column("time", "time", "when the finding was first seen, in UTC"),
    Column("message", "text", "one sentence with the figures"),
    Column(
        "tenant", "text", "the request's KVLEDGER_GROUP, else the keyed hash of its salt; null: not known"
    ),
    Column(
        "session",
        "text",
        "the streaming-input session that the request is, else the session that it is a turn of; null: none",
    ),
    Column("tokens", "count", "how many tokens it was about when it was first seen; null: it says no number"),
)

ADMISSIONS = (
    ENGINE,
    JOURNAL,
    REQUEST,
    REQUEST_ID,
    ENDED,
    Column("life", "count", "number of the life among all of its journal, from 0"),
    Column("arrival", "count", "number of the request in the order of arrival, from 0"),
    Column("added_time", "time", "when the scheduler received the request; null if the trace began later"),
    Column("admitted_time", "time", "when it was admitted, in UTC"),
    Column("local", "count", "tokens that the admission hit; null if it was not recorded"),
    Column("sequence_tokens", "count", "length of the sequence that was looked up in the prefix cache"),
    Column("resumed", "count", "1 if the request had a life before, else 0"),
    Column("hit_blocks", "count", "number of blocks that the lookup hit"),
    Column("external_tokens", "count", "tokens that the KV connector promised at the admission"),
    Column("preempted", "count", "1 if the life ended by a preemption for want of blocks, else 0"),
    Column("computed_tokens", "count", "tokens that had KV when it was preempted or its request ended"),
    Column("prompt_tokens", "count", "length of the request's prompt"),
    *LABEL_COLUMNS,
)
"""One row for each life of a request, of engines with a pool in which full attention is a group."""

BLOCK_OPERATIONS = (
    ENGINE,
    JOURNAL,
    Column("time", "time", "when it happened, in UTC"),
    Column("number", "count", "number of the operation in its journal, from 0: it gives the order"),
    Column(
        "operation",
        "text",
        "admitted, hit, grew, cached or released: of the blocks of a life; evicted: from a block that was "
        "allocated; dropped: by the engine; reset: of the whole cache; cached_in_group: by a life, in "
        "another KV cache group than the others, which are of the first group of full attention",
    ),
    Column("life", "count", "the life, as in `admissions`; null: of none, or not known"),
    Column(
        "blocks",
        "count",
        "number of blocks that the life has after grew, or that stand before the first of hit and cached; "
        "tokens up to the end of the block of cached_in_group; 1 for a reset after the weights changed",
    ),
    Column(
        "hash_ids",
        "counts",
        "hash ids of the blocks' content, in order; they are keyed hashes. Of cached_in_group: the group, "
        "and the hash id",
    ),
)
"""The operations on the prefix cache that ``kvledger whatif`` and ``kvledger why turns`` read, in order."""

TURNS = (
    ENGINE,
    JOURNAL,
    REQUEST_ID,
    ENDED,
    Column("session", "text", "the session; one that begins with ~ was inferred from block hashes"),
    Column("given", "count", "1 if the client or the operator named the session, 0 if it was inferred"),
    Column("number", "count", "number of the turn in its session, from 1, among the turns of this journal"),
    Column("before", "text", "request id of the turn before; null: there is none in this journal"),
    Column("retried", "count", "1 if the request was sent before with the same prompt, else 0"),
    Column("arrived_time", "time", "when the scheduler received it, in UTC"),
    Column("idle_microseconds", "count", "microseconds from the end of the turn before to its arrival"),
    Column("prompt_tokens", "count", "length of its prompt"),
    Column("hit", "count", "local and external tokens of its first admission"),
    Column("reusable", "count", "what the turn before left, below the last token of the prompt"),
    Column("shared", "count", "tokens that both turns have for certain, in whole blocks"),
    Column("kept", "count", "tokens of which it left KV"),
    *(
        Column(f"lost_{cause}", "count", f"reusable tokens that were not hit: {words}")
        for cause, words in TURN_LOSSES.items()
        if cause != OTHER_ENGINE
    ),
)
"""One row for each turn of a session, of engines whose block trace ``kvledger why turns`` can read."""

BLOCK_USE = (
    ENGINE,
    JOURNAL,
    Column("time", "time", "when this span of time begins, in UTC"),
    Column("width_microseconds", "count", "its length in microseconds"),
    Column("blocks", "count", "number of blocks of the engine's pools"),
    Column("most_running", "count", "the most blocks that requests or the connector held"),
    Column("running", "count", "number of blocks that they held at its end"),
    Column("cached", "count", "free blocks at its end whose content could be hit"),
    Column("empty", "count", "free blocks without content"),
    Column("unknown", "count", "free blocks of which the trace does not say whether they have content"),
    *(
        Column(
            f"{state}_microseconds", "count", f"block-microseconds of {state} blocks, up to its last event"
        )
        for state in ("running", "cached", "empty", "unknown")
    ),
    Column("newly_cached", "count", "number of blocks that were cached"),
    Column("allocated", "count", "number of blocks that were allocated"),
    Column("hits", "count", "number of blocks that admissions hit"),
    Column("evicted", "count", "number of blocks whose content was evicted"),
    Column("never_hit", "count", "those of them that nobody had hit"),
    Column("lifetimes", "distribution", "seconds from the caching to the eviction of content"),
    Column("idle", "distribution", "seconds from the last release to the eviction"),
    Column("reuse_seconds", "distribution", "seconds from a release to the next hit"),
    Column("reuse_blocks", "distribution", "blocks allocated between a release and the next hit"),
)
"""How the blocks of an engine were used over time. Distributions are in buckets that are 9 % wide."""

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "causes": CAUSES,
    "chunks": CHUNKS,
    "differences": DIFFERENCES,
    "activity": ACTIVITY,
    "findings": FINDINGS,
    "admissions": ADMISSIONS,
    "block_operations": BLOCK_OPERATIONS,
    "block_use": BLOCK_USE,
    "turns": TURNS,
}
"""The tables that are kept, and that every query can read."""

ENGINES = (
    ENGINE,
    JOURNAL,
    Column("path", "text", "where the journal is"),
    Column("product", "text", "the engine's product, such as vllm"),
    Column("version", "text", "its release"),
    Column("adapter", "text", "the adapter that observed it"),
    Column("level", "text", "the level of recording: tokens, blocks or content"),
    Column("process_id", "count", "the engine's process"),
    Column("model", "text", "the model that it serves"),
    Column("connector", "text", "its KV connector; none without one"),
    Column("block_tokens", "count", "tokens per block of its cache; null: not reported"),
    Column("began_time", "time", "the engine's second 0, in UTC"),
    Column("busy_seconds", "seconds", "time of its steps in the window"),
    Column("prefill_seconds", "seconds", "estimated time of a prefill token; null: no model of step time"),
    Column("decode_seconds", "seconds", "estimated time of a decoding request in a step"),
    Column("draft_seconds", "seconds", "estimated time of a draft token"),
    Column(
        "rows_from_time",
        "time",
        "before this time only sums by the hour are kept of its requests; null: all rows of the window are",
    ),
)
"""A row for each journal. It is made anew each time."""
