"""The live connector, worker side: what it loads, waits for, saves and reports, a step at a time.

A worker is handed a plan, begins its loads, runs the model, waits for what is saved and says what has
arrived or failed. All of that is one event, told where the plan is taken away again, and only of steps
in which the connector did anything. In a process of its own a worker counts the plans that it is handed,
from 1, as the scheduler counts its steps.

A layer's wait is watched only in a step that loads: there are as many calls as layers.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ..event_log import Sink, StepLog
from ..readers import reader_of
from .metadata_reader import MetadataReader

TABLE: tuple[Hook, ...] = (
    Hook("", "bind_connector_metadata", (), after="handed"),
    Hook("", "start_load_kv", (), after="load_started"),
    Hook("", "wait_for_save", (), after="save_waited"),
    Hook("", "get_finished", (), after="finished", optional=True),
    Hook("", "get_transfer_results", (), after="results", optional=True),
    Hook("", "get_block_ids_with_load_errors", (), after="load_errors", optional=True),
    Hook("", "clear_connector_metadata", (), before="step_ends"),
)
LAYERS: tuple[Hook, ...] = (Hook("", "wait_for_layer_load", (), after="layer_waited"),)

Failed = Callable[[str, Exception, bool], None]

PLANS_KEPT = 8
"""Steps are planned ahead of a worker in the same process by fewer than so many."""


class WorkerWatch:
    """Watches the worker side of one connector. ``rank`` names the worker.

    ``beside_scheduler``: it is in the same process, and each plan is :meth:`planned` before it is handed
    over; else plans are counted.
    """

    def __init__(
        self,
        connector: Any,
        log: StepLog,
        failed: Failed,
        *,
        block_size: int,
        rank: int = 0,
        beside_scheduler: bool = False,
    ) -> None:
        self.reader: MetadataReader | None = reader_of(connector)
        self.steps = 0
        self._connector = connector
        self._log = log
        self._failed = failed
        self._block_size = block_size
        self._rank = rank
        self._plans: deque[tuple[Any, int]] | None = deque(maxlen=PLANS_KEPT) if beside_scheduler else None
        self._layers: Hooks | None = None
        self._clear()
        self._hooks = Hooks(TABLE, connector, self, failed)

    def remove(self) -> None:
        """Give the connector back."""
        self._hooks.remove()
        self._let_layers_go()

    def _clear(self) -> None:
        self._handed = self._started = self._saved = False
        self._loads: list[int] | None = None
        self._saves = -1
        self._layers_waited = 0
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._failed_requests: set[str] = set()
        self._sent: set[str] = set()

    # --- a step ---------------------------------------------------------------------------------------

    def planned(self, plan: Any, step: int) -> None:
        """The scheduler has made a plan."""
        if self._plans is not None:
            self._plans.append((plan, step))

    def _step_of(self, plan: Any) -> int:
        """The step that a plan is for; -1: none of the last few."""
        if self._plans is None:
            return self.steps + 1
        return next((step for known, step in self._plans if known is plan), -1)

    def handed(self, _: None, __: None, connector_metadata: Any) -> None:
        if self._handed:
            self._tell()
        self.steps = self._step_of(connector_metadata)
        self._handed = True
        reader = self.reader
        if reader is None:
            return
        self._loads = sorted(reader.filled(connector_metadata, self._block_size))
        if "saves" in reader.READS:
            self._saves = sum(1 for _ in reader.saves(connector_metadata))
        if self._loads:
            self._layers = Hooks(LAYERS, self._connector, self, self._failed)

    def load_started(self, *_: Any, **__: Any) -> None:
        self._started = True

    def layer_waited(self, *_: Any, **__: Any) -> None:
        self._layers_waited += 1

    def save_waited(self, *_: Any, **__: Any) -> None:
        self._saved = True

    def finished(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        sent, received = result
        self._sent.update(sent or ())
        self._received.update(received or ())

    def results(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        self._sent.update(result.finished_sending or ())
        self._received.update(result.finished_recving or ())
        self._failed_requests.update(getattr(result, "failed_recving", None) or ())

    def load_errors(self, _: None, result: Any) -> None:
        self._failed_blocks.update(result or ())

    def step_ends(self) -> None:
        self._tell()

    def _tell(self) -> None:
        self._let_layers_go()
        answered = self._failed_blocks or self._received or self._failed_requests or self._sent
        if self.steps >= 0 and (self._loads or self._saves > 0 or answered):
            self._log.emit(
                ev.WorkerStepped(
                    at=self._log.now(),
                    step=self.steps,
                    worker=self._rank,
                    started=self._started,
                    loaded_blocks=self._loads,
                    layers=self._layers_waited,
                    saves=self._saves,
                    saved=self._saved,
                    failed_blocks=sorted(self._failed_blocks),
                    received=sorted(self._received),
                    failed=sorted(self._failed_requests),
                    sent=sorted(self._sent),
                )
            )
        self._clear()

    def _let_layers_go(self) -> None:
        if self._layers is not None:
            self._layers.remove()
            self._layers = None


class WorkerObserver:
    """Watches a worker in a process of its own, into a journal of its own."""

    def __init__(self, connector: Any, config: Any, sink: Sink, version: str) -> None:
        self._sink = sink
        self._version = version
        self._configuration = identity(config)
        self._log = StepLog(sink)
        self._stopped = False
        self._watch = WorkerWatch(
            connector,
            self._log,
            self._hook_failed,
            block_size=int(config.cache_config.block_size),
            rank=int(self._configuration["rank"] or 0),
        )
        self._end = Hooks(
            (Hook("", "clear_connector_metadata", (), after="at_rest"),), connector, self, _ignore
        )
        self._restart()

    def at_rest(self, *_: Any, **__: Any) -> None:
        """Between two steps."""
        if self._sink.wants_snapshot:
            self._restart()

    def stop(self, reason: str) -> None:
        """Give the connector back. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._end.remove()
        self._watch.remove()
        self._log.emit(ev.EngineStopped(self._log.now(), reason))

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self._log.emit(ev.HookFailed(self._log.now(), hook, f"{type(error).__name__}: {error}", removed))
        if removed:
            self.stop(f"the observer of {hook} kept failing")

    def _restart(self) -> None:
        now = self._log.now()
        self._log.restart(
            ev.EngineStarted(
                at=now,
                wall_seconds=time.time(),
                engine="vllm",
                version=self._version,
                adapter="worker",
                level="worker",
                process_id=os.getpid(),
                configuration=self._configuration,
            ),
            ev.Snapshot(now, self._watch.steps, [], 0),
        )


def identity(config: Any) -> dict[str, ev.Setting]:
    """Whose worker it is: what the engine and its workers call the one transfer between them."""
    return {"transfer": transfer_of(config), "rank": int(config.parallel_config.rank)}


def transfer_of(config: Any) -> str | None:
    """A name that an engine's scheduler and workers share and no other engine has; None without."""
    transfer = getattr(config, "kv_transfer_config", None)
    name = getattr(transfer, "engine_id", None)
    return None if name is None else str(name)


def worker_in_this_process(config: Any) -> Any:
    """The worker side of an engine's connector, where its worker runs in this process; else None."""
    try:
        from vllm.distributed import kv_transfer
    except ImportError:
        return None
    has = getattr(kv_transfer, "has_kv_transfer_group", None)
    if has is None or not has():
        return None
    connector = kv_transfer.get_kv_transfer_group()
    own = getattr(connector, "_vllm_config", None)
    return connector if own is not None and transfer_of(own) == transfer_of(config) else None


def connector_factory() -> Any:
    """vLLM's class that makes both sides of a connector, and the role of a worker; None before 0.10."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    except ImportError:
        return None
    found = KVConnectorFactory, KVConnectorRole.WORKER
    return found if hasattr(KVConnectorFactory, "create_connector") else None


def _ignore(*_: Any) -> None:
    """What fails is told elsewhere."""
