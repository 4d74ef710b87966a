"""Every figure about tokens that an engine exports or hands its client: its definition, and what is counted.

A definition says what the figure counts from first principles: once a request, an admission, a position or a
step. A deviation says what releases count instead. Which releases, and which invariant finds it, is in the
catalogue of known faults, unless no invariant can. No definition is taken from the code that counts.

Examined: vLLM 0.9.1, 0.9.2, 0.18.1, 0.19.1, 0.20.0, 0.23.0, 0.24.0, 0.27.1, 0.32.0 and 0.33.0, and 0.16 and
0.17 in part. The end of this file makes the tables of docs/reconciliation.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from ..faults.catalogue import catalogue


class Deviation(NamedTuple):
    """What some releases count instead.

    ``fault``: its id in the catalogue; "" where only vLLM's front end knows, which is not observed.
    ``unobserved``: the releases, where there is no fault to say it.
    """

    counts: str
    fault: str = ""
    unobserved: str = ""

    @property
    def releases(self) -> str:
        """The releases that count so, with what their numbers do not say."""
        if not self.fault:
            return self.unobserved
        affected = catalogue()[self.fault].releases
        return affected.span + (f" ({affected.note})" if affected.note else "")

    @property
    def finds(self) -> tuple[str, ...]:
        """The invariants that find it."""
        return catalogue()[self.fault].findings if self.fault else ()


class Compared(NamedTuple):
    """A counter that the sidecar compares: its label ``figure``, the ledger's figure, since which release.

    ``source`` is the counter's label of that name; "" for a counter without it.
    """

    figure: str
    counter: str
    source: str
    ledger: str
    since: str


class ExportedFigure(NamedTuple):
    """One figure, or several that are counted alike. A name may end in ``*``.

    ``each``: what it counts one by one. ``compared``: the counters that the sidecar compares.
    """

    names: tuple[str, ...]
    each: str
    definition: str
    deviations: tuple[Deviation, ...] = ()
    compared: tuple[Compared, ...] = ()


EARLY_END = Deviation("nothing of a request that ends before its first output", "prompt-missing")
LATER_CHUNK = Deviation("nothing of the later chunks of a session", "session-chunk-missing")
WHOLE_CHUNK = Deviation(
    "with each chunk of a session, the whole sequence so far (these later reports are not recorded yet)",
    "session-chunk-whole",
)
EACH_SAMPLE = Deviation("with `n` > 1, the prompt once a sample", "samples-counted-each")
ONE_ADMISSION = Deviation(
    "the split of one admission (in 0.20 to 0.25 the last before the first output, else the first), also for "
    "positions whose KV came from another",
    "later-source-missing",
)
MIXED = Deviation(
    "cached tokens of the first admission and external tokens of the last", "negative-local-hit"
)
FAILED_EXTERNAL = Deviation("external tokens that failed to load, as external", "failed-load-counted")
FAILED_LOCAL = Deviation("local hits that a failed load made invalid, as local", "failed-hit-reported")
HANDED_OVER = Deviation(
    "tokens that a prefill engine computed and handed over, as cached", "transfer-as-cached"
)
WORK_LEFT_OUT = (
    Deviation("no token of a full external hit, though the last is executed again", "full-hit-runs-unseen"),
    Deviation("a replayed window as cached only", "replay-missing"),
    Deviation(
        "each token once, though a preemption in mid-prefill or a failed load had it computed twice",
        "recomputed-prompt-missing",
    ),
)
NEVER_RAN = Deviation(
    "an admission whose request ended, or was looked up again, before it ran", "lookup-never-ran"
)
RESUMED_APART = Deviation(
    "lookups after a preemption, apart (`preempted_*`); no logger exports them", "lookup-resumed-missing"
)
FAILED_HIT = Deviation("hits that failed to load, under every failure policy", "lookup-load-failed")
CUT_DRAFTS = Deviation("accepted drafts that a stop before them cut off", "drafts-past-stop")
PADDING = Deviation("padding of a decode of one token, as drafts that were rejected", "padding-as-drafts")
PAST_STOP_STRING = Deviation(
    "tokens of the same step after a stop string; since 0.32 `usage` leaves them out", unobserved="all"
)

_LOOKUPS = "lookups of every admission"
_TIERS = "external tokens of this tier, as the connector reported it at each admission"

FIGURES: tuple[ExportedFigure, ...] = (
    ExportedFigure(
        ("vllm:prompt_tokens", "vllm:request_prompt_tokens", "prefill_stats.num_prompt_tokens"),
        "request",
        "The tokens of the client's prompt: once, when the prompt has been processed or the request ends. Of "
        "a session, those of each chunk.",
        (EARLY_END, LATER_CHUNK, WHOLE_CHUNK, EACH_SAMPLE),
        (
            Compared(
                "prompt_tokens",
                "vllm:prompt_tokens_total",
                "",
                "settled prompt tokens of ended requests",
                "0.20",
            ),
        ),
    ),
    ExportedFigure(
        (
            "vllm:prompt_tokens_by_source",
            "prefill_stats.num_local_cached_tokens",
            "prefill_stats.num_external_cached_tokens",
        ),
        "position",
        "Where the KV of each prompt token first came from, whichever admission brought it: the prefix "
        "cache, the connector (loaded, not promised) or a computation. The sources sum to the prompt.",
        (ONE_ADMISSION, MIXED, FAILED_EXTERNAL, FAILED_LOCAL, EARLY_END, LATER_CHUNK),
        tuple(
            Compared(
                figure, "vllm:prompt_tokens_by_source_total", source, "settled, from this source", "0.20"
            )
            for figure, source in (
                ("local_tokens", "local_cache_hit"),
                ("external_tokens", "external_kv_transfer"),
                ("computed_tokens", "local_compute"),
            )
        ),
    ),
    ExportedFigure(
        ("vllm:prompt_tokens_cached", "prefill_stats.num_cached_tokens"),
        "position",
        "Prompt tokens whose KV came from the prefix cache or from a store. A handover from a prefill engine "
        "is a transfer and no cache hit.",
        (HANDED_OVER, ONE_ADMISSION, FAILED_EXTERNAL, FAILED_LOCAL, EARLY_END),
        (
            Compared(
                "cached_tokens",
                "vllm:prompt_tokens_cached_total",
                "",
                "settled local and external together",
                "0.20",
            ),
        ),
    ),
    ExportedFigure(
        (
            "prefill_stats.num_computed_tokens",
            "vllm:request_prefill_kv_computed_tokens",
            "vllm:prompt_tokens_recomputed",
        ),
        "executed position",
        "Prompt tokens that the engine executed before the first output, each as often as it was executed.",
        (
            *WORK_LEFT_OUT,
            Deviation(
                "in the histogram of a decode engine, the prompt without the prefill engine's hits",
                unobserved="0.32 and later",
            ),
        ),
    ),
    ExportedFigure(
        ("prefill_stats.num_cache_creation_tokens", "usage.prompt_tokens_details.created_cache_tokens"),
        "position",
        "Prompt tokens that the request computed and wrote to the prefix cache.",
        (
            Deviation(
                "what is cached at the first output, without the hits of the first admission",
                "cache-write-overstated",
            ),
            Deviation(
                "less by the external tokens that failed to load and were computed",
                unobserved="0.26 and later",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:iteration_tokens_total",),
        "step",
        "The prompt and output tokens that the step executed.",
        (
            Deviation(
                "a prompt in the step of its first output; up to 0.20 its cached tokens too",
                "chunks-in-one-step",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_*"),
        "admission",
        "At each admission that runs: the tokens of the sequence, and those that the engine's cache had.",
        (
            Deviation("every lookup, also without an admission", "lookup-attempt-counted"),
            NEVER_RAN,
            RESUMED_APART,
            EACH_SAMPLE,
        ),
        (
            Compared("local_queried_tokens", "vllm:prefix_cache_queries_total", "", _LOOKUPS, "0.27"),
            Compared("local_hit_tokens", "vllm:prefix_cache_hits_total", "", _LOOKUPS, "0.27"),
        ),
    ),
    ExportedFigure(
        ("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"),
        "admission",
        "At each admission that runs and may read a cache: the tokens beyond the local hit, and those that "
        "the connector loaded.",
        (
            Deviation(
                "requests that may not read a cache, as those with `prompt_logprobs`; up to 0.27 also their "
                "hits",
                "lookup-exempt-counted",
            ),
            FAILED_HIT,
            HANDED_OVER,
            NEVER_RAN,
            RESUMED_APART,
            Deviation("requests when they begin to run, with the whole sequence", unobserved="0.11 to 0.15"),
        ),
        (
            Compared(
                "external_queried_tokens",
                "vllm:external_prefix_cache_queries_total",
                "",
                "the same for the connector",
                "0.16",
            ),
            Compared(
                "external_hit_tokens",
                "vllm:external_prefix_cache_hits_total",
                "",
                "the same for the connector",
                "0.16",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:prompt_tokens_cached_by_source",),
        "position",
        "Cached prompt tokens by the tier that held their KV.",
        (NEVER_RAN, FAILED_HIT, RESUMED_APART),
        tuple(
            Compared(figure, "vllm:prompt_tokens_cached_by_source_total", tier, ledger, "0.32")
            for figure, tier, ledger in (
                ("device_hit_tokens", "device", _LOOKUPS),
                *((f"{tier}_hit_tokens", tier, _TIERS) for tier in ("host", "p2p", "disk")),
                ("unspecified_hit_tokens", "external_unspecified", _TIERS),
            )
        ),
    ),
    ExportedFigure(
        ("vllm:generation_tokens", "vllm:request_generation_tokens", "usage.completion_tokens"),
        "output token",
        "The tokens that the client gets.",
        (
            PAST_STOP_STRING,
            Deviation("not those that came after their client had gone", unobserved="all"),
        ),
        (
            Compared(
                "output_tokens",
                "vllm:generation_tokens_total",
                "",
                "output tokens of all requests, as the engine delivers them",
                "0.9",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:request_max_num_generation_tokens",),
        "client's request",
        "The output tokens of its longest sample.",
        (PAST_STOP_STRING,),
    ),
    ExportedFigure(
        ("vllm:request_params_max_tokens",),
        "request",
        "The limit that the client set.",
        (EACH_SAMPLE,),
    ),
    ExportedFigure(
        ("usage.prompt_tokens",),
        "client's request",
        "The tokens of its prompt, or of its prompts.",
    ),
    ExportedFigure(
        ("usage.prompt_tokens_details.cached_tokens",),
        "client's request",
        "The tokens of all its prompts whose KV came from a cache, for every sample that read it.",
        (
            Deviation("with `n` > 1, one sample's tokens", "samples-counted-each"),
            Deviation("with several prompts in a call, one prompt's tokens", unobserved="all"),
            Deviation(
                "on a decode engine up to 0.27, the tokens handed over: nearly the whole prompt",
                "transfer-as-cached",
            ),
            Deviation(
                "on a decode engine, the prefill engine's cached tokens, if it tells",
                unobserved="0.32 and later",
            ),
            ONE_ADMISSION,
            FAILED_EXTERNAL,
        ),
    ),
    ExportedFigure(
        ("vllm:spec_decode_num_drafts",),
        "verified draft",
        "How often the model verified draft tokens of a request.",
        (PADDING,),
    ),
    ExportedFigure(
        ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_draft_tokens_per_pos"),
        "draft token",
        "The tokens that a drafter proposed and the model verified.",
        (PADDING, Deviation("without those that a grammar forbids", unobserved="0.18 and later")),
    ),
    ExportedFigure(
        (
            "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "metrics.speculative_decoding",
        ),
        "draft token",
        "The draft tokens that became output.",
        (CUT_DRAFTS,),
    ),
    ExportedFigure(
        ("vllm:diffusion_*",),
        "denoising step",
        "Steps, canvas positions and committed tokens of a diffusion model.",
    ),
    ExportedFigure(
        (
            "vllm:nixl_*",
            "vllm:mooncake_*",
            "vllm:umbp_*",
            "vllm:hf3fs_*",
            "vllm:hisparse_*",
            "vllm:kv_offload_*",
            "vllm:simple_kv_offload_*",
        ),
        "transfer",
        "Bytes, descriptors, keys or blocks of the KV transferred, their time, and the failed transfers.",
        (
            Deviation(
                "by the connector itself, in its own units; the journal has tokens and blocks",
                unobserved="all",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:mm_cache_queries", "vllm:mm_cache_hits"),
        "multimodal item",
        "Items looked up in the processor's cache, and found. They are no KV.",
    ),
    ExportedFigure(
        ("vllm:num_preemptions", "vllm:request_num_preemptions"),
        "preemption",
        "Preemptions, when they happen.",
        (
            Deviation(
                "with the request's next output; a request that ends before then counts none of them",
                unobserved="all",
            ),
        ),
        (
            Compared(
                "preemptions",
                "vllm:num_preemptions_total",
                "",
                "preemptions, counted as they happen",
                "0.9",
            ),
        ),
    ),
    ExportedFigure(
        ("vllm:request_success",),
        "client's request",
        "Requests that ended, by reason.",
        (
            EACH_SAMPLE,
            Deviation("not those whose client had gone when the last output came", unobserved="all"),
        ),
        (Compared("requests", "vllm:request_success_total", "", "ended requests", "0.9"),),
    ),
)
"""Every figure, in the order of the page."""


# --- The tables of docs/reconciliation.md: which counters are compared, and what each figure means.
#
# `make docs` replaces the page from the heading "What is compared" on. Its rows are those above.

HEADING = "## What is compared\n"
"""The first heading of what is written here."""

_NOT_COMPARED = """
A counter is not compared in releases where the journal's events can't reproduce it: before 0.20, prompt
figures are clamped, mixed or missing; before 0.27, local lookups include attempts that led to no admission.
[Releases](reference/releases.md) lists what each figure means in each release.

## What each figure means, and what is counted

Every figure about tokens that vLLM exports or hands its client has a definition here, from first principles:
what it counts once a request, an admission, a position or a step. No definition is taken from the code that
counts. The tables say what releases count instead, and which invariant finds it. Such a *drift* does not
change the verdict. It is found once an engine: by what the engine did or reported, not by its version. Where
no invariant is named, only vLLM's front end knows, which kvledger does not observe.

Examined: the sources of vLLM 0.9.1, 0.9.2, 0.18.1, 0.19.1, 0.20.0, 0.23.0, 0.24.0, 0.27.1, 0.32.0 and 0.33.0,
and those of 0.16 and 0.17 in part. A release between two of these is assumed to be like the older one.
"""


def markdown() -> str:
    """Both tables, from the heading on."""
    figures = ("\n".join(_figure(figure)) for figure in FIGURES)
    return "\n".join((HEADING, "\n".join(_compared()), _NOT_COMPARED, "\n\n".join(figures))) + "\n"


def replaced(page: str) -> str:
    """``page`` with these tables below its prose."""
    return page.partition(HEADING)[0] + markdown()


def _compared() -> Iterator[str]:
    """The table of the counters that the sidecar compares."""
    yield "| `figure` | the engine's counter | the ledger's figure | releases |"
    yield "|---|---|---|---|"
    rows = [row for figure in FIGURES for row in figure.compared]
    for (ledger, since), alike in groupby(rows, lambda row: (row.ledger, row.since)):
        yield _row(list(alike), ledger, since)


def _row(rows: list[Compared], ledger: str, since: str) -> str:
    figures = ", ".join(f"`{row.figure}`" for row in rows)
    counters = ", ".join(dict.fromkeys(f"`{row.counter}`" for row in rows))
    return f"| {figures} | {counters} | {ledger} | since {since} |"


def _figure(figure: ExportedFigure) -> Iterator[str]:
    """One definition and its deviations."""
    yield "### " + ", ".join(f"`{name}`" for name in figure.names)
    yield ""
    yield f"*Each {figure.each}.* {figure.definition}"
    if not figure.deviations:
        return
    yield ""
    yield "| releases | what is counted instead | found by |"
    yield "|---|---|---|"
    for row in figure.deviations:
        found = ", ".join(f"`{id}`" for id in row.finds)
        yield f"| {row.releases} | {row.counts} | {found} |"
