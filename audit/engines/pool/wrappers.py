"""The wrappers of a pool's methods, as lean as each is called often.

Each calls what it wraps with the arguments it got and gives back what came of it. What the watch does
with the call is guarded: an observer must never stop the engine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ...events import ALLOCATED, CACHED, FREED, TOUCHED
from .caller_stack import Caller

Method = Callable[..., Any]
Make = Callable[[Any, int, Method], Method]
"""From a watch, a pool's number and its method: the wrapper."""


def taking(watch: Any, pool: int, original: Method) -> Method:
    """``get_new_blocks``: what it evicts on its way is told with it.

    Whose table they go to is read off the stack, or afterwards off the step's output: see ``untold``.
    """
    untold, handed = watch.untold, watch.untold.handed
    add, caller = untold.add, watch.callers.caller

    @functools.wraps(original)
    def get_new_blocks(num_blocks: int) -> Any:
        blocks = original(num_blocks)
        try:
            if untold.outputs_tell:
                handed.extend(blocks)
            elif blocks:
                add(ALLOCATED, pool, caller(), blocks)
        except Exception as error:
            watch.fail("get_new_blocks", error)
        return blocks

    return get_new_blocks


def touching(watch: Any, pool: int, original: Method) -> Method:
    """``touch``: a list of blocks, or up to 0.12 one for each group."""
    add, caller, books = watch.untold.add, watch.callers.caller, watch.books

    @functools.wraps(original)
    def touch(blocks: Any) -> Any:
        result = original(blocks)
        try:
            if blocks and books is not None:
                books.touched(blocks)
            elif blocks:
                whose = caller()
                if isinstance(blocks, tuple) and isinstance(blocks[0], list | tuple):
                    for group, part in enumerate(blocks):
                        if part:
                            add(TOUCHED, pool, whose._replace(group=group), part)
                else:
                    add(TOUCHED, pool, whose, list(blocks))
        except Exception as error:
            watch.fail("touch", error)
        return result

    return touch


def freeing(watch: Any, pool: int, original: Method) -> Method:
    """``free_blocks``: what it is given may be an iterator, which can be walked once."""
    add, caller, books = watch.untold.add, watch.callers.caller, watch.books
    own = watch.pools[pool] if len(watch.pools) > 1 else None

    @functools.wraps(original)
    def free_blocks(ordered_blocks: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = list(ordered_blocks)
        result = original(blocks, *args, **kwargs)
        try:
            if own is not None:  # one pool hands on what is another's
                blocks = [block for block in blocks if getattr(block, "pool", own) in (own, None)]
            if blocks and books is not None:
                books.freed(blocks)
            elif blocks:
                add(FREED, pool, caller(), blocks)
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
            watch.untold.add(FREED, pool, Caller(None, -1, "unpin_blocks"), blocks)
        except Exception as error:
            watch.fail("unpin_blocks", error)
        return result

    return unpin_blocks


def hashing(watch: Any, pool: int, original: Method) -> Method:
    """``cache_full_blocks``: those of its blocks that have another hash when it is over."""
    what, put, name = CACHED + 8 * pool, watch.untold.rows.extend, watch.name
    known, number_of = watch.numbers.get, watch.number
    tell_now = watch.tell if watch.stacks else None

    @functools.wraps(original)
    def cache_full_blocks(
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
    ) -> Any:
        first, end, group = num_cached_blocks, num_full_blocks, kv_cache_group_id
        if end == first + 1 and block_mask is None and tell_now is None:
            block = blocks[first]
            old = block._block_hash
            result = original(request, blocks, first, end, block_size, group)
            try:
                new = block._block_hash
                if new is not old:
                    number = known(request.request_id)
                    if number is None:
                        number = number_of(request.request_id)
                    more = len(request._all_token_ids) * 2
                    if old is not None:
                        more += 1
                    put((what, number, group, more, 3, block.block_id, name(new), end * block_size))
            except Exception as error:
                watch.fail("cache_full_blocks", error)
            return result
        mask = () if block_mask is None else (block_mask,)
        part = blocks[first:end]
        before = [block._block_hash for block in part]
        result = original(request, blocks, first, end, block_size, group, *mask)
        try:
            told: tuple[list[int], list[int]] = [], []  # that had no hash, that had another
            for block, old in zip(part, before, strict=True):
                first += 1
                new = block._block_hash
                if new is not old:
                    told[old is not None].extend((block.block_id, name(new), first * block_size))
            number, length = number_of(request.request_id), request.num_tokens
            for replaced, row in enumerate(told):
                if row:
                    put((what, number, group, length * 2 + replaced, len(row), *row))
            if tell_now is not None:
                tell_now()
        except Exception as error:
            watch.fail("cache_full_blocks", error)
        return result

    return cache_full_blocks


def hashing_part(watch: Any, pool: int, original: Method) -> Method:
    """``cache_partial_block``: a block gets a hash for its first tokens, perhaps one hash more."""

    @functools.wraps(original)
    def cache_partial_block(request: Any, block: Any, num_tokens: int, *rest: Any, **options: Any) -> Any:
        watch.tell()
        before, more = block._block_hash, watch.further_hashes(pool, block)
        result = original(request, block, num_tokens, *rest, **options)
        replaced = before is not None and block._block_hash != before
        watch.parted.add(pool)
        if result is not None and (replaced or (result != before and result not in more)):
            try:
                group = options["kv_cache_group_id"] if "kv_cache_group_id" in options else rest[0]
                watch.hashed_part(pool, request, group, block, num_tokens, replaced, result)
            except Exception as error:
                watch.fail("cache_partial_block", error)
        return result

    return cache_partial_block


def evicting(watch: Any, pool: int, original: Method) -> Method:
    """``evict_blocks``, of ids: those that had a hash have none when it is over."""
    blocks = watch.pools[pool].blocks

    @functools.wraps(original)
    def evict_blocks(block_ids: Any) -> Any:
        watch.tell()
        block_ids = list(block_ids)
        had = [blocks[each] for each in block_ids if blocks[each]._block_hash is not None]
        result = original(block_ids)
        evicted = [block for block in had if block._block_hash is None]
        if evicted:
            try:
                watch.evicted(pool, evicted, watch.callers.caller())
            except Exception as error:
                watch.fail("evict_blocks", error)
        return result

    return evict_blocks


def evicting_one(watch: Any, pool: int, original: Method) -> Method:
    """``_maybe_evict_cached_block``, where it is not on the way of another call."""
    getframe = sys._getframe

    @functools.wraps(original)
    def _maybe_evict_cached_block(block: Any) -> Any:
        by_itself = getframe(1).f_code.co_name not in ("get_new_blocks", "evict_blocks")
        if by_itself:
            watch.tell()
        result = original(block)
        if result and by_itself:
            try:
                watch.evicted(pool, [block], watch.callers.caller())
            except Exception as error:
                watch.fail("_maybe_evict_cached_block", error)
        return result

    return _maybe_evict_cached_block


def moving(watch: Any, pool: int, original: Method) -> Method:
    """``move_block_hashes``: the hashes go with a copy, and the source will be written to."""
    return after(watch, original, lambda _, source, target: watch.moved(pool, source, target), watch.tell)


def resetting(watch: Any, pool: int, original: Method) -> Method:
    """``reset_prefix_cache``."""
    return after(watch, original, lambda result: watch.reset(pool, bool(result)), watch.tell)


def after(
    watch: Any, original: Method, see: Callable[..., None], first: Callable[[], None] | None = None
) -> Method:
    """``see`` gets what came of the call and then its arguments, as a caller wrote them.

    ``first`` is called before, where hashes go that have still to be told.
    """

    @functools.wraps(original)
    def seen(*args: Any, **kwargs: Any) -> Any:
        if first is not None:
            first()
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
    "evict_blocks": evicting,
    "_maybe_evict_cached_block": evicting_one,
    "move_block_hashes": moving,
    "reset_prefix_cache": resetting,
}
