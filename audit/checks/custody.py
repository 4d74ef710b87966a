"""The checks on transfers: a store is handed what was sealed, and a load brings what was handed over.

Their subjects come from :mod:`kvledger.audit.ledger.content_postings`, which joins both ends by the hash
of the block.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.blocks.pool import hash_text
from ..ledger.entries import ContentStored, ContentTransfer, Entry
from .kinds import CLEAR_STORE
from .registry import (
    LMCACHE_4247,
    LMCACHE_4463,
    VLLM_45704,
    VLLM_46951,
    VLLM_52360,
    VLLM_57661,
    Witness,
    invariant,
)

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
