"""What differs between products, and what the figures of an engine mean in each release.

One row is one meaning, valid from release ``since`` until before ``until``; it also says which invariants
can't be checked then. Adapters are chosen by signatures, never by these tables. They describe what the
releases do, and ``kvledger doctor`` prints them. A release between two that were examined is assumed to be
like the older one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Release = tuple[int, ...]
Product = Literal["vllm", "lmcache", "sglang"]


class Meaning(NamedTuple):
    """What one figure means: ``word`` for programs, ``says`` for people.

    ``unchecked``: invariants that can't be checked then; ``in_part``: invariants that are checked in part.
    """

    figure: str
    since: Release
    until: Release | None
    word: str
    says: str
    unchecked: tuple[str, ...] = ()
    in_part: tuple[str, ...] = ()


REPORTED = (
    "tokens/set-once",
    "connector/failed-load-counted",
    "metrics/prompt-missing",
    "metrics/session-chunk-missing",
    "metrics/session-chunk-whole",
    "metrics/full-hit-token-missing",
    "metrics/replay-missing",
    "metrics/recomputed-prompt-missing",
    "metrics/later-source-missing",
    "metrics/failed-hit-reported",
    "metrics/transfer-as-cached",
    "metrics/cache-write-overstated",
    "metrics/chunks-in-one-step",
)
"""Invariants that check only engine-reported figures."""

LOOKUPS = (
    "tokens/lookup-counted-once",
    "metrics/lookup-never-ran",
    "metrics/lookup-resumed-missing",
    "metrics/lookup-attempt-counted",
    "metrics/lookup-load-failed",
    "metrics/lookup-exempt-counted",
)
"""Invariants that check only the engine's statistics of lookups."""

NONE_IN_FLIGHT = Meaning(
    "tokens in flight",
    (0,),
    None,
    "none",
    "The engine counts neither tokens in flight nor output placeholders.",
    unchecked=("tokens/in-flight",),
)

MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        "prompt figures",
        (0, 9),
        (0, 16),
        "none",
        "The engine does not distinguish local from external prompt tokens.",
        unchecked=REPORTED,
        in_part=("tokens/negative", "tokens/source-sum"),
    ),
    Meaning(
        "prompt figures",
        (0, 16),
        (0, 20),
        "mixed",
        "The cached tokens are from the first admission that ran, the external ones from the last "
        "connector match; local is the difference.",
        in_part=("tokens/set-once",),
    ),
    Meaning(
        "prompt figures",
        (0, 20),
        (0, 26),
        "last",
        "All prompt figures are from the last admission before the first output.",
    ),
    Meaning(
        "prompt figures",
        (0, 26),
        None,
        "first",
        "All prompt figures are from the first admission that ran.",
    ),
    Meaning(
        "a negative figure",
        (0, 16),
        (0, 19),
        "kept",
        "A local figure below zero is counted as it is; a Prometheus counter rejects it.",
    ),
    Meaning(
        "a negative figure",
        (0, 19),
        (0, 20),
        "clamped",
        "A local figure below zero is counted as zero, and the sum of the sources is too high.",
    ),
    Meaning(
        "a full hit",
        (0, 16),
        (0, 20),
        "added back",
        "The recomputed last token of a full hit counts as computed and as a local hit.",
    ),
    Meaning(
        "failed loads",
        (0, 16),
        (0, 20),
        "taken off",
        "Tokens that failed to load are subtracted from the external figure, unless their request was "
        "preempted before; after a synchronous load they then count as local hits.",
    ),
    Meaning(
        "failed loads",
        (0, 20),
        None,
        "counted",
        "Tokens that failed to load stay in the external figure.",
    ),
    Meaning(
        "local lookups",
        (0, 9),
        (0, 27),
        "attempts",
        "Counted at the lookup, so an attempt that leads to no admission counts too.",
    ),
    Meaning("local lookups", (0, 27), None, "admissions", "Counted once an admission."),
    Meaning(
        "external lookups",
        (0, 9),
        (0, 11),
        "none",
        "The engine does not count them.",
        unchecked=LOOKUPS,
    ),
    Meaning(
        "external lookups",
        (0, 11),
        (0, 16),
        "runs",
        "Counted when a request begins to run, with its whole sequence.",
        unchecked=LOOKUPS,
    ),
    Meaning("external lookups", (0, 16), None, "admissions", "Counted once an admission."),
    Meaning("load failure policy", (0, 9), (0, 11), "none", "A load can't be reported failed."),
    Meaning(
        "load failure policy",
        (0, 11),
        (0, 17),
        "recompute",
        "Tokens that failed to load are recomputed; since 0.13 unless configured otherwise.",
    ),
    Meaning(
        "load failure policy",
        (0, 17),
        None,
        "fail",
        "By default a request whose load failed ends with an error.",
    ),
    Meaning(
        "a waiting load",
        (0, 9),
        (0, 18),
        "uncounted",
        "A request that waits for remote KV has no computed tokens.",
        in_part=("tokens/balance", "tokens/unexplained-drop"),
    ),
    Meaning(
        "a waiting load",
        (0, 18),
        None,
        "promised",
        "A request that waits for remote KV counts its promised tokens as computed.",
    ),
    NONE_IN_FLIGHT._replace(until=(0, 10)),
    Meaning(
        "tokens in flight",
        (0, 10),
        (0, 26),
        "placeholders",
        "The engine counts output placeholders only.",
        in_part=("tokens/in-flight",),
    ),
    Meaning("tokens in flight", (0, 26), None, "counted", "The engine counts tokens in flight."),
    Meaning("hits by tier", (0, 32), None, "counted", "The engine counts hits by the tier that had them."),
    Meaning(
        "output in flight at a preemption",
        (0, 9),
        (0, 27),
        "delivered",
        "Delivered; dropped only after a reset of the prefix cache under running requests (since 0.12).",
    ),
    Meaning(
        "output in flight at a preemption",
        (0, 27),
        None,
        "asked",
        "Delivered, or dropped if the connector must deliver the KV.",
    ),
    Meaning(
        "drafts accepted past a stop",
        (0, 9),
        (0, 33),
        "kept",
        "They stay in the computed count of the request.",
    ),
    Meaning(
        "drafts accepted past a stop",
        (0, 33),
        None,
        "trimmed",
        "They are subtracted from the computed count.",
    ),
    Meaning(
        "kv events", (0, 9), (0, 20), "without groups", "KV events do not name the KV cache group of a block."
    ),
)


V0: tuple[Meaning, ...] = (
    Meaning(
        "prompt figures",
        (0, 9),
        (0, 10),
        "none",
        "The v0 scheduler reports none, counts no lookups by request, and has no connector.",
        unchecked=(
            *REPORTED,
            *LOOKUPS,
            "connector/promise-not-loaded",
            "connector/negative-match",
            "connector/tracker-lag",
            "connector/save-gap",
            "connector/never-finished",
        ),
        in_part=("tokens/negative", "tokens/source-sum"),
    ),
    NONE_IN_FLIGHT._replace(says="The v0 scheduler counts neither tokens in flight nor output placeholders."),
)
"""The meanings for the v0 scheduler, which 0.9 still has."""


SGLANG: tuple[Meaning, ...] = (
    Meaning(
        "prompt figures",
        (0, 5),
        (0, 5, 10),
        "first",
        "The engine reports cached tokens, from the first admission that ran, but not their tier: external "
        "is what was loaded at that admission. Computed is the rest of the prompt.",
    ),
    Meaning(
        "prompt figures",
        (0, 5, 10),
        None,
        "first",
        "The engine reports cached tokens by tier, from the first admission that ran. Computed is the rest "
        "of the prompt.",
    ),
    Meaning(
        "local lookups",
        (0, 5),
        None,
        "none",
        "The engine counts no lookups of single requests.",
        unchecked=LOOKUPS,
    ),
    Meaning(
        "external lookups",
        (0, 5),
        None,
        "none",
        "Host and storage are looked up with the cache; nothing is promised that is loaded later.",
        unchecked=V0[0].unchecked[-5:],
    ),
    NONE_IN_FLIGHT,
    Meaning("hits by tier", (0, 5, 10), None, "counted", "The engine counts hits by the tier that had them."),
    Meaning(
        "output in flight at a preemption", (0, 5), None, "dropped", "Dropped; the token is sampled again."
    ),
)
"""The meanings for SGLang."""


class Relation(NamedTuple):
    """The sum of some counters (``figures``) is at most that of ``limits``; the same, if ``equal``."""

    figures: tuple[str, ...]
    limits: tuple[str, ...]
    equal: bool = False


OUTPUTS = Relation(("ended_output_tokens",), ("output_tokens",))
"""The outputs of ended requests are among all outputs."""


class ServerMetrics(NamedTuple):
    """What a server of a product says of itself over HTTP, and by which names; "": it does not say it."""

    prefix: str
    """What the names of its metrics begin with."""
    counters: Mapping[tuple[str, str], str]
    """The figure of each counter (name, ``source``)."""
    summed: Mapping[str, str]
    """The figure of each counter that is summed over all its labels."""
    rank: str
    """The label that has the engine's index."""
    looked_up: str
    """The figure of the tokens that were looked up in the prefix cache."""
    hits: str
    """The figure of the tokens that hit."""
    at_end: bool = False
    """Whether a request is counted when it ends. The ledger counts earlier, and is not compared then."""
    zero: tuple[str, ...] = ()
    """Figures whose counters are absent until they count something."""
    capacity: str = ""
    """The gauge of the tokens that the cache has room for."""
    info: str = ""
    """The path that answers with the release and the settings."""
    cache: str = ""
    """The metric whose labels are the cache's configuration."""
    adapters: str = ""
    """The metric whose labels say how many LoRA adapters there can be."""
    drafts: str = ""
    """A counter that is there only with speculative decoding."""
    lengths: str = ""
    """The histogram of prompt lengths."""
    created: str = ""
    """A sample that differs from server to server."""
    key: str = ""
    """The environment variable with the key for requests of a probe; "": a probe can't be sent."""


class Contract(NamedTuple):
    """What is particular to a product."""

    name: str
    examined: tuple[str, ...] = ()
    """The releases whose scheduler was driven, oldest first: those of the matrix, and earlier ones that are
    no longer observed."""
    observed: str = ""
    """The releases that can be observed, in words."""
    meanings: tuple[Meaning, ...] = ()
    posts: bool = False
    """Whether post-releases are releases of their own; those of vLLM's builds have the same scheduler."""
    level: str = "content"
    """The highest level at which an engine can be observed."""
    suffixed_since: Release | None = None
    """The first release that appends random digits to the ids of requests."""
    relations: tuple[Relation, ...] = ()
    """What must hold between the counters of a server."""
    of_sources: tuple[Relation, ...] = ()
    """What must hold too where the prompt figures by source sum to the prompt."""
    server: ServerMetrics | None = None
    """What its servers say of themselves."""


VLLM_SERVER = ServerMetrics(
    "vllm:",
    {
        ("vllm:prompt_tokens_total", ""): "prompt_tokens",
        ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): "local_tokens",
        ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"): "external_tokens",
        ("vllm:prompt_tokens_by_source_total", "local_compute"): "computed_tokens",
        ("vllm:prompt_tokens_cached_total", ""): "cached_tokens",
        ("vllm:prefix_cache_queries_total", ""): "local_queried_tokens",
        ("vllm:prefix_cache_hits_total", ""): "local_hit_tokens",
        ("vllm:external_prefix_cache_queries_total", ""): "external_queried_tokens",
        ("vllm:external_prefix_cache_hits_total", ""): "external_hit_tokens",
        ("vllm:prompt_tokens_cached_by_source_total", "device"): "device_hit_tokens",
        ("vllm:prompt_tokens_cached_by_source_total", "host"): "host_hit_tokens",
        ("vllm:prompt_tokens_cached_by_source_total", "p2p"): "p2p_hit_tokens",
        ("vllm:prompt_tokens_cached_by_source_total", "disk"): "disk_hit_tokens",
        ("vllm:prompt_tokens_cached_by_source_total", "external_unspecified"): "unspecified_hit_tokens",
        ("vllm:num_preemptions_total", ""): "preemptions",
        ("vllm:generation_tokens_total", ""): "output_tokens",
    },
    {
        "vllm:request_success_total": "requests",
        "vllm:request_generation_tokens_sum": "ended_output_tokens",
    },
    rank="engine",
    looked_up="local_queried_tokens",
    hits="local_hit_tokens",
    cache="vllm:cache_config_info",
    adapters="vllm:lora_requests_info",
    drafts="vllm:spec_decode_num_accepted_tokens_per_pos",
    lengths="vllm:request_prompt_tokens",
    created="vllm:prompt_tokens_created",
    key="VLLM_API_KEY",
)

SGLANG_SERVER = ServerMetrics(
    "sglang:",
    {},
    {
        "sglang:prompt_tokens_total": "prompt_tokens",
        "sglang:cached_tokens_total": "cached_tokens",
        "sglang:uncached_prompt_tokens_histogram_sum": "computed_tokens",
        "sglang:generation_tokens_total": "output_tokens",
        "sglang:num_requests_total": "requests",
    },
    rank="dp_rank",
    looked_up="prompt_tokens",
    hits="cached_tokens",
    at_end=True,
    zero=("cached_tokens",),
    capacity="sglang:max_total_num_tokens",
    info="/server_info",
)

CONTRACTS: dict[Product, Contract] = {
    "vllm": Contract(
        "vLLM",
        (
            *("0.9.1", "0.9.2", "0.10.2", "0.12.0", "0.17.0", "0.18.1", "0.19.1", "0.20.0", "0.21.0"),
            *("0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0"),
            *("0.31.0", "0.32.0", "0.33.0"),
        ),
        "vLLM 0.17 to 0.33, and the v0 scheduler of 0.9",
        MEANINGS,
        suffixed_since=(0, 14),
        relations=(
            Relation(("local_hit_tokens",), ("local_queried_tokens",)),
            Relation(("external_hit_tokens",), ("external_queried_tokens",)),
        ),
        of_sources=(
            Relation(("local_tokens", "external_tokens", "computed_tokens"), ("prompt_tokens",), equal=True),
            Relation(("local_tokens", "external_tokens"), ("cached_tokens",), equal=True),
        ),
        server=VLLM_SERVER,
    ),
    "lmcache": Contract("LMCache", ("0.3.9", "0.3.11", "0.4.2", "0.4.3", "0.5.4", "0.5.6", "0.5.7rc2")),
    "sglang": Contract(
        "SGLang",
        (
            *("0.5.3", "0.5.3.post3", "0.5.5.post3", "0.5.6", "0.5.7", "0.5.10", "0.5.12.post1", "0.5.13"),
            *("0.5.20", "0.5.23"),
        ),
        "SGLang 0.5.3 to 0.5.23",
        SGLANG,
        posts=True,
        level="tokens",
        relations=(
            Relation(("cached_tokens",), ("prompt_tokens",)),
            Relation(("cached_tokens", "computed_tokens"), ("prompt_tokens",), equal=True),
        ),
        server=SGLANG_SERVER,
    ),
}


def contract(engine: str) -> Contract:
    """The contract of an engine; of one that is not known, an empty one."""
    return next((each for name, each in CONTRACTS.items() if name == engine), Contract(engine))


def servers() -> dict[Product, ServerMetrics]:
    """The products whose servers say something of themselves."""
    return {product: each.server for product, each in CONTRACTS.items() if each.server is not None}


def release(version: str) -> Release:
    """``(0, 12, 0)`` for ``0.12.0.post2+cpu``; () where there is no number, or one that no release has."""
    number = re.match(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}(?![0-9])", version)
    return tuple(map(int, number[0].split("."))) if number else ()


def meanings(version: str, adapter: str = "", engine: str = "vllm") -> dict[str, Meaning]:
    """What each figure means in a release of an engine, by figure; none of an engine that is not known."""
    number = release(version)
    return {
        row.figure: row
        for row in (V0 if adapter.startswith("v0") else contract(engine).meanings)
        if row.since <= number and (row.until is None or number < row.until)
    }


def has_random_suffix(engine: str, version: str) -> bool:
    """Whether a release of an engine appends random digits to the ids of requests."""
    since = contract(engine).suffixed_since
    return since is not None and release(version) >= since


def sources_add_up(words: Mapping[str, str]) -> bool:
    """Whether a release's prompt figures by source sum to the prompt; ``words`` are those of its meanings."""
    return words.get("prompt figures") in ("first", "last") and "a negative figure" not in words


def limits(by_figure: dict[str, Meaning]) -> tuple[dict[str, str], dict[str, str]]:
    """Invariants that can't be checked with these meanings, and those checked in part, with the reason."""
    unchecked: dict[str, str] = {}
    in_part: dict[str, str] = {}
    for figure, row in by_figure.items():
        reason = f"{figure}: {row.says}"
        unchecked.update(dict.fromkeys(row.unchecked, reason))
        in_part.update(dict.fromkeys(row.in_part, reason))
    return unchecked, {name: why for name, why in in_part.items() if name not in unchecked}
