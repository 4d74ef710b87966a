"""Cached blocks whose KV is not valid, and the requests that hit them.

A block is marked when the ledger reports it as :class:`CachedContent`, or when external tokens in it were not
loaded although the engine uses them. The mark stays until the hash leaves the cache, or until the request for
which the block is cached computes or loads the tokens after all. A hit is invalid if the block is still
marked when the step of the hit has been scheduled: a hit in the step that computes the tokens is valid.
"""

from __future__ import annotations

from ... import events as ev
from ...causes import NEVER_LOADED, NOT_PLANNED
from .entries import InvalidHit
from .holdings import Holdings
from .records import TABLE, Block, InvalidKV, Pool

USED_UNLOADED = (NOT_PLANNED, NEVER_LOADED)
"""Causes of lost external tokens that the engine does not know of, so that it uses the tokens."""

PENDING, FAILED = "pending", "failed"


def mark_invalid(holdings: Holdings, number: int, block: int, why: str, start: int) -> None:
    """Mark a cached block: its KV is not valid from position ``start`` up."""
    record = holdings.pools[number].records[block]
    record.invalid = InvalidKV(why, start)
    if why == FAILED:
        account = holdings.accounts.get(record.cached_for)
        if account is not None and account.life is not None:
            holdings.awaiting[number, block] = record.cached_for, account.life.number
        return
    for holder in record.holders:  # a failed load is different: the engine tells the holders itself
        if holder.kind == TABLE and holder.request != record.cached_for:
            holdings.unjudged_hits.append((holder.request, holder.group, number, block, 0))


def never_loaded(holdings: Holdings, request: int, start: int, end: int, cause: str) -> None:
    """Mark the cached blocks of a request in which external tokens [start, end) were not loaded."""
    if cause not in USED_UNLOADED:
        return
    holdings.never_loaded.setdefault(request, []).append((start, end, cause))
    for number, block in holdings.held.get(request, ()):
        record = _block(holdings, number, block)
        for holder in record.holders if record is not None else ():
            if holder.kind == TABLE and holder.request == request:
                mark_never_loaded(holdings, number, block, holder.group, request)


def mark_never_loaded(holdings: Holdings, number: int, block: int, group: int, request: int) -> None:
    """Mark a block of a request if it is cached and external tokens in it were not loaded."""
    record = holdings.pools[number].records[block]
    if record.cached_for != request or record.has_hash != 1:
        return
    begin = _begin(holdings.pools[number], group, record.end)
    for start, end, cause in holdings.never_loaded.get(request, ()):
        if max(begin, start) < min(record.end, end):
            mark_invalid(holdings, number, block, cause, max(begin, start))


def _begin(pool: Pool, group: int, end: int) -> int:
    """The first position of a block whose hash covers the positions below ``end``."""
    sizes = [size for size, _ in pool.groups.values()]
    size = pool.groups[group][0] if group in pool.groups else max(sizes, default=0)
    return (end - 1) // size * size if size > 0 else end


def _block(holdings: Holdings, number: int, block: int) -> Block | None:
    return holdings.pools[number].records.get(block) if number in holdings.pools else None


def _in_table(record: Block, request: int) -> bool:
    return any(holder.kind == TABLE and holder.request == request for holder in record.holders)


def after(holdings: Holdings, event: ev.Event) -> None:
    """Remove marks that no longer hold, and judge the hits of a step that has been scheduled."""
    if isinstance(event, ev.LoadFinished | ev.LoadFailed):
        _load_ended(holdings, event)
    elif isinstance(event, ev.Preempted | ev.Finished):
        holdings.never_loaded.pop(event.request, None)
    elif isinstance(event, ev.Stepped | ev.Repeated):
        _remove_computed(holdings)
        if isinstance(event, ev.Stepped):
            _judge(holdings, event.step)


def _load_ended(holdings: Holdings, event: ev.LoadFinished | ev.LoadFailed) -> None:
    """Remove the marks of tokens that a load has filled, or that the engine computes again."""
    request, valid = event.request, event.computed_tokens
    failed = isinstance(event, ev.LoadFailed)
    holdings.never_loaded.pop(request, None)
    for number, block in holdings.held.get(request, ()):
        record = _block(holdings, number, block)
        if record is None or record.invalid is None or record.cached_for != request:
            continue
        if record.invalid.why == PENDING or (record.end > valid if failed else record.end <= valid):
            record.invalid = None


def _remove_computed(holdings: Holdings) -> None:
    """Remove the marks of blocks that their request has computed after a failed load."""
    for (number, block), (request, life) in list(holdings.awaiting.items()):
        record, account = _block(holdings, number, block), holdings.accounts.get(request)
        lasts = account is not None and account.life is not None and account.life.number == life
        if record is None or account is None or record.cached_for != request or not lasts:
            del holdings.awaiting[number, block]
        elif account.computed >= record.end:
            record.invalid = None
            del holdings.awaiting[number, block]


Ranges = dict[tuple[int, int], tuple[int, int]]
"""Positions whose KV is not valid, by pool and block."""


def _judge(holdings: Holdings, posted: int) -> None:
    """Step ``posted`` has been posted: report its hits on marked blocks, and those of earlier steps.

    A pool's calls are emitted before the steps that were held back.
    """
    hits, holdings.unjudged_hits = dict.fromkeys(holdings.unjudged_hits), []
    by_request: dict[int, Ranges] = {}
    for hit in hits:
        request, group, number, block, step = hit
        if step > posted or (number, block) in holdings.failed:
            holdings.unjudged_hits.append(hit)
            continue
        account, record = holdings.accounts.get(request), _block(holdings, number, block)
        life = account.life if account is not None else None
        if record is None or record.invalid is None or life is None or life.began_step < step:
            continue
        start = max(record.invalid.start, _begin(holdings.pools[number], group, record.end))
        end = min(record.end, life.local)
        if start < end and _in_table(record, request):
            by_request.setdefault(request, {})[number, block] = start, end
    for request, ranges in by_request.items():
        _report(holdings, request, ranges)


def _report(holdings: Holdings, request: int, ranges: Ranges) -> None:
    (number, block), tokens, counted = next(iter(ranges)), 0, 0
    for start, end in sorted(ranges.values()):  # the groups of a hybrid model have the same positions
        tokens += max(0, end - max(start, counted))
        counted = max(counted, end)
    record = holdings.pools[number].records[block]
    assert record.invalid is not None
    blocks = [each for pool, each in ranges if pool == number]
    story = holdings.story(number, block)
    subject = InvalidHit(number, blocks, tokens, record.writer, record.invalid.why, story)
    holdings.report(subject, request)
    holdings.invalid_hits += [(request, start, end) for start, end in ranges.values()]
