"""Numbers in place of block hashes: they tell of nothing that was hashed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

REMEMBERED = 2
"""Hashes whose number is remembered, by block of the pool: those that it holds, and as many evicted."""


class HashNames:
    """The names of one pool's hashes. ``fresh``: numbers that no hash of the engine has yet."""

    def __init__(self, pool: Any, fresh: Iterator[int]) -> None:
        self._pool = pool
        self._fresh = fresh
        self._known: dict[int, int] = {}
        self._remembered: dict[Any, int] = {}
        """Names by hash, those of evicted ones too, the last used last."""

    def name(self, block: Any, hash_: Any) -> int:
        """A number for a block's hash: what it was before, as far as is remembered, or a new one."""
        remembered = self._remembered
        name = remembered.pop(hash_, -1)
        if name < 0:
            name = self._other_name(block, hash_)
        remembered[hash_] = self._known[block.block_id] = name
        if len(remembered) > REMEMBERED * len(self._pool.blocks):
            del remembered[next(iter(remembered))]
        return name

    def moved(self, source: Any, target: Any) -> None:
        """A block has the hash that another had."""
        self._known[target.block_id] = self._known.get(source.block_id, -1)

    def _other_name(self, block: Any, hash_: Any) -> int:
        """Another block's that has the same hash, or a new one."""
        found = cache_map(self._pool).get(hash_)
        if type(found) is dict:
            for other in found:
                if other != block.block_id and other in self._known:
                    return self._known[other]
        return next(self._fresh)


def cache_map(pool: Any) -> Any:
    """From a hash to a block, or to a dict of blocks by id."""
    found = pool.cached_block_hash_to_block
    return getattr(found, "_cache", found)
