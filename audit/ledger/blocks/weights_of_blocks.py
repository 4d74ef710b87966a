"""Under which weights blocks, and KV in the connector's store, were filled.

Called only after the weights have changed: everything is of version 0 before.
"""

from __future__ import annotations

from ... import events as ev
from ... import pool_calls
from ..weights import UNKNOWN, Made, extend, oldest_of_all, spans
from .holdings import HitWeights, Holdings
from .records import Block

NOT_KNOWN = UNKNOWN, UNKNOWN


def hit(holdings: Holdings, event: pool_calls.BlocksTouched, record: Block) -> None:
    """A request hit a cached block: note the weights that the block was filled under."""
    rows = holdings.hit_weights.setdefault(event.request, {}).setdefault((event.pool, event.group), [])
    for start, end, version, oldest in _filled(holdings, record):
        rows.append((start, end, version, oldest, record.writer))


def _filled(holdings: Holdings, record: Block) -> list[tuple[int, int, int, int]]:
    """Start, end, version and oldest version of the positions of a block."""
    begin, end, filled = max(0, record.begin), record.room_end, record.filled
    if filled is None or record.begin < 0:
        return [(begin, max(end, begin + 1), *NOT_KNOWN)]
    made = filled.made or []
    if filled.lacks is None:
        account = holdings.accounts.get(filled.request)
        life = account.life if account is not None else None
        if account is None or account.unknown is not None or life is None or life.number != filled.life:
            return [(begin, end, *NOT_KNOWN)]
        made = life.made
    return list(spans(made, begin, end))


def hits(holdings: Holdings, request: int, end: int) -> tuple[list[Made], list[HitWeights]] | None:
    """Under which weights the first ``end`` positions of a request were filled, which it has just hit.

    Also the rows of this by block. None: nothing is known of the blocks.
    """
    groups = holdings.hit_weights.pop(request, None)
    if not groups:
        return None
    tables: list[list[Made]] = []
    for rows in groups.values():
        made: list[Made] = []
        for start, _, version, oldest, _ in sorted(rows):
            extend(made, start, version, oldest)
        tables.append(made)
    return oldest_of_all(tables, end), [row for rows in groups.values() for row in rows]


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
