"""Blocks of v1 engines, at level ``blocks``: what each pool is called for, by whom, and how it stands.

Every pool of the engine is wrapped, and the few scheduler methods in which tables come or go. A call
of a pool becomes one event with all its block ids. What happens beneath these calls (a count that is
changed by hand, a queue that is mended) is seen by the sweep: ``SWEEP_BLOCKS`` blocks are stated every
time the engine is at rest, in turn, and the tables of ``SWEEP_TABLES`` requests.

These events go straight to the sink: equal steps stay counted, and are told when they end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from kvledger.audit import events as ev
from kvledger.audit.engines import callers, pool_calls
from kvledger.audit.engines.callers import Caller, Callers
from kvledger.audit.engines.steps import StepLog
from kvledger.audit.hooks import EngineMismatch, Hook, Wrapping, check

SWEEP_BLOCKS = 64
"""Blocks of each pool that are stated whenever the engine is at rest (every fourth step)."""

SWEEP_TABLES = 4
"""Requests whose tables are stated then."""

POSITIONAL = frozenset(
    ("ChunkedLocalAttentionManager", "FullAttentionManager", "RSWAManager", "SlidingWindowManager")
)
"""Managers in whose tables a block's place is that of its positions."""

_FULL = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id")
_PART = ("request", "block", "num_tokens", "kv_cache_group_id", "block_size")

POOL: tuple[Hook, ...] = (
    Hook("", "get_new_blocks", (("num_blocks",),)),
    Hook("", "touch", (("blocks",),)),
    Hook("", "free_blocks", (("ordered_blocks",), ("ordered_blocks", "prepend"))),
    Hook("", "unpin_blocks", (("blocks", "on_reuse"),), optional=True),  # since 0.30
    Hook("", "cache_full_blocks", (_FULL, (*_FULL, "block_mask"))),
    Hook("", "cache_partial_block", (_PART, (*_PART, "replace_existing_hashes")), optional=True),  # 0.24
    Hook("", "move_block_hashes", (("src_block", "dst_block"),), optional=True),  # since 0.27
    Hook("", "_maybe_evict_cached_block", (("block",),)),
    Hook("", "reset_prefix_cache", ((),)),
)
MANAGER: tuple[Hook, ...] = (
    Hook("", "_apply_cow", (("request_id", "block_idx", "source_block", "cow_block"),), optional=True),
)
SCHEDULER: tuple[Hook, ...] = (
    Hook("", "schedule", (), after="scheduled"),
    Hook("", "_free_blocks", (("request",),), after="left"),
)
ALL_GROUPS: tuple[Hook, ...] = (
    Hook("", "pop_blocks_for_free", (("request",),), after="deferred", optional=True),  # since 0.24
)


class _OnInstance:
    """A pool's method, wrapped on the pool itself: it is called too often for a dispatcher.

    An attribute that is set stands beside the pool's others, and costs them nothing; see
    :class:`~kvledger.audit.hooks.Dispatcher` for what would.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        self.owner = owner
        self.name = name
        self.wrapper = make(getattr(owner, name))
        setattr(owner, name, self.wrapper)

    @staticmethod
    def fits(owner: Any, name: str) -> bool:
        """Whether nobody has set it on the object before."""
        return getattr(getattr(owner, name), "__func__", None) is getattr(type(owner), name, None)

    def undo(self) -> bool:
        """Take it off; False if somebody has wrapped it again since (ours then passes through)."""
        if getattr(self.owner, self.name) is not self.wrapper:
            return False
        delattr(self.owner, self.name)
        return True


def unreadable(managers: Iterable[Any]) -> list[str]:
    """Managers whose blocks wander between tables and pools by ways that no call of a pool shows."""
    names = {type(manager).__name__ for manager in managers}
    return [f"the blocks of a {name} can't be followed" for name in sorted(names) if "HiSparse" in name]


def differences(scheduler: Any) -> list[str]:
    """What a scheduler lacks, or has otherwise, of what level ``blocks`` relies on."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", None)
    if not managers:
        return ["it has no managers of single KV cache groups"]
    found = unreadable(managers)
    for table, owner in (
        (POOL, managers[0].block_pool),
        (MANAGER, managers[0]),
        (ALL_GROUPS, manager),
        (SCHEDULER, scheduler),
    ):
        try:
            check(table, owner)
        except EngineMismatch as mismatch:
            found.append(str(mismatch).partition(": ")[2])
    return found


class PoolWatch:
    """Watches the pools of one scheduler, or of a KV cache manager alone.

    ``step()`` is the number of the present step. ``failed`` is told when an observer raises, which
    ends the watch. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped.
    """

    def __init__(
        self,
        scheduler: Any,
        manager: Any,
        log: StepLog,
        step: Callable[[], int],
        failed: Callable[[str, Exception, bool], None],
        *,
        stacks: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._manager = manager
        self.managers: tuple[Any, ...] = tuple(manager.coordinator.single_type_managers)
        if found := unreadable(self.managers):
            raise EngineMismatch("; ".join(found))
        self.pools: list[Any] = list(dict.fromkeys(found.block_pool for found in self.managers))
        self.inside = False
        """Whether the pool is called by a call that is told as a whole."""
        self.callers = Callers(__name__, callers.__name__, pool_calls.__name__, Wrapping.__module__)
        self._log = log
        self._step = step
        self._failed = failed
        self._stacks = stacks
        self._numbers: dict[str, int] = {}
        """Requests whose tables have not been told gone, also those that the log has forgotten."""
        self._names: list[dict[int, int]] = [{} for _ in self.pools]
        self._next_name = 0
        self.parted: set[int] = set()
        """Pools in which a block was hashed for a part of its tokens: one block, several hashes."""
        self._cursors = [0] * len(self.pools)
        self._table_cursor = 0
        self._taken: list[int] = []
        self._taken_by = (0, "")
        self._hashed: list[int] = []
        self._hashed_by = (0, False)
        self._wrappings: list[Wrapping | _OnInstance] = []
        self._active = True
        try:
            self._wrap()
        except Exception:
            self.remove()
            raise

    def _wrap(self) -> None:
        rows: list[tuple[Any, str, Callable[[Callable[..., Any]], Any]]] = []
        for number, pool in enumerate(self.pools):
            for hook, owner in check(POOL, pool):
                wrapper = pool_calls.WRAPPERS[hook.method]
                rows.append((owner, hook.method, functools.partial(wrapper, self, number)))
        for manager in self.managers:
            for hook, owner in check(MANAGER, manager):
                rows.append((owner, hook.method, self._after(functools.partial(self.copied, manager))))
        for table, root in ((ALL_GROUPS, self._manager), (SCHEDULER, self.scheduler)):
            for hook, owner in check(table, root) if root is not None else ():
                rows.append((owner, hook.method, self._after(getattr(self, hook.after))))
        for owner, method, make in rows:
            on_class = owner in (self.scheduler, self._manager) or not _OnInstance.fits(owner, method)
            self._wrappings.append((Wrapping if on_class else _OnInstance)(owner, method, make))

    def _after(self, see: Callable[..., None]) -> Callable[[Callable[..., Any]], Any]:
        return lambda original: pool_calls.after(self, original, see)

    def remove(self) -> None:
        """Give everything back; what is called no more is told no more. Idempotent."""
        self.tell()
        self._active = False
        while self._wrappings:
            self._wrappings.pop().undo()

    def fail(self, method: str, error: Exception) -> None:
        """An observer raised: what it should have seen is missing, and what follows from it."""
        if self._active:
            self.remove()
            self._failed(method, error, True)

    # --- what a pool is called for ---------------------------------------------------------------

    def taken(self, pool: int, blocks: list[Any], caller: Caller) -> None:
        """``get_new_blocks``: told with what else is taken in this step, until something else happens."""
        if self._taken and (pool, caller.by) != self._taken_by:
            self.tell()
        self._taken_by = pool, caller.by
        self._taken += (self._number(caller.request_id), caller.group, len(blocks))
        self._taken += [block.block_id for block in blocks]
        if self._stacks:
            self.tell()

    def tell(self) -> None:
        """Tell what was taken, and then what was hashed, since the last time."""
        if self._taken:
            rows, self._taken = self._taken, []
            pool, by = self._taken_by
            self._record(ev.BlocksTaken(self._log.now(), self._step(), pool, by, rows, self._stack()))
        if self._hashed:
            rows, self._hashed = self._hashed, []
            pool, replaced = self._hashed_by
            self._record(ev.BlocksHashed(self._log.now(), self._step(), pool, rows, replaced, self._stack()))

    def touched(self, pool: int, blocks: list[Any], caller: Caller) -> None:
        """``touch``."""
        if blocks:
            ids, counts = _ids(blocks), _references(blocks)
            self._say(ev.BlocksTouched(*self._head(pool, caller), ids, counts, self._stack()))

    def freed(self, pool: int, blocks: list[Any], caller: Caller) -> None:
        """``free_blocks``, by the pool whose they are."""
        if len(self.pools) > 1:
            own = self.pools[pool]
            blocks = [block for block in blocks if getattr(block, "pool", own) in (own, None)]
        if blocks:
            ids, counts = _ids(blocks), _references(blocks)
            self._say(ev.BlocksFreed(*self._head(pool, caller), ids, counts, self._stack()))

    def hashed_full(
        self, pool: int, request: Any, group: int, new: list[Any], before: list[Any], first: int, size: int
    ) -> None:
        """Of the blocks ``new``, from place ``first`` of the table up, those that got another hash."""
        hashed, ends, replaced = [], [], False
        for place, (block, old) in enumerate(zip(new, before, strict=True), first + 1):
            if block._block_hash is not None and block._block_hash is not old:
                hashed.append(block)
                ends.append(place * size)
                replaced = replaced or old is not None
        if hashed:
            self.hashed(pool, request, group, hashed, ends, replaced)

    def hashed(
        self, pool: int, request: Any, group: int, blocks: list[Any], ends: list[int], replaced: bool
    ) -> None:
        """Blocks were put into the cache map."""
        if self._hashed and (pool, replaced) != self._hashed_by:
            self.tell()
        self._hashed_by = pool, replaced
        number = self._number(request.request_id)
        self._hashed += (number, group, request.num_tokens, len(blocks))
        for block, end in zip(blocks, ends, strict=True):
            self._hashed += (block.block_id, self._name(pool, block), end)
        if self._stacks:
            self.tell()

    def further_hashes(self, pool: int, block: Any) -> tuple[Any, ...]:
        """The hashes of a block besides its first."""
        return tuple(self.pools[pool].cached_block_hashes_by_block.get(block.block_id, ()))

    def evicted(self, pool: int, blocks: list[Any], caller: Caller) -> None:
        """Blocks lost their hashes, and nothing else happened to them."""
        self._say(ev.BlocksEvicted(*self._head(pool, caller), _ids(blocks), self._stack()))

    def moved(self, pool: int, source: Any, target: Any) -> None:
        """``move_block_hashes``: the source stays in its table."""
        names = self._names[pool]
        names[target.block_id] = names.get(source.block_id, -1)
        head = self._head(pool, self.callers.caller())
        self._say(ev.BlockCopied(*head, _ids((source, target)), True, self._stack()))

    def copied(
        self, manager: Any, _: None, request_id: str, block_idx: int, source_block: Any, cow_block: Any
    ) -> None:
        """``_apply_cow``: the target stands in the table in place of the source."""
        pool = self.pools.index(manager.block_pool)
        head = self._head(pool, Caller(request_id, manager.kv_cache_group_id, "_apply_cow"))
        self._say(ev.BlockCopied(*head, _ids((source_block, cow_block)), False, self._stack()))

    def deferred(self, blocks: list[Any], request: Any) -> None:
        """``pop_blocks_for_free``."""
        for number, pool in enumerate(self.pools):
            ids = _ids(block for block in blocks if getattr(block, "pool", pool) in (pool, None))
            if ids:
                head = self._head(number, Caller(request.request_id, -1, "pop_blocks_for_free"))
                self._say(ev.BlocksDeferred(*head, ids, self._stack()))

    def reset(self, pool: int, succeeded: bool) -> None:
        """``reset_prefix_cache``."""
        self._say(ev.PoolReset(self._log.now(), self._step(), pool, succeeded))

    def left(self, _: None, request: Any) -> None:
        """The scheduler's ``_free_blocks``: the request is gone."""
        number = self._numbers.pop(request.request_id, None)
        if number is not None:
            self._say(ev.TablesGone(self._log.now(), [number]))

    def _head(self, pool: int, caller: Caller) -> tuple[int, int, int, int, int, str]:
        number = self._number(caller.request_id)
        return self._log.now(), self._step(), pool, number, caller.group, caller.by

    def _number(self, request_id: str | None) -> int:
        """The request's number in the stream; -1 for nobody."""
        if request_id is None:
            return -1
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._log.intern(request_id)
        return number

    def _name(self, pool: int, block: Any) -> int:
        """A number for the block's hash: another block's that has the same one, or a new one."""
        known = self._names[pool]
        found = _cache_map(self.pools[pool]).get(block._block_hash)
        if type(found) is dict:
            for other in found:
                if other != block.block_id and other in known:
                    known[block.block_id] = known[other]
                    return known[other]
        name = known[block.block_id] = self._next_name
        self._next_name += 1
        return name

    def _stack(self) -> list[str] | None:
        return self.callers.stack() if self._stacks else None

    def _say(self, event: ev.Event) -> None:
        if self._taken or self._hashed:
            self.tell()
        self._record(event)

    def _record(self, event: ev.Event) -> None:
        if self._active:
            self._log.sink.record(event)

    # --- how they stand --------------------------------------------------------------------------

    def restart(self) -> None:
        """Where a segment begins: say what pools there are; blocks and tables follow in turn."""
        for number, pool in enumerate(self.pools):
            null = getattr(pool, "null_block", None)
            groups: list[int] = []
            for manager in self.managers:
                if manager.block_pool is pool:
                    positional = type(manager).__name__ in POSITIONAL
                    groups += (manager.kv_cache_group_id, manager.block_size, int(positional))
            seen = ev.PoolSeen(
                at=self._log.now(),
                step=self._step(),
                pool=number,
                blocks=pool.num_gpu_blocks,
                null_block=-1 if null is None else null.block_id,
                free_blocks=pool.get_num_free_blocks(),
                cached_hashes=len(_cache_map(pool)),
                groups=groups,
            )
            self._say(seen)
        self._table_cursor = 0

    def scheduled(self, output: Any, *_: Any, **__: Any) -> None:
        """``schedule``: the tables of whom it admitted, when everything else of it has been told."""
        self.tell()
        names = [new.req_id for new in output.scheduled_new_reqs]
        names += getattr(output.scheduled_cached_reqs, "resumed_req_ids", None) or ()
        if names:
            self.state_tables(names)

    def state_tables(self, names: Iterable[str]) -> None:
        """Say which blocks stand in these requests' tables, once each."""
        rows: list[int] = []
        names = dict.fromkeys(names)  # a scheduler that raised may hold one twice
        requests = self.scheduler.requests if self.scheduler is not None else {}
        for manager in self.managers:
            tables, group = manager.req_to_blocks, manager.kv_cache_group_id
            for name in names:
                table = tables.get(name)
                if table:
                    computed = requests[name].num_computed_tokens if name in requests else -1
                    rows += (self._number(name), group, computed, len(table))
                    rows += _ids(table)
        if rows:
            self._say(ev.TablesStated(self._log.now(), self._step(), rows))

    def at_rest(self) -> None:
        """Some blocks and some tables, in turn."""
        try:
            for number, pool in enumerate(self.pools):
                first = self._cursors[number]
                part = pool.blocks[first : first + SWEEP_BLOCKS]
                end = first + len(part)
                self._cursors[number] = end if end < len(pool.blocks) else 0
                self.state_blocks(number, first, part)
            running = self.scheduler.running
            first = self._table_cursor if self._table_cursor < len(running) else 0
            self._table_cursor = first + SWEEP_TABLES
            self.state_tables([request.request_id for request in running[first : self._table_cursor]])
        except Exception as error:  # an observer must never stop the engine
            self.fail("the sweep of the pool", error)

    def state_blocks(self, number: int, first: int, part: list[Any]) -> None:
        """Say how these blocks of a pool, in a row, stand."""
        pool = self.pools[number]
        cache = _cache_map(pool)
        get = cache.get
        states = [
            block.ref_cnt * 8
            + (block.next_free_block is not None)
            + (block._block_hash is not None and _mapped(get(block._block_hash), block))
            for block in part
        ]
        free = pool.get_num_free_blocks()
        hashes = -1 if number in self.parted else len(cache)  # whose several names are not told apart
        self._say(ev.BlocksStated(self._log.now(), self._step(), number, first, states, free, hashes))

    def state_all(self) -> None:
        """Say how every block stands, and every table: for the end, and for tests."""
        for number, pool in enumerate(self.pools):
            self.state_blocks(number, 0, pool.blocks)
        if self.scheduler is not None:
            self.state_tables([request.request_id for request in self.scheduler.running])


def _mapped(found: Any, block: Any) -> int:
    """2 for a hash, and 4 where the cache map leads from it to the block."""
    return 6 if found is block or (type(found) is dict and block.block_id in found) else 2


def _cache_map(pool: Any) -> Any:
    """From a hash to a block, or to a dict of blocks by id."""
    found = pool.cached_block_hash_to_block
    return getattr(found, "_cache", found)


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def _references(blocks: Iterable[Any]) -> list[int]:
    return [block.ref_cnt for block in blocks]
