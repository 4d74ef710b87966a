"""What the observers of all releases share: begin, end, segment starts and the times of a census.

An observer has one scheduler, one event log and parts that handle the hooks of its release. A subclass
chooses the parts (``v1.V1Observer``, ``v0.observer.V0Observer``). The parts read the observer's attributes
and know nothing of other releases.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar

from .. import events as ev
from ..hooks import Hook, Hooks
from ..text import failure
from .configuration import GROUP, SESSION, LabelReader, pattern
from .connectors.scheduler_side import ConnectorWatch
from .connectors.worker_side import WorkerWatch
from .content.attached import AttachedContent
from .pool.pool_watch import PoolWatch
from .pool.requirements import IsolationClasses
from .step_log import Sink, StepLog
from .weights_watch import WeightsWatch

REMOVED = "kvledger observes this engine no longer: its hook on %s kept failing, at last with %s"

CENSUS_STEPS = 512
CENSUS_SECONDS = 30.0

FOLLOWED_IF_RAISED = ("add_request", "reset_prefix_cache", "shutdown")
"""Methods of the scheduler that raise with every change of a request already emitted."""


class Observer:
    """Observes one scheduler. ``start`` wraps its methods, ``stop`` restores them.

    Keep it and its parts under thirty attributes each: CPython 3.11 stores more than that in a dict, and
    then every method call looks its name up.
    """

    NAME: ClassVar[str]
    """The adapter, as the journal and the doctor name it."""
    ENGINE: ClassVar[str] = "vllm"
    """The product, as journals name it."""
    LOGGER: ClassVar[logging.Logger] = logging.getLogger("vllm.kvledger")
    """Below the engine's own logger, so that operators see its lines among the engine's."""
    HOOKS: ClassVar[tuple[Hook, ...]]
    """The methods to wrap; ``before`` and ``after`` name a method of the observer or of one of its parts."""
    HAS: ClassVar[tuple[str, ...]] = ()
    """What the scheduler must have besides the hooked methods, as dotted paths."""
    OUTPUT: ClassVar[tuple[str, ...]] = ()
    """Fields that the engine's output must have."""
    CENSUS_AT_END: ClassVar[tuple[str, ...]] = ("detached", "shutdown", "exit")
    """The reasons to stop at which the engine rests, so that a last census is right."""
    FIGURES: ClassVar[str] = "first"
    """The admission that the engine-reported prompt figures come from: see ``release_semantics``."""

    def __init__(
        self,
        scheduler: Any,
        sink: Sink,
        *,
        version: str,
        level: str = "tokens",
        stacks: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``clock``: nanoseconds; a simulation has its own."""
        self.scheduler = scheduler
        """The engine's scheduler."""
        self.version = version
        """The engine's version."""
        self.level = level
        """``tokens``, ``blocks`` or ``content``."""
        self.stacks = stacks
        """Whether each block operation keeps its Python stack."""
        self.hooks: Hooks | None = None
        """The wrapped methods; None until ``start``."""
        self.pools: PoolWatch | None = None
        """Observes the block pools; None at level ``tokens``."""
        self.connector: ConnectorWatch | None = None
        """Observes the scheduler side of the KV connector; None without a connector."""
        self.instance: dict[str, ev.Setting] = {}
        """Settings that tell this engine from others whose process ids may be the same."""
        self.worker: WorkerWatch | None = None
        """Observes the worker side of the connector, if the worker runs in this process."""
        self.content: AttachedContent | None = None
        """Observes the contents of blocks, at level ``content`` if the worker runs in this process."""
        self.labels = LabelReader(IsolationClasses())
        """Reads the labels of requests."""
        self.log = StepLog(sink, clock)
        """Every part emits its events here."""
        self._step_now = functools.partial(getattr, self, "step")  # no Python frame runs
        self.weights = self._watch_weights()
        """Observes the changes of the weights."""
        self.step = 0
        """Number of the last step that the scheduler began, from 1."""
        self.resync = False
        """A hook failed: emit a snapshot at the next chance, so that readers can go on from there."""
        self.in_step = False
        """``schedule`` or ``update_from_output`` runs, or an exception left it: the counts are in between."""
        self.idle_calls = 0
        """Calls of ``schedule`` since the last census that scheduled nothing, see :class:`Census`."""
        self.misqueued = 0
        """How many places more the queues had, at the last census, than there were open requests."""
        self._stopped = False
        """``stop`` has run."""
        self.on_stopped: Callable[[str], None] | None = None
        """Gets the reason when the observation has ended."""
        self._last_census = 0, self.log.now()
        """Step and time of the last census or snapshot."""

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        self.hooks = Hooks(
            self.HOOKS, self.scheduler, self, self._hook_failed, boundary, raised=self.engine_raised
        )
        try:
            if self.level != "tokens":
                self.pools = self._watch_pools()
            classes = None if self.pools is None else self.pools.isolation
            self.labels = LabelReader(classes or IsolationClasses(), pattern(GROUP), pattern(SESSION))
            if getattr(self.scheduler, "connector", None) is not None:
                self.connector = ConnectorWatch(
                    self.scheduler,
                    self.log,
                    self._step_now,
                    self.computed_tokens,
                    self._hook_failed,
                    self.engine_raised,
                    classes,
                )
        except Exception:
            if self.pools is not None:
                self.pools.remove()
            self.hooks.remove()
            raise
        self.begin_segment()
        self.weights.start(digests=self.level == "content")

    def stop(self, reason: str) -> None:
        """Emit what is still buffered and restore the scheduler. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.log.held = None  # of an output that was interrupted and is not known
        if self.pools is not None:
            if reason in ("detached", "shutdown"):
                self.pools.report_all()
            self.pools.remove()
        if reason in self.CENSUS_AT_END and not self.in_step:
            self._last_look()
        if self.connector is not None:
            self.connector.remove()
        self.weights.remove()
        if self.worker is not None:
            self.worker.remove()
        if self.content is not None:
            self.content.remove()
        if self.hooks is not None:
            self.hooks.remove()
        self.emit_failed_attempts()
        self.log.emit(ev.EngineStopped(self.log.now(), reason))
        if self.on_stopped is not None:
            with contextlib.suppress(Exception):  # a log handler that fails must not stop the engine
                self.on_stopped(reason)

    def _last_look(self) -> None:
        """Emit a census at the end. Never raises."""
        try:
            self.census(self.log.now())
        except Exception as error:  # an observer must never stop the engine
            self._hook_failed("stop", error, removed=False)

    def shutting_down(self) -> None:
        """``Scheduler.shutdown``: emits ``EngineStopped`` and closes the journal."""
        self.stop("shutdown")
        close = getattr(self.log.sink, "close", None)
        if close is not None:
            close()

    def isolation(self, request: Any) -> ev.Isolation | None:
        """The isolation classes of a request at level ``blocks``; else None."""
        return None if self.pools is None else self.pools.isolation.of(request)

    def _watch_weights(self) -> WeightsWatch:
        return WeightsWatch(self.scheduler, self.log, self._step_now, self._hook_failed)

    def _watch_pools(self) -> PoolWatch:
        manager = self.scheduler.kv_cache_manager
        return PoolWatch(
            self.scheduler, manager, self.log, self._step_now, self._hook_failed, stacks=self.stacks
        )

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self.log.held = None
        self.resync = True
        self.log.emit(ev.HookFailed(self.log.now(), hook, failure(error), removed))
        if removed:  # without this hook every later figure would be wrong
            self.LOGGER.warning(REMOVED, hook, type(error).__name__)
            self.stop(f"the observer of {hook} kept failing")

    def engine_raised(self, method: str, error: Exception) -> None:
        """An exception of the engine leaves a hooked method. Emits ``EngineRaised``, then held events.

        An exception that leaves a part of the scheduler goes on to the scheduler's own method, or the engine
        has handled it.
        """
        log = self.log
        lost = "." not in method and method not in FOLLOWED_IF_RAISED
        raised = ev.EngineRaised(log.now(), method, type(error).__name__, lost)
        if method == "update_from_output":
            held, log.held = log.held, None
            log.emit_all([raised, *(held or ())])
        else:
            log.emit(raised)
        self.resync |= lost

    def begin_segment(self) -> None:
        """Emit ``EngineStarted`` and a snapshot of every living request, so that a reader can start here."""
        self.resync = False
        rows, now = self.snapshot_rows(), self.log.now()
        started = ev.EngineStarted(
            at=now,
            wall_seconds=time.time(),
            engine=self.ENGINE,
            version=self.version,
            adapter=self.NAME,
            level=self.level,
            process_id=os.getpid(),
            configuration=self.configuration() | self.instance | self._hash_key() | self._compares_prefixes(),
        )
        weights = dict(self.weights.versions)
        self.log.restart(started, ev.Snapshot(now, self.step, rows, self.log.undelivered, weights))
        self._last_census = self.step, now
        if self.pools is not None:
            self.pools.begin_segment()
        if self.content is not None:
            self.content.begin_segment()

    def _hash_key(self) -> dict[str, ev.Setting]:
        """What tells the key of comparable hash ids from others, if the ids have one."""
        key = None if self.pools is None else self.pools.hash_key
        return {} if key is None else {"hash_key": key}

    def _compares_prefixes(self) -> dict[str, ev.Setting]:
        """That hit blocks are compared with the reader's prefix, if they are."""
        compares = self.pools is not None and self.pools.prefixes is not None
        return {"prefixes": "compared"} if compares else {}

    def at_rest(self) -> None:
        """Between two steps: emit a snapshot if the sink wants one, or a census if one is due."""
        if self.pools is not None:
            self.pools.emit_all_calls()
        now = self.log.now()
        if self.hooks is not None:
            self.hooks.time_some(self.step)
        step, at = self._last_census
        if self.log.sink.wants_snapshot or self.resync:
            self.begin_segment()
        elif self.step - step >= CENSUS_STEPS or now - at >= CENSUS_SECONDS * 1e6 or self.census_wanted():
            self._last_census = self.step, now
            self.census(now)
        else:
            self.log.flush(now)
        self.weights.look(now)
        if self.pools is not None:
            self.pools.at_rest()

    def hook_time(self) -> tuple[int, int]:
        """Microseconds spent in hooks, and the steps in which they were timed, since the last call."""
        return (-1, 0) if self.hooks is None else self.hooks.time_taken()

    # --- what a release's observer defines -------------------------------------------------------------

    def snapshot_rows(self) -> list[ev.SnapshotRow]:
        """The engine's counts for each living request."""
        raise NotImplementedError

    def configuration(self) -> dict[str, ev.Setting]:
        """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
        raise NotImplementedError

    def census(self, now: int) -> None:
        """Emit ``Census``: the engine's counts for each running request, and the pool's totals."""
        raise NotImplementedError

    def computed_tokens(self, request: Any) -> int:
        """The engine's count of a request's computed tokens; -1 while it keeps none."""
        raise NotImplementedError

    def census_wanted(self) -> bool:
        """Whether a census must not wait until it is due."""
        return False

    def emit_failed_attempts(self) -> None:
        """Emit the failed admission attempts that are still being counted."""
        raise NotImplementedError
