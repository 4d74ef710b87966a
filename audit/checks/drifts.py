"""Drifts: figures that the engine counts by a deliberate rule that misleads, of prompts and of lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from ..causes import FAILED, FULL_HIT, LOAD_FAILED, REPLAY
from ..events import Reported
from ..ledger.account import Account, Settlement
from ..ledger.entries import CountedDrafts, Entry, MiscountedLookups, PromptUnreported, SiblingAdded
from .registry import (
    USUAL,
    VLLM_30522,
    VLLM_36752,
    VLLM_36812,
    VLLM_37460,
    VLLM_46898,
    VLLM_47136,
    VLLM_49250,
    Witness,
    drift,
)

# --- prompt drifts -------------------------------------------------------------------------------------
#
# Checks of the prompt figures that an engine reports, against their definitions: the family ``metrics``.
#
# The definitions, and what each release counts instead, are in ``figures.py``. A drift is found by what the
# engine did or reported, not by its version, so it is silent where a release counts by the definition.


def _account(entry: Entry) -> Account:
    assert entry.account is not None
    return entry.account


# --- prompts that are not reported ------------------------------------------------------------------


@drift(
    "prompt-missing",
    on=(PromptUnreported,),
    tokens="tokens",
    message="Request {request} ended before its first output. The {tokens} prompt tokens that it had "
    "computed or hit are in no figure of the engine.",
    references=(VLLM_36812,),
    near_misses=("a request that ends before it runs", "a prompt that is reported when its load fails"),
)
def prompt_missing(entry: Entry) -> Iterator[Witness]:
    """The prompt tokens of every request that ran are reported.

    vLLM reports a prompt with the first output, so an abort or an error before then leaves out the prompt,
    while the lookup counters keep the request's lookups.
    """
    subject = entry.subject
    assert isinstance(subject, PromptUnreported)
    if not subject.session:
        yield Witness(tokens=subject.tokens)


@drift(
    "session-chunk-missing",
    on=(PromptUnreported,),
    tokens="tokens",
    message="The engine reported nothing of the {tokens} tokens of a later chunk of session {request}.",
    near_misses=("the first chunk of a session", "a later chunk with a report of its own"),
)
def session_chunk_missing(entry: Entry) -> Iterator[Witness]:
    """Every chunk of a streaming-input session is reported.

    vLLM reports a request's sources once, so the tokens of later chunks are in none of its prompt counters.
    """
    subject = entry.subject
    assert isinstance(subject, PromptUnreported)
    if subject.session:
        yield Witness(tokens=subject.tokens)


@drift(
    "session-chunk-whole",
    on=(Reported,),
    unless=USUAL,
    tokens="reported_tokens - chunk_tokens",
    message="The engine reported {reported_tokens} prompt tokens for a later chunk of session {request}, "
    "which has {chunk_tokens}: the chunks before it are counted again.",
    near_misses=("a later chunk that is reported alone", "the first chunk of a session"),
)
def session_chunk_whole(entry: Entry) -> Iterator[Witness]:
    """A later chunk of a session is reported without the tokens that the session kept.

    vLLM up to 0.19 takes the whole sequence for the prompt of each chunk.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    chunk = account.prompt_tokens - account.carried
    if account.carried and subject.prompt_tokens > chunk:
        yield Witness(reported_tokens=subject.prompt_tokens, chunk_tokens=chunk)


# --- sources and work of a prompt ---------------------------------------------------------------------


def _recomputed(account: Account) -> dict[str, int]:
    """Prompt tokens computed again so far, by the cause for which their KV was lost."""
    tokens: dict[str, int] = {}
    for start, end, cause in account.executed_again:
        tokens[cause] = tokens.get(cause, 0) + end - start
    return tokens


def _left_out(entry: Entry, causes: Callable[[str], bool]) -> Iterator[Witness]:
    """Prompt tokens computed again for these causes, if the reported computed tokens leave them out."""
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    if not account.executed_again:
        return
    recomputed = _recomputed(account)
    tokens = sum(amount for cause, amount in recomputed.items() if causes(cause))
    executed = sum(end - start for start, end, _ in account.executed_first) + sum(recomputed.values())
    if tokens and not account.carried and subject.computed_tokens + tokens <= executed:
        yield Witness(tokens=tokens, computed_tokens=subject.computed_tokens, executed_tokens=executed)


_EXECUTED = (
    "The engine reported {computed_tokens} computed prompt tokens for request {request}, but executed "
)


@drift(
    "full-hit-token-missing",
    on=(Reported,),
    unless=USUAL,
    tokens="tokens",
    message=_EXECUTED + "{executed_tokens}: the last token of a full hit was computed again.",
    near_misses=("a hit of all tokens but one", "a full hit on vLLM up to 0.19, which adds the token"),
)
def full_hit_token_missing(entry: Entry) -> Iterator[Witness]:
    """The last token of a full hit, which is computed again to get logits, is reported as computed.

    vLLM reports a full external hit with no computed token at all, though it executes one.
    """
    yield from _left_out(entry, lambda cause: cause == FULL_HIT)


@drift(
    "replay-missing",
    on=(Reported,),
    unless=USUAL,
    tokens="tokens",
    message=_EXECUTED + "{executed_tokens}: a window of {tokens} tokens at the end of the hit was replayed.",
    near_misses=("a hit no longer than the window, which is dropped", "a load that brings the window's KV"),
)
def replay_missing(entry: Entry) -> Iterator[Witness]:
    """The replayed window at the end of a hit is reported as computed.

    vLLM reports the whole hit as cached, though it executes the last window of the hit again.
    """
    yield from _left_out(entry, lambda cause: cause == REPLAY)


@drift(
    "recomputed-prompt-missing",
    on=(Reported,),
    unless=USUAL,
    tokens="tokens",
    message=_EXECUTED + "{executed_tokens}: {tokens} tokens were computed again after their KV was lost.",
    references=(VLLM_36752,),
    near_misses=("a preemption after the first output", "a resumed request that hits what it had computed"),
)
def recomputed_prompt_missing(entry: Entry) -> Iterator[Witness]:
    """Prompt tokens that are computed twice before the first output are reported twice as computed.

    vLLM reports each prompt token once: the work that a preemption in mid-prefill or a failed load costs is
    in no counter.
    """
    yield from _left_out(entry, lambda cause: cause not in (FULL_HIT, REPLAY))


def _two_splits(entry: Entry) -> tuple[tuple[int, int, int], Settlement] | None:
    """The reported and the settled sources of a prompt if both are known, add up, and differ."""
    account = _account(entry)
    reported = account.reported
    if reported is None or not account.settled or len(account.settlements) != 1:
        return None
    settled = account.settlements[0]
    if (settled.local, settled.external, settled.computed) == reported:
        return None
    if sum(reported) != settled.prompt_tokens or min(reported) < 0 or settled.unattained:
        return None  # tokens/source-sum, tokens/negative
    return reported, settled


@drift(
    "later-source-missing",
    on=(Reported, Settlement),
    unless=USUAL,
    tokens="moved_tokens",
    message="The engine reported {local_tokens} local, {external_tokens} external and {computed_tokens} "
    "computed tokens for request {request}, of one of its admissions. Over all of them its prompt had "
    "{settled_local} local, {settled_external} external and {settled_computed} computed tokens.",
    references=(VLLM_36752, VLLM_37460),
    near_misses=(
        "a preemption after the first output",
        "a resumed request whose prompt comes from where the first admission planned it",
        "a failed load, which is a drift of its own",
    ),
)
def later_source_missing(entry: Entry) -> Iterator[Witness]:
    """Each prompt token is reported by where its KV first came from, in whichever admission that was.

    vLLM reports the split of one admission. After a preemption in mid-prefill the rest of the prompt may
    come from elsewhere.
    """
    splits, account = _two_splits(entry), _account(entry)
    life = account.reporting
    if splits is None or life is None or sum(each.ran for each in account.lives) < 2:
        return
    if FAILED in life.voided or LOAD_FAILED in life.rolled_back or account.invalid_hits:
        return
    reported, settled = splits
    yield Witness(
        local_tokens=reported[0],
        external_tokens=reported[1],
        computed_tokens=reported[2],
        settled_local=settled.local,
        settled_external=settled.external,
        settled_computed=settled.computed,
        moved_tokens=_moved(reported, (settled.local, settled.external, settled.computed)),
    )


def _moved(reported: tuple[int, ...], settled: tuple[int, ...]) -> int:
    """How many tokens are reported under another source than their own; both splits have the same sum."""
    return sum(max(0, theirs - own) for theirs, own in zip(reported, settled, strict=True))


@drift(
    "failed-hit-reported",
    on=(Reported, Settlement),
    unless=USUAL,
    tokens="failed_tokens",
    message="The engine reported {local_tokens} local tokens for request {request}, but a failed load made "
    "{failed_tokens} of them invalid, and they were computed.",
    references=(VLLM_30522, VLLM_49250),
    near_misses=("a load that failed above the local hit", "local hits that were valid when they were read"),
)
def failed_hit_reported(entry: Entry) -> Iterator[Witness]:
    """Local hits that a failed load made invalid are reported as computed.

    The failure of a load may reach below it, into blocks of the local hit. vLLM then computes their tokens
    and still reports them as local hits.
    """
    splits, life = _two_splits(entry), _account(entry).reporting
    if splits is None or life is None or LOAD_FAILED not in life.rolled_back:
        return
    reported, settled = splits
    if reported[0] == life.local > settled.local:
        yield Witness(local_tokens=reported[0], failed_tokens=reported[0] - settled.local)


@drift(
    "transfer-as-cached",
    on=(Reported,),
    unless=USUAL,
    tokens="external_tokens",
    message="The engine reported {external_tokens} tokens of request {request} as cached, which a prefill "
    "engine computed for it and handed over.",
    references=(VLLM_46898, VLLM_47136),
    near_misses=("external tokens of a store", "a prefill engine's own hits"),
)
def transfer_as_cached(entry: Entry) -> Iterator[Witness]:
    """Tokens that a prefill engine hands over are not reported as cached.

    vLLM counts them in ``prompt_tokens_cached`` and as hits of the external cache of the decode engine, so a
    fleet with separate prefill counts each prompt twice. Newer releases correct ``cached_tokens`` of
    ``usage`` with the prefill engine's figure, and no counter.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    handed_over = min(subject.external_tokens, subject.cached_tokens - subject.local_tokens)
    if account.transferred and handed_over > 0:
        yield Witness(external_tokens=handed_over)


@drift(
    "cache-write-overstated",
    on=(Reported,),
    unless=USUAL,
    tokens="written_tokens - computed_tokens",
    message="The engine claims that request {request} computed {written_tokens} prompt tokens and wrote them "
    "to the prefix cache, but only {computed_tokens} were computed.",
    near_misses=("the last part of a prompt, less than a block, which is not cached",),
)
def cache_write_overstated(entry: Entry) -> Iterator[Witness]:
    """A request writes no more prompt tokens to the prefix cache than it computed.

    vLLM subtracts the hits of the first admission from what is cached at the first output, so hits of a later
    admission count as written.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    if len(account.settlements) != 1:
        return
    computed = account.settlements[0].computed
    if subject.written_tokens > computed:
        yield Witness(written_tokens=subject.written_tokens, computed_tokens=computed)


@drift(
    "chunks-in-one-step",
    on=(Reported,),
    unless=USUAL,
    tokens="computed_tokens",
    message="The engine reported the {computed_tokens} computed prompt tokens of request {request} in one "
    "step, but executed them in {steps} steps.",
    near_misses=("a prompt that is computed in one step",),
)
def chunks_in_one_step(entry: Entry) -> Iterator[Witness]:
    """The tokens of a step are those that the step executed.

    ``vllm:iteration_tokens_total`` counts a prompt in the step of its first output, so a prompt computed in
    chunks makes one step too large and the others too small. Up to 0.20 it counts the cached tokens too.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    if len(account.executed_first) < 2:
        return
    last = account.lives[-1].number if account.lives else 0
    rows = [row for row in account.executed_first if row[2] == last]
    chunks = 1 + sum(before[1] == after[0] for before, after in pairwise(rows))
    if chunks > 1 and not account.carried:
        yield Witness(computed_tokens=subject.computed_tokens, steps=chunks)


# --- lookup drifts -------------------------------------------------------------------------------------
#
# Checks of the lookups, drafts and samples that an engine counts, against their definitions.
#
# As above, the definitions are in ``figures.py``, and what the engine did shows a drift.


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
