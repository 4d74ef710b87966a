"""Checks of one request's tokens: the figures that the engine reports must agree with what it did.

A check is not called for an unknown account. An entry's account has the figures after the whole event was
posted; a :class:`~kvledger.audit.ledger.entries.ReportedCounts` has those of its own instant.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..causes import FAILED, WITH_LAST_OUTPUT
from ..events import Admitted, Finished, LookupKept, Preempted, Reported
from ..ledger.account import Account, Settlement
from ..ledger.entries import (
    Entry,
    ReportedCounts,
    ReportedLookups,
    SampledTwice,
    StaleRejection,
    TokensMissing,
    TurnOvercounted,
)
from .registry import (
    LMCACHE_2912,
    SGLANG_36855,
    USUAL,
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


def _corrected(subject: Reported) -> bool:
    """Whether vLLM up to 0.19 has added the one token that a full hit computes again to the local hit."""
    return subject.cached_tokens + 1 == subject.prompt_tokens and subject.computed_tokens == 1


@invariant(
    "tokens/negative",
    tokens="tokens",
    on=(Reported, Admitted),
    unless=USUAL,
    message="The engine reported {local_tokens} local, {external_tokens} external and "
    "{computed_tokens} computed tokens for the {prompt_tokens}-token prompt of request {request}: "
    "this split is impossible.",
    references=(VLLM_36752, VLLM_36533, VLLM_36755, VLLM_34079, LMCACHE_2912),
    near_misses=(
        "a full hit: local + external tokens equal the prompt",
        "a full hit on vLLM up to 0.19, which adds the one token that is computed again to the local hit",
    ),
)
def negative(entry: Entry) -> Iterator[Witness]:
    """Local and external tokens are never negative, and their sum is never more than the prompt.

    Violated when the engine subtracts two figures from different admissions. For example, after a
    preemption during prefill the engine kept the total hit of admission 1, asked the connector again, and
    subtracted the external tokens of admission 2.
    """
    subject = entry.subject
    if isinstance(subject, Admitted):
        sequence = _account(entry).sequence_tokens
        # Negative external tokens are the connector's fault: connector/negative-match.
        if subject.local_tokens < 0 or subject.local_tokens + subject.external_tokens > sequence:
            yield Witness(
                "Request {request} was admitted with {local_tokens} local and {external_tokens} "
                "external tokens, but its sequence has {sequence_tokens}.",
                local_tokens=subject.local_tokens,
                external_tokens=subject.external_tokens,
                sequence_tokens=sequence,
            )
        return
    assert isinstance(subject, Reported)
    least = min(subject.local_tokens, subject.external_tokens, subject.computed_tokens)
    if least < 0 or subject.local_tokens + subject.external_tokens > subject.prompt_tokens:
        yield Witness(
            local_tokens=subject.local_tokens,
            external_tokens=subject.external_tokens,
            computed_tokens=subject.computed_tokens,
            prompt_tokens=subject.prompt_tokens,
            tokens=max(-least, subject.local_tokens + subject.external_tokens - subject.prompt_tokens),
        )


@invariant(
    "tokens/source-sum",
    tokens="tokens",
    on=(Reported, Settlement),
    unless=USUAL,
    message="The engine reported {local_tokens} local + {external_tokens} external + "
    "{computed_tokens} computed tokens for request {request}, but its prompt has {prompt_tokens}.",
    references=(VLLM_36752,),
    near_misses=(
        "a full hit on vLLM up to 0.19, where the sum is one more than the prompt",
        "a later chunk of a session, which settles only its own tokens",
    ),
)
def source_sum(entry: Entry) -> Iterator[Witness]:
    """Local, external and computed tokens sum to the prompt.

    Violated when the three were not taken together, for example from different admissions, or when a
    negative figure was clamped to 0 and the others were not corrected. The same must hold for the
    settled tokens of kvledger's own account.
    """
    subject = entry.subject
    if isinstance(subject, Settlement):
        total = subject.local + subject.external + subject.computed + subject.unattained
        if total != subject.prompt_tokens - subject.carried:
            yield Witness(
                "A defect of kvledger, not of the engine: the settled tokens of request {request} sum to "
                "{total_tokens}, but its prompt has {prompt_tokens}.",
                total_tokens=total,
                prompt_tokens=subject.prompt_tokens - subject.carried,
            )
        return
    assert isinstance(subject, Reported)
    total = subject.local_tokens + subject.external_tokens + subject.computed_tokens
    if total == subject.prompt_tokens or (total == subject.prompt_tokens + 1 and _corrected(subject)):
        return
    yield Witness(
        local_tokens=subject.local_tokens,
        external_tokens=subject.external_tokens,
        computed_tokens=subject.computed_tokens,
        prompt_tokens=subject.prompt_tokens,
        tokens=abs(total - subject.prompt_tokens),
    )


_NOT_THIS_ADMISSION = (
    "The engine reported {local_tokens} local and {external_tokens} external tokens for request {request}, "
    "but admission {life} had {plan_local_tokens} local and {plan_external_tokens} external tokens"
)


@invariant(
    "tokens/set-once",
    tokens="tokens",
    on=(Reported,),
    unless=USUAL,
    message=_NOT_THIS_ADMISSION + ".",
    references=(VLLM_36752, VLLM_37460),
    near_misses=(
        "vLLM 0.20 to 0.25 report the last admission before the first output, 0.26 and later the first "
        "admission that ran",
        "a load that failed completely: the request is admitted again, and the new admission counts",
        "a load that failed in part: vLLM up to 0.19 subtracts the failed tokens from the external figure",
        "a session, which reports at most once a chunk",
    ),
)
def set_once(entry: Entry) -> Iterator[Witness]:
    """The engine reports a prompt's sources once, and all figures are from the same admission.

    Violated when the engine reports them a second time, or when a figure differs from that of the
    admission which this release reports: a later lookup has overwritten a part.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Reported)
    if account.reports > 1:
        yield Witness(
            "The engine reported the sources of request {request}'s prompt {reports} times.",
            reports=account.reports,
        )
    life = account.reporting
    if life is None or account.carried:
        return
    reported_local = subject.local_tokens
    if reported_local == life.local + 1 and _corrected(subject):
        reported_local = life.local
    loaded = life.external - life.voided.get(FAILED, 0)
    if reported_local != life.local or subject.external_tokens not in (life.external, loaded):
        yield Witness(
            f"{_NOT_THIS_ADMISSION}{_admissions(account, subject)}.",
            local_tokens=subject.local_tokens,
            external_tokens=subject.external_tokens,
            plan_local_tokens=life.local,
            plan_external_tokens=life.external,
            life=life.number,
            tokens=max(abs(reported_local - life.local), abs(subject.external_tokens - life.external)),
        )


def _admissions(account: Account, reported: Reported) -> str:
    """From which admissions the reported figures are, as the end of a sentence; "" if that is not clear."""
    local, external = reported.local_tokens, reported.external_tokens
    by_local = [life.number for life in account.lives if life.local == local]
    by_external = [life.number for life in account.lives if life.external == external]
    by_total = [life.number for life in account.lives if life.local + life.external == local + external]
    match by_local, by_total, by_external:
        case [one], _, [other] if one == other:
            return f": both figures are from admission {one}"
        case [one], _, [other]:
            return (
                f": the local figure is from admission {one} and the external figure from admission {other}"
            )
        case [], [one], [other] if one != other:
            return f": their total is from admission {one} and the external figure from admission {other}"
    return ""


@invariant(
    "tokens/balance",
    tokens="computed_tokens - ledger_tokens",
    on=(ReportedCounts,),
    unless=USUAL,
    message="The engine counts {computed_tokens} computed tokens for request {request} "
    "({instant}), but its hits, loads and scheduled tokens sum to {ledger_tokens}.",
    near_misses=(
        "asynchronous scheduling, one step ahead: the engine and kvledger both count tokens when they are "
        "scheduled",
        "an asynchronous load, which the engine counts as soon as the connector promises it",
        "draft tokens of a step before a preemption: rejecting them changes no count",
    ),
)
def balance(entry: Entry) -> Iterator[Witness]:
    """The engine's count of computed tokens is never more than the account's balance.

    The balance is the sum of hits, external tokens and scheduled tokens, minus the tokens whose KV was
    lost or discarded. Violated when the engine's count grew by more than that, or did not fall when draft
    tokens were rejected or a load failed: the engine then uses KV that does not exist.
    """
    subject = entry.subject
    assert isinstance(subject, ReportedCounts)
    if subject.computed > subject.ledger_computed:
        yield Witness(
            computed_tokens=subject.computed,
            ledger_tokens=subject.ledger_computed,
            instant=subject.instant,
        )


@invariant(
    "tokens/unexplained-drop",
    tokens="ledger_tokens - computed_tokens",
    on=(ReportedCounts, StaleRejection),
    unless=USUAL,
    message="The engine's count of computed tokens for request {request} fell from {ledger_tokens} to "
    "{computed_tokens} ({instant}), and no recorded event explains it.",
    references=(SGLANG_36855,),
    near_misses=(
        "a preemption, rejected draft tokens, a failed load, or an edit of a session's prompt",
        "draft tokens of a step before a failed load that are all accepted",
        "the last token of a full hit, and a replayed window, which are computed again",
    ),
)
def unexplained_drop(entry: Entry) -> Iterator[Witness]:
    """The engine's count of computed tokens falls only for a known cause.

    Causes are a preemption, rejected draft tokens, a failed load, the last token of a full hit, a replayed
    window, and an edit of a session's prompt. Violated when the engine's count is less than the account's
    balance, or when the engine subtracts rejected draft tokens that a failed load has already removed from
    the count: if the request goes on, valid tokens are computed again.
    """
    subject = entry.subject
    if isinstance(subject, StaleRejection):
        yield Witness(
            "The engine's count of computed tokens for request {request} fell from {ledger_tokens} to "
            "{computed_tokens}, because draft tokens of a step before the failed load were rejected. The "
            "failed load had already removed them from the count.",
            computed_tokens=subject.computed - subject.rejected,
            ledger_tokens=subject.computed,
            rejected_tokens=subject.rejected,
        )
        return
    assert isinstance(subject, ReportedCounts)
    if subject.computed < subject.ledger_computed:
        yield Witness(
            computed_tokens=subject.computed,
            ledger_tokens=subject.ledger_computed,
            instant=subject.instant,
        )


@invariant(
    "tokens/without-token",
    tokens="tokens",
    on=(TokensMissing,),
    message="In step {step}, request {request} computes positions up to {end_tokens}, but its sequence has "
    "{sequence_tokens} tokens and the steps in flight bring at most {tokens_to_come}: {tokens} positions "
    "have no token.",
    near_misses=(
        "asynchronous steps in flight, whose sampled tokens the next step computes",
        "draft tokens, which the sequence does not contain yet",
        "a step after a failed load, when the outputs in flight are dropped and computed again",
    ),
)
def without_token(entry: Entry) -> Iterator[Witness]:
    """Each position that a step computes has a token.

    The token is in the request's sequence, or a step in flight samples it, or it is a draft of this step.
    Violated when the engine expects outputs that it has dropped, for example the placeholders of steps before
    a failed load: the worker then computes KV from whatever its buffers hold.
    """
    subject = entry.subject
    assert isinstance(subject, TokensMissing)
    yield Witness(
        step=entry.step,
        end_tokens=subject.end,
        sequence_tokens=subject.sequence,
        tokens_to_come=subject.to_come,
        tokens=subject.end - subject.sequence - subject.to_come,
    )


@invariant(
    "tokens/sampled-twice",
    on=(SampledTwice,),
    message="An output brought request {request} a token for position {position}, but its sequence had "
    "{sequence_tokens} tokens already: the client gets a token for the same position twice.",
    references=(VLLM_48245,),
    near_misses=(
        "a request that resumes after the output in flight at its preemption has come, or was dropped",
        "a chunk of a prompt, which samples nothing",
        "rejected drafts, after which the next steps begin lower",
        "output of a step past the stop of a session's turn that comes before the next chunk, or is dropped",
    ),
)
def sampled_twice(entry: Entry) -> Iterator[Witness]:
    """The token of each position is sampled once.

    Violated when a preempted request is scheduled again while a step of before the preemption is in flight,
    and the outputs of both are delivered: the second token is not that of the position where it stands.
    Violated too when a step is in flight at the end of a session's turn, and its output is taken for the next
    turn's.
    """
    subject = entry.subject
    assert isinstance(subject, SampledTwice)
    yield Witness(position=subject.end, sequence_tokens=subject.sequence)


@invariant(
    "tokens/turn-overcounted",
    tokens="tokens",
    on=(TurnOvercounted,),
    message="The last turn of session {request} left {turn_tokens} tokens, but the engine counts "
    "{computed_tokens} as computed: the first {tokens} tokens of the next chunk are never computed.",
    near_misses=(
        "a turn that ends with its last token uncomputed, as every turn should",
        "drafts that were accepted past the stop, on a release that takes them off the count",
    ),
)
def turn_overcounted(entry: Entry) -> Iterator[Witness]:
    """A session's next chunk begins at or above the engine's count of computed tokens.

    Violated when drafts that were accepted past the stop stay in the count: the KV at these positions is that
    of the dropped drafts, and the model reads it in place of the chunk's first tokens.
    """
    subject = entry.subject
    assert isinstance(subject, TurnOvercounted)
    yield Witness(
        turn_tokens=subject.tokens,
        computed_tokens=subject.computed,
        tokens=subject.computed - subject.tokens,
    )


@invariant(
    "tokens/beyond-sequence",
    on=(ReportedCounts,),
    unless=USUAL,
    message="Request {request} has {computed_tokens} computed tokens, {in_flight_tokens} of them in "
    "flight ({instant}), but its sequence allows at most {limit_tokens} that are executed.",
    references=(VLLM_48245,),
    near_misses=(
        "draft tokens and asynchronous steps in flight, which lie past the sequence until their output comes",
        "draft tokens that were accepted past the stop",
        "a pooling or encoder-only request, which executes its whole sequence because no token follows",
    ),
)
def beyond_sequence(entry: Entry) -> Iterator[Witness]:
    """A request has executed no more tokens than its sequence has.

    At its end it has executed at least one token less, because the last output token is never fed back.
    Checked between steps and at the end, without the tokens in flight. Violated when the engine's count
    runs ahead of the sequence, for example because rejected draft tokens stay counted.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, ReportedCounts)
    if subject.instant not in ("census", "finished"):
        return
    limit = subject.sequence if subject.sequence >= 0 else subject.ledger_sequence
    if subject.instant == "finished":
        # Draft tokens accepted past the stop were executed, though the sequence was cut.
        limit = max(limit, subject.ledger_sequence)
        generated = limit > account.prompt_tokens and not (account.pooling or account.resumable)
        if generated and account.outcome in WITH_LAST_OUTPUT:
            limit -= subject.sampled_last
    in_flight = max(subject.placeholders, subject.in_flight, subject.ledger_in_flight, 0)
    if subject.computed - in_flight > limit:
        yield Witness(
            computed_tokens=subject.computed,
            in_flight_tokens=in_flight,
            limit_tokens=limit,
            instant=subject.instant,
        )


@invariant(
    "tokens/in-flight",
    tokens="in_flight_tokens - ledger_tokens",
    on=(ReportedCounts,),
    unless=USUAL,
    message="The engine counts {in_flight_tokens} tokens in flight for request {request} "
    "({instant}), but {ledger_tokens} are scheduled and have no output yet.",
    references=(VLLM_57562,),
    near_misses=(
        "a step in flight at a preemption, whose tokens stay counted until its output comes",
        "placeholders of draft tokens that were accepted past the stop, left over at the end",
        "a placeholder of a request that ends in the very call that reports its failed load (policy `fail`): "
        "nothing reads it any more",
        "the placeholder of a pooling request that ends: it has no output that could fill it (before 0.32)",
        "an engine that has no such counts",
    ),
)
def in_flight(entry: Entry) -> Iterator[Witness]:
    """Tokens in flight are those scheduled without output yet, and cover the output placeholders.

    Violated when the engine does not subtract a step's tokens once its output came, subtracts them twice,
    or keeps a placeholder for output that never comes. vLLM 0.32 keeps one after a synchronous load
    failure under asynchronous scheduling.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, ReportedCounts)
    ledger = subject.ledger_in_flight
    if subject.in_flight not in (-1, ledger):
        yield Witness(in_flight_tokens=subject.in_flight, ledger_tokens=ledger, instant=subject.instant)
    if subject.instant == "finished" and (account.pooling or _ended_by_failed_load(account, subject)):
        return
    left_over = 0
    if subject.instant == "finished" and account.drafted:
        if subject.sequence < 0:
            return
        left_over = max(0, subject.ledger_sequence - subject.sequence)
    if subject.placeholders < -1 or subject.placeholders > max(subject.in_flight, ledger, 0) + left_over:
        noun = "placeholder" if subject.placeholders == 1 else "placeholders"
        yield Witness(
            f"Request {{request}} has {{placeholder_tokens}} output {noun} ({{instant}}), but "
            "{ledger_tokens} tokens in flight that could fill them.",
            placeholder_tokens=subject.placeholders,
            ledger_tokens=ledger,
            instant=subject.instant,
        )


def _ended_by_failed_load(account: Account, at_end: ReportedCounts) -> bool:
    """Whether the request ended because its load failed: no step has run it since the failure."""
    if account.outcome != "error" or not account.lives:
        return False
    return account.lives[-1].invalid_from == at_end.ledger_computed


@invariant(
    "tokens/beyond-max-tokens",
    tokens="output_tokens - max_tokens",
    on=(Finished,),
    unless=USUAL,
    message="Request {request} ended with {output_tokens} output tokens, but its client asked for "
    "{max_tokens} at most.",
    near_misses=(
        "draft tokens accepted past the last one, which the engine cuts off",
        "a step in flight when the request stopped, whose output is dropped",
        "a session, whose next chunk brings a limit of its own",
    ),
)
def beyond_max_tokens(entry: Entry) -> Iterator[Witness]:
    """A request ends with no more output tokens than its client asked for.

    Violated when the engine stops a request too late: the client pays for tokens that it does not want.
    """
    subject, account = entry.subject, _account(entry)
    assert isinstance(subject, Finished)
    limit = account.max_tokens
    if limit is not None and subject.output_tokens > limit and not (account.resumable or account.pooling):
        yield Witness(output_tokens=subject.output_tokens, max_tokens=limit)


@invariant(
    "tokens/reset-on-preemption",
    on=(Preempted,),
    message="Request {request} was preempted, but kept {computed_tokens} computed tokens and "
    "{held_blocks} blocks.",
    references=(VLLM_36752,),
    near_misses=(
        "a resumed request whose asynchronous load has finished: it waits in state PREEMPTED, with tokens "
        "and blocks, but was not preempted",
        "blocks that are freed later, which are no longer in the request's table",
    ),
)
def reset_on_preemption(entry: Entry) -> Iterator[Witness]:
    """A preempted request has no computed tokens and no blocks.

    Violated when a count or a block remains although the KV was discarded: the engine would use it when
    the request resumes.
    """
    subject = entry.subject
    assert isinstance(subject, Preempted)
    if subject.computed_tokens != 0 or subject.held_blocks > 0:
        yield Witness(computed_tokens=subject.computed_tokens, held_blocks=subject.held_blocks)


@invariant(
    "tokens/stale-lookup",
    on=(Admitted, LookupKept),
    unless=USUAL,
    message="Request {request} was admitted in step {step} with {local_tokens} local tokens, but its last "
    "prefix-cache lookup, in step {looked_up_step}, found {looked_up_tokens}.",
    references=(VLLM_18955, VLLM_18957),
    near_misses=(
        "the last part of a hit, less than a block, which is dropped for a longer external hit",
        "a hit no longer than the replayed window, which is dropped completely",
        "an earlier attempt to admit the request that failed, if the cache was looked up again",
        "a later chunk of a prompt, which uses the hit of the first chunk (vLLM v0)",
        "a kept cache miss while the cache still has nothing: no block is wrongly taken for a hit",
    ),
)
def stale_lookup(entry: Entry) -> Iterator[Witness]:
    """The local hit used at an admission is the result of a prefix-cache lookup in the same step.

    Violated when the engine keeps the result of a failed attempt to admit the request. The cache may have
    changed since, so blocks with other content are used as hits. Also violated when a request ends and the
    engine never releases its result.
    """
    subject, account = entry.subject, _account(entry)
    if isinstance(subject, LookupKept):
        yield from _kept(subject)
        return
    assert isinstance(subject, Admitted)
    local, looked_up = subject.local_tokens, account.looked_up_local
    if account.looked_up_step == subject.step:
        dropped_for_external = local < looked_up < local + subject.external_tokens
        if local == looked_up or dropped_for_external or local == subject.external_tokens == 0:
            return
    elif local == 0:
        return
    if account.looked_up_step < 0:
        yield Witness(
            "Request {request} was admitted in step {step} with {local_tokens} local tokens, but "
            "the prefix cache was never looked up.",
            step=subject.step,
            local_tokens=local,
        )
        return
    yield Witness(
        step=subject.step,
        local_tokens=local,
        looked_up_step=account.looked_up_step,
        looked_up_tokens=looked_up,
    )


def _kept(subject: LookupKept) -> Iterator[Witness]:
    figures = {
        "step": subject.step,
        "local_tokens": subject.local_tokens,
        "looked_up_step": subject.looked_up_step,
    }
    if subject.ended:
        yield Witness(
            "Request {request} has ended, but the engine still keeps the result of its lookup in step "
            "{looked_up_step} ({local_tokens} tokens), and nothing will release it.",
            **figures,
        )
    elif subject.local_tokens or subject.cached_tokens > 0:
        yield Witness(
            "Request {request} was admitted in step {step} with the {local_tokens} local tokens that a "
            "failed attempt had found in step {looked_up_step}; the cache now holds {cached_tokens}.",
            **figures,
            cached_tokens=subject.cached_tokens,
        )


@invariant(
    "tokens/lookup-counted-once",
    on=(ReportedLookups,),
    message="The engine counted {requests} lookups of the {source} cache at once ({query_tokens} tokens "
    "queried, {hit_tokens} hit), but its admissions made {ledger_requests} ({ledger_query_tokens} queried, "
    "{ledger_hit_tokens} hit).",
    references=(VLLM_43736, VLLM_28585, VLLM_25780),
    near_misses=(
        "a connector that has no answer yet: this is not a lookup",
        "a request that may not read the cache, which is not counted",
        "a full local hit, after which the connector is not asked",
        "a hit no longer than the replayed window, which is given up after the connector was asked beyond it",
    ),
)
def lookup_counted_once(entry: Entry) -> Iterator[Witness]:
    """Each admission counts as one local and one external lookup, with that admission's figures.

    Violated when the engine counts an admission twice, not at all, or with other figures: the hit rate is
    wrong. Also violated when it counts a lookup between two steps, as for an abort. Attempts without an
    admission, and requests that may not read a cache, have drifts of their own.
    """
    subject = entry.subject
    assert isinstance(subject, ReportedLookups)
    counted = (subject.requests, subject.queries, subject.hits)
    if counted != (subject.ledger_requests, subject.ledger_queries, subject.ledger_hits):
        yield Witness(
            source=subject.source,
            requests=subject.requests,
            query_tokens=subject.queries,
            hit_tokens=subject.hits,
            ledger_requests=subject.ledger_requests,
            ledger_query_tokens=subject.ledger_queries,
            ledger_hit_tokens=subject.ledger_hits,
        )


@invariant(
    "tokens/suspense",
    tokens="suspense_tokens",
    on=(Settlement, Preempted, Finished),
    unless=USUAL,
    message="{suspense_tokens} tokens of request {request} were computed again, and no recorded event says "
    "why their KV was lost.",
    near_misses=("tokens computed again after a known loss, which are rework with its cause",),
)
def suspense(entry: Entry) -> Iterator[Witness]:
    """Every token that is computed again has a known cause.

    Violated when the engine computes tokens whose KV it already had, without a preemption, a rollback or a
    failed load: the engine does work twice, or something happened that no hook sees.
    """
    tokens = _account(entry).suspense
    if tokens:
        yield Witness(suspense_tokens=tokens)
