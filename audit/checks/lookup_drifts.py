"""Checks of the lookups, drafts and samples that an engine counts, against their definitions.

As in ``prompt_drifts.py``: the definitions are in ``figures.py``, and what the engine did shows a drift.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import CountedDrafts, Entry, MiscountedLookups, SiblingAdded
from .registry import VLLM_30522, VLLM_37460, Witness, drift

# --- lookups ------------------------------------------------------------------------------------------


def _lookups(entry: Entry, why: str) -> Iterator[Witness]:
    """The lookups that the engine counts for this reason."""
    subject = entry.subject
    assert isinstance(subject, MiscountedLookups)
    if subject.why == why:
        yield Witness(
            source=subject.source,
            requests=subject.requests,
            query_tokens=subject.queries,
            hit_tokens=subject.hits,
        )


@drift(
    "lookup-never-ran",
    on=(MiscountedLookups,),
    tokens="query_tokens",
    message="The engine counted a lookup of the {source} cache for request {request} ({query_tokens} tokens "
    "queried, {hit_tokens} hit), but the admission never ran.",
    near_misses=("a request that ends before it is admitted", "an asynchronous load that arrives"),
)
def lookup_never_ran(entry: Entry) -> Iterator[Witness]:
    """Only lookups of admissions that ran are counted.

    vLLM counts at the admission. A request that ends while it waits for remote KV read nothing, and one
    whose load failed completely is admitted and counted again.
    """
    yield from _lookups(entry, "never_ran")


@drift(
    "lookup-load-failed",
    on=(MiscountedLookups,),
    tokens="hit_tokens",
    message="The engine counted {hit_tokens} tokens of request {request} as hits of the external cache, "
    "which failed to load.",
    references=(VLLM_30522, VLLM_37460),
    near_misses=("a load that fails after a preemption, whose lookup is not exported",),
)
def lookup_load_failed(entry: Entry) -> Iterator[Witness]:
    """Only external tokens that are loaded are counted as hits.

    vLLM counts the connector's promise as a hit and takes nothing back when the load fails, under every
    failure policy.
    """
    yield from _lookups(entry, "load_failed")


@drift(
    "lookup-resumed-missing",
    on=(MiscountedLookups,),
    tokens="query_tokens",
    message="Request {request} was looked up in the {source} cache again after a preemption ({query_tokens} "
    "tokens queried, {hit_tokens} hit). The engine counts this apart and exports it in no counter.",
    near_misses=("the first admission of a request", "a new admission after a load that failed completely"),
)
def lookup_resumed_missing(entry: Entry) -> Iterator[Witness]:
    """Every admission counts in the exported lookup counters.

    vLLM keeps the lookups of preempted requests in ``preempted_queries`` and ``preempted_hits``, which no
    logger exports: what the caches save after a preemption can't be seen.
    """
    yield from _lookups(entry, "resumed")


@drift(
    "lookup-exempt-counted",
    on=(MiscountedLookups,),
    tokens="query_tokens",
    message="The engine counted {requests} lookups of the external cache ({query_tokens} tokens queried, "
    "{hit_tokens} hit) for requests that may not read a cache, and none of the local cache.",
    near_misses=("an engine without a prefix cache of its own", "a request that may read both caches"),
)
def lookup_exempt_counted(entry: Entry) -> Iterator[Witness]:
    """A request that may not read a cache, as one with prompt logprobs, counts no lookup.

    vLLM leaves it out of the local statistics and counts its whole prompt as queried in the external ones.
    """
    yield from _lookups(entry, "exempt")


@drift(
    "lookup-attempt-counted",
    on=(MiscountedLookups,),
    tokens="query_tokens",
    message="The engine counted {requests} lookups of the local cache ({query_tokens} tokens queried, "
    "{hit_tokens} hit) that led to no admission.",
    near_misses=("a failed attempt on vLLM 0.27 and later, which counts admissions",),
)
def lookup_attempt_counted(entry: Entry) -> Iterator[Witness]:
    """Only lookups that lead to an admission are counted.

    vLLM up to 0.26 counts at the lookup. A request that waits for blocks is looked up in every step, so it
    alone can make up the hit rate.
    """
    yield from _lookups(entry, "attempts")


# --- drafts, and samples of one request -----------------------------------------------------------------


@drift(
    "drafts-past-stop",
    on=(CountedDrafts,),
    tokens="cut_tokens",
    message="The engine counted {accepted_tokens} draft tokens as accepted in one output, of which a stop "
    "before them cut off {cut_tokens}.",
    near_misses=("a stop at the last accepted draft token", "an abort while drafts are in flight"),
)
def drafts_past_stop(entry: Entry) -> Iterator[Witness]:
    """Only draft tokens that become output are counted as accepted.

    vLLM counts what the model accepted before it cuts the output at a stop, so acceptance is too high and
    differs from the generated tokens.
    """
    subject = entry.subject
    assert isinstance(subject, CountedDrafts)
    if subject.cut and subject.counted_accepted == subject.accepted:
        yield Witness(accepted_tokens=subject.counted_accepted, cut_tokens=subject.cut)


@drift(
    "padding-as-drafts",
    on=(CountedDrafts,),
    tokens="padding_tokens",
    message="The engine counted {draft_tokens} draft tokens in one output, of which {padding_tokens} were "
    "padding: they belong to requests in their first step, before any could be proposed.",
    near_misses=(
        "drafts of a request that has had an output",
        "a diffusion model, which schedules its canvas",
    ),
)
def padding_as_drafts(entry: Entry) -> Iterator[Witness]:
    """Only proposed tokens are counted as draft tokens.

    vLLM since 0.27 pads a request of one token to the size of the other decodes and counts the padding as
    drafts that were rejected, so acceptance is too low.
    """
    subject = entry.subject
    assert isinstance(subject, CountedDrafts)
    if subject.padding and subject.counted_tokens == subject.proposed + subject.padding:
        yield Witness(draft_tokens=subject.counted_tokens, padding_tokens=subject.padding)


@drift(
    "samples-counted-each",
    on=(SiblingAdded,),
    tokens="prompt_tokens",
    message="Request {request} is one of several samples of the client's request {client_request}. The "
    "engine counts the prompt once for each sample; usage has it once, with the cached tokens of one sample.",
    near_misses=("requests with equal prompts", "ids that clients chose alike"),
)
def samples_counted_each(entry: Entry) -> Iterator[Witness]:
    """The prompt of a client's request is counted once.

    With ``n`` > 1, vLLM makes a request of each sample. Its prompt counters, lookup counters and request
    counters have them all.
    """
    subject = entry.subject
    assert isinstance(subject, SiblingAdded)
    prompt_tokens = entry.account.prompt_tokens if entry.account is not None else 0
    yield Witness(client_request=subject.client_request, prompt_tokens=prompt_tokens)
