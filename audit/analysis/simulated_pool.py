"""Replay a block trace on a pool of another size, another eviction policy, or with a second tier.

The pool works as vLLM's does. A block is held by tables, or free. A free block that was cached keeps its
content and can be hit until it is evicted; blocks without content are allocated first. A table is released
last block first, so the beginning of a prefix is evicted last. Two requests that compute the same content at
the same time have a block each.

What is taken from the recording: when requests are admitted and released, how long their tables are, and when
a block is full. So a replay does not know that a larger cache ends prefills sooner.

Which free block is evicted is decided by a :class:`Policy`, which is not in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from .block_trace import ADMIT, CACHED, DROP, GROW, RELEASE, BlockTrace, TraceLife

EMPTY = -1
"""An entry of a table: a block that is not cached."""


class Policy(Protocol):
    """The order in which cached blocks are evicted. A block is a number, and new content a new number."""

    def use(self, block: int) -> None:
        """A block is no longer in use: add it, or count one more use of it."""

    def evict(self) -> int:
        """Remove the block that is evicted next, and return it."""

    def remove(self, block: int) -> None:
        """Remove a block if it is here."""

    def __len__(self) -> int:
        """How many blocks are here."""


MakePolicy = Callable[[int], Policy]
"""Makes a policy for a cache of so many blocks."""


class NeverEvicts:
    """The policy of a pool that is never full."""

    def use(self, block: int) -> None:
        """See :class:`Policy`."""

    def evict(self) -> int:
        """See :class:`Policy`."""
        raise AssertionError("a pool without a limit evicts nothing")

    def remove(self, block: int) -> None:
        """See :class:`Policy`."""

    def __len__(self) -> int:
        return 0


class Tier:
    """A second cache below the pool: every block that is cached in the pool is written to it."""

    def __init__(self, blocks: int, policy: Policy) -> None:
        self.blocks = blocks
        """How many blocks it holds."""
        self._policy = policy
        self._number_of: dict[int, int] = {}
        """The policy's number of each hash id in the tier."""
        self._hash_of: dict[int, int] = {}
        """The hash id of each of the policy's numbers."""
        self._last = 0
        """The number of the newest block; 0: none was written yet."""

    def __contains__(self, hash_id: int) -> bool:
        return hash_id in self._number_of

    def use(self, hash_id: int) -> None:
        """A block is written to the tier, or read from it."""
        number = self._number_of.get(hash_id)
        if number is None:
            self._last += 1
            number = self._number_of[hash_id] = self._last
            self._hash_of[number] = hash_id
        self._policy.use(number)
        while len(self._policy) > self.blocks:
            del self._number_of[self._hash_of.pop(self._policy.evict())]


class Replayed(msgspec.Struct):
    """What a replay of a trace gave. Hits are blocks, by life."""

    hits: list[int]
    tier_hits: list[int]
    evicted: int = 0
    """Cached blocks that were evicted."""
    short: int = 0
    """Blocks that requests needed when every block was held: the engine would have had to preempt."""
    most_held: int = 0
    """The largest number of blocks that tables held at one time."""


class SimulatedPool:
    """A pool of ``blocks`` blocks; None: no limit."""

    def __init__(
        self,
        trace: BlockTrace,
        blocks: int | None,
        policy: Policy,
        *,
        tier: Tier | None = None,
        keep_preempted: bool = False,
    ) -> None:
        self._trace = trace
        self._limited = blocks is not None
        """Whether the pool has a size; without one, no block is evicted."""
        self._empty = blocks or 0
        """Free blocks without content."""
        self._policy = policy
        """Free blocks with content, and some that are held again."""
        self._tier = tier
        """The cache below the pool; None: there is none."""
        self._keep_preempted = keep_preempted
        """Whether a preempted request keeps its table, as if there had been enough blocks."""
        self._last = 0
        """The number of the block that was cached last; 0: none was."""
        self._borrowed = 0
        """Blocks in use beyond the size of the pool."""
        self._held = 0
        """Blocks that are in a table, each counted once."""
        self._tables: dict[int, list[int]] = {}
        """By life: for each block its number, or ``EMPTY``."""
        self._references: dict[int, int] = {}
        """By number: how many tables hold a cached block."""
        self._hash_of: dict[int, int] = {}
        """By number: the hash id of each cached block."""
        self._numbers_of: dict[int, list[int]] = {}
        """By hash id: the blocks that have this content, oldest first."""
        self._stands_for: dict[int, int] = {}
        """With ``keep_preempted``: the life whose table a later life of the same request continues."""
        self._kept: dict[int, int] = {}
        """With ``keep_preempted``: by request, the life that was preempted and keeps its table."""
        lives = len(trace.lives)
        self.result = Replayed([0] * lives, [0] * lives)
        """What the replay counted so far."""

    def run(self) -> Replayed:
        """Replay the whole trace."""
        for kind, life, first, second in self._trace.operations:
            if kind == CACHED:
                self._cached(self._stands_for.get(life, life), first, second)
            elif kind == GROW:
                self._grow(self._stands_for.get(life, life), first)
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
        if life.request in self._kept:
            self._stands_for[number] = self._kept.pop(life.request)
            return
        table = self._tables[number] = []
        hashes = self._trace.requests[life.request].hashes[: self._trace.limit(life)]
        numbers_of, references, free = self._numbers_of, self._references, 0
        for hash_id in hashes:
            numbers = numbers_of.get(hash_id)
            if numbers is None:
                break
            block = numbers[0]
            count = references.get(block, 0)
            references[block] = count + 1
            free += not count
            table.append(block)
        self._count_held(free)
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
        life = self._trace.lives[number]
        number = self._stands_for.pop(number, number)
        if self._keep_preempted and life.preempted:
            self._kept[life.request] = number
            return
        references, use = self._references, self._policy.use
        for block in reversed(self._tables.pop(number, ())):
            if block == EMPTY:
                self._held -= 1
                self._free()
            elif references[block] > 1:
                references[block] -= 1
            else:
                del references[block]
                self._held -= 1
                if block not in self._hash_of:
                    self._free()
                else:
                    use(block)
                    if self._borrowed:
                        self._repay()

    def _drop(self, hash_id: int) -> None:
        for block in self._numbers_of.pop(hash_id, ()):
            del self._hash_of[block]
            self._policy.remove(block)
            if block not in self._references:
                self._free()

    def _reset(self) -> None:
        for hash_id in list(self._numbers_of):
            self._drop(hash_id)

    # --- blocks ---------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> None:
        self._count_held(count)
        if not self._limited:
            return
        empty = min(count, self._empty)
        self._empty -= empty
        for _ in range(count - empty):
            if not self._evict():
                self._borrowed += 1
                self.result.short += 1

    def _count_held(self, count: int) -> None:
        self._held += count
        if self._held > self.result.most_held:
            self.result.most_held = self._held

    def _evict(self) -> bool:
        """Evict the content of a free block; False if every block is held."""
        while len(self._policy):
            block = self._policy.evict()
            if block in self._references:
                continue  # held again since; the policy gets it back when it is released
            hash_id = self._hash_of.pop(block)
            numbers = self._numbers_of[hash_id]
            numbers.remove(block)
            if not numbers:
                del self._numbers_of[hash_id]
            self.result.evicted += 1
            return True
        return False

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
