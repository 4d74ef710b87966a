"""Under which weights blocks, and KV in the connector's store, were filled.

The store's KV is known by the hashes of its blocks: a request that saves a block saves it under the block's
hash, and what is promised to another request is found by the hashes that its own blocks get.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import events as ev
from ... import pool_calls
from ...bounded_tables import keep_newest
from ..weights import BEFORE, UNKNOWN, Made, extend, oldest_of_all, spans
from .holdings import HitBlock, Holdings
from .pool import Block

NOT_KNOWN = UNKNOWN, UNKNOWN

SAVED_KEPT = 1 << 16
"""Of how many hashes it is remembered under which weights their KV was saved, the last ones."""

HitWeights = tuple[int, int, int, int, str]
"""Start and end of positions that a request hit, version and oldest version of their KV, and who wrote it."""


def hit(holdings: Holdings, event: pool_calls.BlocksTouched, record: Block) -> None:
    """A request hit a cached block after the weights had changed: note who filled the block."""
    rows = holdings.hit_blocks.setdefault(event.request, {}).setdefault((event.pool, event.group), [])
    rows.append(_filled_by(record))


def _filled_by(record: Block) -> HitBlock:
    """Who filled a block. The life that fills it may be of the same step, and is then posted after this."""
    filled, begin = record.filled, max(0, record.begin)
    request, life, made = UNKNOWN, 0, None
    if filled is not None and record.begin >= 0:
        request, life = filled.request, filled.life
        made = filled.made if filled.lacks is None else filled.made or [BEFORE]
    return begin, max(begin + 1, record.room_end), record.writer, request, life, made


def _filled(holdings: Holdings, row: HitBlock) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, version and oldest version of the positions of a block."""
    begin, end, _, request, number, made = row
    if made is None:
        account = holdings.account(request)
        known = account is not None and account.unknown is None and 0 < number <= len(account.lives)
        made = (account.lives[number - 1].made or [BEFORE]) if account and known else [(0, *NOT_KNOWN)]
    yield from spans(made, begin, end)


def hits(holdings: Holdings, request: int, end: int) -> tuple[list[Made], list[HitWeights]] | None:
    """Under which weights the first ``end`` positions of a request were filled, which it has just hit.

    Also the rows of this by block. None: nothing is known of the blocks.
    """
    groups = holdings.hit_blocks.pop(request, None)
    if not groups:
        return None
    tables, known = [], []
    for rows in groups.values():
        made: list[Made] = []
        for row in sorted(rows, key=lambda row: row[0]):
            for start, stop, version, oldest in _filled(holdings, row):
                extend(made, start, version, oldest)
                known.append((start, stop, version, oldest, row[2]))
        tables.append(made)
    return oldest_of_all(tables, end), known


def _blocks(holdings: Holdings, request: int, start: int, end: int) -> Iterator[Block]:
    """The cached blocks in the tables of a request that lie in the positions [start, end)."""
    for number, block in holdings.held.get(request, ()):
        record = holdings.pools[number].records[block]
        if start < record.room_end and 0 <= record.begin < end and record.hash_ids:
            yield record


def saved(holdings: Holdings, event: ev.BlocksSaved) -> None:
    """Blocks are saved in the connector's store: note their weights, by hash. The newest count."""
    if len(holdings.pools) != 1:
        return
    ((_, pool),) = holdings.pools.items()
    saved = holdings.saved_weights
    for block in event.blocks:
        record = pool.records.get(block)
        rows = [] if record is None else list(_filled(holdings, _filled_by(record)))
        for hash_id in record.hash_ids if record is not None and rows else ():
            earlier = saved.get(hash_id, NOT_KNOWN)
            version, oldest = min(row[2] for row in rows), min(row[3] for row in rows)
            saved[hash_id] = max(version, earlier[0]), max(oldest, earlier[1])
            keep_newest(saved, SAVED_KEPT)


def loads(holdings: Holdings, request: int, start: int, end: int) -> list[Made]:
    """Under which weights the positions [start, end) were saved that a request loads."""
    made: list[Made] = [(start, *NOT_KNOWN)]
    known_to = start
    for record in sorted(_blocks(holdings, request, start, end), key=lambda each: each.begin):
        known = [holdings.saved_weights.get(hash_id, NOT_KNOWN) for hash_id in record.hash_ids]
        extend(made, max(start, record.begin), *max(known))
        known_to = max(known_to, record.end)
    if known_to < end:
        extend(made, known_to, *NOT_KNOWN)
    return made
