"""Checks of a vLLM scheduler's KV cache for its own tests; ``kvledger export-checks`` prints this file.

Paste it beside the tests. ``checked(method)`` is a method of a scheduler, one of METHODS, that raises
AssertionError if its call breaks an invariant: a block or request that was broken before the call is not
judged, nor is a Mock. ``assert_kv_invariants(scheduler)`` judges one instant. Nothing of vLLM is imported.
Each check begins with the id and the words of the invariant of kvledger that it states, as far as one instant
shows it, and yields each block or request that breaks it, with words.
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


def _tables(scheduler: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each request's table of blocks in each group, with the group's manager, without empty tables."""
    manager = scheduler.kv_cache_manager
    for group in manager.coordinator.single_type_managers:
        for request_id, blocks in group.req_to_blocks.items():
            if blocks and group.block_pool is manager.block_pool:
                yield request_id, group, blocks


def references(scheduler: Any) -> Found:
    """blocks/references: A block's reference count is the number of its holders."""
    held = Counter(b.block_id for _, _, blocks in _tables(scheduler) for b in blocks)
    held.update(b.block_id for _, blocks in getattr(scheduler, "deferred_frees", ()) for b in blocks)
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        pinned = scheduler.connector is not None and block.ref_cnt > held[block.block_id]
        if not block.is_null and block.ref_cnt != held[block.block_id] and not pinned:
            yield f"block {block.block_id}", f"has {block.ref_cnt} references, {held[block.block_id]} holders"


def free_queue(scheduler: Any) -> Found:
    """blocks/free-iff-unreferenced: A block is in the free queue exactly when nobody holds a reference to
    it.
    """
    pool = scheduler.kv_cache_manager.block_pool
    free = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if free.total() != pool.get_num_free_blocks():
        yield "the free queue", f"has {free.total()} blocks, and counts {pool.get_num_free_blocks()}"
    for block in pool.blocks:
        if not block.is_null and free[block.block_id] != (block.ref_cnt == 0):
            times = free[block.block_id]
            yield (
                f"block {block.block_id}",
                f"has {block.ref_cnt} references, {times} places in the free queue",
            )


def one_owner(scheduler: Any) -> Found:
    """blocks/double-allocation: A block has one owner, unless it is a cached block that several requests
    share.
    """
    owners: dict[int, set[str]] = {}
    for request_id, _, blocks in _tables(scheduler):
        held = Counter(block.block_id for block in blocks if not block.is_null)
        yield from (
            (f"block {n}", f"is {k} times in a table of {request_id}") for n, k in held.items() if k > 1
        )
        for block in blocks:
            if not block.is_null and block.block_hash is None:
                owners.setdefault(block.block_id, set()).add(request_id)
    for block_id, names in owners.items():
        if len(names) > 1:
            yield f"block {block_id}", f"has no hash and is held by {sorted(names)}"


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
    computed = {request.request_id: request.num_computed_tokens for request in scheduler.running}
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for request_id, tokens in computed.items() if type(group).__name__ in POSITIONAL else ():
            blocks = group.req_to_blocks.get(request_id, ())
            if tokens > len(blocks) * group.block_size:
                yield request_id, f"has {tokens} computed tokens in {len(blocks)} blocks"


def no_leak(scheduler: Any) -> Found:
    """blocks/leak: No block is held for a request that has ended, or has given it up."""
    for request_id, _, blocks in _tables(scheduler):
        request = scheduler.requests.get(request_id)
        if request is None or (request.is_finished() and scheduler.connector is None):
            yield request_id, f"has ended and holds {len(blocks)} blocks"


def preempted(scheduler: Any) -> Found:
    """tokens/reset-on-preemption: A preempted request has no computed tokens and no blocks."""
    held = {request_id for request_id, _, _ in _tables(scheduler)}
    for name, request in scheduler.requests.items() if scheduler.connector is None else ():
        if request.status.name == "PREEMPTED" and (request.num_computed_tokens or name in held):
            yield name, f"was preempted and kept {request.num_computed_tokens} computed tokens or blocks"


def sequence(scheduler: Any) -> Found:
    """tokens/beyond-sequence: A request has executed no more tokens than its sequence has."""
    drafts = getattr(scheduler, "num_spec_tokens", 0)
    for request in scheduler.running:
        tokens = request.num_tokens + request.num_output_placeholders + drafts
        if request.num_computed_tokens > tokens:
            yield request.request_id, f"has {request.num_computed_tokens} computed tokens, {tokens} at most"


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
    places = Counter(request.request_id for request in scheduler.running)
    for queue in QUEUES:
        places.update(request.request_id for request in getattr(scheduler, queue, ()))
    for name, request in scheduler.requests.items():
        if places[name] != 1 and not request.is_finished():
            yield name, f"is open and in {places[name]} queues"
    yield from ((name, "is queued and has ended") for name in places if name not in scheduler.requests)


CHECKS = (
    references,
    free_queue,
    one_owner,
    hash_map,
    coverage,
    no_leak,
    preempted,
    sequence,
    in_flight,
    queues,
)


def broken(scheduler: Any) -> list[tuple[str, str]]:
    """Each block or request that is broken, with the id of the invariant and the words."""
    parts = (getattr(scheduler, name, None) for name in ("kv_cache_manager", "requests", "running", *QUEUES))
    if any(isinstance(part, NonCallableMock) for part in parts):
        return []
    ids = {check: str(check.__doc__).partition(":")[0] for check in CHECKS}
    return [(who, f"{id}: {who} {what}") for check, id in ids.items() for who, what in check(scheduler)]


def assert_kv_invariants(scheduler: Any, but: Collection[str] = ()) -> None:
    """Raise AssertionError, with each finding in a line, if the scheduler breaks an invariant.

    ``but``: blocks and requests that are not judged.
    """
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
