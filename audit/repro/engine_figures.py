"""The figures of an engine that a reproduction compares with the right ones.

The text of these functions is copied into the files that ``kvledger repro`` writes, so each stands for
itself: it imports what it needs, and nothing of kvledger. ``engine`` has ``scheduler`` (vLLM's),
``requests`` (vLLM's Request by name, kept after its end), ``outputs`` (EngineCoreOutput by name, in order),
``steps`` (the SchedulerOutput of each step) and ``raised`` (the exception that ended the run, as text).
"""

from __future__ import annotations

from typing import Any


def placeholders(engine: Any, name: str) -> Any:
    """Output placeholders that the scheduler counts for the request."""
    return engine.requests[name].num_output_placeholders


def computed(engine: Any, name: str) -> Any:
    """Computed tokens that the scheduler counts for the request now."""
    return engine.requests[name].num_computed_tokens


def computed_before_step(engine: Any, name: str) -> Any:
    """Computed tokens with which the last step that ran the request began."""
    for step in reversed(engine.steps):
        for new in step.scheduled_new_reqs:
            if new.req_id == name:
                return new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        if name in cached.req_ids:
            return cached.num_computed_tokens[cached.req_ids.index(name)]
    return 0


def executed(engine: Any, name: str) -> Any:
    """Tokens of the request that all steps executed."""
    return sum(step.num_scheduled_tokens.get(name, 0) for step in engine.steps)


def reported(engine: Any, name: str) -> Any:
    """Local, external and computed tokens of the prompt, as vLLM's front end counts them."""
    outputs = engine.outputs[name]
    if hasattr(outputs[0], "prefill_stats"):  # a request that ended before it ran has none
        stats = next((output.prefill_stats for output in outputs if output.prefill_stats), None)
        names = ("num_local_cached_tokens", "num_external_cached_tokens", "num_computed_tokens")
        return [getattr(stats, name, 0) for name in names]
    from vllm.v1.metrics.stats import PromptTokenStats

    first, counted = outputs[0], PromptTokenStats()
    prompt = engine.requests[name].num_prompt_tokens
    counted.update_from_output(first.num_cached_tokens, first.num_external_computed_tokens, prompt)
    return [counted.local_cache_hit, counted.external_kv_transfer, counted.computed]


def cached(engine: Any, name: str) -> Any:
    """Tokens from the start of the request's sequence that the prefix cache has, in whole blocks."""
    pool, tokens = engine.scheduler.kv_cache_manager.block_pool, 0
    for block_hash in engine.requests[name].block_hashes:
        if not pool.get_cached_block(block_hash, [0]):
            break
        tokens += engine.scheduler.block_size
    return tokens


def blocks_in_two_places(engine: Any, name: str) -> Any:
    """Blocks that are in two groups, or at two positions, of the block tables."""
    places: dict[int, set[Any]] = {}
    manager = engine.scheduler.kv_cache_manager
    for request_id in engine.scheduler.requests:
        for group, blocks in enumerate(manager.get_block_ids(request_id)):
            for index, block in enumerate(blocks):
                places.setdefault(block, set()).add((group, index))
    places.pop(manager.block_pool.null_block.block_id, None)
    return sum(len(found) > 1 for found in places.values())


def blocks_held(engine: Any, name: str) -> Any:
    """Blocks of the pool that are not free."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def raised(engine: Any, name: str) -> Any:
    """The exception that the scheduler raised."""
    return engine.raised


def kept_lookups(engine: Any, name: str) -> Any:
    """Lookups of waiting or ended requests whose result the v0 scheduler keeps."""
    tracker = engine.scheduler.block_manager._computed_blocks_tracker
    running = {sequence.seq_id for group in engine.scheduler.running for sequence in group.seqs}
    return len(set(tracker._seq_id_to_num_tokens_computed) - running)


def planned_to_load(engine: Any, name: str) -> Any:
    """External tokens that LMCache's metadata orders to load for the request."""
    tokens = 0
    for step in engine.steps:
        for request in step.kv_connector_metadata.requests:
            load = request.load_spec
            if request.req_id == name and load is not None and load.can_load:
                tokens += load.lmcache_cached_tokens - load.vllm_cached_tokens
    return tokens


def planned_to_save(engine: Any, name: str) -> Any:
    """Tokens of the request that LMCache's metadata orders to save."""
    orders = [order for step in engine.steps for order in step.kv_connector_metadata.requests]
    saves = [order for order in orders if order.req_id == name and order.save_spec]
    return max((len(order.token_ids) for order in saves if order.save_spec.can_save), default=0)


def tracked(engine: Any, name: str) -> Any:
    """Tokens of the request that LMCache's tracker knows."""
    return len(engine.scheduler.connector._lmcache_engine._request_trackers[name].token_ids)
