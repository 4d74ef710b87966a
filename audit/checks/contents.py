"""The checks on the contents of blocks: a sealed block keeps its bytes, and a hit block was filled.

Their subjects come from :mod:`kvledger.audit.ledger.content_postings`, which joins what workers compared with
the holders of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.blocks.pool import hash_text
from ..ledger.entries import (
    ContentChanged,
    ContentRecomputed,
    ContentStored,
    ContentTransfer,
    Entry,
    UnsealedHit,
)
from .registry import (
    CLEAR_STORE,
    LMCACHE_4247,
    LMCACHE_4463,
    VLLM_38715,
    VLLM_43569,
    VLLM_45357,
    VLLM_45704,
    VLLM_46951,
    VLLM_52234,
    VLLM_52360,
    VLLM_56104,
    VLLM_56525,
    VLLM_57661,
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


# --- custody -------------------------------------------------------------------------------------------
#
# The checks on transfers: a store is handed what was sealed, and a load brings what was handed over.
#
# Their subjects come from :mod:`kvledger.audit.ledger.content_postings`, which joins both ends by the hash
# of the block.


_HOW = {
    "exchanged": "keys and values are exchanged",
    "zeros": "only zeros arrived",
    "other": "other bytes arrived",
}


@invariant(
    "content/transfer",
    stop_now=CLEAR_STORE,
    tokens="tokens",
    on=(ContentTransfer,),
    message="In step {step}, a load filled block {block} for request {reader} with KV that was not stored "
    "under its hash: {what}. The block that was stored in step {stored_step} held KV of request {writer}."
    "{arrived}",
    references=(VLLM_45704, VLLM_46951, VLLM_57661, LMCACHE_4463, LMCACHE_4247),
    near_misses=(
        "a load that fails and is reported as failed",
        "a block that was stored several times, each time with the bits of another computation",
        "a store with a codec that loses bits",
        "a block of which a load fills a part",
        "a load for a request that ends before the load arrives",
        "a store that other engines write to",
    ),
)
def transfer(entry: Entry) -> Iterator[Witness]:
    """A load brings the bytes that were handed to the connector under the same block hash.

    Level ``content`` takes fingerprints of the keys and values of each layer when a block is stored and when
    a load has arrived. Violated when they differ from every version that was stored under the hash. Where
    other engines may write to the store, only exchanged keys and values and blocks of zeros are violations.
    """
    subject = entry.subject
    assert isinstance(subject, ContentTransfer)
    count = len(subject.blocks)
    several = (
        "In step {step}, loads filled {count} blocks for request {reader}, the first of them block {block}, "
        "with KV that was not stored under their hashes: {what}. The block that was stored for the first in "
        "step {stored_step} held KV of request {writer}.{arrived}"
    )
    yield Witness(
        several if count > 1 else None,
        subject.story,
        block=subject.blocks[0],
        blocks=subject.blocks,
        count=count,
        tokens=subject.tokens,
        step=subject.step,
        worker=subject.worker,
        group=subject.group,
        pool=subject.pool,
        how=subject.how,
        layers=list(subject.layers),
        part=subject.part,
        reader=subject.reader or "not known",
        writer=subject.writer or "not known",
        stored_step=subject.stored_step,
        what=f"{_HOW[subject.how]} in {_where(subject)}",
        arrived=_whose(subject),
        arrived_request="" if subject.arrived is None else subject.arrived.writer,
        arrived_block=-1 if subject.arrived is None else subject.arrived.block,
        arrived_step=-1 if subject.arrived is None else subject.arrived.step,
    )


def _whose(subject: ContentTransfer) -> str:
    """A sentence about the stored block whose bytes arrived, if other bytes did."""
    if subject.how != "other":
        return ""
    source = subject.arrived
    if source is None:
        return " No block with the bytes that arrived is known to have been stored."
    first = " in the first" if len(subject.blocks) > 1 else ""
    by = f" by worker {source.worker}" if source.worker != subject.worker else ""
    return (
        f" The bytes that arrived{first} are those of block {source.block}, which was stored in step "
        f"{source.step}{by} under {hash_text(source.hash_id)} and held KV of request "
        f"{source.writer or 'not known'}."
    )


def _where(subject: ContentTransfer) -> str:
    """The layers that differ, and the part of the block."""
    layers = subject.layers
    if len(layers) == subject.layer_count:
        place = f"all {len(layers)} layers" if len(layers) > 1 else "the only layer"
    elif layers and layers == tuple(range(layers[0], layers[-1] + 1)) and len(layers) > 1:
        place = f"layers {layers[0]} to {layers[-1]} of {subject.layer_count}"
    else:
        place = (
            f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))} of {subject.layer_count}"
        )
    if subject.group:
        place += f" of KV cache group {subject.group}"
    return place if subject.part == "both" else f"the {subject.part} of {place}"


@invariant(
    "content/stored",
    stop_now=CLEAR_STORE,
    on=(ContentStored,),
    message="The connector stored block {block} in step {step}, whose KV is not what was sealed after step "
    "{sealed_step}{writer_phrase}.",
    references=(VLLM_45704, VLLM_52360),
    near_misses=(
        "a block that is stored in the step that fills it",
        "a block that was allocated again after its seal",
    ),
)
def stored(entry: Entry) -> Iterator[Witness]:
    """A connector stores the KV that was sealed when the block was full.

    Violated when a block is handed to the store with other bytes, and it was not allocated again since its
    seal: every later load of its hash brings KV that was not computed for its tokens.
    """
    subject = entry.subject
    assert isinstance(subject, ContentStored)
    yield Witness(
        None,
        subject.story,
        block=subject.block,
        step=subject.step,
        sealed_step=subject.sealed_step,
        worker=subject.worker,
        group=subject.group,
        pool=subject.pool,
        writer=subject.writer,
        writer_phrase=f", when request {subject.writer} had filled it" if subject.writer else "",
    )
