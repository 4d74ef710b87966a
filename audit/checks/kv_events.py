"""The checks on an engine's stream of KV events: it says what the prefix cache holds.

Their subjects come from :mod:`kvledger.audit.ledger.kv_events`, which compares a recorded stream with the
events of level ``blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import Entry
from ..ledger.kv_events import (
    AGAIN,
    CLEARED,
    ORPHAN,
    REMOVED,
    STORED,
    CopyRemoved,
    NotAnnounced,
    StreamGap,
    TierMissing,
    Unfounded,
)
from ..text import counted
from .registry import VLLM_45261, VLLM_48933, VLLM_55092, VLLM_58119, Witness, invariant


@invariant(
    "events/gap",
    on=(StreamGap,),
    message="{batches} of the KV events were not received: sequence numbers {first} to {last}. The cache "
    "says what was in them: {stores} stores and {removals} removals.",
    near_misses=(
        "batches that the publisher replayed",
        "numbers that begin again because the engine was restarted",
        "batches before the recording began",
    ),
)
def gap(entry: Entry) -> Iterator[Witness]:
    """A subscriber receives every batch of the engine's KV events.

    Violated when sequence numbers are missing and the publisher did not replay them. A router that keeps an
    index of the cache from this stream has a wrong index from then on. The finding lists the changes of the
    cache that have no KV event and fall into the gap; without level ``blocks`` they are not known.
    """
    subject = entry.subject
    assert isinstance(subject, StreamGap)
    kinds = [change.kind for change in subject.changes]
    yield Witness(
        None,
        subject.story,
        batches=counted(subject.last - subject.first + 1, "batch", "batches"),
        first=subject.first,
        last=subject.last,
        stores=kinds.count(STORED),
        removals=kinds.count(REMOVED),
        resets=kinds.count(CLEARED),
        stored_blocks=[change.block for change in subject.changes if change.kind == STORED],
        removed_blocks=[change.block for change in subject.changes if change.kind == REMOVED],
    )


@invariant(
    "events/not-announced",
    on=(NotAnnounced,),
    message="{changes} of the prefix cache {were} not announced by any KV event: {what}.",
    near_misses=(
        "changes in batches that were lost, which are part of events/gap",
        "changes at the end, whose batch the engine has not published yet",
        "changes before the recording, or before the journal, began",
        "an evicted block whose hash stays cached in another block",
    ),
)
def not_announced(entry: Entry) -> Iterator[Witness]:
    """Each block that is cached or evicted, and each reset of the cache, is announced by a KV event.

    Violated when a block was cached, evicted or dropped by a reset, no batch is missing at that time, and no
    KV event says so. An index kept from the stream then lacks a block, or promises one that is gone.
    """
    subject = entry.subject
    assert isinstance(subject, NotAnnounced)
    yield Witness(
        None,
        subject.story,
        changes=counted(subject.total, "change"),
        were="was" if subject.total == 1 else "were",
        what={STORED: "blocks cached", REMOVED: "blocks evicted", CLEARED: "resets of the cache"}[
            subject.kind
        ],
        blocks=[change.block for change in subject.examples if change.block >= 0],
        hashes=subject.hashes,
    )


@invariant(
    "events/not-in-cache",
    on=(Unfounded,),
    message="{number} announced by KV events {have} no change of the prefix cache beside {it}: {what}.",
    near_misses=(
        "stores of blocks that are cached already, which are events/stored-but-cached",
        "blocks of other tiers, which the engine's own cache does not hold",
        "KV events at the end, whose change the engine's journal does not hold yet",
        "an engine that was observed only after it had cached blocks",
    ),
)
def not_in_cache(entry: Entry) -> Iterator[Witness]:
    """Each KV event of the engine's own tier says what happened in the prefix cache.

    Violated when a store, a removal or a clearing is announced and the journal of level ``blocks``, which is
    whole at that time, has no such change.
    """
    subject = entry.subject
    assert isinstance(subject, Unfounded)
    if subject.kind in (AGAIN, ORPHAN):
        return
    one = subject.total == 1
    yield Witness(
        None,
        subject.story,
        number=counted(subject.total, "change"),
        have="has" if one else "have",
        it="it" if one else "them",
        what={STORED: "stored blocks", REMOVED: "removed blocks", CLEARED: "all blocks cleared"}[
            subject.kind
        ],
        batch=subject.examples[0].sequence,
    )


@invariant(
    "events/parent-not-announced",
    on=(Unfounded,),
    message="{stores} announced by KV events {come} after a parent that the stream does not have.",
    references=(VLLM_58119,),
    near_misses=(
        "a parent that was announced in the same KV event or batch",
        "a parent of which one of two announced copies was removed",
        "groups with a window or with states, whose blocks below are not cached",
        "a stream of which batches were lost, up to the next reset of the cache",
    ),
)
def parent_not_announced(entry: Entry) -> Iterator[Witness]:
    """In a group of full attention, the parent of a stored block was announced before and not removed since.

    Violated when a KV event stores a block after a parent that the stream never announced, or announced as
    removed. An index that is kept as a tree, or that makes its own hashes of a prefix's tokens, can't place
    the block: requests that would hit it are sent elsewhere.
    """
    subject = entry.subject
    assert isinstance(subject, Unfounded)
    if subject.kind == ORPHAN:
        stores, batch = counted(subject.total, "store"), subject.examples[0].sequence
        come = "comes" if subject.total == 1 else "come"
        yield Witness(None, subject.story, stores=stores, come=come, number=subject.total, batch=batch)


@invariant(
    "events/stored-but-cached",
    on=(Unfounded,),
    severity="drift",
    message="KV events announced blocks as stored that were cached already, {stores} at first.",
    references=(VLLM_45261,),
    once=True,
    near_misses=("a second block with the same hash", "a hash that was removed and is stored again"),
)
def stored_but_cached(entry: Entry) -> Iterator[Witness]:
    """A KV event says that a block was stored when it enters the cache.

    A request whose client asks for ``kv_cache_report_mode: full`` has each block that it hits announced once
    more. A router that counts stores and removals then promises blocks after they are gone; one that drops a
    hash at its first removal does not. No index can be right for these stores and for copies at once.
    """
    subject = entry.subject
    assert isinstance(subject, Unfounded)
    if subject.kind == AGAIN:
        yield Witness(None, subject.story, stores=counted(subject.total, "store"), number=subject.total)


@invariant(
    "events/removed-but-cached",
    on=(CopyRemoved,),
    severity="drift",
    message="A KV event said that the hash of block {block} was removed, which another block still has.",
    references=(VLLM_55092, VLLM_48933),
    once=True,
    near_misses=(
        "the removal of the last block with a hash",
        "two blocks with a hash that one reset drops",
    ),
)
def removed_but_cached(entry: Entry) -> Iterator[Witness]:
    """A KV event says that a hash was removed when no block with it is cached any more.

    vLLM announces each block that it evicts. KV events name no block, and several blocks may have one hash:
    requests that compute the same tokens at the same time each cache their own. A router that drops a hash at
    the first removal then lacks what the engine still has; one that counts stores and removals does not.
    """
    subject = entry.subject
    assert isinstance(subject, CopyRemoved)
    yield Witness(None, subject.story, block=subject.change.block)


@invariant(
    "events/tier-missing",
    on=(TierMissing,),
    message="{events} stores and removals do not name their tier, and the stream has blocks of {tiers}.",
    near_misses=("a stream of a release that never names tiers, of an engine with one tier",),
)
def tier_missing(entry: Entry) -> Iterator[Witness]:
    """KV events of an engine with several tiers name the tier of their blocks.

    Violated when some events of the stream name a tier other than the engine's own blocks, and others name
    none: a reader takes a block in a slower tier for one in the cache, or the reverse.
    """
    subject = entry.subject
    assert isinstance(subject, TierMissing)
    yield Witness(None, subject.story, events=subject.by_tier[""], tiers=", ".join(subject.tiers))
