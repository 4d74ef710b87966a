"""Histories of an engine's cache and of the KV events that announce it."""

from __future__ import annotations

from kvledger.audit.events import (
    BlocksCached,
    BlocksEvicted,
    Event,
    KVEventsReceived,
    PoolReset,
    PoolSeen,
    Stepped,
)
from kvledger.audit.ledger.kv_events import REMOVED, STORED

BEGAN = 1000.0
"""Unix time of the engine's start."""

POOL = PoolSeen(0, 0, 0, 64, 0, 63, 0, [0, 16, 2])


def at(step: int) -> int:
    """Steps take a second each."""
    return step * 1_000_000


def cached(step: int, block: int, hash_id: int) -> list[Event]:
    return [
        Stepped(at(step), step, [], []),
        BlocksCached(at(step), step, 0, [0, 0, 64, 1, block, hash_id, 16]),
    ]


def evicted(step: int, block: int) -> list[Event]:
    return [
        Stepped(at(step), step, [], []),
        BlocksEvicted(at(step), step, 0, -1, 0, "evict", [block]),
    ]


def reset(step: int) -> list[Event]:
    return [PoolReset(at(step), step, 0, True)]


def batch(
    sequence: int, step: float, *said: tuple[int, ...], tier: str = "GPU", spec: str = "full_attention"
) -> KVEventsReceived:
    """A batch published half a second after a step began; of each KV event kind, hash id and parent."""
    rows, details = [], []
    for kind, hash_id, *parent in said:
        ids = [hash_id] if hash_id else []
        rows += [kind, 0, 0 if tier else -1, 16, *(parent or [0]), len(ids), *ids]
        details += [0, 0, 0] if kind == STORED else []
    tiers = [tier] if tier else []
    return KVEventsReceived(0, 0, sequence, BEGAN + step + 0.5, 0, tiers, rows, details=details, kinds=[spec])


CACHE: list[list[Event]] = [
    cached(1, 5, 50),
    cached(20, 6, 60),
    evicted(40, 5),
    cached(60, 5, 70),
    cached(80, 7, 50),
    cached(100, 8, 80),
]
"""Content 50 is cached, evicted and cached again in another block."""

STREAM = [
    batch(0, 1, (STORED, 50)),
    batch(1, 20, (STORED, 60)),
    batch(2, 40, (REMOVED, 50)),
    batch(3, 60, (STORED, 70)),
    batch(4, 80, (STORED, 50)),
    batch(5, 100, (STORED, 80)),
]
END = 200


def without(*sequences: int) -> list[KVEventsReceived]:
    return [each for each in STREAM if each.sequence not in sequences]


def saying(sequence: int, *said: tuple[int, ...], **more: str) -> list[KVEventsReceived]:
    """The stream with other KV events in one batch."""
    step = STREAM[sequence].published_seconds - BEGAN - 0.5
    changed = batch(sequence, step, *said, **more)
    return [changed if each.sequence == sequence else each for each in STREAM]
