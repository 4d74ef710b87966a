"""Checks of a vLLM scheduler's KV cache for its own tests; ``kvledger repro checks`` prints this file.

Paste it beside the tests. ``checked(method)`` is a method of a scheduler, one of METHODS, that raises
AssertionError if its call breaks an invariant: a block or request that was broken before the call is not
judged, nor is a Mock. ``assert_kv_invariants(scheduler)`` judges one instant. Nothing of vLLM is imported.
Each check begins with the id and words of an invariant of kvledger, and yields what breaks it, with words.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest.mock import NonCallableMock

METHODS = ("add_request", "schedule", "update_from_output", "finish_requests", "reset_prefix_cache")
QUEUES = ("waiting", "kv_holding_waiting", "skipped_waiting")
POSITIONAL = ("FullAttentionManager", "SlidingWindowManager", "ChunkedLocalAttentionManager")
JUDGED: set[int] = set()
"""The ids of the schedulers in a call that is judged; a call within it is judged with it."""
Found = Iterator[tuple[str, str]]


def _tables(scheduler: Any) -> Iterator[tuple[str, list[Any]]]:
    """Each request's table of blocks in each group, without empty tables."""
    manager = scheduler.kv_cache_manager
    for group in manager.coordinator.single_type_managers:
        if group.block_pool is manager.block_pool:
            yield from ((name, blocks) for name, blocks in group.req_to_blocks.items() if blocks)


def references(scheduler: Any) -> Found:
    """blocks/references: A block's reference count is the number of its holders."""
    tables = [*_tables(scheduler), *getattr(scheduler, "deferred_frees", ())]
    held = Counter(block.block_id for _, blocks in tables for block in blocks)
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        n, references, holders = block.block_id, block.ref_cnt, held[block.block_id]
        pinned = scheduler.connector is not None and references > holders
        if not block.is_null and references != holders and not pinned:
            yield f"block {n}", f"has {references} references, {holders} holders"


def free(scheduler: Any) -> Found:
    """blocks/free-iff-unreferenced: A block is in the free queue exactly when nobody holds a reference to
    it.
    """
    pool = scheduler.kv_cache_manager.block_pool
    queue = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if queue.total() != pool.get_num_free_blocks():
        yield "the free queue", f"has {queue.total()} blocks, and counts {pool.get_num_free_blocks()}"
    for block in pool.blocks:
        n, references, places = block.block_id, block.ref_cnt, queue[block.block_id]
        if not block.is_null and places != (references == 0):
            yield f"block {n}", f"has {references} references, {places} places in the free queue"


def hash_map(scheduler: Any) -> Found:
    """blocks/hash-map: A block has a hash exactly when the cache map has the block under that hash."""
    pool = scheduler.kv_cache_manager.block_pool
    known = getattr(pool.cached_block_hash_to_block, "_cache", pool.cached_block_hash_to_block)
    more = getattr(pool, "cached_block_hashes_by_block", {})
    mapped: dict[int, set[Any]] = {}
    for key, found in known.items():
        for block in found.values() if isinstance(found, dict) else [found]:
            mapped.setdefault(block.block_id, set()).add(key)
    for block in pool.blocks:
        hashes = ({block.block_hash} - {None}) | set(more.get(block.block_id, ()))
        if hashes != mapped.get(block.block_id, set()):
            yield f"block {block.block_id}", "has other hashes than the cache map has of it"


def coverage(scheduler: Any) -> Found:
    """blocks/coverage: A request's block tables have a slot for each of its computed tokens."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    for group in (each for each in groups if type(each).__name__ in POSITIONAL):
        for request in scheduler.running:
            tokens, blocks = request.num_computed_tokens, len(group.req_to_blocks.get(request.request_id, ()))
            if tokens > blocks * group.block_size:
                yield request.request_id, f"has {tokens} computed tokens in {blocks} blocks"


def no_leak(scheduler: Any) -> Found:
    """blocks/leak: No block is held for a request that has ended, or has given it up, or for nobody."""
    for name, blocks in _tables(scheduler):
        request = scheduler.requests.get(name)
        if request is None or (request.is_finished() and scheduler.connector is None):
            yield name, f"has ended and holds {len(blocks)} blocks"


def preempted(scheduler: Any) -> Found:
    """tokens/reset-on-preemption: A preempted request has no computed tokens and no blocks."""
    held = {name for name, _ in _tables(scheduler)}
    for name, request in scheduler.requests.items() if scheduler.connector is None else ():
        if request.status.name == "PREEMPTED" and (request.num_computed_tokens or name in held):
            yield name, f"was preempted and kept {request.num_computed_tokens} computed tokens or blocks"


def in_flight(scheduler: Any) -> Found:
    """tokens/in-flight: Tokens in flight are those scheduled without output yet, and cover the output
    placeholders.
    """
    for name, request in scheduler.requests.items():
        for figure in ("num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens"):
            if getattr(request, figure, 0) < 0:
                yield name, f"has {getattr(request, figure)} as {figure}"
        if request.num_output_placeholders > getattr(request, "num_in_flight_tokens", 1 << 40):
            yield name, f"has {request.num_output_placeholders} placeholders without a token in flight"


def queues(scheduler: Any) -> Found:
    """requests/queued-once: An open request is in exactly one of the scheduler's queues, and an ended one
    is in none.
    """
    lists = [scheduler.running, *(getattr(scheduler, queue, ()) for queue in QUEUES)]
    places = Counter(request.request_id for queue in lists for request in queue)
    for name, request in scheduler.requests.items():
        if places[name] != 1 and not request.is_finished():
            yield name, f"is open and in {places[name]} queues"
    yield from ((name, "is queued and has ended") for name in places if name not in scheduler.requests)


CHECKS = (references, free, hash_map, coverage, no_leak, preempted, in_flight, queues)


def broken(scheduler: Any) -> list[tuple[str, str]]:
    """Each block or request that is broken, with the id of the invariant and the words."""
    parts = (getattr(scheduler, name, None) for name in ("kv_cache_manager", "requests", "running", *QUEUES))
    if any(isinstance(part, NonCallableMock) for part in parts):
        return []
    ids = {check: str(check.__doc__).partition(":")[0] for check in CHECKS}
    return [(who, f"{id}: {who} {what}") for check, id in ids.items() for who, what in check(scheduler)]


def assert_kv_invariants(scheduler: Any, but: Collection[str] = ()) -> None:
    """Raise AssertionError if anything but the blocks and requests ``but`` breaks an invariant."""
    found = [words for who, words in broken(scheduler) if who not in but]
    assert not found, "\n".join(found)


def checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a scheduler that raises AssertionError if its call breaks what was whole before."""

    @functools.wraps(method)
    def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if id(scheduler) in JUDGED:
            return method(scheduler, *args, **kwargs)
        before = {who for who, _ in broken(scheduler)}
        JUDGED.add(id(scheduler))
        try:
            result = method(scheduler, *args, **kwargs)
        finally:
            JUDGED.remove(id(scheduler))
        assert_kv_invariants(scheduler, but=before)
        return result

    return call
