"""Prefixes by what the cache saved and lost: small histories of block events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvledger.audit import events as ev
from kvledger.audit import pool_calls
from kvledger.audit.analysis.prefixes import Prefix
from kvledger.audit.replay.block_traces import RecordedBlocks, block_prefixes

SIZE = 16
SECOND = 1_000_000
STARTED = ev.EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "blocks", 4000, {})
BEGAN = STARTED.began_seconds


class Recording:
    """Block events of requests that run one after the other, a second each."""

    def __init__(self, blocks: int = 9) -> None:
        self.events: list[ev.Event] = [ev.PoolSeen(0, 0, 0, blocks, 0, blocks - 1, 0, [0, SIZE, 2])]
        self.requests = 0

    def request(self, hit: Sequence[int], computed: Sequence[tuple[int, int]]) -> None:
        """A request hits these blocks, and computes hash ids into other blocks."""
        number, at = self.requests, self.requests * SECOND
        self.requests += 1
        whole = len(hit) + len(computed)
        self.events.append(ev.RequestAdded(at, number, f"r{number}", whole * SIZE + 1))
        if hit:
            touched = pool_calls.BlocksTouched(at, 1, 0, number, 0, "touch", list(hit), [1] * len(hit))
            self.events.append(touched)
        ids = [block for block, _ in computed]
        rows = [number, 0, len(ids), *ids]
        self.events.append(pool_calls.BlocksAllocated(at + 1, 1, 0, "allocate", rows))
        cached = [number, 0, -1, len(ids)]
        for place, (block, hash_id) in enumerate(computed):
            cached += [block, hash_id, (len(hit) + place + 1) * SIZE]
        self.events.append(ev.BlocksCached(at + 1, 1, 0, cached))
        self.events.append(ev.Admitted(at, number, 1, False, len(hit) * SIZE, 0, False, len(hit) * SIZE))
        freed = [*hit, *ids]
        self.events.append(
            pool_calls.BlocksFreed(at + 2, 1, 0, number, 0, "free", freed[::-1], [0] * len(freed))
        )

    def prefixes(self) -> dict[str, Prefix]:
        recorded = RecordedBlocks(Path("engine"))
        recorded.feed([STARTED, *self.events])
        return {prefix.label: prefix for prefix in block_prefixes(recorded)[0]}


def label(hash_id: int) -> str:
    return f"{hash_id:016x}"[:8]


A, B, C, D = (number << 40 for number in (1, 2, 3, 4))


def test_prefixes_part_where_requests_part() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B), (3, C)])
    recording.request([1, 2], [(4, D)])
    found = recording.prefixes()

    assert {label(B), label(C), label(D)} == set(found)
    shared = found[label(B)]
    assert (0, 32, 2, 32, 0, "") == (
        shared.start,
        shared.end,
        shared.requests,
        shared.saved_tokens,
        shared.lost_tokens,
        shared.parent,
    )
    assert (32, 48, label(B), 0) == (
        found[label(D)].start,
        found[label(D)].end,
        found[label(D)].parent,
        found[label(D)].saved_tokens,
    )


def test_evicted_content_that_is_computed_again_is_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(2, C)])
    recording.request([1], [(3, B)])
    [prefix] = [each for each in recording.prefixes().values() if each.start == 0 and each.end == 32]

    assert (16, 16, 1) == (prefix.saved_tokens, prefix.lost_tokens, prefix.losses)
    [loss] = prefix.last_losses
    assert ("r1", "r2", 16) == (loss.evicted_for, loss.needed_by, loss.tokens)
    assert BEGAN + 1.0 <= loss.evicted_seconds < loss.needed_seconds == BEGAN + 2.0
    assert prefix.wait_seconds is not None and 0.9 < prefix.wait_seconds < 1.1


def test_evicted_content_that_nobody_needs_is_not_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(2, C)])
    recording.request([1], [(3, D)])
    assert 0 == sum(prefix.lost_tokens for prefix in recording.prefixes().values())


def test_content_computed_twice_without_an_eviction_is_not_lost() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    recording.request([], [(3, A), (4, B)])
    assert 0 == sum(prefix.lost_tokens for prefix in recording.prefixes().values())


def test_blocks_that_are_emitted_last_block_first_make_one_prefix() -> None:
    recording = Recording()
    recording.request([], [(1, A), (2, B)])
    cached = next(event for event in recording.events if isinstance(event, ev.BlocksCached))
    cached.rows[4:] = [2, B, 32, 1, A, 16]
    assert {label(B)} == set(recording.prefixes())
