"""Replay a block trace on a pool of another size, or with a second tier below it.

The pool works as vLLM's does. A block is held by tables, or free. A free block that was cached keeps its
content and can be hit until it is evicted, least recently used first; blocks without content are allocated
first. A table is released last block first, so the beginning of a prefix is evicted last. Two requests that
compute the same content at the same time have a block each.

What is taken from the recording: when requests are admitted and released, how long their tables are, and when
a block is full. So a replay does not know that a larger cache ends prefills sooner.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from .block_trace import ADMIT, CACHED, DROP, GROW, RELEASE, BlockTrace, TraceLife

EMPTY = -1
"""An entry of a table: a block that is not cached."""


class Tier:
    """A second cache below the pool: every block that is cached in the pool is written to it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        """How many blocks it holds."""
        self._hash_ids: OrderedDict[int, None] = OrderedDict()
        """The hash ids of its blocks, least recently used first."""

    def __contains__(self, hash_id: int) -> bool:
        return hash_id in self._hash_ids

    def use(self, hash_id: int) -> None:
        """A block is written to the tier, or read from it."""
        self._hash_ids[hash_id] = None
        self._hash_ids.move_to_end(hash_id)
        if len(self._hash_ids) > self.blocks:
            self._hash_ids.popitem(last=False)


class Replayed(msgspec.Struct):
    """What a replay of a trace gave. Hits are blocks, by life."""

    hits: list[int]
    tier_hits: list[int]
    evicted: int = 0
    """Cached blocks that were evicted."""
    short: int = 0
    """Blocks that requests needed when every block was held: the engine would have had to preempt."""


class SimulatedPool:
    """A pool of ``blocks`` blocks, with a tier of ``tier_blocks`` below it. None: no limit; 0: no tier."""

    def __init__(self, trace: BlockTrace, blocks: int | None, tier_blocks: int = 0) -> None:
        self._trace = trace
        self._limited = blocks is not None
        """Whether the pool has a size; without one, no block is evicted."""
        self._empty = blocks or 0
        """Free blocks without content."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The numbers of free blocks with content, least recently used first."""
        self._tier = Tier(tier_blocks) if tier_blocks else None
        """The cache below the pool; None: there is none."""
        self._last = 0
        """The number of the block that was cached last; 0: none was."""
        self._borrowed = 0
        """Blocks in use beyond the size of the pool."""
        self._tables: dict[int, list[int]] = {}
        """By life: for each block its number, or ``EMPTY``."""
        self._references: dict[int, int] = {}
        """By number: how many tables hold a cached block."""
        self._hash_of: dict[int, int] = {}
        """By number: the hash id of each cached block."""
        self._numbers_of: dict[int, list[int]] = {}
        """By hash id: the blocks that have this content, oldest first."""
        lives = len(trace.lives)
        self.result = Replayed([0] * lives, [0] * lives)
        """What the replay counted so far."""

    def run(self) -> Replayed:
        """Replay the whole trace."""
        for kind, life, first, second in self._trace.operations:
            if kind == CACHED:
                self._cached(life, first, second)
            elif kind == GROW:
                self._grow(life, first)
            elif kind == ADMIT:
                self._admit(life)
            elif kind == RELEASE:
                self._release(life)
            elif kind == DROP:
                self._drop(life)
            else:
                self._reset()
        return self.result

    # --- operations -----------------------------------------------------------------------------------

    def _admit(self, number: int) -> None:
        life = self._trace.lives[number]
        table = self._tables[number] = []
        hashes = self._trace.requests[life.request].hashes[: self._trace.limit(life)]
        numbers_of, references = self._numbers_of, self._references
        for hash_id in hashes:
            numbers = numbers_of.get(hash_id)
            if numbers is None:
                break
            block = numbers[0]
            references[block] = references.get(block, 0) + 1
            self._idle.pop(block, None)
            table.append(block)
        self.result.hits[number] = len(table)
        if self._tier is not None:
            self._read_tier(number, hashes[len(table) :])
        if life.hit_blocks > len(table):
            self._compute_missed(number, life, table)

    def _read_tier(self, number: int, hashes: list[int]) -> None:
        assert self._tier is not None
        for hash_id in hashes:
            if hash_id not in self._tier:
                break
            self._tier.use(hash_id)
            self.result.tier_hits[number] += 1

    def _compute_missed(self, number: int, life: TraceLife, table: list[int]) -> None:
        """The recorded engine hit more blocks than this pool has: the request computes and caches them."""
        first = len(table)
        self._grow(number, life.hit_blocks)
        for index in range(first, life.hit_blocks):
            self._cached(number, index, self._trace.requests[life.request].hashes[index])

    def _grow(self, number: int, length: int) -> None:
        table = self._tables.get(number)
        if table is None:
            return
        if length > len(table):
            self._allocate(length - len(table))
            table += [EMPTY] * (length - len(table))

    def _cached(self, number: int, index: int, hash_id: int) -> None:
        table = self._tables.get(number)
        if table is None or index >= len(table) or table[index] != EMPTY or not hash_id:
            return
        self._last += 1
        block = table[index] = self._last
        self._hash_of[block] = hash_id
        self._numbers_of.setdefault(hash_id, []).append(block)
        self._references[block] = 1
        if self._tier is not None:
            self._tier.use(hash_id)

    def _release(self, number: int) -> None:
        references = self._references
        for block in reversed(self._tables.pop(number, ())):
            if block == EMPTY:
                self._free()
            elif references[block] > 1:
                references[block] -= 1
            else:
                del references[block]
                if block not in self._hash_of:
                    self._free()
                else:
                    self._idle[block] = None
                    if self._borrowed:
                        self._repay()

    def _drop(self, hash_id: int) -> None:
        for block in self._numbers_of.pop(hash_id, ()):
            del self._hash_of[block]
            self._idle.pop(block, None)
            if block not in self._references:
                self._free()

    def _reset(self) -> None:
        for hash_id in list(self._numbers_of):
            self._drop(hash_id)

    # --- blocks ---------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> None:
        if not self._limited:
            return
        empty = min(count, self._empty)
        self._empty -= empty
        for _ in range(count - empty):
            if not self._evict():
                self._borrowed += 1
                self.result.short += 1

    def _evict(self) -> bool:
        """Evict the content of a free block; False if every block is held."""
        if not self._idle:
            return False
        block, _ = self._idle.popitem(last=False)
        hash_id = self._hash_of.pop(block)
        numbers = self._numbers_of[hash_id]
        numbers.remove(block)
        if not numbers:
            del self._numbers_of[hash_id]
        self.result.evicted += 1
        return True

    def _free(self) -> None:
        """A block without content is free."""
        if self._borrowed:
            self._borrowed -= 1
        else:
            self._empty += 1

    def _repay(self) -> None:
        """A block with content is free while more blocks are in use than there are: evict one."""
        if self._evict():
            self._borrowed -= 1
