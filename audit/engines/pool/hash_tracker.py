"""Reads which blocks a pool allocates and caches from the engine's own state, instead of wrapping those
calls.

``get_new_blocks`` and ``cache_full_blocks`` are most of a pool's calls, and even a wrapper that does nothing
costs about a microsecond in a running step. Neither is wrapped if one pool serves one group of full attention
and there is no connector (:func:`can_track`). A pool reports each block that it allocates to its metrics
collector; such a pool has none, so an :class:`AllocationCollector` is set. A cached block holds its hash, and
:class:`HashTracker` knows when to look at the block.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

from ...errors import LedgerError
from ...hash_key import CONTENT_VARIABLE, VARIABLE, HashKey, from_environment
from .allocations import Allocations
from .call_buffer import CallBuffer, Callers, block_ids
from .requirements import method_codes

# --- Hash ids: numbers that stand for block hashes in the journal, and reveal nothing of the hashed
# tokens.

logger = logging.getLogger("vllm.kvledger")

HashId = Callable[[Any], int]
"""From a block's hash to its id."""


def shared_key(pool: Any) -> HashKey | None:
    """The key of hash ids that others can make too; None: there is none.

    Others are those who receive the pool's KV events, if it publishes any, and engines that transfer KV.
    Without a key an engine's hash ids depend on a secret of its process, which costs less.
    """
    key = None
    if getattr(pool, "enable_kv_cache_events", False):
        key = _key(VARIABLE, "The engine's KV events can't be compared with its blocks.")
    return key or _key(CONTENT_VARIABLE, "The engine's blocks can't be compared with those of other engines.")


def _key(variable: str, consequence: str) -> HashKey | None:
    try:
        return from_environment(variable=variable)
    except LedgerError as error:
        logger.warning("kvledger: %s %s", error, consequence)
        return None


def hash_ids(key: HashKey | None = None) -> HashId:
    """A function from a block's hash to its id. Equal hashes have equal ids; no id is -1.

    The id depends on a secret of this process, so nobody can guess tokens and compare ids. Two hashes share
    an id by chance of 1 in 2**64. No hash is remembered, so memory does not grow.

    A block's hash is bytes. Python hashes bytes with a secret of the process (PEP 456) and keeps the result
    in the object, so Python's own hash is the id. If ``PYTHONHASHSEED`` is set, that secret is known, and
    the id is the hash of the block's hash with a secret made here. With a ``key`` the id depends on that
    instead.
    """
    if key is not None:
        return key.of_pool
    if os.environ.get("PYTHONHASHSEED", "") in ("", "random"):
        return hash
    secret = os.urandom(16)
    return lambda block_hash: hash(secret + block_hash)


def cache_map(pool: Any) -> Any:
    """The pool's map from a hash to a block, or to a dict of blocks by id."""
    blocks = pool.cached_block_hash_to_block
    return getattr(blocks, "_cache", blocks)


TAKING_OUTPUT = ("update_from_output", "_update_request_with_output")
"""Methods in which schedulers that run ahead of their outputs cache blocks."""

OF_MANAGERS = ("coordinator", "single_type_managers", "req_to_blocks")
"""Attributes of which each manager of block tables has one, whatever its class."""

COLLECTED = frozenset(("on_block_allocated", "on_block_accessed", "on_block_evicted"))
"""What a pool reports to its metrics collector."""

NOT_DUE = 0
"""The due byte of a block that need not be looked at."""

WHEN_SEEN = 1
"""The due byte of a block that is looked at when it is touched or freed; also the byte of some steps."""


class AllocationCollector:
    """Stands in for a pool's metrics collector. Its callbacks are C builtins: no Python frame runs."""

    __slots__ = (*COLLECTED, "reset")

    def __init__(self, add: Callable[[Any], None]) -> None:
        self.on_block_allocated = add
        """vLLM calls it with each block that it allocates."""
        self.on_block_accessed = self.on_block_evicted = callable
        """Take one argument and do nothing."""
        self.reset = tuple
        """Takes no argument and does nothing."""


class HashTracker:
    """Finds out which blocks of one pool have been cached.

    A block into which a request decodes is full a fixed number of steps after its allocation; any other block
    may be full at once. A block is *due* in that step. It is looked at when the engine is at rest after the
    step, or earlier when it is touched or freed. The manager counts its cached blocks too; if its sum differs
    from the tracker's, a block was missed.
    """

    def __init__(
        self,
        scheduler: Any,
        manager: Any,
        buffer: CallBuffer,
        callers: Callers,
        hash_id: HashId,
        allocations: Allocations,
    ) -> None:
        self._manager = manager
        """The only KV cache group's manager, with the block tables and counts of cached blocks."""
        self._group: int = manager.kv_cache_group_id
        self._pool = manager.block_pool
        self._buffer = buffer
        """Keeps the calls until they are emitted."""
        self._callers = callers
        """Reads off the stack who calls the pool, if that is not known otherwise."""
        self._hash_id = hash_id
        """Returns the number that stands for a block hash."""
        self._allocations = allocations
        """Has the deferred steps, which must be written before a later pool call."""
        self._decode_steps = _decode_steps(type(scheduler), manager.block_size)
        """The number of steps after which a block is full into which a request decodes."""
        self._cached_blocks = sum(manager.num_cached_block.values())
        """How many blocks in present tables are known to be cached."""
        self._looked_up: str | None = None
        """The request of the last prefix-cache lookup: its hits are touched next, if it is admitted."""
        self._admitting: dict[int, str] = {}
        """The functions of managers that touch the hits of admitted requests: the name by the id of the code,
        as hashing a code object hashes its constants. A touch by another function is not of the request that
        was looked up last, which may not have been admitted."""
        self._codes: list[CodeType] = []
        """The same code objects, kept alive so that their ids are not reused."""
        self._leaving: str | None = None
        """The request that is about to free its blocks."""
        self._left: dict[str, int] = {}
        """Requests that have freed their blocks but are still counted by the manager, with that count."""
        self._due_bytes = bytearray(len(self._pool.blocks))
        """For each block the byte of the step in which it is due (:func:`_byte`): they fit the CPU caches."""
        self._due: dict[int, list[Any]] = {}
        """The blocks that are due, by step. A block with another byte than the step's is no longer due."""
        self._cached_unowned: set[int] = set()
        """Blocks that were found cached before their owners were known."""
        self.collector = AllocationCollector(buffer.allocated.append)
        """Adds allocated blocks to the buffer."""
        for table in manager.req_to_blocks.values():
            blocks = [block for block in table if block._block_hash is None]
            self._expect(buffer.step() + 1, blocks, block_ids(blocks))
        self._pool.metrics_collector = self.collector

    def close(self) -> None:
        """Remove the collector; the pool had none before."""
        if self._pool.metrics_collector is self.collector:
            self._pool.metrics_collector = None

    def check(self) -> None:
        """Raise an exception if the pool no longer reports its allocations here."""
        if self._pool.metrics_collector is not self.collector:
            raise RuntimeError("the pool was given another collector of metrics")

    # --- what the engine is about to do ----------------------------------------------------------

    def looked_up(self, request_id: str | None) -> None:
        """A request was looked up. If it is admitted, its hits are touched next. None: no request."""
        if self._left:
            self._forget_left()
        self._looked_up = request_id

    def leaves(self, request_id: str) -> None:
        """A request is about to free its blocks."""
        if self._left:
            self._forget_left()
        self._left[request_id] = self._manager.num_cached_block.get(request_id, 0)
        self._leaving = request_id if request_id in self._manager.req_to_blocks else None

    def expect(self, step: int, blocks: list[Any], ids: list[int], decoding: int) -> None:
        """The pool allocated these blocks in ``step``, the first ``decoding`` to decoding requests."""
        self._expect(step + self._decode_steps, blocks[:decoding], ids[:decoding])
        self._expect(step, blocks[decoding:], ids[decoding:])
        for block_id in self._cached_unowned:
            self._due_bytes[block_id] = NOT_DUE
        self._cached_unowned.clear()

    # --- wrapped calls -----------------------------------------------------------------------------

    def touched(self, _: None, __: None, blocks: list[Any]) -> None:
        """``touch``: the hits of the request that was looked up last, or blocks that another caller pins.

        Reading the stack costs more than the rest of a touch, so for each function that admits requests it is
        read once.
        """
        if not blocks:
            return
        buffer, request_id = self._buffer, self._looked_up
        by = self._admitting.get(id(sys._getframe(2).f_code)) or self._admits(sys._getframe(2))
        ids = self._before_call(blocks)
        if any(map(self._due_bytes.__getitem__, ids)):
            self._look_at(ids, blocks, last=False)
        if not by or request_id is None or self._manager.req_to_blocks.get(request_id):
            request_id, group, by = self._callers.caller()
        else:
            self._looked_up = None
            group = self._group
        if request_id is not None:
            self._cached_blocks += len(ids)
        number = buffer.request_nos[request_id]
        buffer.blocks_touched(0, number, group, by, ids, [block.ref_cnt for block in blocks])

    def _admits(self, frame: FrameType | None) -> str:
        """The name of the function that calls ``touch`` if it is a manager's; "" of any other."""
        while frame is not None and self._callers.is_ours(frame):
            frame = frame.f_back
        if frame is None:
            return ""
        caller = frame.f_locals.get("self")
        if caller is not self._manager and not any(hasattr(caller, name) for name in OF_MANAGERS):
            return ""
        self._codes.append(frame.f_code)
        self._admitting[id(frame.f_code)] = frame.f_code.co_name
        return frame.f_code.co_name

    def freed(self, _: None, __: None, ordered_blocks: list[Any], prepend: bool = False) -> None:
        """``free_blocks``: the table of the request in ``leaves``, or other blocks."""
        blocks = ordered_blocks
        if not blocks:
            return
        request_id, group, by = self._leaving, self._group, "free"
        ids = self._before_call(blocks)
        if request_id is None or request_id in self._manager.req_to_blocks:
            self._look_at(ids, blocks, last=True)
            request_id, group, by = self._callers.caller()
        else:
            # A table is freed end first, and only blocks at its end can be due.
            if due := list(takewhile(self._due_bytes.__getitem__, ids)):
                self._look_at(due, blocks, last=True)
            self._leaving = None
            if request_id not in self._manager.num_cached_block:
                self._cached_blocks -= self._left.pop(request_id, 0)
        buffer = self._buffer
        number = buffer.request_nos[request_id]
        buffer.blocks_freed(0, number, group, by, ids, [block.ref_cnt for block in blocks])

    def frees_deferred(self, blocks: list[Any]) -> None:
        """``pop_blocks_for_free``: the blocks of the request in ``leaves`` are freed later."""
        self._leaving = None
        self._look_at(self._before_call(blocks), blocks, last=True)

    def _before_call(self, blocks: list[Any]) -> list[int]:
        """Write everything that came before a call; return the ids of the call's blocks."""
        if self._allocations.deferred:
            self._allocations.write_deferred()
        ids = [block.block_id for block in blocks]
        if self._buffer.allocated:
            for block_id in set(ids).intersection(self._buffer.allocated_ids()):
                if block_id not in self._cached_unowned:
                    self._due_bytes[block_id] = WHEN_SEEN
        return ids

    def _look_at(self, ids: list[int], blocks: list[Any], *, last: bool) -> None:
        """Record which of these blocks have been cached. ``last``: do not look at the others again."""
        due = self._due_bytes
        cached: list[int] = []
        for block_id, block in zip(ids, blocks, strict=False):
            if due[block_id] != NOT_DUE:
                block_hash = block._block_hash
                if block_hash is not None:
                    cached += (block_id, self._hash_id(block_hash), block._block_hash_num_tokens)
                    if self._buffer.allocated:
                        self._cached_unowned.add(block_id)
                if last or block_hash is not None:
                    due[block_id] = NOT_DUE
        if cached:
            self._record(cached)

    # --- at rest -----------------------------------------------------------------------------------

    def record_due(self) -> None:
        """Record which of the due blocks have been cached, and whether a cached block was missed."""
        step = self._buffer.step()
        cached: list[int] = []
        not_cached: list[Any] = []
        for due in [due for due in self._due if due <= step]:
            not_cached += self._look_at_due(cached, self._due.pop(due), due)
        if not_cached:
            self._expect(step + 1, not_cached, block_ids(not_cached))
        if self._left:
            self._forget_left()
        counted = sum(self._manager.num_cached_block.values())
        if 3 * (counted - self._cached_blocks) != len(cached):  # a request did not run in every step
            for due, blocks in self._due.items():
                self._due[due] = self._look_at_due(cached, blocks, due)
        if cached:
            self._record(cached)
        if counted != self._cached_blocks:  # a block was cached that was not due
            self._cached_blocks = counted
            self._buffer.table_blocks_cached(self._group, ())

    def _look_at_due(self, cached: list[int], blocks: list[Any], step: int) -> list[Any]:
        """Add the cached ones of the blocks due in ``step`` to ``cached``; return the others."""
        due, hash_id, byte = self._due_bytes, self._hash_id, _byte(step)
        not_cached: list[Any] = []
        for block in blocks:
            block_id = block.block_id
            if due[block_id] == byte:  # else it has been looked at, or is due in another step
                block_hash = block._block_hash
                if block_hash is None:
                    not_cached.append(block)
                else:
                    due[block_id] = NOT_DUE
                    cached += (block_id, hash_id(block_hash), block._block_hash_num_tokens)
        return not_cached

    def _record(self, cached: list[int]) -> None:
        self._cached_blocks += len(cached) // 3
        self._buffer.table_blocks_cached(self._group, cached)

    def _forget_left(self) -> None:
        """Forget the requests that the manager has forgotten, and their counts."""
        for request_id in [name for name in self._left if name not in self._manager.num_cached_block]:
            self._cached_blocks -= self._left.pop(request_id)

    def _expect(self, step: int, blocks: list[Any], ids: list[int]) -> None:
        """Make the blocks with these ids due in ``step``."""
        if ids:
            due, byte = self._due_bytes, _byte(step)
            for block_id in ids:
                due[block_id] = byte
            self._due.setdefault(step, []).extend(blocks)


def _byte(step: int) -> int:
    """A byte for a step, different from those of the next 254 steps and from :data:`NOT_DUE`."""
    return step % 255 + 1


def _decode_steps(scheduler: type[Any], block_size: int) -> int:
    """How many steps after its allocation a block is full into which a request decodes.

    One step more if the scheduler caches blocks when it takes an output, and for every scheduler that is not
    vLLM's, because that one may.
    """
    codes = method_codes(scheduler, TAKING_OUTPUT)
    late = not scheduler.__module__.startswith("vllm.") or any("cache_blocks" in c.co_names for c in codes)
    return block_size - 1 + late


def can_track(scheduler: Any, managers: tuple[Any, ...]) -> bool:
    """Whether a :class:`HashTracker` can follow the engine: vLLM since 0.24, without drafts and pipelines."""
    if scheduler is None or len(managers) != 1 or getattr(scheduler, "connector", None) is not None:
        return False
    (manager,) = managers
    pool = manager.block_pool
    reported = {name for code in method_codes(type(pool)) for name in code.co_names if name.startswith("on_")}
    allocates = getattr(getattr(type(pool).get_new_blocks, "__code__", None), "co_names", ())
    return (
        type(manager).__name__ == "FullAttentionManager"
        and getattr(scheduler, "num_spec_tokens", -1) == 0
        and not getattr(scheduler, "use_pp", False)  # else a request does not run in every step
        and not getattr(scheduler.kv_cache_manager.coordinator, "enable_partial_hash_hits", False)
        and getattr(pool, "enable_caching", False)
        and reported <= COLLECTED
        and "on_block_allocated" in allocates
        and getattr(pool, "metrics_collector", pool) is None
        and hasattr(pool.blocks[0], "_block_hash_num_tokens")
        and hasattr(manager, "num_cached_block")
    )
