"""What every v1 adapter's observer does at rest: beginning, ending, snapshots and the census.

The figures that not every release has are asked for here, in one place each.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, ClassVar

from .. import events as ev
from ..hooks import EngineMismatch, Hook, Hooks
from .connectors.scheduler_side import ConnectorWatch
from .connectors.worker_side import WorkerWatch, transfer_of, worker_in_this_process
from .event_log import Sink, StepLog
from .pool.watch import PoolWatch

CENSUS_STEPS = 512
CENSUS_SECONDS = 30.0


class Observer:
    """Watches one scheduler. ``start`` wraps it, ``stop`` gives it back.

    It has fewer than thirty attributes: of more CPython makes a dict, and looks up each call of a method.
    """

    NAME: ClassVar[str]
    HOOKS: ClassVar[tuple[Hook, ...]]
    HAS: ClassVar[tuple[str, ...]] = ()
    """What the scheduler must have besides the hooked methods, as dotted paths."""
    OUTPUT: ClassVar[tuple[str, ...]] = ()
    """Fields of the engine's output that are read."""
    FIGURES: ClassVar[str] = "first"
    """Which admission's hits the engine reports: see ``semantics``."""

    def __init__(
        self, scheduler: Any, sink: Sink, *, version: str, level: str = "tokens", stacks: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.version = version
        self.level = level
        self.stacks = stacks
        self.hooks: Hooks | None = None
        self.pools: PoolWatch | None = None
        self.connector: ConnectorWatch | None = None
        self.worker: WorkerWatch | None = None
        self.log = StepLog(sink)
        self._step = 0
        self._stopped = False
        self._failed_attempts: dict[str, ev.AdmissionFailed] = {}
        self._lived: set[str] = set()
        self._unreported: dict[str, int] = {}
        self._resync = False
        self._last_census = 0, self.log.now()
        """In which step, and when."""

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` untouched."""
        self.hooks = Hooks(self.HOOKS, self.scheduler, self, self._hook_failed, boundary)
        try:
            if self.level == "blocks":
                self.pools = self._watch_pools()
            if getattr(self.scheduler, "connector", None) is not None:
                self.connector = ConnectorWatch(
                    self.scheduler, self.log, lambda: self._step, self._hook_failed
                )
        except Exception:
            if self.pools is not None:
                self.pools.remove()
            self.hooks.remove()
            raise
        self._restart()

    def watch_worker(self, connector: Any = None) -> None:
        """Watch the connector's worker side as well, where it runs in this process and has no journal."""
        connector = connector or worker_in_this_process(self.scheduler.vllm_config)
        if self.connector is None or connector is None:
            return
        with contextlib.suppress(EngineMismatch):  # then the scheduler's side is all that is seen
            self.worker = WorkerWatch(
                connector,
                self.log,
                self._hook_failed,
                block_size=int(self.scheduler.block_size),
                beside_scheduler=True,
            )

    def stop(self, reason: str) -> None:
        """Say what is still to be said and give the scheduler back. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self.pools is not None:
            if reason in ("detached", "shutdown"):
                self.pools.sweep.state_all()
            self.pools.remove()
        if self.connector is not None:
            self.connector.remove()
        if self.worker is not None:
            self.worker.remove()
        if self.hooks is not None:
            self.hooks.remove()
        for failed in self._failed_attempts.values():
            self.log.emit(failed)
        self.log.emit(ev.EngineStopped(self.log.now(), reason))

    def _watch_pools(self) -> PoolWatch:
        manager = self.scheduler.kv_cache_manager
        return PoolWatch(
            self.scheduler, manager, self.log, lambda: self._step, self._hook_failed, stacks=self.stacks
        )

    def shutting_down(self) -> None:
        self.stop("shutdown")
        close = getattr(self.log.sink, "close", None)
        if close is not None:
            close()

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self.log.held = None
        self._resync = True
        self.log.emit(ev.HookFailed(self.log.now(), hook, f"{type(error).__name__}: {error}", removed))
        if removed:  # without it every later figure would be wrong
            self.stop(f"the observer of {hook} kept failing")

    def _restart(self) -> None:
        """Tell the reader everything that lives, so that it may begin here."""
        self._resync = False
        now = self.log.now()
        rows = [
            self._snapshot_row(request)
            for request in self.scheduler.requests.values()
            if not request.is_finished()
        ]
        started = ev.EngineStarted(
            at=now,
            wall_seconds=time.time(),
            engine="vllm",
            version=self.version,
            adapter=self.NAME,
            level=self.level,
            process_id=os.getpid(),
            configuration=self.configuration(),
        )
        self.log.restart(started, ev.Snapshot(now, self._step, rows, self.log.undelivered))
        self._last_census = self._step, now
        if self.pools is not None:
            self.pools.sweep.restart()

    def _snapshot_row(self, request: Any) -> ev.SnapshotRow:
        request_id = request.request_id
        number = self.log.intern(request_id)
        if getattr(request, "resumable", False):
            self.sessions_come()
        if self.unreported(request):
            self._unreported[request_id] = request.num_prompt_tokens
        return ev.SnapshotRow(
            request=number,
            request_id=request_id,
            prompt_tokens=request.num_prompt_tokens,
            fresh=(
                request_id not in self._lived
                and self.computed(request) == 0
                and self.preemptions(request) == 0
                and request.num_output_tokens == 0
            ),
            computed_tokens=self.computed(request),
            in_flight_tokens=self.in_flight(request),
            placeholder_tokens=self.placeholders(request),
            sequence_tokens=request.num_tokens,
            preemptions=self.preemptions(request),
            transferred=self.transferred(request),
        )

    def sessions_come(self) -> None:
        """A request may be given further chunks: from now on turns end too, and not only requests."""
        if self.hooks is not None:
            self.hooks.wake("_handle_stopped_request")

    def _forget(self, request_id: str) -> None:
        """It is gone from the engine."""
        self.log.forget(request_id)
        if self._unreported:
            self._unreported.pop(request_id, None)
        self._lived.discard(request_id)

    def _at_rest(self) -> None:
        """Between two steps: a snapshot if one is wanted, a census if one is due."""
        if self.pools is not None:
            self.pools.tell()
        now = self.log.now()
        if self.hooks is not None:
            self.hooks.time_some(self._step)
        step, at = self._last_census
        if self.log.sink.wants_snapshot or self._resync:
            self._restart()
        elif self._step - step >= CENSUS_STEPS or now - at >= CENSUS_SECONDS * 1e6:
            self._census(now)
        else:
            self.log.flush(now)
        if self.pools is not None:
            self.pools.sweep.at_rest()

    def _hook_time(self) -> tuple[int, int]:
        """Microseconds in hooks, and the steps in which they were timed, since the last time."""
        return (-1, 0) if self.hooks is None else self.hooks.time_taken()

    def _census(self, now: int) -> None:
        self._last_census = self._step, now
        scheduler, ids = self.scheduler, self.log.ids
        rows: list[int] = []
        counts = self.counts
        for request in scheduler.running:
            computed, (_, in_flight, placeholders) = request.num_computed_tokens, counts(request)
            rows += (ids[request.request_id], computed, in_flight, placeholders, request.num_tokens)
        if self.connector is not None:
            for request in scheduler.running:
                self.track(request, request.num_computed_tokens)
            self.connector.at_rest()
        pool = scheduler.kv_cache_manager.block_pool
        waiting = scheduler.get_request_counts()[1]
        free = pool.get_num_free_blocks()
        self.log.emit(
            ev.Census(now, self._step, rows, waiting, free, pool.num_gpu_blocks, *self._hook_time())
        )

    def track(self, request: Any, computed_tokens: int) -> None:
        """State what the connector itself counts of a request, beside the engine's count."""
        if self.connector is not None:
            self.connector.track(request, computed_tokens, self.waits_for_load(request))

    # --- figures that not every release has -------------------------------------------------------

    def counts(self, request: Any) -> tuple[int, int, int]:
        """What the three below say of it. Where every release has them they are asked for directly."""
        return self.computed(request), self.in_flight(request), self.placeholders(request)

    def computed(self, request: Any) -> int:
        """The engine's count of computed tokens; -1 where it says nothing."""
        return int(request.num_computed_tokens)

    def waits_for_load(self, request: Any) -> bool:
        """Whether an asynchronous load holds it back."""
        return bool(request.status.name == "WAITING_FOR_REMOTE_KVS")

    def in_flight(self, request: Any) -> int:
        """Tokens of steps whose output has not come, by the engine's count; -1 before 0.26."""
        return int(getattr(request, "num_in_flight_tokens", -1))

    def placeholders(self, request: Any) -> int:
        """Output placeholders of asynchronous scheduling; -1 before 0.10."""
        return int(getattr(request, "num_output_placeholders", -1))

    def preemptions(self, request: Any) -> int:
        """How often it was preempted; counted by the engine since 0.11."""
        return int(getattr(request, "num_preemptions", 0))

    def transferred(self, request: Any) -> bool:
        """Whether a prefill engine hands its KV over; the connector takes the word away at allocation."""
        words = getattr(request, "kv_transfer_params", None)
        return bool(words and words.get("do_remote_prefill"))

    def unreported(self, request: Any) -> bool:
        """Whether the engine has still to tell where this prompt came from."""
        return request.prefill_stats is not None

    def configuration(self) -> dict[str, ev.Setting]:
        """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
        scheduler = self.scheduler
        config = scheduler.vllm_config
        transfer = config.kv_transfer_config
        connector = scheduler.connector
        return {
            "model": _model_name(config.model_config),
            "scheduler": type(scheduler).__name__,
            "asynchronous": bool(getattr(config.scheduler_config, "async_scheduling", False)),
            "policy": str(config.scheduler_config.policy),
            "block_size": int(config.cache_config.block_size),
            "blocks": int(config.cache_config.num_gpu_blocks or 0),
            "groups": len(scheduler.kv_cache_config.kv_cache_groups),
            "max_running": int(scheduler.max_num_running_reqs),
            "max_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "max_model_len": int(scheduler.max_model_len),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "drafts": int(scheduler.num_spec_tokens),
            "sampled_beside_drafts": int(getattr(scheduler, "num_sampled_tokens_per_step", 1)),
            "connector": type(connector).__name__ if connector is not None else None,
            "plan": "read" if self.connector is not None and self.connector.reader else "opaque",
            "load_failure_policy": _failure_policy(transfer),
            "deferred_loads": bool(getattr(scheduler, "defer_async_loads", False)),
            "transfer": transfer_of(config),
            "log_stats": bool(scheduler.log_stats),
            "figures": self.FIGURES,
            "data_parallel_rank": int(getattr(config.parallel_config, "data_parallel_rank", 0)),
            "engine_index": _engine_index(config.parallel_config),
            "census_steps": CENSUS_STEPS,
        }


def _model_name(config: Any) -> str:
    """The served name; of a local path its last part only."""
    name = getattr(config, "served_model_name", "") or ""
    name = str(name[0] if isinstance(name, list) else name)
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name


def _engine_index(config: Any) -> int:
    """What the engine's own metrics call it. Where there is an index, a dense model's ranks are all 0."""
    return int(getattr(config, "data_parallel_index", getattr(config, "data_parallel_rank", 0)))


def _failure_policy(transfer: Any) -> str | None:
    """What becomes of a request whose load failed; before 0.13 it is always executed again."""
    return None if transfer is None else str(getattr(transfer, "kv_load_failure_policy", "recompute"))
