"""Blocks: one owner for each reference, one content for each hash, and nothing in two places.

Subjects come from :mod:`kvledger.audit.ledger.blocks`, which keeps the blocks and gives what two sides say of
one thing. A figure of -1 is not known, and nothing is claimed of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.blocks.subjects import (
    BlockComparison,
    CachedContent,
    Collision,
    Leak,
    PoolComparison,
    SharedWrite,
    StrayFree,
    Uncovered,
)
from ..ledger.subjects import Entry
from .registry import (
    VLLM_26813,
    VLLM_33775,
    VLLM_37076,
    VLLM_39146,
    VLLM_42571,
    VLLM_42903,
    VLLM_43884,
    VLLM_44409,
    Figure,
    Witness,
    invariant,
)

_HOW = {
    "taken": "was handed out as free to {second} while {first} held it",
    "unhashed": "was taken by {second} for a block of the cache, but has no hash: {first} took it first",
    "twice": "stands twice in the tables of one request: {first}, and {second}",
    "unheld": "stands in a table of {second}, who holds no reference to it; {first} does",
}


@invariant(
    "blocks/double-allocation",
    on=(Collision,),
    says="",
    references=(VLLM_44409, VLLM_33775, VLLM_43884, VLLM_42903),
    near_misses=(
        "a shared prefix: many requests hold one block of one hash",
        "two blocks of the same hash: vLLM does not merge what was computed twice",
        "the null block, which stands in every table",
        "a connector's pin on a block that a request holds",
    ),
)
def double_allocation(entry: Entry) -> Iterator[Witness]:
    """A block has one owner, unless it is a cached block that several share.

    A real block stands once in a request's tables, across all groups; a block that is handed out as
    new has no holder; a block that is shared has a hash. Violated when one group's allocation takes
    what another group of the same request has found in the cache and not yet touched: both then write
    to the same memory, and attention reads what was written last.
    """
    said = entry.subject
    assert isinstance(said, Collision)
    first = said.first if said.first is not None else "somebody unseen"
    how = _HOW[said.how].format(first=first, second=said.second)
    figures: dict[str, Figure] = {
        "how": said.how,
        "pool": said.pool,
        "block": said.block,
        "references": said.references,
        "first": str(first),
        "second": str(said.second),
    }
    says = f"Block {said.block} {how}. Both write to it, and both read what was written last."
    yield Witness(_plain(says), said.story, **figures)


@invariant(
    "blocks/double-free",
    on=(StrayFree,),
    says="",
    references=(VLLM_42571,),
    near_misses=(
        "frees that wait until no step in flight may write to the block (vLLM 0.24 and later)",
        "both ends of a copy, each released once more when the copy is made",
        "a connector that lets go of its own pins",
        "the null block, which is never freed",
    ),
)
def double_free(entry: Entry) -> Iterator[Witness]:
    """Nobody gives back a block that they do not hold.

    vLLM raises nothing: the count falls to -1, or another holder's reference is gone, and the block is
    handed to somebody else while it is still read. The assertion that ends the engine, if any, comes
    at a later and unrelated allocation.
    """
    said = entry.subject
    assert isinstance(said, StrayFree)
    by, earlier = said.by, said.earlier
    who = (
        f"request {by.request_id}, life {by.life}, group {by.group}"
        if by.request_id
        else "nobody in particular"
    )
    before = "; nobody was seen to free it before"
    if earlier is not None:
        freer = f"request {earlier.request_id}, life {earlier.life}" if earlier.request_id else earlier.by
        before = f"; {freer} freed it before, at step {earlier.step}"
    says = (
        f"Block {said.block} was freed at step {by.step} for {who}, who does not hold it{before}. It has "
        f"{said.references} references now, and can be handed out while somebody reads it."
    )
    yield Witness(
        _plain(says),
        said.story,
        pool=said.pool,
        block=said.block,
        references=said.references,
        freed_by=by.by,
        first_freed_step=earlier.step if earlier is not None else -1,
    )


@invariant(
    "blocks/references",
    on=(BlockComparison,),
    says="Block {block} has {references} references, but {ledger_references} holders are known: {holders}. "
    "A reference too few frees it under a holder; one too many keeps it for ever.",
    references=(VLLM_42571, VLLM_37076),
    near_misses=(
        "the null block, whose count vLLM does not keep",
        "a deferred free: the request is gone, its reference is not",
        "both ends of a copy that is still to be made",
        "a block that was held when the trace began, whose holders are not known",
    ),
)
def references(entry: Entry) -> Iterator[Witness]:
    """A block's reference count is the number of its holders.

    Holders are the places in requests' tables, deferred frees, the ends of pending copies, and pins of
    connectors. The engine's count is stated with each touch and free, and by the sweep.
    """
    said = entry.subject
    assert isinstance(said, BlockComparison)
    if said.ledger_references >= 0 and said.references != said.ledger_references:
        yield Witness(
            None,
            said.story,
            pool=said.pool,
            block=said.block,
            references=said.references,
            ledger_references=said.ledger_references,
            holders="; ".join(said.holders) or "none",
        )


@invariant(
    "blocks/free-iff-unreferenced",
    on=(BlockComparison, PoolComparison),
    says="Block {block} has {references} references and {where} in the free queue. It {meaning}.",
    references=(VLLM_42571,),
    near_misses=(
        "the null block, which is in no queue and has no count",
        "a cached block that nobody holds: it is free, and hashed",
    ),
)
def free_iff_unreferenced(entry: Entry) -> Iterator[Witness]:
    """A block stands in the free queue exactly when nobody has a reference to it.

    And the queue is as long as its counter says: what was taken from it and given back to it, call by
    call, leads to the same number.
    """
    said = entry.subject
    if isinstance(said, PoolComparison):
        if said.free_blocks != said.ledger_free_blocks:
            yield Witness(
                "The free queue of pool {pool} has {free_blocks} blocks by the engine's counter, but "
                "{ledger_free_blocks} by what was taken and given back.",
                pool=said.pool,
                free_blocks=said.free_blocks,
                ledger_free_blocks=said.ledger_free_blocks,
            )
        return
    assert isinstance(said, BlockComparison)
    if said.references < 0 or (said.queued >= 0 and (said.references == 0) != bool(said.queued)):
        handed = "can be handed out while it is held" if said.queued else "will never be handed out again"
        yield Witness(
            None,
            said.story,
            pool=said.pool,
            block=said.block,
            references=said.references,
            where={1: "stands", 0: "does not stand"}.get(said.queued, "may or may not stand"),
            meaning="was freed more often than it was held" if said.references < 0 else handed,
        )


@invariant(
    "blocks/hash-map",
    on=(BlockComparison, PoolComparison),
    says="Block {block} {has} hash, but {what}: what the cache promises and what is there differ.",
    near_misses=(
        "two blocks of the same hash: the map leads to both",
        "a block with a hash for its first tokens, and one more when it is full",
        "a block evicted by the call that hands it out",
    ),
)
def hash_map(entry: Entry) -> Iterator[Witness]:
    """A block has a hash exactly when the cache map leads to it.

    Violated when a hash stays on a block that the map has lost (it is never found, and never evicted),
    when the map leads to a block that holds something else, or when a hash comes or goes and no call
    of the pool did it.
    """
    said = entry.subject
    if isinstance(said, PoolComparison):
        if said.ledger_hashes >= 0 and said.hashes != said.ledger_hashes:
            yield Witness(
                "The cache map of pool {pool} has {hashes} hashes, but {ledger_hashes} were put there and "
                "not evicted.",
                pool=said.pool,
                hashes=said.hashes,
                ledger_hashes=said.ledger_hashes,
            )
        return
    assert isinstance(said, BlockComparison)
    if said.has_hash < 0:
        return
    if said.has_hash != said.mapped:
        what = "the cache map does not lead to it"
    elif said.ledger_has_hash >= 0 and said.has_hash != said.ledger_has_hash:
        what = "no call of the pool gave it one" if said.has_hash else "none took away the one it had"
    else:
        return
    has = "has a" if said.has_hash else "has no"
    yield Witness(None, said.story, pool=said.pool, block=said.block, has=has, what=what)


@invariant(
    "blocks/hash-content",
    on=(CachedContent,),
    says="",
    references=(VLLM_26813,),
    near_misses=(
        "a hash given at scheduling, for what the step is about to compute",
        "blocks that hold several hashes' worth of tokens, or a part of one",
        "a load that failed above what is hashed",
        "drafts: only finished tokens are hashed",
    ),
)
def hash_content(entry: Entry) -> Iterator[Witness]:
    """What a block is hashed for was computed or loaded, by position.

    Violated when a block is hashed beyond its request's sequence, while an asynchronous load has not
    finished, or still after a load failed: the next request with this prefix reads what is not there.
    """
    said = entry.subject
    assert isinstance(said, CachedContent)
    why = {
        "sequence": f"has only {said.limit} tokens",
        "pending": f"has KV up to {said.limit}: its load has not finished",
        "failed": f"has none from {said.limit} up: its load failed, and nobody computed them instead",
    }[said.why]
    says = (
        f"Block {said.block} is hashed for positions up to {said.end} of request {said.request_id}, which "
        f"{why}. The next request with this prefix reads what is not there."
    )
    yield Witness(
        _plain(says),
        said.story,
        pool=said.pool,
        block=said.block,
        end=said.end,
        limit=said.limit,
        why=said.why,
    )


@invariant(
    "blocks/write-shared",
    on=(SharedWrite,),
    says="",
    references=(VLLM_39146,),
    near_misses=(
        "a hit on a block in the very step that fills it: its hasher came first",
        "the last token of a full external hit, computed again in the request's own block",
        "a partial hit, which writes to a copy",
        "the last positions of a hit, replayed with the same tokens",
    ),
)
def write_shared(entry: Entry) -> Iterator[Witness]:
    """A request writes only to blocks that nobody held before it.

    Blocks above the local hit are filled by the request, by computing or loading. Violated when one of
    them had a holder already, whose KV is then overwritten.
    """
    said = entry.subject
    assert isinstance(said, SharedWrite)
    says = (
        f"Block {said.block}, place {said.place} of the table of {said.second}, is filled by it, but was "
        f"held before by {said.first}, who then reads another's KV."
    )
    yield Witness(_plain(says), said.story, pool=said.pool, block=said.block, place=said.place)


@invariant(
    "blocks/coverage",
    on=(Uncovered,),
    says="Request {request} has {computed_tokens} computed tokens, but its table in group {group} has "
    "{blocks} blocks of {block_tokens} tokens: the rest was written nowhere, or to another's block.",
    near_misses=(
        "null blocks before a sliding window, which stand for their positions",
        "Mamba states, cross-attention and rings, whose tables do not stand for positions",
    ),
)
def coverage(entry: Entry) -> Iterator[Witness]:
    """A request's tables have a slot for each of its computed tokens.

    Judged when tables are stated: at an admission, and in turn for all that runs.
    """
    said = entry.subject
    assert isinstance(said, Uncovered)
    yield Witness(
        group=said.group,
        blocks=said.blocks,
        block_tokens=said.block_tokens,
        computed_tokens=said.computed_tokens,
    )


@invariant(
    "blocks/leak",
    on=(Leak,),
    says="",
    near_misses=(
        "a connector that sends the blocks of a request that has ended, and then gives them up",
        "a deferred free, whose step is still in flight",
    ),
)
def leak(entry: Entry) -> Iterator[Witness]:
    """Nothing is held for a request that is gone.

    Violated at once when the engine forgets a request whose blocks it did not give up, and after 15
    minutes when a connector keeps them: the pool is smaller by these blocks until a restart.
    """
    said = entry.subject
    assert isinstance(said, Leak)
    when = f"ended {said.seconds} seconds ago" if said.seconds else "is gone"
    says = (
        f"Request {said.holder.request_id} {when} and still holds {len(said.blocks)} blocks: the pool is "
        "smaller by these until a restart."
    )
    yield Witness(_plain(says), said.story, blocks=said.blocks, seconds=said.seconds)


def _plain(says: str) -> str:
    """A sentence whose braces, in a request's id, are not for filling in."""
    return says.replace("{", "{{").replace("}", "}}")
