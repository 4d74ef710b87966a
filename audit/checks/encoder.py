"""The checks on the encoder cache: its free space, and the outputs that requests read.

Their subjects come from :mod:`kvledger.audit.ledger.encoder`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import (
    EncoderBudget,
    EncoderOutputEvicted,
    EncoderOutputMissing,
    EncoderOutputsKept,
    Entry,
)
from .registry import VLLM_52482, VLLM_54284, VLLM_55733, Witness, invariant


@invariant(
    "encoder/free-space",
    on=(EncoderBudget, EncoderOutputsKept),
    message="In step {step} the engine counts {free} embeddings of its encoder cache as free, of {size}. By "
    "its entries {expected} are.",
    references=(VLLM_55733,),
    near_misses=(
        "an output that stays cached after its last request has ended, held by none",
        "an output that a preempted request, or one that computes further, holds no longer",
        "an encoder-decoder model whose output is free once its step has run",
    ),
)
def free_space(entry: Entry) -> Iterator[Witness]:
    """The encoder cache has as many free embeddings as its entries leave.

    Violated when the engine's count differs from the size less the embeddings of all entries. At a census,
    violated too when its count of free and evictable embeddings differs from the size less the embeddings
    of the entries that requests hold, or when an ended request holds an entry, which is never evicted. In an
    encoder-decoder model, where an output occupies the cache until its step has run, violated when more is
    free than the cache has. With too high a count, more requests are admitted than fit.
    """
    subject = entry.subject
    if isinstance(subject, EncoderOutputsKept):
        noun = "output" if subject.outputs == 1 else "outputs"
        yield Witness(
            f"Request {{ended}} has ended and at the census after step {{step}} still holds {{outputs}} "
            f"encoder {noun}, which can't be evicted.",
            ended=subject.request_id,
            outputs=subject.outputs,
            step=subject.step,
        )
        return
    assert isinstance(subject, EncoderBudget)
    at_most = (
        "In step {step} the engine counts {free} embeddings of its encoder cache as free, which has {size}."
    )
    evictable = (
        "After step {step} the engine counts {free} embeddings of its encoder cache as free or evictable, of "
        "{size}. By the outputs that requests hold {expected} are."
    )
    yield Witness(
        evictable if subject.evictable else None if subject.shared else at_most,
        size=subject.size,
        free=subject.free,
        expected=subject.expected,
        step=subject.step,
    )


@invariant(
    "encoder/evicted-while-read",
    on=(EncoderOutputEvicted,),
    tokens="tokens",
    message="In step {step} an encoder output of {embeddings} embeddings was evicted that request {request} "
    "has still to read for {tokens} tokens, from position {start} up. It is computed again.",
    references=(VLLM_54284,),
    near_misses=(
        "an output that the request has read to its end",
        "an output of a request that was preempted or has ended",
    ),
)
def evicted_while_read(entry: Entry) -> Iterator[Witness]:
    """An encoder output stays cached until every running request that reads it has read it to its end.

    Violated when it is evicted while a request that has begun to read it, in its present life, has positions
    of it left to compute. The same input at several positions is read to the end of the last one that was
    begun.
    """
    subject = entry.subject
    assert isinstance(subject, EncoderOutputEvicted)
    yield Witness(
        tokens=subject.tokens,
        start=subject.item.end - subject.tokens,
        embeddings=subject.item.embeddings,
        step=subject.step,
    )


@invariant(
    "encoder/not-at-worker",
    on=(EncoderOutputMissing,),
    tokens="tokens",
    message="Step {step} reads an encoder output of {embeddings} embeddings for {tokens} tokens of request "
    "{request}, from position {start} up. The engine takes it for cached, and no worker has it: none "
    "computed it, or it was removed there.",
    references=(VLLM_52482,),
    near_misses=(
        "an output that the same step computes for another request",
        "an output that is removed and computed again in one step",
        "an output that an encoder cache connector loads",
    ),
)
def not_at_worker(entry: Entry) -> Iterator[Witness]:
    """A step reads only encoder outputs that its workers have.

    Violated when a request reads an output that the engine has in its cache, which no step computed since it
    was reserved, or which the workers were told to remove. The worker then finds no tensor, and the engine
    stops.
    """
    subject = entry.subject
    assert isinstance(subject, EncoderOutputMissing)
    yield Witness(
        tokens=subject.tokens,
        start=subject.item.start,
        embeddings=subject.item.embeddings,
        step=subject.step,
    )
