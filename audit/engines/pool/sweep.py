"""How pools and tables stand, stated in turn: what no call of a pool shows is seen here.

A count that is changed by hand, a queue that is mended: when the engine is at rest ``SWEEP_BLOCKS``
blocks of each pool are stated, and the next time the tables of ``SWEEP_TABLES`` requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ... import events as ev
from .hash_ids import cache_map

if TYPE_CHECKING:
    from .watch import PoolWatch

SWEEP_BLOCKS = 64
"""Blocks of each pool that are stated every other time that the engine is at rest."""

SWEEP_TABLES = 4
"""Requests whose tables are stated the times between: fewer where these hold more than ``SWEEP_BLOCKS``."""

WHOLE = 2
"""Of a group: a hit needs every block below it."""

POSITIONAL = frozenset(
    ("ChunkedLocalAttentionManager", "FullAttentionManager", "RSWAManager", "SlidingWindowManager")
)
"""Managers in whose tables a block's place is that of its positions."""


class Sweep:
    """States what the pools of one watch hold, some of it each time."""

    def __init__(self, watch: PoolWatch) -> None:
        self._watch = watch
        self._next_block = [0] * len(watch.pools)
        self._next_table = 0
        self._tables_next = False

    def restart(self) -> None:
        """Where a segment begins: say what pools there are; blocks and tables follow in turn."""
        watch = self._watch
        for number, pool in enumerate(watch.pools):
            null = getattr(pool, "null_block", None)
            groups: list[int] = []
            for manager in watch.managers:
                if manager.block_pool is pool:
                    name = type(manager).__name__
                    places = WHOLE if name == "FullAttentionManager" else int(name in POSITIONAL)
                    groups += (manager.kv_cache_group_id, manager.block_size, places)
            seen = ev.PoolSeen(
                at=watch.log.now(),
                step=watch.step(),
                pool=number,
                blocks=pool.num_gpu_blocks,
                null_block=-1 if null is None else null.block_id,
                free_blocks=pool.get_num_free_blocks(),
                cached_hashes=len(cache_map(pool)),
                groups=groups,
            )
            watch.say(seen)
        self._next_table = 0

    def at_rest(self) -> None:
        """Some blocks, or some tables, in turn."""
        watch = self._watch
        self._tables_next = not self._tables_next
        try:
            if watch.books is not None:
                watch.books.check()
            if self._tables_next:
                for number, pool in enumerate(watch.pools):
                    first = self._next_block[number]
                    part = pool.blocks[first : first + SWEEP_BLOCKS]
                    end = first + len(part)
                    self._next_block[number] = end if end < len(pool.blocks) else 0
                    self.state_blocks(number, first, part)
            else:
                self.state_tables(self._next_tables(watch.scheduler.running))
        except Exception as error:  # an observer must never stop the engine
            watch.fail("the sweep of the pool", error)

    def _next_tables(self, running: list[Any]) -> list[str]:
        """The next requests' names: at least one, however long its table is."""
        first = self._next_table if self._next_table < len(running) else 0
        names: list[str] = []
        room = SWEEP_BLOCKS
        for request in running[first : first + SWEEP_TABLES]:
            name = request.request_id
            room -= sum(len(manager.req_to_blocks.get(name, ())) for manager in self._watch.managers)
            if names and room < 0:
                break
            names.append(name)
        self._next_table = first + len(names)
        return names

    def state_tables(self, names: Iterable[str]) -> None:
        """Say which blocks stand in these requests' tables, once each."""
        watch = self._watch
        rows: list[int] = []
        names = dict.fromkeys(names)  # a scheduler that raised may hold one twice
        requests = watch.scheduler.requests if watch.scheduler is not None else {}
        for manager in watch.managers:
            tables, group = manager.req_to_blocks, manager.kv_cache_group_id
            for name in names:
                table = tables.get(name)
                if table:
                    computed = requests[name].num_computed_tokens if name in requests else -1
                    rows += (watch.number(name), group, computed, len(table))
                    rows += [block.block_id for block in table]
        if rows:
            watch.untold.rows += (ev.TABLES_REPORTED, -1, -1, 0, len(rows), *rows)

    def state_blocks(self, number: int, first: int, part: list[Any]) -> None:
        """Say how these blocks of a pool, in a row, stand."""
        watch = self._watch
        pool = watch.pools[number]
        cache = cache_map(pool)
        get = cache.get
        states = [
            block.ref_cnt * 8
            + (block.next_free_block is not None)
            + ((h := block._block_hash) is not None and (6 if get(h) is block else _mapped(get(h), block)))
            for block in part
        ]
        free = pool.get_num_free_blocks()
        hashes = -1 if number in watch.parted else len(cache)  # whose several names are not told apart
        watch.say(ev.BlockStatesReported(watch.log.now(), watch.step(), number, first, states, free, hashes))

    def state_all(self) -> None:
        """Say how every block stands, and every table: for the end, and for tests."""
        watch = self._watch
        for number, pool in enumerate(watch.pools):
            self.state_blocks(number, 0, pool.blocks)
        if watch.scheduler is not None:
            self.state_tables([request.request_id for request in watch.scheduler.running])


def _mapped(found: Any, block: Any) -> int:
    """2 for a hash, and 4 where the cache map leads from it to several blocks and this is one."""
    return 6 if type(found) is dict and block.block_id in found else 2
