"""What blocks hold: the hash ids of each, and the request to which it was allocated last.

The ledger of blocks keeps holders, operations and doubts as well, and takes six times as long. Readers that
judge nothing follow the contents by this class.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import msgspec

from ... import events as ev
from ... import pool_calls


class PoolContents(msgspec.Struct):
    """Follows one pool. It consists of plain data, so a checkpoint can hold it."""

    hashes: dict[int, tuple[int, ...]] = {}
    """The hash ids of each cached block, oldest first."""
    owner: dict[int, int] = {}
    """The request to which each block was allocated last."""

    def allocate(self, request: int, blocks: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Blocks are allocated to a request. Returns those that are evicted by it, with their hash ids."""
        leave, owner = self.hashes.pop, self.owner
        for block in blocks:
            owner[block] = request
        return [(block, ids) for block in blocks if (ids := leave(block, None))]

    def cached(self, event: ev.BlocksCached) -> Iterator[tuple[int, int, int, int, int]]:
        """Request, group, block, hash id and end of each block that is cached; -1: no request is known."""
        for named, group, _, blocks, hash_ids, ends in event.calls():
            writers = repeat(named) if named >= 0 else (self.owner.get(block, -1) for block in blocks)
            yield from zip(writers, repeat(group), blocks, hash_ids, ends, strict=False)

    def move(self, source: int, target: int) -> None:
        """The hash ids of a block go to another one."""
        ids = self.hashes.pop(source, None)
        if ids:
            self.hashes[target] = ids

    def forget(self) -> None:
        """Events were lost."""
        self.hashes.clear()
        self.owner.clear()


class RequestContents:
    """Which contents requests have, as one KV cache group of each pool tells."""

    def __init__(self) -> None:
        self._pools: dict[int, PoolContents] = {}
        """Each pool."""
        self._cached: dict[tuple[int, int], tuple[int, int]] = {}
        """Hash id and end of each cached block, by pool and block."""
        self.groups: dict[int, int] = {}
        """The group that tells, by pool; of a pool that is not here, group 0."""

    def allocated(self, event: pool_calls.BlocksAllocated) -> None:
        """Blocks are allocated."""
        pool = self._pools.setdefault(event.pool, PoolContents())
        for request, _, blocks in event.calls():
            pool.allocate(request, blocks)
            for block in blocks:
                self._cached.pop((event.pool, block), None)

    def cached(self, event: ev.BlocksCached) -> Iterator[tuple[int, int, int]]:
        """Request, hash id and end of each block that is cached."""
        pool = self._pools.setdefault(event.pool, PoolContents())
        for request, group, block, hash_id, end in pool.cached(event):
            if self._tells(event.pool, group):
                self._cached[event.pool, block] = hash_id, end
                yield request, hash_id, end

    def touched(self, event: pool_calls.BlocksTouched) -> Iterator[tuple[int, int, int]]:
        """The same of each cached block that a request touches."""
        for block in event.blocks if self._tells(event.pool, event.group) else ():
            known = self._cached.get((event.pool, block))
            if known is not None:
                yield event.request, *known

    def _tells(self, pool: int, group: int) -> bool:
        return group < 0 or group == self.groups.get(pool, 0)
