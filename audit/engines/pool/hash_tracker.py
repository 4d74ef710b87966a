"""What a pool hands out and hashes, read off the engine's own books instead of its calls.

These are most of a pool's calls, and a wrapper that does nothing costs a microsecond where it stands, for
what it is made of is out of the processor's caches by then. So where one pool serves one group of full
attention, and no connector promises tokens, neither is wrapped. A pool tells its collector of metrics which
blocks it hands out; where it has none, :class:`HandedOut` stands in its place. A block says itself what it
is hashed for, and :class:`Books` knows when to ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ...events import CACHED, FREED, TOUCHED
from .signatures import codes

if TYPE_CHECKING:
    from .watch import PoolWatch

READ = ("get_new_blocks", "cache_full_blocks")
"""Methods of a pool that need no wrapper where :func:`readable`."""

TAKING_OUTPUT = ("update_from_output", "_update_request_with_output")
"""Where schedulers that run ahead of their outputs hash blocks, and others do not."""

TOLD = frozenset(("on_block_allocated", "on_block_accessed", "on_block_evicted"))
"""What a pool tells its collector of metrics."""

NEVER = 0
"""For the step of a block that is not to be looked at."""

SOON = 1
"""For that of one that is, whenever it is seen again."""


class HandedOut:
    """A collector of metrics that keeps what is handed out. What it is called for is no Python of ours."""

    __slots__ = (*TOLD, "reset")

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.on_block_allocated = take
        self.on_block_accessed = self.on_block_evicted = callable  # takes one argument and does nothing
        self.reset = tuple  # takes none


class Books:
    """Which blocks of one pool may have been hashed, and when to look at them.

    A block that a request decodes into is full so many steps after it was handed out, any other perhaps at
    once. It is looked at when the engine is at rest next, or sooner where it is touched or given back. That
    none was overlooked the manager's own counts show: their sum is that of what was found.
    """

    def __init__(self, watch: PoolWatch) -> None:
        scheduler, (manager,), (pool,) = watch.scheduler, watch.managers, watch.pools
        kind = type(scheduler)
        self._watch = watch
        self._manager = manager
        self._group: int = manager.kv_cache_group_id
        self._pool = pool
        self._decodes: int = manager.block_size - 1
        """In so many steps a block is full that was handed out to who decodes."""
        if not kind.__module__.startswith("vllm.") or any(
            "cache_blocks" in code.co_names for code in codes(kind, TAKING_OUTPUT)
        ):
            self._decodes += 1  # it may be hashed when that step's output is taken
        self._total = sum(manager.num_cached_block.values())
        """So many blocks of present tables are hashed, as far as that was found."""
        self._looked_up: str | None = None
        self._touches = ""
        """Which operation touches the hits of who is admitted."""
        self._leaving: str | None = None
        self._going: dict[str, int] = {}
        """Requests whose tables may stay for a step yet, and how many of their blocks are hashed."""
        self._when = bytearray(len(pool.blocks))
        """Of each block, in which step it is looked at (:func:`_byte`); else ``_due`` has it from before."""
        self._due: dict[int, list[Any]] = {}
        self._at_once: set[int] = set()
        """Blocks that were found to be hashed before it was told who took them."""
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

    def looked_up(self, name: str | None) -> None:
        """A request's hits are known, and are touched next if it is admitted. None: nobody is any more."""
        if self._going:
            self._gone()
        self._looked_up = name

    def touched(self, blocks: list[Any]) -> None:
        """The hits of who was looked up last, or a pin.

        To ask the stack for the names of requests costs more than all the rest of a touch, so it is asked
        once, for the operation.
        """
        watch, untold, name = self._watch, self._watch.untold, self._looked_up
        if untold.later:
            untold.catch_up()
        ids = [block.block_id for block in blocks]
        if untold.handed:
            self._look_at_new(ids)
        if any(map(self._when.__getitem__, ids)):
            self._seen(ids, blocks, last=False)
        if name is None or self._manager.req_to_blocks.get(name):
            name, group, by = watch.callers.caller()
        else:
            self._looked_up = None
            self._touches = by = self._touches or watch.callers.caller().by
            group = self._group
            untold.hits[name] = ids
        if name is not None:
            self._total += len(ids)
        untold.call(TOUCHED, name, group, by, ids, [block.ref_cnt for block in blocks])

    def freed(self, blocks: list[Any]) -> None:
        """The blocks of who is leaving, or others'. Those without a hash get none."""
        watch, untold, name, group, by = self._watch, self._watch.untold, self._leaving, self._group, "free"
        if untold.later:
            untold.catch_up()
        ids = [block.block_id for block in blocks]
        if untold.handed:
            self._look_at_new(ids)
        if name is None or name in self._manager.req_to_blocks:
            self._seen(ids, blocks, last=True)
            name, group, by = watch.callers.caller()
        else:
            # They are a table from its end on, and what is to be looked at is at its end.
            if to_see := list(takewhile(self._when.__getitem__, ids)):
                self._seen(to_see, blocks, last=True)
            self._leaving = None
            if name not in self._manager.num_cached_block:
                self._total -= self._going.pop(name, 0)
        untold.call(FREED, name, group, by, ids, [block.ref_cnt for block in blocks])

    def deferred(self, blocks: list[Any]) -> None:
        """Who was about to leave keeps its blocks for a while."""
        self._leaving = None
        ids = [block.block_id for block in blocks]
        if self._watch.untold.later:
            self._watch.untold.catch_up()
        if self._watch.untold.handed:
            self._look_at_new(ids)
        self._seen(ids, blocks, last=True)

    def _look_at_new(self, ids: list[int]) -> None:
        """Have those of them looked at that were handed out just now, and to whom is not told yet."""
        for number in set(ids).intersection(self._watch.untold.handed_ids()):
            if number not in self._at_once:
                self._when[number] = SOON

    def _seen(self, ids: list[int], blocks: list[Any], *, last: bool) -> None:
        """Tell which of these were hashed. ``last``: the others will not be."""
        when = self._when
        told: list[int] = []
        for number, block in zip(ids, blocks, strict=False):
            if when[number] != NEVER:
                hash_ = block._block_hash
                if hash_ is not None:
                    told += (number, self._watch.name(hash_), block._block_hash_num_tokens)
                    if self._watch.untold.handed:
                        self._at_once.add(number)
                if last or hash_ is not None:
                    when[number] = NEVER
        if told:
            self._tell(told)

    def handed_out(self, step: int, blocks: list[Any], ids: list[int], decode: int) -> None:
        """The pool has handed them out in ``step``, the first ``decode`` of them to who decodes."""
        full, due, when = step + self._decodes, self._due, self._when
        byte = _byte(full)
        for number in ids[:decode]:
            when[number] = byte
        byte = _byte(step)
        for number in ids[decode:]:
            when[number] = byte
        due.setdefault(full, []).extend(blocks[:decode])
        due.setdefault(step, []).extend(blocks[decode:])
        for number in self._at_once:
            when[number] = NEVER
        self._at_once.clear()

    def leaves(self, name: str) -> None:
        """A request is about to give its blocks back."""
        if self._going:
            self._gone()
        self._going[name] = self._manager.num_cached_block.get(name, 0)
        self._leaving = name if name in self._manager.req_to_blocks else None

    def _gone(self) -> None:
        """Those whose counts the manager has given up."""
        for name in [name for name in self._going if name not in self._manager.num_cached_block]:
            self._total -= self._going.pop(name)

    def settle(self) -> None:
        """Write down what else was hashed, or that not all of it was found."""
        step = self._watch.step()
        told: list[int] = []
        late: list[Any] = []
        for due in [due for due in self._due if due <= step]:
            late += self._look(told, self._due.pop(due), due)
        if late:
            self._expect(step + 1, late)
        if self._going:
            self._gone()
        total = sum(self._manager.num_cached_block.values())
        if 3 * (total - self._total) != len(told):  # somebody did not run in every step
            for due, blocks in self._due.items():
                self._due[due] = self._look(told, blocks, due)
        if told:
            self._tell(told)
        if total != self._total:  # a block was hashed that nobody was handed, or by a way not known here
            self._total = total
            self._watch.log.calls += (CACHED, -1, self._group, -2, 0)

    def _look(self, told: list[int], blocks: list[Any], step: int) -> list[Any]:
        """Write down those due in ``step`` that have been hashed; the rest."""
        when, name, byte = self._when, self._watch.name, _byte(step)
        rest: list[Any] = []
        for block in blocks:
            number = block.block_id
            if when[number] == byte:  # else it has been looked at, or is due again
                hash_ = block._block_hash
                if hash_ is None:
                    rest.append(block)
                else:
                    when[number] = NEVER
                    told += (number, name(hash_), block._block_hash_num_tokens)
        return rest

    def _tell(self, told: list[int]) -> None:
        """That these were hashed, for whose table they stand in: as long as all its outputs make it."""
        log = self._watch.log
        unheard = log.repeats + (log.held is not None)
        self._total += len(told) // 3
        log.calls += (CACHED, -1, self._group, 2 * (-1 - unheard), len(told), *told)

    def _expect(self, step: int, blocks: list[Any]) -> None:
        """To be hashed in this step, as far as is known."""
        for block in blocks:
            self._when[block.block_id] = _byte(step)
        self._due.setdefault(step, []).extend(blocks)


def _byte(step: int) -> int:
    """Stands for a step among those that come soon: of a byte each, those of a pool stay in the caches."""
    return step % 255 + 1


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
        and told <= TOLD
        and "on_block_allocated" in allocates
        and getattr(pool, "metrics_collector", pool) is None
        and hasattr(pool.blocks[0], "_block_hash_num_tokens")
        and hasattr(manager, "num_cached_block")
    )
