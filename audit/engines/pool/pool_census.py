"""Reports the present state of the pools' blocks and of the block tables, a part each time the engine rests.

No call of a pool shows a reference count that was changed by hand or a broken free queue; the sweep does. By
turns it reports ``SWEEP_BLOCKS`` blocks of each pool and the tables of ``SWEEP_TABLES`` requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ... import events as ev
from .call_buffer import CallBuffer, block_ids
from .hash_tracker import cache_map

SWEEP_BLOCKS = 64
"""How many blocks of each pool are reported in a turn of blocks."""

SWEEP_TABLES = 4
"""How many requests' tables are reported in a turn; fewer if these have more than ``SWEEP_BLOCKS`` blocks."""

WHOLE = 2
"""A kind of tables (``PoolSeen.groups``): an index is a position, and a hit needs every block below it."""

STATE = 2
"""A kind of windows (``PoolSeen.windows``): tokens read one checkpoint."""

WHOLE_MANAGER = "FullAttentionManager"
"""The manager of a group in which a hit needs every block below it."""

POSITIONAL = frozenset(
    ("ChunkedLocalAttentionManager", "FullAttentionManager", "RSWAManager", "SlidingWindowManager")
)
"""Managers in whose tables a block's index gives its positions."""


class Sweep:
    """Reports what the pools of one engine hold, a part each time."""

    def __init__(
        self,
        scheduler: Any,
        managers: Sequence[Any],
        pools: Sequence[Any],
        buffer: CallBuffer,
        emit: Callable[[ev.Event], None],
        has_several_hashes: Sequence[Callable[[], bool]],
    ) -> None:
        self._scheduler = scheduler
        """The scheduler, or None where a KV cache manager is observed alone."""
        self._managers = managers
        """The managers of single KV cache groups, which hold the block tables."""
        self._pools = pools
        """The engine's pools, in the order of their numbers."""
        self._buffer = buffer
        self._emit = emit
        """Emits one event, after the buffered calls."""
        self._has_several_hashes = has_several_hashes
        """For each pool, whether a block of the pool may have several hashes."""
        self._next_block = [0] * len(pools)
        """For each pool, the id of the block that is reported next."""
        self._next_table = 0
        """The index of the running request whose table is reported next."""
        self._tables_next = False
        """Whether the next turn reports tables, not blocks."""

    def describe_pools(self) -> None:
        """Emit ``PoolSeen`` for each pool where a segment begins; blocks and tables follow by turns."""
        buffer = self._buffer
        for number, pool in enumerate(self._pools):
            null = getattr(pool, "null_block", None)
            groups: list[int] = []
            windows: list[int] = []
            for manager in self._managers:
                if manager.block_pool is pool:
                    name = type(manager).__name__
                    places = WHOLE if name == WHOLE_MANAGER else int(name in POSITIONAL)
                    groups += (manager.kv_cache_group_id, manager.block_size, places)
                    windows += _window(name, manager)
            self._emit(
                ev.PoolSeen(
                    at=buffer.log.now(),
                    step=buffer.step(),
                    pool=number,
                    blocks=pool.num_gpu_blocks,
                    null_block=-1 if null is None else null.block_id,
                    free_blocks=pool.get_num_free_blocks(),
                    cached_hashes=len(cache_map(pool)),
                    groups=groups,
                    windows=windows,
                )
            )
        self._next_table = 0

    def report_next(self) -> None:
        """Report some blocks or some tables, by turns."""
        self._tables_next = not self._tables_next
        if not self._tables_next:
            self.report_tables(self._next_requests(self._scheduler.running))
            return
        for number, pool in enumerate(self._pools):
            first = self._next_block[number]
            blocks = pool.blocks[first : first + SWEEP_BLOCKS]
            end = first + len(blocks)
            self._next_block[number] = end if end < len(pool.blocks) else 0
            self.report_blocks(number, first, blocks)

    def report_all(self) -> None:
        """Report every block and every table: at the end, and for tests."""
        for number, pool in enumerate(self._pools):
            self.report_blocks(number, 0, pool.blocks)
        if self._scheduler is not None:
            self.report_tables([request.request_id for request in self._scheduler.running])

    def _next_requests(self, running: list[Any]) -> list[str]:
        """Ids of the requests whose tables come next: at least one, however long its table is."""
        first = self._next_table if self._next_table < len(running) else 0
        request_ids: list[str] = []
        room = SWEEP_BLOCKS
        for request in running[first : first + SWEEP_TABLES]:
            request_id = request.request_id
            room -= sum(len(manager.req_to_blocks.get(request_id, ())) for manager in self._managers)
            if request_ids and room < 0:
                break
            request_ids.append(request_id)
        self._next_table = first + len(request_ids)
        return request_ids

    def report_tables(self, request_ids: Iterable[str]) -> None:
        """Report the blocks in these requests' tables, each request once."""
        rows: list[int] = []
        request_ids = dict.fromkeys(request_ids)  # a scheduler that raised may hold a request twice
        requests = self._scheduler.requests if self._scheduler is not None else {}
        for manager in self._managers:
            tables, group = manager.req_to_blocks, manager.kv_cache_group_id
            for request_id in request_ids:
                table = tables.get(request_id)
                if table:
                    computed = requests[request_id].num_computed_tokens if request_id in requests else -1
                    rows += (self._buffer.request_nos[request_id], group, computed, len(table))
                    rows += block_ids(table)
        if rows:
            self._buffer.tables_reported(rows)

    def report_blocks(self, number: int, first: int, blocks: list[Any]) -> None:
        """Report these blocks of a pool, in a row from block ``first``."""
        pool, buffer = self._pools[number], self._buffer
        cache = cache_map(pool)
        get = cache.get
        states = [
            block.ref_cnt * 8
            + (block.next_free_block is not None)
            + ((h := block._block_hash) is not None and (6 if get(h) is block else _mapped(get(h), block)))
            for block in blocks
        ]
        free = pool.get_num_free_blocks()
        # The map's length says nothing of a block with several hashes.
        hashes = -1 if self._has_several_hashes[number]() else len(cache)
        head = buffer.log.now(), buffer.step(), number
        self._emit(ev.BlockStatesReported(*head, first, states, free, hashes))


def _window(name: str, manager: Any) -> tuple[int, ...]:
    """The row of ``PoolSeen.windows`` for a group; empty if its tokens read all tokens before them."""
    if name == "MambaManager":
        return manager.kv_cache_group_id, 1, STATE
    in_chunks = name == "ChunkedLocalAttentionManager"
    tokens = getattr(manager, "attention_chunk_size" if in_chunks else "sliding_window", None)
    if name not in POSITIONAL or not isinstance(tokens, int):
        return ()
    return manager.kv_cache_group_id, tokens, int(in_chunks)


def _mapped(cached: Any, block: Any) -> int:
    """2 for a hash, and 4 where the cache map leads from it to several blocks, of which this is one."""
    return 6 if type(cached) is dict and block.block_id in cached else 2
