"""What a pool hands out and hashes, read off the engine's own books instead of its calls.

These are most of a pool's calls, and a wrapper that does nothing costs a microsecond where it stands, for
what it is made of is out of the processor's caches by then. So where one pool serves one group of full
attention, and no connector promises tokens, neither is wrapped. A pool tells its collector of metrics which
blocks it hands out; where it has none, :class:`HandedOut` stands in its place. A block says itself what it
is hashed for, and :class:`Books` knows when to ask it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from kvledger.audit.engines.callers import Caller
from kvledger.audit.engines.pool_hooks import codes
from kvledger.audit.events import FREED, HASHED, TOUCHED

if TYPE_CHECKING:
    from kvledger.audit.engines.pools import PoolWatch

READ = ("get_new_blocks", "cache_full_blocks")
"""Methods of a pool that need no wrapper where :func:`readable`."""

TAKING_OUTPUT = ("update_from_output", "_update_request_with_output")
"""Where schedulers that run ahead of their outputs hash blocks, and others do not."""

TOLD = frozenset(("on_block_allocated", "on_block_accessed", "on_block_evicted"))
"""What a pool tells its collector of metrics."""

NEVER = -1
"""For the step of a block that is not to be looked at."""


class HandedOut:
    """A collector of metrics that keeps what is handed out. What it is called for is no Python of ours."""

    __slots__ = (*TOLD, "reset")

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.on_block_allocated = take
        self.on_block_accessed = self.on_block_evicted = callable  # takes one argument and does nothing
        self.reset = tuple  # takes none


class Books:
    """Which blocks of one pool are still to be hashed, and when.

    A block that a request decodes into is full so many steps after it was handed out. It is looked at when
    the engine is at rest next, or sooner where it is touched or given back. What is hashed of who prefills is
    told in the step that hashes it. That nothing was overlooked the manager's own counts show: their sum is
    that of what was found.
    """

    def __init__(self, watch: PoolWatch) -> None:
        scheduler, (manager,), (pool,) = watch.scheduler, watch.managers, watch.pools
        kind = type(scheduler)
        self._watch = watch
        self._manager = manager
        self._group: int = manager.kv_cache_group_id
        self._pool = pool
        self._requests: dict[str, Any] = scheduler.requests
        self._size: int = manager.block_size
        self._late = int(
            not kind.__module__.startswith("vllm.")
            or any("cache_blocks" in code.co_names for code in codes(kind, TAKING_OUTPUT))
        )
        """A block that is decoded into may be hashed when an output is taken: so many steps later."""
        self._decodes = self._size - 1 + self._late
        """In so many steps a block is full that was handed out to who decodes."""
        self._total = sum(manager.num_cached_block.values())
        """So many blocks of present tables are hashed, as far as that was found."""
        self._looked_up: str | None = None
        self._touches = ""
        """Which operation touches the hits of who is admitted."""
        self._prefill: dict[str, int] = dict(manager.num_cached_block)
        """Requests whose blocks are hashed as they are scheduled, and how many have been found."""
        self.prefills = False
        """Some of them ran in this step."""
        self._leaving: str | None = None
        self._going: dict[str, int] = {}
        """Requests whose tables may stay for a step yet, and how many of their blocks are hashed."""
        self._when = array("q", [NEVER]) * len(pool.blocks)
        """Of each block, in which step it is looked at; at another, ``_due`` has it from before."""
        self._due: dict[int, list[Any]] = {}
        for table in manager.req_to_blocks.values():
            self._expect(watch.step() + 1, [block for block in table if block._block_hash is None])
        self.collector = pool.metrics_collector = HandedOut(watch.untold.handed.append)

    def close(self) -> None:
        """Give the pool its collector back: none."""
        if self._pool.metrics_collector is self.collector:
            self._pool.metrics_collector = None

    def check(self) -> None:
        """Raises where what is handed out is no longer told."""
        if self._pool.metrics_collector is not self.collector:
            raise RuntimeError("the pool was given another collector of metrics")

    def looked_up(self, name: str) -> None:
        """A request's hits are known, and are touched next if it is admitted."""
        if self._going:
            self._gone()
        self._looked_up = name
        self._prefill[name] = 0

    def touched(self, blocks: list[Any]) -> None:
        """The hits of who was looked up last, or a pin.

        To ask the stack for the names of requests costs more than all the rest of a touch, so it is asked
        once, for the operation.
        """
        watch, name, prefill = self._watch, self._looked_up, self._prefill
        if watch.untold.later:
            watch.untold.catch_up()
        if len(prefill) > 1:
            self.prefilled()
        ids = self._seen(blocks)
        if name is None or self._manager.req_to_blocks.get(name):
            whose = watch.callers.caller()
        else:
            self._looked_up = None
            self._touches = self._touches or watch.callers.caller().by
            watch.untold.hits[name] = ids
            whose = Caller(name, self._group, self._touches)
        if whose.request_id is not None:
            self._total += len(blocks)
            if whose.request_id in prefill:
                prefill[whose.request_id] += len(blocks)
        watch.untold.call(TOUCHED, *whose, ids, [block.ref_cnt for block in blocks])

    def freed(self, blocks: list[Any]) -> None:
        """The blocks of who is leaving, or others'. Those without a hash get none."""
        watch, name = self._watch, self._leaving
        if watch.untold.later:
            watch.untold.catch_up()
        ids = self._seen(blocks, last=True)
        if name is None or name in self._manager.req_to_blocks:
            whose = watch.callers.caller()
        else:
            self._leaving = None
            whose = Caller(name, self._group, "free")
            if name not in self._manager.num_cached_block:
                self._total -= self._going.pop(name, 0)
        watch.untold.call(FREED, *whose, ids, [block.ref_cnt for block in blocks])

    def _seen(self, blocks: list[Any], *, last: bool = False) -> list[int]:
        """Their ids. Tells which of these were hashed. ``last``: the others will not be."""
        when = self._when
        ids = [block.block_id for block in blocks]
        told: list[int] = []
        for place, number in enumerate(ids):
            if when[number] != NEVER:
                hash_ = blocks[place]._block_hash
                if hash_ is not None:
                    told += (number, self._watch.name(hash_), blocks[place]._block_hash_num_tokens)
                if last or hash_ is not None:
                    when[number] = NEVER
        if told:
            self._tell(told)
        return ids

    def handed_out(self, step: int, blocks: list[Any], ids: Sequence[int], *, prefills: bool) -> None:
        """The pool has handed them out in ``step``, to be decoded into: all, unless somebody ``prefills``."""
        when = self._when
        if prefills:
            blocks = [b for b in blocks if b._block_hash is None and when[b.block_id] == NEVER]
            ids = [block.block_id for block in blocks]
        step += self._decodes
        for number in ids:
            when[number] = step
        if step in self._due:
            self._due[step] += blocks
        else:
            self._due[step] = blocks

    def leaves(self, name: str) -> None:
        """A request is about to give its blocks back."""
        if name in self._prefill:
            self.prefilled()
            del self._prefill[name]
        if self._going:
            self._gone()
        self._going[name] = self._manager.num_cached_block.get(name, 0)
        self._leaving = name if name in self._manager.req_to_blocks else None

    def _gone(self) -> None:
        """Those whose counts the manager has given up."""
        for name in [name for name in self._going if name not in self._manager.num_cached_block]:
            self._total -= self._going.pop(name)

    def deferred(self, blocks: list[Any]) -> None:
        """Who was about to leave keeps its blocks for a while."""
        self._leaving = None
        if self._watch.untold.later:
            self._watch.untold.catch_up()
        self._seen(blocks, last=True)

    def scheduled(self, output: Any) -> None:
        """A step has been scheduled, and who was handed what in it is not known yet."""
        self._looked_up = None
        tokens, prefill, requests = output.num_scheduled_tokens, self._prefill, self._requests
        others = output.total_num_scheduled_tokens - len(tokens)
        if others:
            others -= sum([tokens[name] - 1 for name in prefill if name in tokens])
        step, size, tables = self._watch.step(), self._size, self._manager.req_to_blocks
        if others:  # sessions, whose prompts grow; to look for them is to touch all names
            for name in compress(tokens, map((1).__lt__, tokens.values())):
                prefill.setdefault(name, (requests[name].num_computed_tokens - tokens[name]) // size)
        self.prefills = bool(prefill)
        if not prefill:
            return
        self.prefilled()
        for name in list(prefill):
            if name not in tokens:
                if not tables.get(name):  # it was not admitted
                    del prefill[name]
                continue
            request = requests[name]
            filled = request.num_computed_tokens
            if filled >= request.num_tokens:
                del prefill[name]
                if filled % size:
                    self._expect(step + size - filled % size + self._late, [tables[name][filled // size]])

    def settle(self) -> None:
        """Write down what else was hashed, or that not all of it was found."""
        step = self._watch.step()
        told: list[int] = []
        late: list[Any] = []
        for due in [due for due in self._due if due <= step]:
            late += self._look(told, self._due.pop(due), due)
        if late:
            self._expect(step + 1, late)
        if self._prefill:
            self.prefilled()
        if self._going:
            self._gone()
        total = sum(self._manager.num_cached_block.values())
        if 3 * (total - self._total) != len(told):  # somebody did not run in every step
            self._look(told, list(chain.from_iterable(self._due.values())))
        if told:
            self._tell(told)
        if total != self._total:  # a block was hashed that nobody was handed, or by a way not known here
            self._total = total
            self._watch.log.calls += (HASHED, -1, self._group, -2, 0)

    def _look(self, told: list[int], blocks: list[Any], step: int = NEVER) -> list[Any]:
        """Write down those that have been hashed; the rest, as far as they were due in ``step``."""
        when, name, rest = self._when, self._watch.name, []
        for block in blocks:
            number = block.block_id
            due = when[number]
            if due == NEVER:
                continue
            hash_ = block._block_hash
            if hash_ is not None:
                when[number] = NEVER
                told += (number, name(hash_), block._block_hash_num_tokens)
            elif due == step:
                rest.append(block)
        return rest

    def prefilled(self) -> None:
        """Tell what was hashed of who prefills."""
        manager, watch = self._manager, self._watch
        counts = manager.num_cached_block
        for name, known in self._prefill.items():
            count = counts.get(name, 0)
            if count > known:
                self._prefill[name] = count
                told: list[int] = []
                for block in manager.req_to_blocks[name][known:count]:
                    number, hash_ = block.block_id, block._block_hash
                    self._when[number] = NEVER
                    if hash_ is not None:
                        told += (number, watch.name(hash_), block._block_hash_num_tokens)
                if told:
                    self._tell(told, watch.number(name), self._requests[name].num_tokens)

    def _tell(self, told: list[int], request: int = -1, length: int = -1) -> None:
        """That these were hashed; without a request, for whose table they stand in."""
        log = self._watch.log
        if request < 0:
            length = -1 - log.repeats - (log.held is not None)
        self._total += len(told) // 3
        log.calls += (HASHED, request, self._group, 2 * length, len(told), *told)

    def _expect(self, step: int, blocks: list[Any]) -> None:
        """To be hashed in this step, as far as is known."""
        for block in blocks:
            self._when[block.block_id] = step
        self._due.setdefault(step, []).extend(blocks)


def readable(scheduler: Any, managers: tuple[Any, ...]) -> bool:
    """Whether :data:`READ` can be done without: vLLM since 0.24, without drafts and pipelines."""
    if scheduler is None or len(managers) != 1 or getattr(scheduler, "connector", None) is not None:
        return False
    (manager,) = managers
    pool = manager.block_pool
    told = {name for code in codes(type(pool)) for name in code.co_names if name.startswith("on_")}
    allocates = getattr(getattr(type(pool).get_new_blocks, "__code__", None), "co_names", ())
    return (
        type(manager).__name__ == "FullAttentionManager"
        and getattr(scheduler, "num_spec_tokens", -1) == 0
        and not getattr(scheduler, "use_pp", False)  # else a request does not run in every step
        and not getattr(scheduler.kv_cache_manager.coordinator, "enable_partial_hash_hits", False)
        and getattr(pool, "enable_caching", False)
        and manager.block_size > 1  # else blocks are full in the step that hands them out
        and told <= TOLD
        and "on_block_allocated" in allocates
        and getattr(pool, "metrics_collector", pool) is None
        and hasattr(pool.blocks[0], "_block_hash_num_tokens")
        and hasattr(manager, "num_cached_block")
    )
