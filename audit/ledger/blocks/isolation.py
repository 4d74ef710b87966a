"""Isolation classes of cached blocks and of the requests that hit them.

The hash of a cached block covers every position below its end. So a request may hit the block only if it has
the writer's cache salt and LoRA adapter, and the same multimodal inputs before that end. Later inputs may
differ.
"""

from __future__ import annotations

from ... import events as ev
from ...bounded_tables import keep_newest
from ..entries import ForeignHit, ForeignLoad
from .holdings import Following, Holdings
from .pool import Holder

FIXED = 2
"""The class of the cache salt and the class of the LoRA adapter; a pair for each multimodal input follows."""

SALT, ADAPTER, INPUT = "cache salt", "LoRA adapter", "multimodal input"
"""What the KV of two requests may differ in."""


def isolation_below(isolation: list[int] | None, end: int) -> list[int] | None:
    """The isolation classes that KV below position ``end`` depends on; None: not known."""
    if isolation is None or len(isolation) <= FIXED or isolation[-1] < end:
        return isolation
    below = isolation[:FIXED]
    for place in range(FIXED, len(isolation), 2):
        if isolation[place + 1] < end:
            below += isolation[place : place + 2]
    return below if any(below) else []


def difference(left: list[int], right: list[int]) -> list[str]:
    """What two lists of isolation classes differ in."""
    left, right = left or [0, 0], right or [0, 0]
    pairs = (SALT, left[0], right[0]), (ADAPTER, left[1], right[1]), (INPUT, left[FIXED:], right[FIXED:])
    return [name for name, one, other in pairs if one != other]


def report_other_classes(holdings: Holdings, number: int, holder: Holder, blocks: list[int]) -> None:
    """Report the hits of a request on blocks that were written under other isolation classes."""
    own, pool = holdings.isolation.get(holder.request), holdings.pools[number]
    foreign = []
    for block in blocks:
        record = pool.records.get(block)
        if own is None or record is None or record.isolation is None or record.isolation == own:
            continue
        if record.isolation != isolation_below(own, record.least_end):
            foreign.append(block)
    if own is None or not foreign:
        return
    first = pool.records[foreign[0]]
    assert first.isolation is not None
    differs = difference(first.isolation, isolation_below(own, first.least_end) or [])
    story = holdings.story(number, foreign[0], second=holder)
    tokens = len(foreign) * pool.groups[holder.group][0]
    holdings.report(ForeignHit(number, foreign, tokens, first.writer, holder, differs, story), holder.request)


# --- store ---------------------------------------------------------------------------------------------
#
# The connector's store: who saved KV under which key, and who is promised KV under that key.
#
# A key that requests of several isolation classes have saved proves nothing about the KV that is there now.
# So a promise is foreign only if no request of its own classes is known to have saved the key.


KEYS_KEPT = 1 << 16
"""How many keys of the store are remembered, the last ones."""

CLASSES_KEPT = 4
"""How many requests of different classes are remembered for a key, the last ones."""


def _saved(holdings: Holdings, event: ev.SavePlanned) -> None:
    """Note under which classes the chunks of a request were saved."""
    request = event.request
    own, account = holdings.isolation.get(request), holdings.account(request)
    if own is None or account is None or request not in holdings.store_keys:
        return
    size, keys = holdings.store_keys[request]
    for place, key in enumerate(keys[: max(0, event.end) // size]):
        end = (place + 1) * size
        classes = isolation_below(own, end)
        if end <= event.start or classes is None:
            continue
        saved = holdings.saved_keys.setdefault(key, [])
        if all(classes != known for known, _ in saved):
            saved.append((classes, account.request_id))
            del saved[:-CLASSES_KEPT]
            keep_newest(holdings.saved_keys, KEYS_KEPT)


def _promised(holdings: Holdings, event: ev.Admitted) -> None:
    """Report promised tokens whose chunks were saved under other classes only."""
    request, start = event.request, event.local_tokens
    stop, own = start + event.external_tokens, holdings.isolation.get(request)
    if own is None or request not in holdings.store_keys or start >= stop:
        return
    size, keys = holdings.store_keys[request]
    tokens, first, writer, differs = 0, -1, "", [""]
    for place, key in enumerate(keys[start // size : -(-stop // size)], start // size):
        end = (place + 1) * size
        classes, saved = isolation_below(own, end) or [], holdings.saved_keys.get(key, [])
        if not saved or any(classes == known for known, _ in saved):
            continue
        if first < 0:
            first, (known, writer) = max(start, end - size), saved[-1]
            differs = difference(known, classes)
        tokens += min(end, stop) - max(start, end - size)
    if first >= 0:
        holdings.report(ForeignLoad(tokens, first, writer, differs), request)


FOLLOWING: Following = {ev.SavePlanned: _saved, ev.Admitted: _promised}
