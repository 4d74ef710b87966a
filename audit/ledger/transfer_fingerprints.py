"""Transfers of blocks between the engine and a connector's store, compared by block hash.

A worker gives the fingerprints of a block's parts (keys and values of each layer) when the block was handed
to the store, and when a load of it has arrived. The ledger of blocks knows the block's hash in that step.
What arrives must be equal to something that was handed over under the same hash. Several computations of one
prefix differ in bits, so all versions are kept.

Nothing is concluded where the hash is not known, where no store of that hash was seen, or where another
engine may have written to the store. Two cases need no such knowledge of the store: exchanged keys and
values, and blocks of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import events as ev
from .blocks.records import TABLE, hash_text
from .content_postings import allocation, record_of
from .entries import ContentStored, ContentTransfer, Entry, StoredElsewhere
from .ledger_state import LedgerState
from .transfer_fingerprint_state import CustodyState, ForeignLoad
from .unchanged_steps import open_accounts

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
    _enter(state, judged)
    if event.differed:
        _enter_differed(state, event)


def _enter(state: LedgerState, judged: Sequence[ContentTransfer]) -> None:
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
    rows = _parts(prints)
    empty = tuple(layer for layer, row in enumerate(rows) if set("".join(row)) == {"0"})
    for version in versions:
        known = _parts(version)
        exchanged = tuple(
            layer for layer, (row, other) in enumerate(zip(rows, known, strict=False)) if row != other
        )
        if exchanged and all(rows[layer] == known[layer][::-1] for layer in exchanged):
            return "exchanged", exchanged, "both"
    if not versions:
        return "", (), ""
    nearest = min((_differing(rows, _parts(version)) for version in versions), key=len)
    layers = tuple(sorted({layer for layer, _ in nearest}))
    sides = {side for _, side in nearest}
    part = "both" if len(sides) == 2 else ("keys", "values")[min(sides)]
    return ("zeros" if layers and set(layers) <= set(empty) else "other"), layers, part


def _parts(prints: str) -> list[tuple[str, str]]:
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
