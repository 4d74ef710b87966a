"""Reads the changes of an engine whose KV cache has several groups, for turns of sessions and prefixes.

The reader follows the first group of full attention, as its base does, and names what the other groups cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import events as ev
from .. import pool_calls
from ..ledger.blocks.pool import post
from ..ledger.blocks.postings import pool_of
from .block_trace import CACHED, EVICT, GROW, IN_GROUP
from .group_boundaries import Group, several_groups_of
from .trace_reader import HANDLERS, TraceReader


class GroupTraceReader(TraceReader):
    """Makes changes and requests from events, of engines with several groups in one pool, too.

    Those have a ``problem`` all the same: a pool of another size can't be replayed from their changes.
    """

    group: int = 0
    """The group that is followed."""
    others: list[Group] = []
    """The other groups that prefixes are cached in; [] in an engine with one group."""

    @property
    def stopped(self) -> bool:
        """See the base."""
        return bool(self.problem) and not self.others

    def feed(self, event: ev.Event) -> None:
        """Read one event, in the journal's order."""
        if not self.stopped:
            post(self, event, _HANDLERS)

    def _grouped_pool(self, event: ev.PoolSeen) -> None:
        self._pool(event)
        groups = None if event.pool else several_groups_of(pool_of(event))
        if groups is None:
            self.others = []
        elif not self.block_tokens:
            self.group, self.block_tokens, self.others = groups
            self.blocks = event.blocks - (event.null_block >= 0)

    def _grouped_touch(self, event: pool_calls.BlocksTouched) -> None:
        if not self.others or event.group == self.group:
            self._touched(event)

    def _grouped_allocation(self, event: pool_calls.BlocksAllocated) -> None:
        if not self.others:
            self._allocated(event)
            return
        for number, group, blocks in event.calls():
            evicted = self.contents.allocate(number, blocks)
            request = self._living(number, event.at)
            if evicted:
                life = -1 if request is None else request.life
                self._add(event.at, EVICT, life, 0, [ids[-1] for _, ids in evicted])
            if request is not None and group == self.group:
                request.table += blocks
                self._add(event.at, GROW, request.life, len(request.table))

    def _grouped_caching(self, event: ev.BlocksCached) -> None:
        if not self.others:
            self._cached(event)
            return
        if not self.block_tokens:
            return
        for number, group, block, hash_id, end in self.contents.cached(event):
            self.contents.hashes[block] = (hash_id,)
            request = self.requests.get(number)
            if request is None or not request.lives:
                continue
            life = request.life if request.life >= 0 else max(request.lives)
            if group != self.group:
                self._add(event.at, IN_GROUP, life, end, (group, hash_id))
            elif not end % self.block_tokens:
                self._add(event.at, CACHED, life, end // self.block_tokens - 1, (hash_id,))

    def _grouped_tables(self, event: pool_calls.TablesReported) -> None:
        if not self.others:
            self._reported(event)
            return
        rows = [
            number
            for request, group, computed, blocks in event.tables()
            if group == self.group
            for number in (request, group, computed, len(blocks), *blocks)
        ]
        self._reported(pool_calls.TablesReported(event.at, event.step, rows))


_HANDLERS: dict[type[ev.Event], Callable[[Any, Any], None]] = {
    **HANDLERS,
    ev.PoolSeen: GroupTraceReader._grouped_pool,
    pool_calls.BlocksTouched: GroupTraceReader._grouped_touch,
    pool_calls.BlocksAllocated: GroupTraceReader._grouped_allocation,
    ev.BlocksCached: GroupTraceReader._grouped_caching,
    pool_calls.TablesReported: GroupTraceReader._grouped_tables,
}
