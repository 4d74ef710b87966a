"""An engine's stream of KV events, and how the events of one hash id pair with the changes of its cache.

KV events name no block, so two blocks with one hash are told apart by their number only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from .. import events as ev
from .cache_changes import CLEARED, STORED, Change

GPU = "GPU"
"""The tier of vLLM's own blocks."""

SLACK_SECONDS = 0.05
"""How far the clocks of one host may differ: a batch has wall time, the journal monotonic time."""


class KVEvent(NamedTuple):
    """One store or removal of one hash id in the stream, or a clearing of the cache (hash id 0)."""

    kind: int
    hash_id: int
    seconds: float
    """Unix time at which its batch was published."""
    sequence: int
    since: float = 0.0
    """Unix time at which the batch before was published."""


def kv_events(batch: ev.KVEventsReceived, since: float = 0.0) -> Iterator[tuple[KVEvent, str]]:
    """Every store, removal and clearing of a batch, with its tier ("": not given).

    ``since``: Unix time at which the batch before was published.
    """
    rows, place = batch.rows, 0
    while place < len(rows):
        kind, _, tier, _, _, count = rows[place : place + ev.KV_HEAD]
        place += ev.KV_HEAD + count
        name = batch.tiers[tier] if tier >= 0 else ""
        for hash_id in rows[place - count : place] if kind != CLEARED else (0,):
            yield KVEvent(kind, hash_id, batch.published_seconds, batch.sequence, since), name


def of_group(batch: ev.KVEventsReceived, group: int) -> ev.KVEventsReceived:
    """A batch without the stores and removals of other KV cache groups; those without a group stay."""
    rows, contents, place, known = list[int](), list[int](), 0, iter(batch.contents)
    while place < len(batch.rows):
        kind, of, *_, count = batch.rows[place : place + ev.KV_HEAD]
        row = batch.rows[place : place + ev.KV_HEAD + count]
        place += len(row)
        named = list(islice(known, count)) if kind == STORED else []
        if kind == CLEARED or of in (-1, group):
            rows += row
            contents += named
    return replace(batch, rows=rows, contents=contents)


def aligned(
    ours: Sequence[Change], theirs: Sequence[KVEvent], began: float
) -> Iterator[tuple[Change | None, KVEvent | None]]:
    """Pair the changes of one hash id with its KV events: the most pairs, and of these the nearest in time.

    What only one account has comes alone, in the order of time. ``began``: Unix time from which the changes
    count.
    """
    best = _best(ours, theirs, began)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        without_ours, without_theirs = best[i][j] == best[i + 1][j], best[i][j] == best[i][j + 1]
        if without_ours and not (without_theirs and theirs[j].seconds < began + ours[i].at / 1e6):
            yield ours[i], None
            i += 1
        elif without_theirs:
            yield None, theirs[j]
            j += 1
        else:
            yield ours[i], theirs[j]
            i, j = i + 1, j + 1
    yield from ((change, None) for change in ours[i:])
    yield from ((None, event) for event in theirs[j:])


def _best(ours: Sequence[Change], theirs: Sequence[KVEvent], began: float) -> list[list[tuple[int, float]]]:
    """For each two ends of both accounts: the most pairs, and less their distance in time."""
    best = [[(0, 0.0)] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i in range(len(ours) - 1, -1, -1):
        change = ours[i]
        earliest, latest = began + change.earliest / 1e6, began + change.at / 1e6
        for j in range(len(theirs) - 1, -1, -1):
            event = theirs[j]
            choice = max(best[i + 1][j], best[i][j + 1])
            if change.kind == event.kind and event.seconds >= earliest - SLACK_SECONDS:
                pairs, nearness = best[i + 1][j + 1]
                apart = abs(event.seconds - latest)
                choice = max(choice, (pairs + 1, nearness - apart))
            best[i][j] = choice
    return best
