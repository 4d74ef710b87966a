"""The observation of a v1 engine's block pools, at level ``blocks``: :class:`PoolWatch` wires its parts.

The parts do not know the watch. A wrapped call goes through three files: ``hooks`` calls the observer of the
pool (``pool_observer``, or ``hash_tracker`` if the pool's state is read), and the observer adds the call to
``call_buffer``. When a step has been scheduled, ``allocations`` finds the owners of allocated blocks
(``attribution``), and the buffered calls are emitted as one event. ``sweep`` reports what no call shows.

Block events go to the sink directly, so they do not end a series of unchanged steps.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ... import events as ev
from ...hooks import EngineMismatch, Hook, Hooks
from ...text import cut_id, failure
from ..step_log import Sink, StepLog
from .allocations import Allocations
from .attribution import BlockRun
from .call_buffer import CallBuffer, Caller, Callers, block_ids
from .hash_tracker import HashTracker, can_track, hash_ids, shared_key
from .pool_census import Sweep
from .pool_observer import Emitter, PoolObserver
from .prefixes import Prefixes
from .requirements import (
    ALL_GROUPS,
    EVICTING,
    MANAGER,
    OCCASIONAL,
    POOL,
    TRACKED,
    IsolationClasses,
    evicts,
    refusal,
)

OURS = (__package__, Hooks.__module__)
"""Modules whose frames are never the callers of a pool."""


class PoolWatch:
    """Observes the pools of one scheduler, or of a KV cache manager alone.

    ``step()`` returns the number of the present step. When an observer raises, the watch ends and calls
    ``failed(hook, error, removed)``. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing
    wrapped.
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
        managers: tuple[Any, ...] = tuple(manager.coordinator.single_type_managers)
        if phrases := refusal(managers):
            raise EngineMismatch("; ".join(phrases))
        self._scheduler = scheduler
        """The scheduler, or None where a KV cache manager is observed alone."""
        self._failed = failed
        self._stacks = stacks
        """Whether the Python stack of each call is recorded."""
        self._log = log
        self._step = step
        self._pools: list[Any] = list(dict.fromkeys(each.block_pool for each in managers))
        """The pools, in the order of their numbers."""
        self._callers = Callers(*OURS)
        self.isolation = IsolationClasses()
        """Reads what keeps a request's KV apart from other requests."""
        self._ending: list[Any] = []
        """Requests that have ended, and that the engine may not have forgotten yet."""
        self._hooks: list[Hooks] = []
        self._active = True
        """Whether events are recorded, because the watch has not ended."""
        self._buffer = CallBuffer(log, step)
        """Calls that have not been emitted."""
        self._allocations = Allocations(
            self._buffer,
            managers,
            outputs_name_owners=scheduler is not None and len(self._pools) == 1 and not stacks,
            connector=getattr(scheduler, "connector", None) is not None,
        )
        tracked = can_track(scheduler, managers) and not stacks
        key = shared_key(self._pools[0])
        self.hash_key = key.print if key is not None else None
        """What tells the shared key of hash ids from others; None: they have a secret of this process."""
        hash_id = hash_ids(key)
        self.prefixes: Prefixes | None = None
        """Compares the prefixes of hit blocks; None without a scheduler."""
        if scheduler is not None:
            self.prefixes = Prefixes(managers, self._request_of, tracked=tracked)
        emitter = Emitter(self.emit, self.emit_all_calls, self._stack)
        parts = self._buffer, self._allocations, self._callers, hash_id, emitter, self.prefixes
        several = len(self._pools) > 1
        self._observers = [
            PoolObserver(pool, number, *parts, shares_frees=several)
            for number, pool in enumerate(self._pools)
        ]
        several_hashes = [observer.has_several_hashes for observer in self._observers]
        self._sweep = Sweep(scheduler, managers, self._pools, self._buffer, self.emit, several_hashes)
        self._hashes: HashTracker | None = None
        """Reads the pool's state instead of wrapping its busiest methods; None if ``can_track`` is false."""
        if stacks:
            self._buffer.call_added = self.emit_calls
        log.emit_pool_calls = self.emit_calls
        try:
            if tracked:
                self._hashes = HashTracker(
                    scheduler, managers[0], self._buffer, self._callers, hash_id, self._allocations
                )
                self._allocations.expect = self._hashes.expect
                if self.prefixes is not None:
                    self._allocations.owned = self.prefixes.allocated
            self._wrap(manager, managers)
        except Exception:
            self.remove()
            raise

    def _wrap(self, manager: Any, managers: tuple[Any, ...]) -> None:
        for pool, observer in zip(self._pools, self._observers, strict=True):
            evicted = any(evicts(each) for each in managers if each.block_pool is pool)
            self._hook((*OCCASIONAL, *EVICTING) if evicted else OCCASIONAL, pool, observer)
            if self._hashes is None:
                self._hook(POOL, pool, observer)
            else:
                self._hook(TRACKED, pool, self._hashes)
        for each in managers:
            observer = self._observers[self._pools.index(each.block_pool)]
            copied = functools.partial(observer.block_copied, each.kv_cache_group_id)
            self._hook(MANAGER, each, SimpleNamespace(block_copied=copied))
        self._hook(ALL_GROUPS, manager, self)

    def _hook(self, table: tuple[Hook, ...], owner: Any, observer: object) -> None:
        self._hooks.append(Hooks(table, owner, observer, self._hook_failed))

    def remove(self) -> None:
        """Emit the last calls and restore everything. Idempotent."""
        self.emit_all_calls()
        self.report_compared()
        self._active = False
        while self._hooks:
            self._hooks.pop().remove()
        if self._hashes is not None:
            self._hashes.close()

    def fail(self, hook: str, error: Exception) -> None:
        """End the watch: an observer raised, so a record is missing and later ones would be wrong."""
        self._allocations.clear()
        if self._hashes is not None:
            self._hashes.close()
            self._hashes = self._allocations.expect = None
        if self._active:
            self.remove()
            self._failed(hook, error, True)

    def _hook_failed(self, hook: str, error: Exception, _: bool) -> None:
        self.fail(hook, error)

    def _request_of(self, number: int) -> Any:
        return self._scheduler.requests.get(self._buffer.request_nos.ids.get(number))

    # --- emitting -----------------------------------------------------------------------------------

    def emit_all_calls(self) -> None:
        """Emit the calls so far, and with them all blocks that have been cached. Never raises."""
        try:
            self._allocations.write_deferred()
            if self._hashes is not None:
                self._hashes.record_due()
            self._emit_calls(self._step())
        except Exception as error:  # an observer must never stop the engine
            self.fail("the calls of a pool", error)

    def emit_calls(self) -> None:
        """Emit the calls so far, and with them the blocks that are known to be cached. Never raises."""
        try:
            self._emit_calls(self._step())
        except Exception as error:  # an observer must never stop the engine
            self.fail("the calls of a pool", error)

    def emit(self, event: ev.Event) -> None:
        """Emit one event, after all calls before it."""
        self.emit_all_calls()
        if self._active:
            self._log.sink.record(event)

    def _emit_calls(self, step: int, leaving: BlockRun | None = None) -> None:
        if self._buffer.allocated or self._allocations.deferred:
            self._allocations.find_owners(leaving)
        if self._ending:
            self._report_removed()
        event = self._buffer.take(step, self._callers.stack() if self._stacks else None)
        if event is not None and self._active:
            self._log.sink.record(event)

    def _stack(self) -> list[str] | None:
        return self._callers.stack() if self._stacks else None

    # --- a step -------------------------------------------------------------------------------------

    def begin_step(self, nobody_waits: bool) -> None:
        """The scheduler begins a step. ``nobody_waits``: no request waits to be admitted."""
        try:
            buffer = self._buffer
            if buffer.rows or buffer.allocated or self._ending:  # from before the step
                self._emit_calls(self._step() - 1)
            self._allocations.begin_step(nobody_waits)
        except Exception as error:  # an observer must never stop the engine
            self.fail("schedule", error)

    def looked_up(self, request_id: str) -> None:
        """The prefix-cache hits of a waiting request are known."""
        if self._hashes is not None:
            self._hashes.looked_up(request_id)

    def hit(self, request: Any, blocks: Any, tokens: int) -> ev.HitsCompared | None:
        """A request was admitted with a local hit: the event, if a block of it holds another prefix.

        ``blocks``: the KVCacheBlocks of the lookup; None if the engine used the answer of an earlier one.
        """
        if self.prefixes is None:
            return None
        try:
            other = self.prefixes.hit(request, getattr(blocks, "blocks", None), tokens)
        except Exception as error:  # an observer must never stop the engine
            self.fail("get_computed_blocks", error)
            return None
        number = self._buffer.request_nos[request.request_id] if other else -1
        return self._compared(number, other) if other else None

    def report_compared(self) -> None:
        """Emit how many hit blocks were compared since the last time."""
        if self.prefixes is not None and any(self.prefixes.counts):
            self.emit(self._compared(-1, []))

    def _compared(self, number: int, other: list[int]) -> ev.HitsCompared:
        assert self.prefixes is not None
        equal, unknown = self.prefixes.take_counts()
        return ev.HitsCompared(self._log.now(), self._step(), number, equal, unknown, other)

    def scheduled(self, output: Any, request_nos: list[int] | None, *, unchanged: bool) -> None:
        """A step has been scheduled; its own event has not been emitted.

        ``request_nos`` are the numbers of the requests that ran before, in the output's order, if the caller
        has them. ``unchanged``: each request runs as in the last step.
        """
        try:
            if unchanged and self._allocations.defer(output, request_nos):
                return
            self._allocations.scheduled(output, request_nos)
            self._emit_calls(self._step())
            if self._hashes is not None:
                self._hashes.looked_up(None)
        except Exception as error:  # an observer must never stop the engine
            self.fail("schedule", error)

    def admitted(self, output: Any) -> None:
        """The step's event has been emitted: report the tables of the requests that it admitted."""
        if self._allocations.tables_known:  # they follow from the calls
            return
        try:
            resumed = getattr(output.scheduled_cached_reqs, "resumed_req_ids", None)
            if output.scheduled_new_reqs or resumed:
                request_ids = [new.req_id for new in output.scheduled_new_reqs]
                self._sweep.report_tables([*request_ids, *(resumed or ())])
        except Exception as error:  # an observer must never stop the engine
            self.fail("schedule", error)

    # --- the end of a request -------------------------------------------------------------------------

    def leaves(self, request_id: str) -> None:
        """A request is about to free its blocks."""
        if self._hashes is not None:
            try:
                if self._allocations.deferred:
                    self._allocations.write_deferred()
                self._hashes.leaves(request_id)
            except Exception as error:  # an observer must never stop the engine
                self.fail("free_blocks", error)

    def tokens_change(self, request: Any) -> None:
        """Tokens of a request are about to be replaced."""
        try:
            self._allocations.write_deferred()
            if self.prefixes is not None:
                self.prefixes.tokens_change(request, self._buffer.request_nos[request.request_id])
        except Exception as error:  # an observer must never stop the engine
            self.fail("a session's next chunk", error)

    def ends(self, request: Any) -> None:
        """A request has ended and is about to free its blocks, unless a connector keeps them."""
        number = self._buffer.request_nos[request.request_id]
        self._ending.append(request)
        self.leaves(request.request_id)
        if self.prefixes is not None:
            self.prefixes.ends(request, number)

    def frees_deferred(self, _: None, blocks: list[Any], request: Any) -> None:
        """``pop_blocks_for_free``: a request gives up its table; its blocks are freed later."""
        caller = Caller(request.request_id, -1, "pop_blocks_for_free")
        if self._hashes is not None:
            self._hashes.frees_deferred(blocks)
        number = self._buffer.request_nos[request.request_id]
        self._emit_calls(self._step(), BlockRun(number, -1, block_ids(blocks)))
        for observer in self._observers:
            observer.frees_deferred(caller, blocks)

    def _report_removed(self) -> None:
        """Report the tables of those ended requests that the engine has forgotten."""
        requests = self._scheduler.requests
        ending, self._ending = self._ending, []
        for request in ending:
            if requests.get(request.request_id) is request:
                self._ending.append(request)
            else:
                self._buffer.tables_removed(request.request_id)

    # --- at rest --------------------------------------------------------------------------------------

    def begin_segment(self) -> None:
        """A new segment of the journal begins: describe the pools."""
        self._sweep.describe_pools()

    def at_rest(self) -> None:
        """The engine is at rest, and all calls have been emitted: report some blocks or tables."""
        try:
            if self._hashes is not None:
                self._hashes.check()
            self._sweep.report_next()
        except Exception as error:  # an observer must never stop the engine
            self.fail("the sweep of the pool", error)

    def report_all(self) -> None:
        """Report every block and every table."""
        try:
            self._sweep.report_all()
        except Exception as error:  # an observer must never stop the engine
            self.fail("the sweep of the pool", error)


# --- Observes a KV cache manager without a scheduler, as tests build it: only its pools are observed.
#
# There are no steps and no accounts. A request is emitted, with no length, when a pool is first called for
# it; its blocks are known from the calls of the pool.


class _Log(StepLog):
    """Emits a request when it is first seen."""

    def intern(self, request_id: str) -> int:
        first = request_id not in self.ids
        number = super().intern(request_id)
        if first:
            self.emit(ev.RequestAdded(self.now(), number, cut_id(request_id), prompt_tokens=0))
        return number


class ManagerObserver:
    """Observes one manager. ``start`` wraps its pools; ``stop`` reports all blocks and restores the pools."""

    NAME = "kv-cache-manager"

    def __init__(self, manager: Any, sink: Sink, *, version: str, stacks: bool = False) -> None:
        self.manager = manager
        """vLLM's KV cache manager."""
        self.log = _Log(sink)
        """Receives the events."""
        self.version = version
        """The release of vLLM."""
        self._stacks = stacks
        """Whether the Python stack of each call is recorded."""
        self._step = 0
        self.pools: PoolWatch | None = None
        """Observes the manager's pools; None before the start."""

    def start(self, boundary: Any = None) -> None:
        """Wrap the pools. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        self.pools = PoolWatch(
            None, self.manager, self.log, lambda: self._step, self._failed, stacks=self._stacks
        )
        now = self.log.now()
        started = ev.EngineStarted(
            now, time.time(), "vllm", self.version, self.NAME, "blocks", os.getpid(), {}
        )
        self.log.restart(started, ev.Snapshot(now, 0, [], 0))
        self.pools.begin_segment()

    def step(self) -> None:
        """The user of the manager begins another step: report every block."""
        assert self.pools is not None
        self.pools.emit_all_calls()
        self._step += 1
        self.pools.report_all()

    def stop(self, reason: str) -> None:
        """Report every block and restore the pools. Idempotent."""
        if self.pools is not None:
            self.pools.report_all()
            self.pools.remove()
            self.pools = None
            self.log.emit(ev.EngineStopped(self.log.now(), reason))

    def _failed(self, hook: str, error: Exception, removed: bool) -> None:
        self.log.emit(ev.HookFailed(self.log.now(), hook, failure(error), removed))
