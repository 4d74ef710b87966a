"""The checks of weights that change under a running engine: no request reads KV of older weights unawares.

Their subjects come from ``audit/ledger/weights_postings.py``, which knows under which weights the KV of each
position was computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import Entry, OlderOutputs, OutputsMislabelled, ResetRefused, StaleKV, WorkersDiffer
from ..ledger.weights import version_words
from ..ledger.weights_postings import HIT, LOAD
from .registry import (
    CLEAR_STORE,
    NEMO_RL_4018,
    PRIME_RL_1650,
    UPDATE_AGAIN,
    VERL_6523,
    VLLM_42695,
    VLLM_46125,
    VLLM_54443,
    Witness,
    invariant,
)


def _witness(subject: StaleKV) -> Witness:
    return Witness(
        tokens=subject.tokens,
        start=subject.start,
        oldest=subject.oldest,
        version=subject.version,
        before=version_words(subject.oldest),
        wrote=f", which request {subject.writer} wrote" if subject.writer else "",
        writer=subject.writer,
    )


@invariant(
    "weights/stale-hit",
    tokens="tokens",
    on=(StaleKV,),
    message="Request {request} hit {tokens} tokens from position {start} up{wrote}. Their KV is of {before}, "
    "and the request runs under version {version}.",
    references=(VLLM_46125, VLLM_42695, NEMO_RL_4018, VERL_6523, PRIME_RL_1650),
    near_misses=(
        "a reset of the prefix cache between the change and the hit",
        "a call that may change weights and left all of them as they were, by a digest",
        "a new label for the same weights",
        "a change of another LoRA adapter",
        "blocks that were filled before the observation began, and hits at level `tokens`: not known",
    ),
)
def stale_hit(entry: Entry) -> Iterator[Witness]:
    """A request hits only KV whose whole chain was computed under the weights that the request runs under.

    The chain of a position is every position that its KV was computed from. Violated when the weights of the
    model, or of the request's LoRA adapter, have changed since a position of the hit, or one before it, was
    computed: vLLM leaves the reset of the prefix cache to the caller. Every output token of the request is
    then computed from KV of two models.
    """
    subject = entry.subject
    assert isinstance(subject, StaleKV)
    if subject.source == HIT:
        yield _witness(subject)


@invariant(
    "weights/stale-load",
    tokens="tokens",
    stop_now=CLEAR_STORE,
    on=(StaleKV,),
    message="The connector promised request {request} {tokens} tokens from position {start} up. Their KV was "
    "saved under {before}, and the request runs under version {version}.",
    references=(VLLM_46125, VLLM_42695),
    near_misses=(
        "a key that was saved again since the change",
        "a key that this engine has not saved: another engine may have",
    ),
)
def stale_load(entry: Entry) -> Iterator[Witness]:
    """A request loads only KV whose whole chain was computed under the weights that the request runs under.

    Violated when a connector promises tokens under keys of its store that this engine saved last before the
    weights changed: a reset of the prefix cache does not reach every store, also if the caller asked for it.
    """
    subject = entry.subject
    assert isinstance(subject, StaleKV)
    if subject.source == LOAD:
        yield _witness(subject)


@invariant(
    "weights/reset-refused",
    tokens="tokens",
    on=(ResetRefused,),
    message="The reset of the prefix cache at step {step}, after change {version} of the weights, was "
    "refused. The cache kept its blocks, and request {request} is the first one that hit some: {tokens} "
    "tokens.",
    references=(VLLM_46125,),
    near_misses=(
        "a reset that was refused and succeeded when it was repeated, before a request hit",
        "a reset that was refused while the weights had not changed since the last one",
    ),
)
def reset_refused(entry: Entry) -> Iterator[Witness]:
    """A reset of the prefix cache that the caller asks for after a change of weights is carried out.

    Violated when the engine refuses it, as vLLM does while requests run unless it is told to reset these too,
    and a request then hits the cache. The call returns false and raises nothing.
    """
    subject = entry.subject
    assert isinstance(subject, ResetRefused)
    yield Witness(step=subject.step, version=subject.version, tokens=subject.tokens)


@invariant(
    "weights/own-older-kv",
    severity="drift",
    tokens="tokens",
    on=(OlderOutputs,),
    message="Request {request} went on after a change of weights: {tokens} output tokens were sampled under "
    "weights up to version {version} over KV of its own from version {oldest} on.",
    references=(VLLM_46125,),
    near_misses=(
        "a request that was preempted with its blocks dropped, and computed all of its KV again",
        "a request that ended before the change",
    ),
)
def own_older_kv(entry: Entry) -> Iterator[Witness]:
    """A request that runs while the weights change computes its KV again.

    Found when it goes on over its own older KV instead. That is the caller's choice, as with the pause mode
    ``keep`` without a reset: the tokens after the change are those of no model.
    """
    subject = entry.subject
    assert isinstance(subject, OlderOutputs)
    yield Witness(tokens=subject.tokens, version=subject.version, oldest=subject.oldest)


@invariant(
    "weights/span",
    severity="drift",
    tokens="tokens",
    on=(OutputsMislabelled,),
    message="The engine's output says that tokens {start} to {end} of request {request} are of the weights "
    "{label!r}. The steps of {tokens} of them read KV of {before}, and ran under version {version}.",
    references=(VLLM_54443,),
    near_misses=(
        "a label for tokens all of whose KV was computed under the weights of their step",
        "an engine whose caller labels no weights, or whose output has no labels",
    ),
)
def mislabelled_span(entry: Entry) -> Iterator[Witness]:
    """What the engine's output calls the weights of a token holds for the KV that the token was sampled from.

    Found when it does not: the label is that of the last change when the token was returned, and says nothing
    of older KV that the step read.
    """
    subject = entry.subject
    assert isinstance(subject, OutputsMislabelled)
    yield Witness(
        label=subject.label,
        start=subject.start,
        end=subject.end,
        tokens=subject.tokens,
        oldest=subject.oldest,
        before=version_words(subject.oldest),
        version=subject.version,
    )


@invariant(
    "weights/workers-differ",
    stop_now=UPDATE_AGAIN,
    on=(WorkersDiffer,),
    message="A step ran after call {call} of `{by}`, though workers {with_new} have the new weights and "
    "workers {without} do not: {why}. Request {request} is the first in it.",
    near_misses=(
        "workers that hold other shards: what is compared is whether each worker's own tensors changed",
        "a call that failed on some workers and was repeated before a step",
        "a call that failed on all workers",
        "a worker whose journal is not there, or has lost events",
    ),
)
def workers_differ(entry: Entry) -> Iterator[Witness]:
    """All workers of an engine hold the weights of the same calls when a step runs.

    Violated when a call that changes weights returned on some workers and raised on others, or changed the
    tensors that every worker holds whole on some of them alone (level `content`), and a step ran before
    another call. The model then computes each token with weights of two versions.
    """
    subject = entry.subject
    assert isinstance(subject, WorkersDiffer)
    why = "the call raised there" if subject.raised else "the call left theirs as they were"
    yield Witness(
        by=subject.by, call=subject.call, with_new=subject.with_new, without=subject.without, why=why
    )
