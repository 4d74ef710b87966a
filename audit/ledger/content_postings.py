"""Postings of the contents of blocks.

Fingerprints that differ, blocks that were computed again, and transfers to a connector's store and back.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .. import events as ev
from .account import Account, Life
from .accounts import add_line, enter, open_accounts
from .blocks.pool import TABLE, Block, hash_text
from .entries import (
    ContentChanged,
    ContentRecomputed,
    ContentStored,
    ContentTransfer,
    Entry,
    StoredElsewhere,
    UnsealedHit,
)
from .ledger_state import Computation, CustodyState, ForeignLoad, LedgerState

# --- content postings ----------------------------------------------------------------------------------
#
# What workers found out about the contents of blocks, judged with the ledger of blocks.
#
# A worker compares a block with its seal and knows nothing of who holds it. A difference is a change only if
# the block was not allocated anew between seal and comparison: a connector may load other KV into it. A hit
# without a seal is a fault only if no load was to fill the block, or if the load failed.
#
# If the steps of a worker and of its scheduler do not match, nothing is judged.


class _Run(NamedTuple):
    """Consecutive blocks of one request's table that a worker looked at."""

    request_id: str
    group: int
    first: int
    blocks: list[tuple[int, int]]
    """Each block, with the step of its seal or its code."""


def runs(event: ev.HitsVerified) -> Iterator[_Run]:
    """The rows of an event, one run of blocks after the other."""
    rows, index = event.rows, 0
    while index + 4 <= len(rows):
        who, group, first, count = rows[index : index + 4]
        index += 4 + 2 * count
        pairs = rows[index - 2 * count : index]
        blocks = list(zip(pairs[::2], pairs[1::2], strict=True))
        yield _Run(event.request_ids[who], group, first, blocks)


def _watched(state: LedgerState, event: ev.ContentWatched) -> None:
    state.contents.watched(event)
    state.sums.watches += bool(event.groups)
    enter(state, event)


def _counted(state: LedgerState, event: ev.ContentCounted) -> None:
    sums = state.sums.contents
    for name in ("sealed", "scrubbed", "bytes", "microseconds"):
        sums[name] = sums.get(name, 0) + getattr(event, name)
    sums["compared"] = sums.get("compared", 0) + event.verified


def _hits(state: LedgerState, event: ev.HitsVerified) -> None:
    accounts = {account.request_id: account for account in open_accounts(state).values()}
    differed = {event.differed[i]: event.differed[i + 1] for i in range(0, len(event.differed), 2)}
    for run in runs(event):
        account = accounts.get(run.request_id)
        life = None if account is None else _life_in(account, event.step)
        if account is None or life is None:
            state.sums.count_content("unmatched", len(run.blocks))
            continue
        _judge_run(state, event, run, account, life, differed)


def _life_in(account: Account, step: int) -> Life | None:
    """The life in which a request begins to run in a worker's step, or gets a session's next chunk."""
    for life in reversed(account.lives):
        if life.began_step <= step:
            return life if life.began_step == step or life.asynchronous or account.resumable else None
    return None


def _judge_run(
    state: LedgerState,
    event: ev.HitsVerified,
    run: _Run,
    account: Account,
    life: Life,
    differed: dict[int, int],
) -> None:
    contents, found = state.contents, _Found({}, [], [])
    for index, (block, code) in enumerate(run.blocks, run.first):
        record, number = record_of(state, run.group, block)
        if record is None:
            continue
        allocated = allocation(record, event.step)
        if allocated is None:
            state.sums.count_content("unseen")
        elif allocated[1] == account.request and allocated[0] >= life.began_step:
            in_part = contents.filled_in_part(block, code, allocated)
            state.sums.count_content("unsealed" if in_part else "arrived")
            if in_part:  # the engine counts the rest as computed
                found.unsealed.append((number, block, *allocated))
        elif code > 0 and allocated[0] <= code:
            changed = block in differed or contents.changed.get(block, -1) >= allocated[0]
            state.sums.count_content("differed" if changed else "verified")
            if changed:
                contents.changed[block] = event.step
                found.changed.setdefault(number, []).append((block, code, differed.get(block, code)))
            else:
                found.intact.append(index)
        elif code in (ev.UNSEEN, ev.UNSAMPLED, ev.SAME_STEP):
            state.sums.count_content(_NOT_VERIFIED[code])
        elif code == ev.MISMATCHED and contents.changed.get(block, -1) >= allocated[0]:
            state.sums.count_content("differed")
            found.changed.setdefault(number, []).append((block, contents.changed[block], 0))
        elif contents.loads_into(state.blocks, block, allocated):
            state.sums.count_content("loaded")
        else:
            state.sums.count_content("unsealed")
            found.unsealed.append((number, block, *allocated))
    _enter_found(state, event, run, account, found)


class _Found(NamedTuple):
    """What one run of hit blocks showed."""

    changed: dict[int, list[tuple[int, int, int]]]
    """By pool: block, step of its seal, and the last step at which it was intact."""
    intact: list[int]
    """Table indices of the blocks that held the bytes that were sealed."""
    unsealed: list[tuple[int, int, int, int]]
    """Pool, block, and step and request of its allocation."""


_NOT_VERIFIED = {ev.UNSEEN: "unseen", ev.UNSAMPLED: "unsampled", ev.SAME_STEP: "same_step"}
"""What to count for a code of a hit block."""


def _enter_found(
    state: LedgerState, event: ev.HitsVerified, run: _Run, account: Account, found: _Found
) -> None:
    size = state.contents.block_tokens.get(run.group, 0)
    if found.intact:
        state.sums.count_content("tokens", len(found.intact) * size)
        for start, end in _ranges(found.intact):
            add_line(state, account, f"verified: positions {start * size} to {end * size} hold the sealed KV")
    for number, rows in found.changed.items():
        block, sealed, intact = rows[0]
        story = _story(state, number, block, sealed, intact, event.step, f"read by request {run.request_id}")
        writer = state.blocks.pools[number].records[block].writer
        blocks = [each for each, _, _ in rows]
        place = event.worker, run.group, number, blocks, len(blocks) * size
        subject = ContentChanged(*place, sealed, intact, event.step, run.request_id, writer, story)
        state.entries.append(Entry(state.number, event.step, state.at, subject, account))
    if found.unsealed:
        number, block, step, request = found.unsealed[0]
        holder = state.blocks.holder("table", request, run.group)
        blocks = [each for _, each, _, _ in found.unsealed]
        unsealed = UnsealedHit(
            event.worker,
            run.group,
            number,
            blocks,
            len(blocks) * size,
            step,
            _name(state, number, block, holder.request_id),
            event.step,
            state.blocks.story(number, block),
        )
        state.entries.append(Entry(state.number, event.step, state.at, unsealed, account))


def _name(state: LedgerState, number: int, block: int, known: str) -> str:
    """The request for which a block was allocated, which may have ended."""
    operations = state.blocks.pools[number].records[block].operations
    named = [done.request_id for done in operations if done.what.startswith("allocated")]
    return named[-1] if named and named[-1] else known


def _scrubbed(state: LedgerState, event: ev.ScrubDiffered) -> None:
    contents = state.contents
    for index in range(0, len(event.rows), 4):
        group, block, sealed, intact = event.rows[index : index + 4]
        record, number = record_of(state, group, block)
        allocated = None if record is None else allocation(record, event.step)
        if record is None or allocated is None or allocated[0] > sealed:
            continue
        state.sums.count_content("scrub_differed")
        contents.changed[block] = event.step
        story = _story(state, number, block, sealed, intact, event.step, "read by a scrub")
        place = event.worker, group, number, [block], contents.block_tokens.get(group, 0)
        subject = ContentChanged(*place, sealed, intact, event.step, "", record.writer, story)
        state.entries.append(Entry(state.number, event.step, state.at, subject, None))


def _story(
    state: LedgerState, number: int, block: int, sealed: int, intact: int, step: int, how: str
) -> list[str]:
    known = f", and was still the same at step {intact}" if intact > sealed else ""
    return [
        *state.blocks.story(number, block),
        f"  its bytes: sealed after step {sealed}{known}; other bytes in step {step}, {how}",
    ]


def record_of(state: LedgerState, group: int, block: int) -> tuple[Block | None, int]:
    """The record of a block of a group, and the number of its pool."""
    for number, pool in state.blocks.pools.items():
        if group in pool.groups:
            return (None if block == pool.null_block else pool.records.get(block)), number
    return None, -1


def allocation(record: Block, step: int) -> tuple[int, int] | None:
    """Step and request of a block's last allocation up to ``step``; None if it is not known."""
    rows = record.allocations
    known = [(rows[i], rows[i + 1]) for i in range(0, len(rows), 2) if rows[i] <= step]
    return known[-1] if known else None


def _ranges(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive indices as ranges."""
    start = indices[0]
    for before, after in zip(indices, [*indices[1:], -1], strict=True):
        if after != before + 1:
            yield start, before + 1
            start = after


CONTENTS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.ContentWatched: _watched,
    ev.ContentCounted: _counted,
    ev.HitsVerified: _hits,
    ev.ScrubDiffered: _scrubbed,
}
"""Postings by event."""


# --- recomputed ----------------------------------------------------------------------------------------
#
# Blocks that were computed more than once: are the computations about equal?
#
# A worker takes a sketch of each block that a step computed: random projections of the keys and of the
# values of each layer. The ledger of blocks knows the block's hash. Two computations under one hash differ
# by rounding only, so their sketches are near each other. A large distance means that one of the two is
# wrong; which one is not known. The sketches of a block that is computed again before it is allocated again
# replace each other.
#
# When the prefix cache is reset, the weights may have changed, so nothing is compared across a reset.


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
        distance(a, b)
        for a, b in zip(
            _parts_of_sketch(first, projections), _parts_of_sketch(second, projections), strict=True
        )
    ]


def _parts_of_sketch(sketch: str, projections: int) -> Iterator[tuple[float, ...]]:
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
    _enter_pairs(state, pairs)


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
    _enter_pairs(state, pairs)


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


def _enter_pairs(state: LedgerState, pairs: Sequence[_Pair]) -> None:
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


# --- transfer fingerprints -----------------------------------------------------------------------------
#
# Transfers of blocks between the engine and a connector's store, compared by block hash.
#
# A worker gives the fingerprints of a block's parts (keys and values of each layer) when the block was
# handed to the store, and when a load of it has arrived. The ledger of blocks knows the block's hash in that
# step. What arrives must be equal to something that was handed over under the same hash. Several
# computations of one prefix differ in bits, so all versions are kept.
#
# Nothing is concluded where the hash is not known, where no store of that hash was seen, or where another
# engine may have written to the store. Two cases need no such knowledge of the store: exchanged keys and
# values, and blocks of zeros.


DIGITS = 16
"""Hexadecimal digits of one fingerprint. A layer has two: of its keys and of its values."""


def _moved(state: LedgerState, event: ev.BlocksMoved) -> None:
    custody = state.custody
    custody.use_key(event.key_name)
    custody.fleet_store = event.fleet_store
    if not event.blocks:
        return
    size = len(event.prints) // len(event.blocks)
    judged: list[ContentTransfer] = []
    for index, block in enumerate(event.blocks):
        prints = event.prints[index * size : (index + 1) * size].hex()
        record, number = record_of(state, event.group, block)
        allocated = None if record is None else allocation(record, event.step)
        if record is None or allocated is None or record.allocations[-2] > event.step:
            state.sums.count_transfer("unmatched")
        elif not record.hash_ids:
            waiting = custody.waiting.setdefault((number, block, event.worker), [])
            waiting.append((allocated[0], event.group, event.step, event.out, event.own_store, prints))
        elif event.out:
            state.sums.count_transfer("stored")
            stored = prints, event.step, block, record.writer
            custody.keep((record.hash_ids[-1], event.worker, event.group), stored)
        else:
            found = _judge(state, event, number, block, record.hash_ids[-1], prints)
            judged += [] if found is None else [found]
    _enter_transfers(state, judged)
    if event.differed:
        _enter_differed(state, event)


def _enter_transfers(state: LedgerState, judged: Sequence[ContentTransfer]) -> None:
    """Enter findings; blocks that differ in the same way are one subject."""
    alike: dict[object, list[ContentTransfer]] = {}
    for found in judged:
        alike.setdefault((found.how, found.layers, found.part, found.reader), []).append(found)
    for group in alike.values():
        blocks = [block for found in group for block in found.blocks]
        first = group[0]
        source = _stored_elsewhere(state.custody, first) if first.how == "other" else None
        tokens = len(blocks) * state.contents.block_tokens.get(first.group, 0)
        subject = first._replace(blocks=blocks, arrived=source, tokens=tokens)
        accounts = open_accounts(state).values()
        account = next((each for each in accounts if each.request_id == subject.reader), None)
        state.entries.append(Entry(state.number, subject.step, state.at, subject, account))


def _enter_differed(state: LedgerState, event: ev.BlocksMoved) -> None:
    blocks, sealed = event.differed[::2], event.differed[1::2]
    for block, step in zip(blocks, sealed, strict=True):
        record, number = record_of(state, event.group, block)
        allocated = None if record is None else allocation(record, event.step)
        if record is None or allocated is None or allocated[0] > step:
            continue  # the block was allocated again after its seal
        state.sums.count_transfer("store_differed")
        subject = ContentStored(
            event.worker,
            event.group,
            number,
            block,
            step,
            event.step,
            record.writer,
            state.blocks.story(number, block),
        )
        state.entries.append(Entry(state.number, event.step, state.at, subject, None))


def follow_waiting(state: LedgerState) -> None:
    """Judge the transfers of blocks that have got their hash since, and drop those of reallocated blocks."""
    custody = state.custody
    for key, rows in list(custody.waiting.items()):
        number, block, worker = key
        pool = state.blocks.pools.get(number)
        record = None if pool is None else pool.records.get(block)
        if pool is None or record is None or record.allocations[-2:-1] != [rows[-1][0]]:
            state.sums.count_transfer("unmatched", len(rows))
            del custody.waiting[key]
        elif record.hash_ids:
            del custody.waiting[key]
            for allocated, group, step, out, own, prints in rows:
                if allocated != record.allocations[-2]:
                    state.sums.count_transfer("unmatched")
                    continue
                where = state.at, step, worker, out, group, custody.key_name, own, [block]
                _moved(state, ev.BlocksMoved(*where, bytes.fromhex(prints), [], custody.fleet_store))


def _judge(
    state: LedgerState, event: ev.BlocksMoved, number: int, block: int, hash_id: int, prints: str
) -> ContentTransfer | None:
    """What is wrong with a block that a load has filled; None: nothing, or it can't be told."""
    custody = state.custody
    versions = custody.stored.get((hash_id, event.worker, event.group), [])
    if any(prints == version[0] for version in versions):
        state.sums.count_transfer("moved")
        return None
    how, layers, part = differences(prints, [version[0] for version in versions])
    if not how or not (event.own_store or how in ("exchanged", "zeros")):
        counted_as = "unknown" if not versions else "foreign"
        state.sums.count_transfer(counted_as)
        if event.fleet_store:
            place = hash_id, event.worker, event.group, number, block, event.step, state.at
            custody.keep_foreign(ForeignLoad(*place, _reader(state, number, block), prints, counted_as))
        return None
    state.sums.count_transfer("transfer_differed")
    sources = [
        f"  stored in step {step} under {hash_text(hash_id)}: block {source}, "
        f"filled by request {writer or 'not known'}"
        for _, step, source, writer in versions
    ]
    return ContentTransfer(
        event.worker,
        event.group,
        number,
        [block],
        event.step,
        how,
        layers,
        part,
        len(prints) // (2 * DIGITS),
        _reader(state, number, block),
        versions[-1][1],
        versions[-1][3],
        [*state.blocks.story(number, block), *sources],
        prints,
    )


def _reader(state: LedgerState, number: int, block: int) -> str:
    """The request that holds a block."""
    holders = state.blocks.pools[number].records[block].holders
    return next((holder.request_id for holder in holders.values() if holder.kind == TABLE), "")


def _stored_elsewhere(custody: CustodyState, found: ContentTransfer) -> StoredElsewhere | None:
    """The stored block with the fingerprints that arrived, in all parts that differ; of several, the last."""
    size = 2 * DIGITS
    sides = {"keys": (0, 1), "values": (1, 2), "both": (0, 2)}[found.part]
    places = [(layer * size + sides[0] * DIGITS, layer * size + sides[1] * DIGITS) for layer in found.layers]
    known = None
    for (hash_id, worker, group), versions in custody.stored.items():
        for prints, step, block, writer in versions if group == found.group else ():
            alike = all(prints[start:end] == found.prints[start:end] for start, end in places)
            if alike and (known is None or step >= known.step):
                known = StoredElsewhere(hash_id, worker, step, block, writer)
    return known


def differences(prints: str, versions: Sequence[str]) -> tuple[str, tuple[int, ...], str]:
    """How a loaded block differs from the nearest version that was stored: how, in which layers, which part.

    ``how`` is ``exchanged`` (keys and values), ``zeros``, ``other`` (bytes that were not stored under this
    hash), or "" where there is nothing to compare with.
    """
    rows = _parts_of_prints(prints)
    empty = tuple(layer for layer, row in enumerate(rows) if set("".join(row)) == {"0"})
    for version in versions:
        known = _parts_of_prints(version)
        exchanged = tuple(
            layer for layer, (row, other) in enumerate(zip(rows, known, strict=False)) if row != other
        )
        if exchanged and all(rows[layer] == known[layer][::-1] for layer in exchanged):
            return "exchanged", exchanged, "both"
    if not versions:
        return "", (), ""
    nearest = min((_differing(rows, _parts_of_prints(version)) for version in versions), key=len)
    layers = tuple(sorted({layer for layer, _ in nearest}))
    sides = {side for _, side in nearest}
    part = "both" if len(sides) == 2 else ("keys", "values")[min(sides)]
    return ("zeros" if layers and set(layers) <= set(empty) else "other"), layers, part


def _parts_of_prints(prints: str) -> list[tuple[str, str]]:
    """Fingerprints of the keys and the values of each layer."""
    size = 2 * DIGITS
    return [(prints[at : at + DIGITS], prints[at + DIGITS : at + size]) for at in range(0, len(prints), size)]


def _differing(rows: Sequence[tuple[str, str]], known: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    """Layer and side of the parts that differ."""
    if len(rows) != len(known):
        return [(layer, side) for layer in range(len(rows)) for side in (0, 1)]
    return [
        (layer, side)
        for layer, (row, other) in enumerate(zip(rows, known, strict=True))
        for side in (0, 1)
        if row[side] != other[side]
    ]


CUSTODY: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {ev.BlocksMoved: _moved}
"""Postings by event."""

__all__ = ["CUSTODY", "CustodyState", "differences", "follow_waiting"]
