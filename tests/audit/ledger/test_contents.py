"""What blocks contain, where readers of block events disagreed: a history for each case, and its reason.

The judge of blocks, the states of blocks, the block trace and the changes for KV events must say the same.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest

from kvledger.audit import events as ev
from kvledger.audit.analysis.block_states import BlockStates
from kvledger.audit.analysis.trace_reader import DROP, EVICT, RESET, TraceReader
from kvledger.audit.ledger.blocks.contents import Contents, is_named
from kvledger.audit.ledger.kv_events import REMOVED, STORED, CacheChanges
from kvledger.audit.ledger.ledger import Ledger

SIZE = 16
A, B, C = 101, 102, 103
"""Hash ids."""
UNKNOWN = 0
"""Stands for content whose hash id nobody knows."""


def seen(cached: int = 0) -> ev.Event:
    return ev.PoolSeen(0, 0, 0, 9, 0, 8, cached, [0, SIZE, 2])


def allocated(*blocks: int) -> ev.Event:
    return ev.BlocksAllocated(1, 1, 0, "allocate_slots", [0, 0, len(blocks), *blocks])


def cached(block: int, hash_id: int, end: int = SIZE, *, replaced: bool = False) -> ev.Event:
    return ev.BlocksCached(1, 1, 0, [0, 0, 2 * SIZE, 1, block, hash_id, end], replaced)


def hit(*blocks: int) -> ev.Event:
    return ev.BlocksTouched(2, 2, 0, 0, 0, "touch", list(blocks), [1] * len(blocks))


def freed(*blocks: int) -> ev.Event:
    return ev.BlocksFreed(1, 1, 0, 0, 0, "free", list(blocks), [0] * len(blocks))


def reported(*states: int) -> ev.Event:
    return ev.BlockStatesReported(0, 0, 0, 1, list(states), -1, -1)


FREE, FREE_CACHED, RUNNING_CACHED = 1, 7, 14


class Case(NamedTuple):
    history: list[ev.Event]
    held: dict[int, list[int]]
    """By block: the hash ids that it has in the end."""
    evicted: list[int]
    """What left the cache because its block was allocated, in order."""
    dropped: list[int] = []
    """What the engine took away."""
    why: str = ""


CASES = {
    "a block that is allocated": Case([allocated(1), cached(1, A), freed(1), allocated(1)], {}, [A]),
    "a hash replaced": Case(
        [allocated(1), cached(1, A, 8), cached(1, B, replaced=True)],
        {1: [B]},
        [],
        [A],
        "the engine gave the block another hash: nobody needed the block, so it is no eviction",
    ),
    "a second hash": Case(
        [allocated(1), cached(1, A, 8), cached(1, B), freed(1), allocated(1)],
        {},
        [A, B],
        why="a hit on either was possible, and no longer is",
    ),
    "the same hash again": Case(
        [allocated(1), cached(1, A), cached(1, A), freed(1), allocated(1)],
        {},
        [A],
        why="nothing was computed twice, so it is one copy",
    ),
    "the same hash, replaced": Case(
        [allocated(1), cached(1, A), cached(1, A, replaced=True)], {1: [A]}, [], why="nothing left"
    ),
    "one hash in two blocks": Case(
        [allocated(1, 2), cached(1, A), cached(2, A), freed(1), allocated(1)],
        {2: [A]},
        [A],
        why="the copy in block 1 was evicted; the content can still be hit",
    ),
    "hashes that move": Case(
        [
            allocated(1, 2),
            cached(1, A),
            ev.BlockCopied(1, 1, 0, 0, 0, "move_block_hashes", [1, 2], True),
            freed(1, 2),
            allocated(1),
        ],
        {2: [A]},
        [],
        why="the source was emptied before it was allocated, so that allocation evicted nothing",
    ),
    "content from before, evicted": Case(
        [seen(2), reported(FREE_CACHED, FREE), allocated(1)],
        {},
        [UNKNOWN],
        why="it could have been hit, and it was evicted for a request",
    ),
    "content from before, in use": Case(
        [seen(2), reported(RUNNING_CACHED), freed(1), allocated(1)],
        {},
        [UNKNOWN],
        why="a block that runs is cached as well, and stays so when it is freed",
    ),
    "content from before, whose hash is emitted later": Case(
        [seen(2), reported(RUNNING_CACHED), cached(1, A), freed(1), allocated(1)],
        {},
        [A],
        why="events of caching come some steps late: it is one content, and now it has a name",
    ),
    "a hit on content that was never reported": Case(
        [seen(2), hit(1), freed(1), allocated(1)], {}, [UNKNOWN], why="a hit proves that it was cached"
    ),
    "an engine that drops content": Case(
        [allocated(1), cached(1, A), ev.BlocksEvicted(1, 1, 0, -1, 0, "evict", [1]), freed(1), allocated(1)],
        {},
        [],
        [A],
    ),
    "a reset": Case(
        [allocated(1), cached(1, A), freed(1), ev.PoolReset(1, 1, 0, True), allocated(1)], {}, []
    ),
    "a reset that failed": Case([allocated(1), cached(1, A), ev.PoolReset(1, 1, 0, False)], {1: [A]}, []),
    "the null block": Case(
        [ev.BlocksTouched(1, 1, 0, 0, 0, "touch", [0], [5]), allocated(0, 1), cached(1, A)],
        {1: [A]},
        [],
        why="windows fill tables with it; it is never cached, hit or evicted",
    ),
    "a hook that failed": Case(
        [allocated(1), cached(1, A), ev.HookFailed(1, "touch", "KeyError", False), seen(1), allocated(1)],
        {},
        [],
        why="calls may be missing, so nobody knows what was in the block",
    ),
    "lost events": Case([allocated(1), cached(1, A), ev.Gap(1, 5, "full"), seen(1), allocated(1)], {}, []),
}


def names(ids: object) -> list[int]:
    assert isinstance(ids, list | tuple)
    return [hash_id if is_named(hash_id) else UNKNOWN for hash_id in ids]


@pytest.mark.parametrize("name", CASES)
def test_every_reader_says_what_blocks_contain(name: str) -> None:
    case = CASES[name]
    history = case.history if type(case.history[0]) is ev.PoolSeen else [seen(), *case.history]
    contents, states, reader, kv = Contents(), BlockStates(), TraceReader(), CacheChanges()
    ledger, evicted, dropped = Ledger(), list[int](), list[int]()
    for event in [
        ev.EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "blocks", 1, {}),
        ev.RequestAdded(0, 0, "r", 2 * SIZE),
        *history,
    ]:
        ledger.apply(event)
        changes = contents.read(event)
        states.feed(event, changes)
        reader.feed(event, changes)
        kv.feed(event, changes)

    held = {block: names(ids) for block, ids in contents.pools[0].hashes.items()}
    assert case.held == held, case.why
    judged = ledger.blocks.pools[0].records
    assert held == {block: record.hash_ids for block, record in judged.items() if record.hash_ids}
    assert held.keys() == {stay.block for stay in states.open_stays()}

    for kind, _, _, ids, _ in reader.changes:
        if kind == EVICT:
            evicted += names(ids)
        elif kind == DROP:
            dropped += names(ids)
    assert (case.evicted, case.dropped) == (evicted, dropped), case.why
    assert bool(case.evicted) == bool(states.use.evicted)

    copies = Counter[int]()
    for change in kv.changes:
        copies[change.hash_id] += {STORED: 1, REMOVED: -1}.get(change.kind, 0)
    lost = not kv.whole or any(kind == RESET for kind, *_ in reader.changes)
    assert lost or +copies == Counter(hash_id for ids in held.values() for hash_id in ids)


def test_all_readers_share_the_changes_of_an_event() -> None:
    contents, event = Contents(), cached(1, A)

    first = contents.read(event)

    assert first is contents.read(event) and [(A,)] == list(contents.pools[0].hashes.values())
