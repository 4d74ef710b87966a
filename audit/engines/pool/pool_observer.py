"""What is recorded of each wrapped method of a block pool.

:class:`~kvledger.audit.hooks.Hooks` wraps the methods listed in ``requirements`` and calls the methods of
:class:`PoolObserver` before and after the engine's own. The wrapper catches whatever they raise. Calls that
``hash_tracker`` replaces by reading the pool's state do not come here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ... import events as ev
from .allocations import Allocations
from .call_buffer import CallBuffer, Caller, Callers, block_ids, reference_counts
from .hash_tracker import HashId
from .prefixes import Prefixes


class Emitter(NamedTuple):
    """The functions with which an observer emits an event that is not buffered."""

    emit: Callable[[ev.Event], None]
    """Emits one event, after all calls that were made before it."""
    emit_calls: Callable[[], None]
    """Emits the calls that were made so far; never raises."""
    stack: Callable[[], list[str] | None]
    """The Python stack, where stacks are recorded."""


class PoolObserver:
    """Records the calls of one pool."""

    def __init__(
        self,
        pool: Any,
        pool_no: int,
        buffer: CallBuffer,
        allocations: Allocations,
        callers: Callers,
        hash_id: HashId,
        emitter: Emitter,
        prefixes: Prefixes | None,
        *,
        shares_frees: bool,
    ) -> None:
        self._pool = pool
        self._pool_no = pool_no
        self._buffer = buffer
        """Keeps the calls until they are emitted."""
        self._allocations = allocations
        """Knows whether the owners of allocated blocks will be found later."""
        self._callers = callers
        self._hash_id = hash_id
        """Returns the number that stands for a block hash."""
        self._emitter = emitter
        """Emits the events that are not buffered."""
        self._prefixes = prefixes
        """Knows the prefix of each cached block; None without a scheduler."""
        self._shares_frees = shares_frees
        """Whether the engine has several pools; a pool passes another pool's block on to that pool."""
        self._several_hashes = False
        """Whether a block got a hash for a part of its tokens; then blocks may have several hashes."""

    def has_several_hashes(self) -> bool:
        """Whether a block of the pool may have several hashes."""
        return self._several_hashes

    # --- allocating, touching, freeing ----------------------------------------------------------------

    def allocated(self, _: None, blocks: list[Any], num_blocks: int) -> None:
        """``get_new_blocks``. The ledger derives the evicted hashes from the allocation."""
        if self._allocations.named_later:
            self._buffer.allocated.extend(blocks)
        elif blocks:
            number, group, by = self._caller()
            self._buffer.blocks_allocated(self._pool_no, number, group, by, block_ids(blocks))

    def touched(self, _: None, __: None, blocks: Any) -> None:
        """``touch``."""
        if blocks:
            number, group, by = self._caller()
            ids, counts = block_ids(blocks), reference_counts(blocks)
            self._buffer.blocks_touched(self._pool_no, number, group, by, ids, counts)

    def freed(self, _: None, __: None, ordered_blocks: list[Any], prepend: bool = False) -> None:
        """``free_blocks``."""
        pool, blocks = self._pool, ordered_blocks
        if self._shares_frees:
            blocks = [block for block in blocks if getattr(block, "pool", pool) in (pool, None)]
        if blocks:
            number, group, by = self._caller()
            ids, counts = block_ids(blocks), reference_counts(blocks)
            self._buffer.blocks_freed(self._pool_no, number, group, by, ids, counts)

    def unpinned(self, _: None, __: None, blocks: list[Any], on_reuse: Any) -> None:
        """``unpin_blocks``: the blocks are freed, but still read until they are allocated again."""
        ids, counts = block_ids(blocks), reference_counts(blocks)
        self._buffer.blocks_freed(self._pool_no, -1, -1, "unpin_blocks", ids, counts)

    def frees_deferred(self, caller: Caller, blocks: list[Any]) -> None:
        """``pop_blocks_for_free`` of the KV cache manager: these blocks will be freed later."""
        pool = self._pool
        ids = block_ids(block for block in blocks if getattr(block, "pool", pool) in (pool, None))
        if ids:
            self._emitter.emit(ev.BlocksDeferred(*self._head(caller), ids, self._emitter.stack()))

    def _caller(self) -> tuple[int, int, str]:
        request_id, group, by = self._callers.caller()
        return self._buffer.request_nos[request_id], group, by

    # --- caching ------------------------------------------------------------------------------------

    def caching_begins(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *_: Any
    ) -> list[Any]:
        """``cache_full_blocks`` is called: return the hashes that the blocks have before the call."""
        return [block._block_hash for block in blocks[num_cached_blocks:num_full_blocks]]

    def cached(
        self,
        before: list[Any],
        _: None,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Any = None,
    ) -> None:
        """``cache_full_blocks`` returned: record the blocks whose hash has changed."""
        fresh: list[int] = []
        replaced: list[int] = []
        end = num_cached_blocks * block_size
        for block, old in zip(blocks[num_cached_blocks:num_full_blocks], before, strict=True):
            end += block_size
            new = block._block_hash
            if new is not old:
                (fresh if old is None else replaced).extend((block.block_id, self._hash_id(new), end))
        if fresh or replaced:
            number, length = self._buffer.request_nos[request.request_id], request.num_tokens
            if self._prefixes is not None:
                self._prefixes.cached(self._pool, number, [*fresh[::3], *replaced[::3]])
            head = self._pool_no, number, kv_cache_group_id, length
            if fresh:
                self._buffer.blocks_cached(*head, False, fresh)
            if replaced:
                self._buffer.blocks_cached(*head, True, replaced)

    def part_caching_begins(self, request: Any, block: Any, *_: Any) -> tuple[Any, tuple[Any, ...]]:
        """``cache_partial_block`` is called: return the block's first hash and its further hashes."""
        self._emitter.emit_calls()
        further = self._pool.cached_block_hashes_by_block.get(block.block_id, ())
        return block._block_hash, tuple(further)

    def part_cached(
        self,
        before: tuple[Any, tuple[Any, ...]],
        result: Any,
        request: Any,
        block: Any,
        num_tokens: int,
        kv_cache_group_id: int,
        *_: Any,
    ) -> None:
        """``cache_partial_block`` returned: the block got a hash for its first tokens, perhaps one more."""
        self._several_hashes = True
        if self._prefixes is not None and result is not None:
            self._prefixes.forget_block(self._pool, block.block_id)
        first, further = before
        replaced = first is not None and block._block_hash != first
        if result is None or not (replaced or (result != first and result not in further)):
            return
        buffer = self._buffer
        row = [buffer.request_nos[request.request_id], kv_cache_group_id, request.num_tokens, 1]
        row += (block.block_id, self._hash_id(result), num_tokens)
        head = buffer.log.now(), buffer.step(), self._pool_no
        self._emitter.emit(ev.BlocksCached(*head, row, replaced, self._emitter.stack()))

    # --- evicting and moving hashes -------------------------------------------------------------------

    def eviction_begins(self, ids: list[int]) -> list[Any]:
        """``evict_blocks`` is called: return the blocks that have a hash."""
        self._emitter.emit_calls()
        blocks = self._pool.blocks
        return [blocks[each] for each in ids if blocks[each]._block_hash is not None]

    def evicted(self, cached: list[Any], _: None, __: list[int]) -> None:
        """``evict_blocks`` returned: emit the cached blocks that have lost their hash."""
        self._emit_evicted([block for block in cached if block._block_hash is None])

    def single_eviction_begins(self, block: Any) -> bool:
        """``_maybe_evict_cached_block`` is called: return whether its caller is not itself recorded."""
        alone = self._callers.caller().by not in ("get_new_blocks", "evict_blocks")
        if alone:
            self._emitter.emit_calls()
        return alone

    def single_evicted(self, alone: bool, evicted: bool, block: Any) -> None:
        """``_maybe_evict_cached_block`` returned: emit the eviction unless the caller's record implies it."""
        if alone and evicted:
            self._emit_evicted([block])

    def _emit_evicted(self, blocks: list[Any]) -> None:
        if blocks:
            head = self._head(self._callers.caller())
            self._emitter.emit(ev.BlocksEvicted(*head, block_ids(blocks), self._emitter.stack()))

    def hashes_may_go(self, *_: Any) -> None:
        """Blocks are about to lose hashes: first emit the calls that cached them."""
        self._emitter.emit_calls()

    def hashes_moved(self, _: None, __: None, src_block: Any, dst_block: Any) -> None:
        """``move_block_hashes``: the source stays in its table and will be written to."""
        head, ids = self._head(self._callers.caller()), block_ids((src_block, dst_block))
        if self._prefixes is not None:
            self._prefixes.moved(self._pool, *ids)
        self._emitter.emit(ev.BlockCopied(*head, ids, True, self._emitter.stack()))

    def block_copied(
        self,
        group: int,
        _: None,
        __: None,
        request_id: str,
        block_idx: int,
        source_block: Any,
        cow_block: Any,
    ) -> None:
        """``_apply_cow`` of a group's manager: the copy replaces the source in the table."""
        head, ids = self._head(Caller(request_id, group, "_apply_cow")), block_ids((source_block, cow_block))
        self._emitter.emit(ev.BlockCopied(*head, ids, False, self._emitter.stack()))

    def reset(self, _: None, succeeded: Any) -> None:
        """``reset_prefix_cache``."""
        buffer = self._buffer
        self._emitter.emit(ev.PoolReset(buffer.log.now(), buffer.step(), self._pool_no, bool(succeeded)))

    def _head(self, caller: Caller) -> tuple[int, int, int, int, int, str]:
        buffer, (request_id, group, by) = self._buffer, caller
        return buffer.log.now(), buffer.step(), self._pool_no, buffer.request_nos[request_id], group, by
