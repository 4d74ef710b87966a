"""The checks of weights that change under a running engine: no request reads KV of older weights unawares.

Their subjects come from ``audit/ledger/weights_postings.py``, which knows under which weights the KV of each
position was computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import Entry, OlderOutputs, ResetRefused, StaleKV
from ..ledger.weights_postings import HIT, LOAD
from .kinds import CLEAR_STORE
from .registry import NEMO_RL_4018, PRIME_RL_1650, VERL_6523, VLLM_42695, VLLM_46125, Witness, invariant


def _witness(subject: StaleKV) -> Witness:
    before = f"version {subject.oldest}" if subject.oldest else "the weights before the first change"
    return Witness(
        tokens=subject.tokens,
        start=subject.start,
        oldest=subject.oldest,
        version=subject.version,
        before=before,
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
