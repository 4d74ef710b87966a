"""The wrappers of a pool's methods, as lean as each is called often.

Each calls what it wraps with the arguments it got and gives back what came of it. What the watch does
with the call is guarded: an observer must never stop the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvledger.audit.engines.callers import Caller

Method = Callable[..., Any]
Make = Callable[[Any, int, Method], Method]
"""From a watch, a pool's number and its method: the wrapper."""


def taking(watch: Any, pool: int, original: Method) -> Method:
    """``get_new_blocks``: what it evicts on its way is told with it."""

    @functools.wraps(original)
    def get_new_blocks(num_blocks: int) -> Any:
        watch.inside = True
        try:
            blocks = original(num_blocks)
        finally:
            watch.inside = False
        if blocks:
            try:
                watch.taken(pool, blocks, watch.callers.caller())
            except Exception as error:
                watch.fail("get_new_blocks", error)
        return blocks

    return get_new_blocks


def touching(watch: Any, pool: int, original: Method) -> Method:
    """``touch``: a list of blocks, or up to 0.12 one for each group."""

    @functools.wraps(original)
    def touch(blocks: Any) -> Any:
        result = original(blocks)
        try:
            caller = watch.callers.caller()
            if isinstance(blocks, tuple) and blocks and isinstance(blocks[0], list | tuple):
                for group, part in enumerate(blocks):
                    watch.touched(pool, part, caller._replace(group=group))
            else:
                watch.touched(pool, list(blocks), caller)
        except Exception as error:
            watch.fail("touch", error)
        return result

    return touch


def freeing(watch: Any, pool: int, original: Method) -> Method:
    """``free_blocks``: what it is given may be an iterator, which can be walked once."""

    @functools.wraps(original)
    def free_blocks(ordered_blocks: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = list(ordered_blocks)
        result = original(blocks, *args, **kwargs)
        if blocks:
            try:
                watch.freed(pool, blocks, watch.callers.caller())
            except Exception as error:
                watch.fail("free_blocks", error)
        return result

    return free_blocks


def unpinning(watch: Any, pool: int, original: Method) -> Method:
    """``unpin_blocks``: given back, and still read until somebody takes them."""

    @functools.wraps(original)
    def unpin_blocks(blocks: Any, on_reuse: Any) -> Any:
        blocks = list(blocks)
        result = original(blocks, on_reuse)
        try:
            watch.freed(pool, blocks, Caller(None, -1, "unpin_blocks"))
        except Exception as error:
            watch.fail("unpin_blocks", error)
        return result

    return unpin_blocks


def hashing(watch: Any, pool: int, original: Method) -> Method:
    """``cache_full_blocks``: those of its blocks that have another hash when it is over."""

    @functools.wraps(original)
    def cache_full_blocks(
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if num_cached_blocks >= num_full_blocks:
            return original(
                request,
                blocks,
                num_cached_blocks,
                num_full_blocks,
                block_size,
                kv_cache_group_id,
                *rest,
                **options,
            )
        new = blocks[num_cached_blocks:num_full_blocks]
        before = [block._block_hash for block in new]
        watch.inside = True
        try:
            result = original(
                request,
                blocks,
                num_cached_blocks,
                num_full_blocks,
                block_size,
                kv_cache_group_id,
                *rest,
                **options,
            )
        finally:
            watch.inside = False
        try:
            watch.hashed_full(pool, request, kv_cache_group_id, new, before, num_cached_blocks, block_size)
        except Exception as error:
            watch.fail("cache_full_blocks", error)
        return result

    return cache_full_blocks


def hashing_part(watch: Any, pool: int, original: Method) -> Method:
    """``cache_partial_block``: a block gets a hash for its first tokens, perhaps one hash more."""

    @functools.wraps(original)
    def cache_partial_block(request: Any, block: Any, num_tokens: int, *rest: Any, **options: Any) -> Any:
        before, more = block._block_hash, watch.further_hashes(pool, block)
        watch.inside = True
        try:
            result = original(request, block, num_tokens, *rest, **options)
        finally:
            watch.inside = False
        replaced = before is not None and block._block_hash != before
        watch.parted.add(pool)
        if result is not None and (replaced or (result != before and result not in more)):
            try:
                group = options["kv_cache_group_id"] if "kv_cache_group_id" in options else rest[0]
                watch.hashed(pool, request, group, [block], [num_tokens], replaced, result)
            except Exception as error:
                watch.fail("cache_partial_block", error)
        return result

    return cache_partial_block


def evicting(watch: Any, pool: int, original: Method) -> Method:
    """``_maybe_evict_cached_block``, where it is not on the way of another call."""

    @functools.wraps(original)
    def _maybe_evict_cached_block(block: Any) -> Any:
        result = original(block)
        if result and not watch.inside:
            try:
                watch.evicted(pool, [block], watch.callers.caller())
            except Exception as error:
                watch.fail("_maybe_evict_cached_block", error)
        return result

    return _maybe_evict_cached_block


def moving(watch: Any, pool: int, original: Method) -> Method:
    """``move_block_hashes``: the hashes go with a copy, and the source will be written to."""
    return after(watch, original, lambda _, source, target: watch.moved(pool, source, target))


def resetting(watch: Any, pool: int, original: Method) -> Method:
    """``reset_prefix_cache``."""
    return after(watch, original, lambda result: watch.reset(pool, bool(result)))


def after(watch: Any, original: Method, see: Callable[..., None]) -> Method:
    """``see`` gets what came of the call and then its arguments, as a caller wrote them."""

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            see(result, *args, **kwargs)
        except Exception as error:
            watch.fail(original.__name__, error)
        return result

    return seen


WRAPPERS: dict[str, Make] = {
    "get_new_blocks": taking,
    "touch": touching,
    "free_blocks": freeing,
    "unpin_blocks": unpinning,
    "cache_full_blocks": hashing,
    "cache_partial_block": hashing_part,
    "_maybe_evict_cached_block": evicting,
    "move_block_hashes": moving,
    "reset_prefix_cache": resetting,
}
