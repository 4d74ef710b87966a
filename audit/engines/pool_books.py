"""What a pool hands out and hashes, read off the engine's own books instead of its calls.

These are most of a pool's calls, and a wrapper that does nothing costs a microsecond where it stands, for
what it is made of is out of the processor's caches by then. So where one pool serves one group of full
attention, and no connector promises tokens, neither is wrapped. A pool tells its collector of metrics which
blocks it hands out; where it has none, :class:`HandedOut` stands in its place. A block says itself what it
is hashed for, and :class:`Books` knows when to ask it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from kvledger.audit.engines.callers import Caller
from kvledger.audit.engines.pool_hooks import codes
from kvledger.audit.events import HASHED

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

    A block that a request decodes into is full so many steps after it was handed out, and is looked at then.
    That none was overlooked the manager's own counts show: their sum has grown by as many as were found.
    """

    def __init__(self, watch: PoolWatch) -> None:
        scheduler, (manager,), (pool,) = watch.scheduler, watch.managers, watch.pools
        kind = type(scheduler)
        self.with_outputs = not kind.__module__.startswith("vllm.") or any(
            "cache_blocks" in code.co_names for code in codes(kind, TAKING_OUTPUT)
        )
        """Blocks may be hashed when an output is taken, and not only when a step is scheduled."""
        self._watch = watch
        self._manager = manager
        self._pool = pool
        self._requests: dict[str, Any] = scheduler.requests
        self._size: int = manager.block_size
        self._decodes = self._size - 1 + self.with_outputs
        """In so many steps a block is full that was handed out to who decodes."""
        self._total = sum(manager.num_cached_block.values())
        self._settled = False
        """Nothing is hashed before the next step."""
        self._looked_up: str | None = None
        self._look_ups = 0
        self._touches = ""
        """Which operation touches the hits of who is admitted."""
        self._leaving: str | None = None
        self._going: dict[str, int] = {}
        """Requests whose tables may stay for a step yet, and how many of their blocks are hashed."""
        self._when = array("q", [NEVER]) * len(pool.blocks)
        """Of each block, in which step it is looked at; at another, ``_due`` has it from before."""
        self._due: dict[int, list[Any]] = {}
        self._at_once: set[int] = set()
        """Blocks that were hashed in the step in which they were handed out: their requests prefill."""
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

    def step_begins(self) -> None:
        """Blocks are handed out and hashed from now on."""
        self._settled = False
        self._looked_up, self._look_ups = None, 0
        self._gone()

    def looked_up(self, name: str) -> None:
        """A request's hits are known, and are touched next if it is admitted."""
        self._looked_up = name
        self._look_ups += 1

    def touched(self, blocks: list[Any]) -> Caller:
        """The hits of who was looked up last, or a pin: who touches them.

        What has been hashed in this step is told before, where any of them may be of it. To ask the stack for
        the names of requests costs more than all the rest of a touch, so it is asked once, for the operation.
        """
        watch, name = self._watch, self._looked_up
        if self._look_ups > 1 or any(self._when[block.block_id] != NEVER for block in blocks):
            self.settle()
        if name is None or self._manager.req_to_blocks.get(name):
            whose = watch.callers.caller()
        else:
            self._looked_up = None
            self._touches = self._touches or watch.callers.caller().by
            whose = Caller(name, self._manager.kv_cache_group_id, self._touches)
        if whose.request_id is not None:
            self._total += len(blocks)
        return whose

    def freed(self, blocks: list[Any]) -> Caller:
        """The blocks of who is leaving, or others': who gives them back. Those without a hash get none."""
        name, when = self._leaving, self._when
        for block in blocks:
            if block._block_hash is None:
                when[block.block_id] = NEVER
        if name is None or name in self._manager.req_to_blocks:
            return self._watch.callers.caller()
        self._leaving = None
        return Caller(name, self._manager.kv_cache_group_id, "free")

    def handed_out(self, blocks: list[Any], ids: list[int], *, in_between: bool) -> None:
        """What the pool has handed out; the hashes are settled.

        ``in_between``: the step is not over, and some may have been given back.
        """
        at_once = self._at_once
        if at_once or in_between:
            blocks = [block for block in blocks if block.ref_cnt and block.block_id not in at_once]
            ids = [block.block_id for block in blocks]
            at_once.clear()
        step, when = self._watch.step() + self._decodes, self._when
        for number in ids:
            when[number] = step
        if step in self._due:
            self._due[step] += blocks
        else:
            self._due[step] = blocks.copy()

    def leaves(self, name: str) -> None:
        """A request is about to give its blocks back: what was hashed of them comes before that."""
        self.settle()
        self._going[name] = self._manager.num_cached_block.get(name, 0)
        self._leaving = name if name in self._manager.req_to_blocks else None

    def _gone(self) -> None:
        """Those whose counts the manager has given up."""
        for name in [name for name in self._going if name not in self._manager.num_cached_block]:
            self._total -= self._going.pop(name)

    def deferred(self) -> None:
        """Who was about to leave keeps its blocks for a while."""
        self._leaving = None

    def scheduled(self, output: Any) -> None:
        """A step has been scheduled, and what was handed out in it is known."""
        self._settled = not self.with_outputs
        self._looked_up = None
        tokens, others = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        if others == len(tokens):
            return
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        others -= len(tokens) - len(admitted) + sum([tokens[name] for name in admitted])
        if others:  # who prefills further, or again; to look for them is to touch all names
            admitted = list(compress(tokens, map((1).__lt__, tokens.values())))
        step, size = self._watch.step(), self._size
        for name in admitted:
            request = self._requests[name]
            filled = request.num_computed_tokens
            if filled % size:
                left = size - filled % size + self.with_outputs if filled >= request.num_tokens else 1
                self._expect(step + left, [self._manager.req_to_blocks[name][filled // size]])

    def settle(self, *, ends: bool = False) -> None:
        """Write down what was hashed since the last time, or that not all of it was found.

        ``ends``: of what is due in this step nothing more will be hashed in it.
        """
        if self._settled:
            return
        step = self._watch.step()
        told: list[int] = []
        due = self._due.pop(step, None)
        if due is not None:
            late = self._look(told, due, step)
            if late:
                self._expect(step + ends, late)
        if self._going:
            self._gone()
        total = sum(self._manager.num_cached_block.values())
        more = total - self._total
        self._total = total
        if 3 * more != len(told):  # somebody prefills, or did not run in every step
            self._look_at_new(told, more)
            if 3 * more != len(told):
                self._look(told, list(chain.from_iterable(self._due.values())))
        log, group = self._watch.log, self._manager.kv_cache_group_id
        if told:
            unheard = log.repeats + (log.held is not None)
            log.calls += (HASHED, -1, group, 2 * (-1 - unheard), len(told), *told)
        if 3 * more != len(told):  # a block was hashed that nobody was handed, or by a way not known here
            log.calls += (HASHED, -1, group, -2, 0)

    def _look(self, told: list[int], blocks: list[Any], step: int = NEVER) -> list[Any]:
        """Write down those that have been hashed; the rest, as far as they were due in ``step``."""
        when, name, rest = self._when, self._watch.name, []
        for block in blocks:
            number = block.block_id
            due, hash_ = when[number], block._block_hash
            if due == NEVER:
                continue
            if hash_ is not None:
                when[number] = NEVER
                told += (number, name(hash_), block._block_hash_num_tokens)
            elif due == step:
                rest.append(block)
        return rest

    def _look_at_new(self, told: list[int], more: int) -> None:
        """Write down what was handed out and hashed in this step, of so many: the last handed out are it."""
        name, at_once = self._watch.name, self._at_once
        found: list[tuple[int, int, int]] = []
        for block in reversed(self._watch.untold.handed):
            if 3 * (more - len(found)) == len(told):
                break
            number, hash_ = block.block_id, block._block_hash
            if hash_ is not None and number not in at_once:
                at_once.add(number)
                self._when[number] = NEVER
                found.append((number, name(hash_), block._block_hash_num_tokens))
        told += chain.from_iterable(reversed(found))

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
        and told <= TOLD
        and "on_block_allocated" in allocates
        and getattr(pool, "metrics_collector", pool) is None
        and hasattr(pool.blocks[0], "_block_hash_num_tokens")
        and hasattr(manager, "num_cached_block")
    )
