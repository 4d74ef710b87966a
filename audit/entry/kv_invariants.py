"""Checks of a vLLM scheduler's KV cache for its own tests; ``kvledger export-checks`` prints this file.

Paste it beside the tests, and call ``assert_kv_invariants(scheduler)`` after ``schedule()`` and after
``update_from_output()``. It reads one instant and imports nothing of vLLM. Each check begins with the id and
the words of the invariant of kvledger that it states, as far as one instant shows it.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

QUEUES = ("waiting", "kv_holding_waiting", "skipped_waiting")
POSITIONAL = ("FullAttentionManager", "SlidingWindowManager", "ChunkedLocalAttentionManager")


def _tables(scheduler: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each request's table of blocks in each group, with the group's manager, without empty tables."""
    manager = scheduler.kv_cache_manager
    for group in manager.coordinator.single_type_managers:
        for request_id, blocks in group.req_to_blocks.items():
            if blocks and group.block_pool is manager.block_pool:
                yield request_id, group, blocks


def references(scheduler: Any) -> Iterator[str]:
    """blocks/references: A block's reference count is the number of its holders."""
    held = Counter(b.block_id for _, _, blocks in _tables(scheduler) for b in blocks)
    held.update(b.block_id for _, blocks in getattr(scheduler, "deferred_frees", ()) for b in blocks)
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        pinned = scheduler.connector is not None and block.ref_cnt > held[block.block_id]
        if not block.is_null and block.ref_cnt != held[block.block_id] and not pinned:
            yield f"block {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} holders"


def free_queue(scheduler: Any) -> Iterator[str]:
    """blocks/free-iff-unreferenced: A block is in the free queue exactly when nobody holds a reference to
    it.
    """
    pool = scheduler.kv_cache_manager.block_pool
    free = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if free.total() != pool.get_num_free_blocks():
        yield f"{free.total()} blocks are in the free queue, which counts {pool.get_num_free_blocks()}"
    for block in pool.blocks:
        if not block.is_null and free[block.block_id] != (block.ref_cnt == 0):
            times = free[block.block_id]
            yield f"block {block.block_id} has {block.ref_cnt} references, {times} places in the free queue"


def one_owner(scheduler: Any) -> Iterator[str]:
    """blocks/double-allocation: A block has one owner, unless it is a cached block that several requests
    share.
    """
    owners: dict[int, set[str]] = {}
    for request_id, _, blocks in _tables(scheduler):
        held = Counter(block.block_id for block in blocks if not block.is_null)
        yield from (f"block {n} is {k} times in a table of {request_id}" for n, k in held.items() if k > 1)
        for block in blocks:
            if not block.is_null and block.block_hash is None:
                owners.setdefault(block.block_id, set()).add(request_id)
    for block_id, names in owners.items():
        if len(names) > 1:
            yield f"block {block_id} has no hash and is held by {sorted(names)}"


def hash_map(scheduler: Any) -> Iterator[str]:
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
            yield f"block {block.block_id}: the block and the cache map have different hashes of it"


def coverage(scheduler: Any) -> Iterator[str]:
    """blocks/coverage: A request's block tables have a slot for each of its computed tokens."""
    computed = {request.request_id: request.num_computed_tokens for request in scheduler.running}
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for request_id, tokens in computed.items() if type(group).__name__ in POSITIONAL else ():
            blocks = group.req_to_blocks.get(request_id, ())
            if tokens > len(blocks) * group.block_size:
                yield f"{request_id} has {tokens} computed tokens in {len(blocks)} blocks"


def no_leak(scheduler: Any) -> Iterator[str]:
    """blocks/leak: No block is held for a request that has ended, or has given it up."""
    for request_id, _, blocks in _tables(scheduler):
        request = scheduler.requests.get(request_id)
        if request is None or (request.is_finished() and scheduler.connector is None):
            yield f"{request_id} has ended and holds {len(blocks)} blocks"


def preempted(scheduler: Any) -> Iterator[str]:
    """tokens/reset-on-preemption: A preempted request has no computed tokens and no blocks."""
    held = {request_id for request_id, _, _ in _tables(scheduler)}
    for name, request in scheduler.requests.items() if scheduler.connector is None else ():
        if request.status.name == "PREEMPTED" and (request.num_computed_tokens or name in held):
            yield f"{name} was preempted and kept {request.num_computed_tokens} computed tokens or blocks"


def sequence(scheduler: Any) -> Iterator[str]:
    """tokens/beyond-sequence: A request has executed no more tokens than its sequence has."""
    drafts = getattr(scheduler, "num_spec_tokens", 0)
    for request in scheduler.running:
        tokens = request.num_tokens + request.num_output_placeholders + drafts
        if request.num_computed_tokens > tokens:
            yield f"{request.request_id} has {request.num_computed_tokens} computed tokens, {tokens} at most"


def in_flight(scheduler: Any) -> Iterator[str]:
    """tokens/in-flight: Tokens in flight are those scheduled without output yet, and cover the output
    placeholders.
    """
    for name, request in scheduler.requests.items():
        for figure in ("num_computed_tokens", "num_output_placeholders", "num_in_flight_tokens"):
            if getattr(request, figure, 0) < 0:
                yield f"{name} has {getattr(request, figure)} as {figure}"
        if request.num_output_placeholders > getattr(request, "num_in_flight_tokens", 1 << 40):
            yield f"{name} has {request.num_output_placeholders} placeholders without a token in flight"


def queues(scheduler: Any) -> Iterator[str]:
    """requests/queued-once: An open request is in exactly one of the scheduler's queues, and an ended one
    is in none.
    """
    places = Counter(request.request_id for request in scheduler.running)
    for queue in QUEUES:
        places.update(request.request_id for request in getattr(scheduler, queue, ()))
    for name, request in scheduler.requests.items():
        if places[name] != 1 and not request.is_finished():
            yield f"{name} is open and in {places[name]} queues"
    yield from (f"{name} is queued and has ended" for name in places if name not in scheduler.requests)


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


def assert_kv_invariants(scheduler: Any) -> None:
    """Raise AssertionError, with each finding in a line, if the scheduler breaks an invariant."""
    found = [
        f"{str(check.__doc__).partition(':')[0]}: {what}" for check in CHECKS for what in check(scheduler)
    ]
    assert not found, "\n".join(found)
