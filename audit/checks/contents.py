"""The checks on the contents of blocks: a sealed block keeps its bytes, and a hit block was filled.

Their subjects come from :mod:`kvledger.audit.ledger.content_postings`, which joins what workers compared with
the holders of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import ContentChanged, ContentRecomputed, Entry, UnsealedHit
from .registry import (
    VLLM_38715,
    VLLM_43569,
    VLLM_45357,
    VLLM_52234,
    VLLM_56104,
    VLLM_56525,
    Witness,
    invariant,
)


@invariant(
    "content/changed",
    tokens="tokens",
    on=(ContentChanged,),
    message="Request {request} hit block {block}, whose KV is not what was sealed after step "
    "{sealed_step}: {writer_phrase}, and nobody was to write it since.",
    references=(VLLM_56104, VLLM_45357),
    near_misses=(
        "a block that was allocated again after its seal, whose new content came from a connector",
        "the last, partial block of a request",
        "positions of rejected drafts, which are written again",
        "a block that the same step zeroes, copies into or computes",
        "a cache that lost its contents in sleep mode",
    ),
)
def changed(entry: Entry) -> Iterator[Witness]:
    """The KV of a full block stays as it was computed until the block is allocated again.

    Level ``content`` seals each full block with a fingerprint of its bytes in all layers, and compares it
    before each hit and now and then at rest. Violated when the bytes differ and no request was allocated the
    block in between: something wrote to a block that it did not hold, such as a late write of a request that
    had freed the block. The story shows the block's last operations and the steps between which it changed.
    """
    subject = entry.subject
    assert isinstance(subject, ContentChanged)
    several = len(subject.blocks) > 1
    by_hit = (
        "Request {request} hit {count} blocks, the first of them block {block}, whose KV is not what was "
        "sealed after step {sealed_step}: {writer_phrase}, and nobody was to write it since."
    )
    by_scrub = (
        "The KV of block {block} is not what was sealed after step {sealed_step}: {writer_phrase}, and "
        "nobody was to write it since. A scrub found it in step {step}."
    )
    yield Witness(
        by_scrub if not subject.reader else by_hit if several else None,
        subject.story,
        block=subject.blocks[0],
        blocks=subject.blocks,
        count=len(subject.blocks),
        tokens=subject.tokens,
        sealed_step=subject.sealed_step,
        intact_step=subject.intact_step,
        step=subject.step,
        worker=subject.worker,
        group=subject.group,
        pool=subject.pool,
        writer=subject.writer,
        writer_phrase=f"request {subject.writer} had filled it" if subject.writer else "it was full",
    )


@invariant(
    "content/unsealed-hit",
    tokens="tokens",
    on=(UnsealedHit,),
    message="Request {request} hit block {block}, which no worker was seen to fill since it was allocated "
    "for request {allocated_for} in step {allocated_step}.",
    references=(VLLM_52234, VLLM_43569, VLLM_56525, VLLM_38715),
    near_misses=(
        "a block that another request of the same step computes",
        "a block that was filled before the journal began",
        "a block that a connector loaded, where the load is not known to have failed",
        "a block that was full of accepted drafts and not sealed yet",
    ),
)
def unsealed_hit(entry: Entry) -> Iterator[Witness]:
    """A request hits only blocks whose KV was computed or loaded.

    Violated when a request hits a cached block and no worker executed all positions of the block, or loaded
    it, after its allocation: the block was cached before its KV existed, or although its load failed. The
    request reads whatever the block held before.
    """
    subject = entry.subject
    assert isinstance(subject, UnsealedHit)
    several = (
        "Request {request} hit {count} blocks, the first of them block {block}, which no worker was seen to "
        "fill since they were allocated, the first for request {allocated_for} in step {allocated_step}."
    )
    yield Witness(
        several if len(subject.blocks) > 1 else None,
        subject.story,
        block=subject.blocks[0],
        blocks=subject.blocks,
        count=len(subject.blocks),
        tokens=subject.tokens,
        allocated_for=subject.allocated_for,
        allocated_step=subject.allocated_step,
        step=subject.step,
        worker=subject.worker,
        group=subject.group,
        pool=subject.pool,
    )


@invariant(
    "content/recomputed",
    on=(ContentRecomputed,),
    severity="drift",
    message="Request {writer} computed block {block} in step {step}, and the KV differs from an earlier "
    "computation of the same tokens by {distance}, most in the {part} of layer {layer}: request {before} had "
    "filled block {before_block} in step {before_step}. One of the two computations is wrong.",
    near_misses=(
        "a computation in another batch or other chunks, or after a preemption, which rounds differently",
        "a block that a connector loaded: only computed blocks are compared",
        "a computation over a load that failed, which the engine repeats",
        "a computation after the prefix cache was reset, perhaps for new weights",
        "rejected drafts, which are computed again",
    ),
)
def recomputed(entry: Entry) -> Iterator[Witness]:
    """Two computations of the same tokens give about the same KV.

    With ``KVLEDGER_CONTENT_SKETCH=1``, level ``content`` compares a computed block with the last computation
    under the same hash, by random projections of the keys and values of each layer. A distance above 0.15
    is more than rounding: one of the two was computed at other positions, with other weights or another
    adapter, or something wrote to the block before it was sealed. Which one is wrong is not known, so this is
    a drift. ``docs/content.md`` has the measurement of the threshold, and what is too small to be seen.
    """
    subject = entry.subject
    assert isinstance(subject, ContentRecomputed)
    several = (
        "Request {writer} computed {count} blocks in step {step} whose KV differs from an earlier "
        "computation of the same tokens by up to {distance}, most in the {part} of layer {layer} of block "
        "{block}: request {before} had filled block {before_block} in step {before_step}. One of the two "
        "computations is wrong."
    )
    yield Witness(
        several if len(subject.blocks) > 1 else None,
        subject.story,
        block=subject.blocks[0],
        blocks=subject.blocks,
        count=len(subject.blocks),
        step=subject.step,
        worker=subject.worker,
        group=subject.group,
        pool=subject.pool,
        writer=subject.writer or "not known",
        before=subject.before_writer or "not known",
        before_block=subject.before_block,
        before_step=subject.before_step,
        distance=f"{subject.distance:.2f}",
        layer=subject.layer,
        layers=list(subject.layers),
        layer_count=subject.layer_count,
        part=subject.part,
    )
