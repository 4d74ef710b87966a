"""Tokens of one request: what the engine says of them must agree with what was done.

Checks see known accounts only. The account of an entry stands as it did after the whole event was
posted; a :class:`~kvledger.audit.ledger.ledger.ReportedCounts` holds the figures of its own instant.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..causes import FAILED
from ..events import Admitted, Finished, LookupKept, Preempted, Reported
from ..ledger.account import Account
from ..ledger.frozen import Settlement
from ..ledger.subjects import Entry, ReportedCounts, ReportedLookups
from .registry import (
    LMCACHE_2912,
    VLLM_18955,
    VLLM_18957,
    VLLM_25780,
    VLLM_28585,
    VLLM_34079,
    VLLM_36533,
    VLLM_36752,
    VLLM_36755,
    VLLM_37460,
    VLLM_43736,
    VLLM_48245,
    VLLM_57562,
    Witness,
    invariant,
)


def _account(entry: Entry) -> Account:
    assert entry.account is not None
    return entry.account


def _corrected(said: Reported) -> bool:
    """Up to 0.19 vLLM adds the one token that a full hit executes again back to the local hit."""
    return said.cached_tokens + 1 == said.prompt_tokens and said.computed_tokens == 1


@invariant(
    "tokens/negative",
    on=(Reported, Admitted),
    says="The engine reported {local_tokens} local, {external_tokens} external and "
    "{computed_tokens} computed tokens for the {prompt_tokens}-token prompt of request {request}: "
    "no such split can be.",
    references=(VLLM_36752, VLLM_36533, VLLM_36755, VLLM_34079, LMCACHE_2912),
    near_misses=(
        "a prompt that is wholly a hit: local + external equal the prompt",
        "the one token of a full hit that is executed again, added back to the local hit (vLLM up to 0.19)",
    ),
)
def negative(entry: Entry) -> Iterator[Witness]:
    """Local and external tokens are never negative, and together never more than there are.

    Violated when one figure is taken out of another of a different instant: after a preemption in
    mid-prefill the whole hit was kept and its external part asked again.
    """
    said = entry.subject
    if isinstance(said, Admitted):
        sequence = _account(entry).sequence_tokens
        # A negative promise is the connector's: connector/negative-match.
        if said.local_tokens < 0 or said.local_tokens + said.external_tokens > sequence:
            yield Witness(
                "Request {request} was admitted with {local_tokens} local and {external_tokens} "
                "external tokens, but its sequence has {sequence_tokens}.",
                local_tokens=said.local_tokens,
                external_tokens=said.external_tokens,
                sequence_tokens=sequence,
            )
        return
    assert isinstance(said, Reported)
    least = min(said.local_tokens, said.external_tokens, said.computed_tokens)
    if least < 0 or said.local_tokens + said.external_tokens > said.prompt_tokens:
        yield Witness(
            local_tokens=said.local_tokens,
            external_tokens=said.external_tokens,
            computed_tokens=said.computed_tokens,
            prompt_tokens=said.prompt_tokens,
        )


@invariant(
    "tokens/source-sum",
    on=(Reported, Settlement),
    says="The engine reported {local_tokens} local + {external_tokens} external + "
    "{computed_tokens} computed tokens for request {request}, but its prompt has {prompt_tokens}.",
    references=(VLLM_36752,),
    near_misses=(
        "a full hit on vLLM up to 0.19, where the sum is one more than the prompt",
        "a session's later chunk, which settles its own tokens only",
    ),
)
def source_sum(entry: Entry) -> Iterator[Witness]:
    """Local, external and computed tokens sum to the prompt.

    Violated when the three were not taken together, or when a negative one was clamped to 0 and
    the others were not. The ledger's own settlement is held to the same, by counting each part.
    """
    said = entry.subject
    if isinstance(said, Settlement):
        total = said.local + said.external + said.computed + said.unattained
        if total != said.prompt_tokens - said.carried:
            yield Witness(
                "A fault of kvledger, not of the engine: the settlement of request {request} sums "
                "to {total_tokens} tokens, but {prompt_tokens} were to be settled.",
                total_tokens=total,
                prompt_tokens=said.prompt_tokens - said.carried,
            )
        return
    assert isinstance(said, Reported)
    total = said.local_tokens + said.external_tokens + said.computed_tokens
    if total == said.prompt_tokens or (total == said.prompt_tokens + 1 and _corrected(said)):
        return
    yield Witness(
        local_tokens=said.local_tokens,
        external_tokens=said.external_tokens,
        computed_tokens=said.computed_tokens,
        prompt_tokens=said.prompt_tokens,
    )


@invariant(
    "tokens/set-once",
    on=(Reported,),
    says="The engine reported {local_tokens} local and {external_tokens} external tokens for "
    "request {request}, but its admission {life} found {plan_local_tokens} and was promised "
    "{plan_external_tokens}: these figures are not of one admission.",
    references=(VLLM_36752, VLLM_37460),
    near_misses=(
        "vLLM 0.20 to 0.25 report the last admission before the first output, 0.26 and later the "
        "first that ran",
        "a load that failed wholly: the request is looked up anew, and that admission counts",
        "a part that failed to load, taken off the external figure again (vLLM up to 0.19)",
        "a session reports once a chunk at most",
    ),
)
def set_once(entry: Entry) -> Iterator[Witness]:
    """Where a prompt came from is reported once, and all of it is of one admission.

    Violated when the split is reported again, or when it is not what the admission that the
    version means was given: a later attempt or a re-query has overwritten a part.
    """
    said, account = entry.subject, _account(entry)
    assert isinstance(said, Reported)
    if account.reports > 1:
        yield Witness(
            "The engine reported {reports} times where the prompt of request {request} came from.",
            reports=account.reports,
        )
    life = account.reporting
    if life is None or account.carried:
        return
    said_local = said.local_tokens
    if said_local == life.local + 1 and _corrected(said):
        said_local = life.local
    loaded = life.external - life.voided.get(FAILED, 0)
    if said_local != life.local or said.external_tokens not in (life.external, loaded):
        yield Witness(
            local_tokens=said.local_tokens,
            external_tokens=said.external_tokens,
            plan_local_tokens=life.local,
            plan_external_tokens=life.external,
            life=life.number,
        )


@invariant(
    "tokens/balance",
    on=(ReportedCounts,),
    says="The engine counts {computed_tokens} computed tokens for request {request} "
    "({instant}), but all that it was given sums to {ledger_tokens}.",
    near_misses=(
        "work is counted when it is scheduled, by the engine and here: an asynchronous step ahead "
        "is no difference",
        "an asynchronous load counts as soon as it is promised",
        "rejections of a step from before a preemption roll nothing back",
    ),
)
def balance(entry: Entry) -> Iterator[Witness]:
    """The engine's computed tokens are never more than credits less debits.

    Violated when the count grew by more than hits, promises and scheduled work, or did not fall
    when drafts were rejected or a load failed: KV is taken to be there that never came to be.
    """
    said = entry.subject
    assert isinstance(said, ReportedCounts)
    if said.computed > said.ledger_computed:
        yield Witness(
            computed_tokens=said.computed,
            ledger_tokens=said.ledger_computed,
            instant=said.instant,
        )


@invariant(
    "tokens/unexplained-drop",
    on=(ReportedCounts,),
    says="The engine's computed tokens for request {request} are down to {computed_tokens} "
    "({instant}) from {ledger_tokens}, and nothing that was seen explains it.",
    near_misses=(
        "preemption, rejected drafts, a failed load, a session's edit",
        "a full hit gives back its last token, and a replayed window is executed again",
    ),
)
def unexplained_drop(entry: Entry) -> Iterator[Witness]:
    """Computed tokens fall only for a cause.

    Causes are preemption, rejected drafts, a failed load, the last token of a full hit, a replayed
    window and a session's edit. Violated when the engine's count is less than the ledger's.
    """
    said = entry.subject
    assert isinstance(said, ReportedCounts)
    if said.computed < said.ledger_computed:
        yield Witness(
            computed_tokens=said.computed,
            ledger_tokens=said.ledger_computed,
            instant=said.instant,
        )


_RAN_TO_ITS_END = frozenset(("stopped", "length"))


@invariant(
    "tokens/beyond-sequence",
    on=(ReportedCounts,),
    says="Request {request} has {computed_tokens} computed tokens, {in_flight_tokens} of them in "
    "flight ({instant}), but its sequence allows no more than {limit_tokens} executed ones.",
    references=(VLLM_48245,),
    near_misses=(
        "drafts and asynchronous steps in flight stand past the sequence until they are answered",
        "drafts that were accepted past the stop",
        "a pooling or encoder-only request executes its whole sequence: it has no last token to feed",
    ),
)
def beyond_sequence(entry: Entry) -> Iterator[Witness]:
    """What has been executed lies within the sequence, at the end without its last token.

    Judged at rest and at the end, without what is in flight. Violated when the count runs ahead of
    the tokens that there are, for instance when rejected drafts stay counted.
    """
    said, account = entry.subject, _account(entry)
    assert isinstance(said, ReportedCounts)
    if said.instant not in ("census", "finished"):
        return
    limit = said.sequence if said.sequence >= 0 else said.ledger_sequence
    if said.instant == "finished":
        # What was accepted past the stop was executed, though the sequence was cut.
        limit = max(limit, said.ledger_sequence)
        generated = limit > account.prompt_tokens and not (account.pooling or account.resumable)
        limit -= generated and account.outcome in _RAN_TO_ITS_END
    in_flight = max(said.placeholders, said.in_flight, said.ledger_in_flight, 0)
    if said.computed - in_flight > limit:
        yield Witness(
            computed_tokens=said.computed,
            in_flight_tokens=in_flight,
            limit_tokens=limit,
            instant=said.instant,
        )


@invariant(
    "tokens/in-flight",
    on=(ReportedCounts,),
    says="The engine counts {in_flight_tokens} tokens in flight for request {request} "
    "({instant}), but {ledger_tokens} are scheduled and unanswered.",
    references=(VLLM_57562,),
    near_misses=(
        "output that is still in flight after a preemption stays counted until it is answered",
        "placeholders of drafts that were accepted past the stop, left over at the end",
        "an engine without such counts",
    ),
)
def in_flight(entry: Entry) -> Iterator[Witness]:
    """Tokens in flight are those scheduled and unanswered, and cover the output placeholders.

    Violated when an answer is not drained or drained twice, or when a placeholder is left behind
    by output that never came; vLLM 0.32 does so after a synchronous load failure under
    asynchronous scheduling.
    """
    said, account = entry.subject, _account(entry)
    assert isinstance(said, ReportedCounts)
    ledger = said.ledger_in_flight
    if said.in_flight not in (-1, ledger):
        yield Witness(in_flight_tokens=said.in_flight, ledger_tokens=ledger, instant=said.instant)
    left_over = 0
    if said.instant == "finished" and account.drafted:
        if said.sequence < 0:
            return
        left_over = max(0, said.ledger_sequence - said.sequence)
    if said.placeholders < -1 or said.placeholders > max(said.in_flight, ledger) + left_over:
        yield Witness(
            "Request {request} has {placeholder_tokens} output placeholders ({instant}), but "
            "{ledger_tokens} tokens in flight that could fill them.",
            placeholder_tokens=said.placeholders,
            ledger_tokens=ledger,
            instant=said.instant,
        )


@invariant(
    "tokens/reset-on-preemption",
    on=(Preempted,),
    says="Request {request} was preempted, but kept {computed_tokens} computed tokens and "
    "{held_blocks} blocks.",
    references=(VLLM_36752,),
    near_misses=(
        "a resumed request whose asynchronous load finished waits as preempted, with tokens and "
        "blocks: no preemption took place",
        "blocks whose freeing is deferred are out of its table",
    ),
)
def reset_on_preemption(entry: Entry) -> Iterator[Witness]:
    """A preempted request has no computed tokens and no blocks.

    Violated when a count or a block outlives the KV that was given up, to be believed when the
    request resumes.
    """
    said = entry.subject
    assert isinstance(said, Preempted)
    if said.computed_tokens != 0 or said.held_blocks > 0:
        yield Witness(computed_tokens=said.computed_tokens, held_blocks=said.held_blocks)


@invariant(
    "tokens/stale-lookup",
    on=(Admitted, LookupKept),
    says="Request {request} was admitted in step {step} with {local_tokens} local tokens, but "
    "step {looked_up_step} found {looked_up_tokens}: the hit is not that of the cache as it is.",
    references=(VLLM_18955, VLLM_18957),
    near_misses=(
        "the tail of a hit, less than a block, given up for a longer external one",
        "a hit no longer than the replayed window, given up whole",
        "a failed attempt before, in the same step or an earlier one, when the cache was asked again",
        "a later chunk of a prompt, which goes by the hit of the first (vLLM v0)",
        "an answer of none that is kept while the cache still has none: nothing is taken for a hit",
    ),
)
def stale_lookup(entry: Entry) -> Iterator[Witness]:
    """The local hit used at an admission is the answer of a look-up in the same step.

    Violated when an answer is kept from an attempt that failed: the cache may have changed since,
    and blocks are taken for hits that hold something else now. Violated too when a request ends and
    its answer stays behind, for nobody and for ever.
    """
    said, account = entry.subject, _account(entry)
    if isinstance(said, LookupKept):
        yield from _kept(said)
        return
    assert isinstance(said, Admitted)
    local, found = said.local_tokens, account.looked_up_local
    if account.looked_up_step == said.step:
        given_up_for_external = local < found < local + said.external_tokens
        if local == found or given_up_for_external or local == said.external_tokens == 0:
            return
    elif local == 0:
        return
    if account.looked_up_step < 0:
        yield Witness(
            "Request {request} was admitted in step {step} with {local_tokens} local tokens, but "
            "the cache was never asked.",
            step=said.step,
            local_tokens=local,
        )
        return
    yield Witness(
        step=said.step,
        local_tokens=local,
        looked_up_step=account.looked_up_step,
        looked_up_tokens=found,
    )


def _kept(said: LookupKept) -> Iterator[Witness]:
    figures = {"step": said.step, "local_tokens": said.local_tokens, "looked_up_step": said.looked_up_step}
    if said.ended:
        yield Witness(
            "Request {request} has ended, but the answer to its look-up of step {looked_up_step} "
            "({local_tokens} tokens) is still kept: nothing will ever release it.",
            **figures,
        )
    elif said.local_tokens or said.cached_tokens > 0:
        yield Witness(
            "Request {request} was admitted in step {step} with the {local_tokens} local tokens "
            "that step {looked_up_step} had found for an attempt that failed; for it the cache holds "
            "{cached_tokens} now.",
            **figures,
            cached_tokens=said.cached_tokens,
        )


@invariant(
    "tokens/lookup-counted-once",
    on=(ReportedLookups,),
    says="The engine counted {requests} {source} cache look-ups ({query_tokens} tokens asked, "
    "{hit_tokens} found) in one step, but its admissions made {ledger_requests} "
    "({ledger_query_tokens} asked, {ledger_hit_tokens} found).",
    references=(VLLM_43736, VLLM_28585, VLLM_25780),
    near_misses=(
        "a connector that has no answer yet was not asked",
        "a request that may not read the cache is not counted",
        "a whole local hit leaves nothing to ask the connector for",
    ),
)
def lookup_counted_once(entry: Entry) -> Iterator[Witness]:
    """An admission counts one local and one external look-up, with its own figures.

    Violated when attempts that led to no admission are counted too (vLLM up to 0.26 counts
    at the look-up), or an admission is not: the hit rate is wrong.
    """
    said = entry.subject
    assert isinstance(said, ReportedLookups)
    counted = (said.requests, said.queries, said.hits)
    if counted != (said.ledger_requests, said.ledger_queries, said.ledger_hits):
        yield Witness(
            source=said.source,
            requests=said.requests,
            query_tokens=said.queries,
            hit_tokens=said.hits,
            ledger_requests=said.ledger_requests,
            ledger_query_tokens=said.ledger_queries,
            ledger_hit_tokens=said.ledger_hits,
        )


@invariant(
    "tokens/suspense",
    on=(Settlement, Preempted, Finished),
    says="{suspense_tokens} tokens of request {request} were executed again, and nothing that was "
    "seen says why their KV had been lost.",
    near_misses=("work done again after a known loss is rework, with its cause",),
)
def suspense(entry: Entry) -> Iterator[Witness]:
    """Every token's origin is known.

    Violated when KV that had come to be is executed again though it was not preempted, rolled
    back or failed: the engine does work twice, or something happened that no hook sees.
    """
    tokens = _account(entry).suspense
    if tokens:
        yield Witness(suspense_tokens=tokens)
