"""What the slots of SGLang's token pool are used for, one slot a token.

Each slot is free, cached and used by nobody (evictable), cached and used (protected), held by a session
between its turns, or of a request and not in the cache. SGLang checks the sum while it is idle, and while it
works only if ``SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY`` is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

SEVERAL_POOLS = ("is_hybrid", "is_hybrid_swa", "is_hybrid_gdn", "is_hybrid_ssm", "enable_hisparse")
"""Attributes of a scheduler that are true where several pools have counts of their own."""


class Slots(NamedTuple):
    """The slots of a pool by use, and all of them, as a census has them."""

    free_slots: int
    evictable_slots: int
    protected_slots: int
    held_slots: int
    uncached_slots: int
    slots: int


def slots(scheduler: Any, requests: Iterable[Any], in_flight: Iterable[Any]) -> Slots | None:
    """What slots are used for; None if there is not one pool of tokens.

    ``requests`` may have slots; ``in_flight`` are those of steps whose outputs have not been taken.
    """
    if any(getattr(scheduler, name, False) for name in SEVERAL_POOLS):
        return None
    cache, allocator, page = (
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
        int(scheduler.page_size),
    )
    counts = allocator.available_size(), cache.evictable_size(), cache.protected_size()
    if any(isinstance(each, tuple) for each in counts):
        return None
    requests = {id(each): each for each in requests}.values()
    if all(hasattr(getattr(each, "kv", each), "kv_allocated_len") for each in requests):
        sessions = _session_records(cache)
        uncached = sum(_uncached(each, page, sessions) for each in requests)
    else:
        uncached = _uncached_in_batches(scheduler, in_flight)
    free, evictable, protected = map(int, counts)
    size = int(scheduler.max_total_num_tokens)
    borrowed = {getattr(each, "req_pool_idx", None) for each in requests} - {None}
    return Slots(free, evictable, protected, _held(scheduler, page, borrowed), uncached, size)


def _uncached(request: Any, page: int, sessions: frozenset[int]) -> int:
    """The slots that a request has beyond those of the cache, since 0.5.5."""
    record = getattr(request, "kv", request)  # since 0.5.23 an object of its own
    if id(record) in sessions or not getattr(record, "holds_kv", True):
        return 0
    if record is request and (request.req_pool_idx is None or request.kv_committed_freed):
        return 0
    protected = getattr(record, "cache_protected_len", None)  # since 0.5.6
    protected = len(request.prefix_indices) if protected is None else protected
    pages = -(-int(record.kv_allocated_len) // page)
    return int(pages * page - int(protected))


def _uncached_in_batches(scheduler: Any, in_flight: Iterable[Any]) -> int:
    """The same of all requests, until 0.5.4: only the batches know how many slots a request has.

    A request that has ended keeps the slot of the step that was launched before its end.
    """
    own = {}
    for batch in (scheduler.last_batch, scheduler.running_batch):
        for place, request in enumerate(getattr(batch, "reqs", None) or ()):
            if request.req_pool_idx is not None and not request.finished():
                own[id(request)] = int(batch.seq_lens_cpu[place]) - len(request.prefix_indices)
    return sum(own.values()) + sum(1 for request in in_flight if request.finished())


def _session_records(cache: Any) -> frozenset[int]:
    """Since 0.5.23: the records that sessions have, also while a request of theirs runs."""
    records = getattr(cache, "session_records", None)
    return frozenset() if records is None else frozenset(id(each) for each in records().values())


def _held(scheduler: Any, page: int, borrowed: set[Any]) -> int:
    """The slots that sessions hold. ``borrowed``: the rows of running requests, until 0.5.22."""
    observer = getattr(scheduler, "pool_stats_observer", None)  # since 0.5.13
    if observer is not None:
        return int(observer.session_held_tokens())
    cache = scheduler.tree_cache
    if not hasattr(cache, "session_held_tokens"):
        return 0
    held = int(cache.session_held_tokens())
    for slot in getattr(cache, "slots", {}).values():  # it counts what a running turn has, too
        if slot.req_pool_idx in borrowed:
            held -= -(-int(slot.kv_allocated_len) // page) * page - int(slot.cache_protected_len)
    return held
