"""Under which weights blocks, and KV in the connector's store, were filled.

Called only after the weights have changed: everything is of version 0 before.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import events as ev
from ... import pool_calls
from ..weights import BEFORE, UNKNOWN, Made, extend, oldest_of_all, spans
from .holdings import HitBlock, Holdings
from .records import Block

NOT_KNOWN = UNKNOWN, UNKNOWN

HitWeights = tuple[int, int, int, int, str]
"""Start and end of positions that a request hit, version and oldest version of their KV, and who wrote it."""


def hit(holdings: Holdings, event: pool_calls.BlocksTouched, record: Block) -> None:
    """A request hit a cached block: note who filled the block.

    The life that fills it may be of the same step. Its admission is then posted after this.
    """
    rows = holdings.hit_blocks.setdefault(event.request, {}).setdefault((event.pool, event.group), [])
    filled, begin = record.filled, max(0, record.begin)
    request, life, made = UNKNOWN, 0, None
    if filled is not None and record.begin >= 0:
        request, life = filled.request, filled.life
        made = None if filled.lacks is None else filled.made or [BEFORE]
    rows.append((begin, max(begin + 1, record.room_end), record.writer, request, life, made))


def _filled(holdings: Holdings, row: HitBlock) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, version and oldest version of the positions of a block that was hit."""
    begin, end, _, request, number, made = row
    if made is None:
        account = holdings.accounts.get(request)
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


def saved(holdings: Holdings, event: ev.SavePlanned) -> None:
    """Note the weights of the KV that a request saves under each of its keys."""
    account = holdings.accounts.get(event.request)
    if event.request not in holdings.store_keys or account is None or account.life is None:
        return
    size, keys = holdings.store_keys[event.request]
    known = account.unknown is None
    for place, key in enumerate(keys[: max(0, event.end) // size]):
        start, end = place * size, (place + 1) * size
        if end <= event.start:
            continue
        rows = list(spans(account.life.made, start, end)) if known else []
        if rows:
            version, oldest = min(row[2] for row in rows), min(row[3] for row in rows)
            earlier = holdings.saved_weights.get(key, NOT_KNOWN)
            holdings.saved_weights[key] = max(version, earlier[0]), max(oldest, earlier[1])


def promised(holdings: Holdings, request: int, start: int, end: int) -> list[Made]:
    """Under which weights the positions [start, end) were computed that a connector promises.

    Several engines may have saved KV under one key: the newest that this engine has saved counts.
    """
    made: list[Made] = []
    if request not in holdings.store_keys:
        return [(start, *NOT_KNOWN)]
    size, keys = holdings.store_keys[request]
    for place in range(start // size, -(-end // size)):
        known = place < len(keys) and keys[place] in holdings.saved_keys
        version = holdings.saved_weights.get(keys[place], (0, 0)) if known else NOT_KNOWN
        extend(made, max(start, place * size), *version)
    return made
