"""Eviction policies of libCacheSim, for replays of block traces.

Only policies that name the block they will evict, because a pool passes over blocks that requests hold, and
that evict nothing when a block is added.
"""

from __future__ import annotations

from functools import partial

import libcachesim

from ..audit.analysis.simulated_pool import MakePolicy
from ..audit.errors import LedgerError

POLICIES = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "clock": libcachesim.Clock,
    "sieve": libcachesim.Sieve,
}
"""By name, as users write it."""


class LibraryPolicy:
    """A policy of libCacheSim; see :class:`~kvledger.audit.analysis.simulated_pool.Policy`."""

    def __init__(self, name: str, blocks: int) -> None:
        # The hash table begins small and grows; the library's default takes 128 MiB.
        self._cache = POLICIES[name](cache_size=max(1, blocks), hashpower=max(8, blocks.bit_length()))
        """The cache of the library; each block has size 1."""
        self._request = libcachesim.Request()
        """The request of every call; a call sets its block."""
        self._request.obj_size = 1

    def use(self, block: int) -> None:
        """See the protocol."""
        self._request.obj_id = block
        if self._cache.find(self._request) is None:
            self._cache.insert(self._request)

    def evict(self) -> int:
        """See the protocol."""
        block = int(self._cache.to_evict(self._request).obj_id)
        self._cache.evict(self._request)
        return block

    def remove(self, block: int) -> None:
        """See the protocol."""
        self._cache.remove(block)

    def __len__(self) -> int:
        return int(self._cache.get_n_obj())


def policies(names: str) -> dict[str, MakePolicy]:
    """Makers of the policies that a user named, by name: ``lru,lfu``. Raises LedgerError."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in POLICIES:
            *others, last = POLICIES
            raise LedgerError(f"{name!r} is no policy: the policies are {', '.join(others)} and {last}.")
    return {name: partial(LibraryPolicy, name) for name in wanted or ["lru"]}
