"""Blocks that were computed more than once: are the computations about equal?

A worker takes a sketch of each block that a step computed: random projections of the keys and of the values
of each layer. The ledger of blocks knows the block's hash. Two computations under one hash differ by rounding
only, so their sketches are near each other. A large distance means that one of the two is wrong; which one
is not known. The sketches of a block that is computed again before it is allocated again replace each other.

When the prefix cache is reset, the weights may have changed, so nothing is compared across a reset.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import events as ev
from .content_postings import allocation, record_of
from .entries import ContentRecomputed, Entry
from .ledger_state import LedgerState
from .sketch_state import Computation
from .unchanged_steps import open_accounts

THRESHOLD = 0.15
"""The largest distance of two computations that rounding explains (docs/content.md has the measurement)."""

APART = 2.0
"""The largest distance there is, and that of numbers that are not finite."""


class _Pair(NamedTuple):
    """Two computations of one block."""

    before: Computation
    now: Computation
    number: int
    """The pool."""
    worker: int
    group: int
    distances: list[float]


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """How far two sketches of a part are from each other, as a share of the larger one."""
    if not all(map(math.isfinite, (*first, *second))):
        return APART
    size = max(math.hypot(*first), math.hypot(*second))
    return math.dist(first, second) / size if size else 0.0


def distances(first: str, second: str, projections: int) -> list[float]:
    """The distance of each part of a block: the keys and the values of each layer in turn."""
    if first == second:
        return [0.0] * (len(first) // (8 * projections))
    if len(first) != len(second):
        return [APART] * (len(second) // (8 * projections))
    return [
        distance(a, b) for a, b in zip(_parts(first, projections), _parts(second, projections), strict=True)
    ]


def _parts(sketch: str, projections: int) -> Iterator[tuple[float, ...]]:
    return struct.iter_unpack(f"<{projections}f", bytes.fromhex(sketch))


def _sketched(state: LedgerState, event: ev.BlocksSketched) -> None:
    """Compare computed blocks. Those without a hash wait for it."""
    sketches = state.sketches
    sketches.use_key(event.key_name, event.projections)
    size = len(event.sketches) // max(1, len(event.blocks))
    pairs: list[_Pair] = []
    for index, block in enumerate(event.blocks):
        sketch = event.sketches[index * size : (index + 1) * size].hex()
        record, number = record_of(state, event.group, block)
        allocated = None if record is None else allocation(record, event.step)
        if record is None or allocated is None or record.allocations[-2] > event.step:
            continue
        if record.hash_ids:
            now = Computation(event.step, block, allocated[0], record.writer, sketch)
            key = record.hash_ids[-1], event.worker, event.group
            pairs += _compare(state, key, number, now)
        else:
            sketches.wait((number, block), (event.worker, event.group, allocated[0], event.step, sketch))
            state.blocks.hash_awaited.add((number, block))
    _enter(state, pairs)


def compare_hashed(state: LedgerState) -> None:
    """Compare the computed blocks that have got their hash."""
    sketches = state.sketches
    pairs: list[_Pair] = []
    for number, block, hash_id, allocated, writer in state.blocks.hash_arrived:
        for worker, group, then, step, sketch in sketches.waiting.pop((number, block), ()):
            if then == allocated:
                now = Computation(step, block, allocated, writer, sketch)
                pairs += _compare(state, (hash_id, worker, group), number, now)
    state.blocks.hash_arrived.clear()
    _enter(state, pairs)


def _compare(state: LedgerState, key: tuple[int, int, int], number: int, now: Computation) -> Iterator[_Pair]:
    """Keep a computation. Yield it with the one before if they are too far apart."""
    sketches, sums = state.sketches, state.sums.recomputed
    kept = sketches.kept.get(key)
    sketches.keep(key, now)
    if kept is None:
        return
    before = Computation(*kept)
    if (before.block, before.allocated) == (now.block, now.allocated):
        return
    apart = distances(before.sketch, now.sketch, sketches.projections)
    sums.compared += 1
    if max(apart) <= THRESHOLD:
        sums.largest = max(sums.largest, *apart)
    else:
        sums.differed += 1
        yield _Pair(before, now, number, *key[1:], apart)


def _enter(state: LedgerState, pairs: Sequence[_Pair]) -> None:
    """Enter findings. The blocks of one request are one subject, told by the block that differs most."""
    alike: dict[object, list[_Pair]] = {}
    for pair in pairs:
        alike.setdefault((pair.worker, pair.now.writer, pair.before.writer), []).append(pair)
    for group in alike.values():
        worst = max(group, key=lambda pair: max(pair.distances))
        subject = _subject(state, worst, [pair.now.block for pair in group if pair is not worst])
        accounts = open_accounts(state).values()
        account = next((each for each in accounts if each.request_id == subject.writer), None)
        state.entries.append(Entry(state.number, subject.step, state.at, subject, account))


def _subject(state: LedgerState, worst: _Pair, other_blocks: list[int]) -> ContentRecomputed:
    now, before, apart = worst.now, worst.before, worst.distances
    part = max(range(len(apart)), key=apart.__getitem__)
    story = [
        *state.blocks.story(worst.number, now.block),
        f"  computed before in step {before.step}: block {before.block}, "
        f"filled by request {before.writer or 'not known'}",
    ]
    return ContentRecomputed(
        worst.worker,
        worst.group,
        worst.number,
        [now.block, *other_blocks],
        now.step,
        now.writer,
        before.block,
        before.step,
        before.writer,
        apart[part],
        part // 2,
        ("keys", "values")[part % 2],
        tuple(sorted({index // 2 for index, each in enumerate(apart) if each > THRESHOLD})),
        len(apart) // 2,
        story,
    )


RECOMPUTED: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {ev.BlocksSketched: _sketched}
"""Postings by event."""
