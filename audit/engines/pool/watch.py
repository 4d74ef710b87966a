"""Blocks of v1 engines, at level ``blocks``: what each pool is called for, and by whom.

Every pool of the engine is wrapped, and the few scheduler methods in which tables come or go. Calls
are told together, in their order: see :mod:`~kvledger.audit.engines.pool.attribution`. What happens beneath
them (a count that is changed by hand, a queue that is mended) is seen by the
:mod:`~kvledger.audit.engines.pool.sweep`.

These events go straight to the sink: equal steps stay counted, and are told when they end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from ... import events as ev
from ...hooks import EngineMismatch, Wrapping, check
from ..event_log import StepLog
from . import caller_stack, wrappers
from .attribution import Untold
from .caller_stack import Caller, Callers
from .hash_ids import namer
from .hash_tracker import READ, Books, readable
from .signatures import ALL_GROUPS, EVICTING, MANAGER, POOL, evicts, unreadable
from .sweep import Sweep


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
        ours = (Untold.__module__, Sweep.__module__, Wrapping.__module__)
        self.callers = Callers(__name__, caller_stack.__name__, wrappers.__name__, Books.__module__, *ours)
        self.log = log
        self.step = step
        self._failed = failed
        self.stacks = stacks
        self.untold = Untold(self)
        log.tell_calls = self.tell_calls
        self.numbers: dict[str | None, int] = {None: -1}
        """Requests whose tables have not been told gone, also those that the log has forgotten."""
        self.ending: list[Any] = []
        """Requests that have ended, and that the engine may not have forgotten yet."""
        self.name = namer()
        self.parted: set[int] = set()
        """Pools in which a block was hashed for a part of its tokens: one block, several hashes."""
        self.books: Books | None = None
        if readable(scheduler, self.managers) and not stacks:
            self.name = namer(of_bytes=True)
            self.books = Books(self)
        self.sweep = Sweep(self)
        self._wrappings: list[Wrapping] = []
        self._active = True
        try:
            self._wrap()
        except Exception:
            self.remove()
            raise

    def _wrap(self) -> None:
        rows: list[tuple[Any, str, Callable[[Callable[..., Any]], Any]]] = []
        for number, pool in enumerate(self.pools):
            directly = any(evicts(manager) for manager in self.managers if manager.block_pool is pool)
            for hook, owner in check((*POOL, *EVICTING) if directly else POOL, pool):
                if hook.method in READ and self.books is not None:
                    continue
                wrapper = wrappers.WRAPPERS[hook.method]
                rows.append((owner, hook.method, functools.partial(wrapper, self, number)))
        for manager in self.managers:
            for hook, owner in check(MANAGER, manager):
                rows.append((owner, hook.method, self._after(functools.partial(self.copied, manager))))
        for hook, owner in check(ALL_GROUPS, self._manager):
            rows.append((owner, hook.method, self._after(getattr(self, hook.after))))
        for owner, method, make in rows:
            self._wrappings.append(Wrapping(owner, method, make))

    def _after(self, see: Callable[..., None]) -> Callable[[Callable[..., Any]], Any]:
        return lambda original: wrappers.after(self, original, see)

    def remove(self) -> None:
        """Give everything back; what is called no more is told no more. Idempotent."""
        self.tell()
        self._active = False
        while self._wrappings:
            self._wrappings.pop().undo()
        if self.books is not None:
            self.books.close()

    def fail(self, method: str, error: Exception) -> None:
        """An observer raised: what it should have seen is missing, and what follows from it."""
        self.untold.clear()
        if self.books is not None:
            self.books.close()
            self.books = None
        if self._active:
            self.remove()
            self._failed(method, error, True)

    def number(self, request_id: str | None) -> int:
        """The request's number in the stream, from when it is first asked for; -1 for nobody."""
        found = self.numbers.get(request_id)
        if found is None:
            assert request_id is not None
            found = self.numbers[request_id] = self.log.intern(request_id)
        return found

    # --- what a pool is called for ---------------------------------------------------------------

    def tell(self) -> None:
        """Tell what the pools were called for, and all that has been hashed. Never raises."""
        try:
            if self.untold.later:
                self.untold.catch_up()
            if self.books is not None:
                self.books.settle()
            self.untold.tell(self.step())
        except Exception as error:  # an observer must never stop the engine
            self.fail("what a pool was called for", error)

    def tell_calls(self) -> None:
        """Tell what was called for, and what is known already to have been hashed. Never raises."""
        try:
            self.untold.tell(self.step())
        except Exception as error:  # an observer must never stop the engine
            self.fail("what a pool was called for", error)

    def hashed_part(
        self, pool: int, request: Any, group: int, block: Any, end: int, replaced: bool, further: Any
    ) -> None:
        """``cache_partial_block``: the hash ``further`` for the tokens up to ``end``."""
        row = [self.number(request.request_id), group, request.num_tokens, 1]
        row += (block.block_id, self.name(further), end)
        self.say(ev.BlocksCached(self.log.now(), self.step(), pool, row, replaced, self.stack()))

    def further_hashes(self, pool: int, block: Any) -> tuple[Any, ...]:
        """The hashes of a block besides its first."""
        return tuple(self.pools[pool].cached_block_hashes_by_block.get(block.block_id, ()))

    def evicted(self, pool: int, blocks: list[Any], caller: Caller) -> None:
        """Blocks lost their hashes, and nothing else happened to them."""
        self.say(ev.BlocksEvicted(*self._head(pool, caller), _ids(blocks), self.stack()))

    def moved(self, pool: int, source: Any, target: Any) -> None:
        """``move_block_hashes``: the source stays in its table."""
        head = self._head(pool, self.callers.caller())
        self.say(ev.BlockCopied(*head, _ids((source, target)), True, self.stack()))

    def copied(
        self, manager: Any, _: None, request_id: str, block_idx: int, source_block: Any, cow_block: Any
    ) -> None:
        """``_apply_cow``: the target stands in the table in place of the source."""
        pool = self.pools.index(manager.block_pool)
        head = self._head(pool, Caller(request_id, manager.kv_cache_group_id, "_apply_cow"))
        self.say(ev.BlockCopied(*head, _ids((source_block, cow_block)), False, self.stack()))

    def deferred(self, blocks: list[Any], request: Any) -> None:
        """``pop_blocks_for_free``."""
        caller = Caller(request.request_id, -1, "pop_blocks_for_free")
        if self.books is not None:
            self.books.deferred(blocks)
        self.untold.tell(self.step(), leaving=_ids(blocks), whose=caller)
        for number, pool in enumerate(self.pools):
            ids = _ids(block for block in blocks if getattr(block, "pool", pool) in (pool, None))
            if ids:
                head = self._head(number, caller)
                self.say(ev.BlocksDeferred(*head, ids, self.stack()))

    def reset(self, pool: int, succeeded: bool) -> None:
        """``reset_prefix_cache``."""
        self.say(ev.PoolReset(self.log.now(), self.step(), pool, succeeded))

    def scheduled(self, output: Any, numbers: list[int] | None, *, again: bool) -> None:
        """``schedule``: all of it, before what the step is told to be.

        ``numbers`` are those of who ran before, in the output's order, if they are at hand. ``again``: each
        request ran as in the last step.
        """
        untold = self.untold
        try:
            if again and untold.put_aside(output, numbers):
                return
            untold.outputs_tell = False
            untold.tell(self.step(), output, numbers)
            if self.books is not None:
                self.books.looked_up(None)
        except Exception as error:
            self.fail("schedule", error)

    def admitted(self, output: Any) -> None:
        """The tables of whom a step admitted, after it has been told."""
        if self.untold.adds_up:  # touched and taken is what the output names: nothing is left to be said
            return
        resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", None)
        if output.scheduled_new_reqs or resumed:
            try:
                names = [new.req_id for new in output.scheduled_new_reqs]
                self.sweep.state_tables([*names, *(resumed or ())])
            except Exception as error:
                self.fail("schedule", error)

    def leaves(self, request_id: str) -> None:
        """A request is about to give its blocks back."""
        if self.books is not None:
            try:
                if self.untold.later:
                    self.untold.catch_up()
                self.books.leaves(request_id)
            except Exception as error:  # an observer must never stop the engine
                self.fail("cache_full_blocks", error)

    def ends(self, request: Any) -> None:
        """A request has ended, and is about to give its blocks back, unless a connector still wants them."""
        self.number(request.request_id)
        self.ending.append(request)
        self.leaves(request.request_id)

    def say_gone(self) -> None:
        """Write down which of those the engine has forgotten by now."""
        requests, ending = self.scheduler.requests, self.ending
        self.ending = []
        for request in ending:
            if requests.get(request.request_id) is request:
                self.ending.append(request)
            elif (number := self.numbers.pop(request.request_id, None)) is not None:
                self.untold.rows += (ev.TABLES_REMOVED, number, -1, 0, 0)

    def _head(self, pool: int, caller: Caller) -> tuple[int, int, int, int, int, str]:
        number = self.number(caller.request_id)
        return self.log.now(), self.step(), pool, number, caller.group, caller.by

    def stack(self) -> list[str] | None:
        return self.callers.stack() if self.stacks else None

    def say(self, event: ev.Event) -> None:
        """Tell one event, after everything that came before it."""
        self.tell()
        self.record(event)

    def record(self, event: ev.Event) -> None:
        if self._active:
            self.log.sink.record(event)


def _ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]
