"""The worker side of a live KV connector: what it loads, waits for, saves and reports in each step.

A worker receives connector metadata, starts its loads, runs the model, waits for its saves and reports what
arrived or failed. ``WorkerStepped`` carries all of that; it is emitted when the metadata is cleared, and only
for steps in which the connector did something. A worker in its own process counts the metadata that it
receives, from 1, as the scheduler counts its steps.

The waits for single layers are observed only in a step that loads, since there is a call for each layer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ...text import cut_id, failure
from ..connector_metadata import reader_of
from ..connector_metadata.metadata_reader import MetadataReader
from ..step_log import Sink, StepLog
from ..worker_journal import WorkerJournal
from .scheduler_side import Raised, in_connector

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

TABLE: tuple[Hook, ...] = (
    Hook("", "bind_connector_metadata", (), after="bound"),
    Hook("", "start_load_kv", (), after="load_started"),
    Hook("", "wait_for_save", (), after="save_waited"),
    Hook("", "get_finished", (), after="finished", optional=True),
    Hook("", "get_transfer_results", (), after="results", optional=True),
    Hook("", "get_block_ids_with_load_errors", (), after="load_errors", optional=True),
    Hook("", "clear_connector_metadata", (), before="step_ends"),
)
LAYERS: tuple[Hook, ...] = (Hook("", "wait_for_layer_load", (), after="layer_waited"),)

Failed = Callable[[str, Exception, bool], None]

METADATA_KEPT = 8
"""More than the steps that a scheduler runs ahead of a worker in its process."""


class WorkerWatch:
    """Observes the worker side of one connector. ``rank`` is the worker's number.

    ``in_scheduler_process``: the scheduler runs in the same process, and reports its metadata by
    :meth:`planned` before the worker receives it. Otherwise the metadata received is counted. ``raised`` is
    called for each exception that leaves a method of the connector.
    """

    def __init__(
        self,
        connector: Any,
        log: StepLog,
        failed: Failed,
        *,
        block_size: int,
        rank: int = 0,
        in_scheduler_process: bool = False,
        raised: Raised | None = None,
    ) -> None:
        self.reader: MetadataReader | None = reader_of(connector)
        """Reads the connector's metadata; None if kvledger has no reader for it."""
        self.step = 0
        """The current step; -1 if the metadata belongs to no recent one."""
        self._connector = connector
        self._log = log
        self._failed = failed
        self._block_size = block_size
        """Tokens per block."""
        self._rank = rank
        self._planned: deque[tuple[Any, int]] | None = (
            deque(maxlen=METADATA_KEPT) if in_scheduler_process else None
        )
        """The scheduler's last metadata with their steps; None in a worker's own process."""
        self._layers: Hooks | None = None
        self._clear()
        raises = None if raised is None else in_connector(raised)
        self._hooks = Hooks(TABLE, connector, self, failed, raised=raises)

    def remove(self) -> None:
        """Restore the connector."""
        self._hooks.remove()
        self._unhook_layers()

    def _clear(self) -> None:
        self._bound = self._started = self._saved = False
        """Whether metadata was received, loads were started, and saves were waited for in this step."""
        self._loads: list[int] | None = None
        """The blocks that the metadata orders to be loaded; None if unknown."""
        self._saves = -1
        """The number of saves that the metadata orders; -1 if unknown."""
        self._layers_waited = 0
        """Calls of ``wait_for_layer_load``."""
        self._failed_blocks: set[int] = set()
        """Blocks reported as failed to load."""
        self._received: set[str] = set()
        """Ids of the requests whose loads are reported finished."""
        self._failed_requests: set[str] = set()
        """Ids of the requests whose loads are reported failed."""
        self._sent: set[str] = set()
        """Ids of the requests whose saves are reported finished."""

    # --- a step ---------------------------------------------------------------------------------------

    def planned(self, metadata: Any, step: int) -> None:
        """The scheduler has built the metadata of a step."""
        if self._planned is not None:
            self._planned.append((metadata, step))

    def _step_of(self, metadata: Any) -> int:
        """The step that the metadata was built for; -1: none of the last few."""
        if self._planned is None:
            return self.step + 1
        return next((step for planned, step in self._planned if planned is metadata), -1)

    def bound(self, _: None, __: None, connector_metadata: Any) -> None:
        """``bind_connector_metadata``: the worker received a step's metadata."""
        if self._bound:
            self._emit_step()
        self.step = self._step_of(connector_metadata)
        self._bound = True
        reader = self.reader
        if reader is None:
            return
        self._loads = sorted(reader.filled(connector_metadata, self._block_size))
        if "saves" in reader.READS:
            self._saves = sum(1 for _ in reader.saves(connector_metadata))
        if self._loads:
            self._layers = Hooks(LAYERS, self._connector, self, self._failed)

    def load_started(self, *_: Any, **__: Any) -> None:
        """``start_load_kv`` returned."""
        self._started = True

    def layer_waited(self, *_: Any, **__: Any) -> None:
        """``wait_for_layer_load`` returned."""
        self._layers_waited += 1

    def save_waited(self, *_: Any, **__: Any) -> None:
        """``wait_for_save`` returned."""
        self._saved = True

    def finished(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_finished`` returned the requests whose transfers are complete."""
        sent, received = result
        self._sent.update(sent or ())
        self._received.update(received or ())

    def results(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_transfer_results`` returned, since 0.30 with the failed loads."""
        self._sent.update(result.finished_sending or ())
        self._received.update(result.finished_recving or ())
        self._failed_requests.update(getattr(result, "failed_recving", None) or ())

    def load_errors(self, _: None, result: Any) -> None:
        """``get_block_ids_with_load_errors`` returned."""
        self._failed_blocks.update(result or ())

    def step_ends(self) -> None:
        """``clear_connector_metadata`` is called. Emits ``WorkerStepped``."""
        self._emit_step()

    def _emit_step(self) -> None:
        """Emit ``WorkerStepped`` if the connector did something in this step."""
        self._unhook_layers()
        reported = self._failed_blocks or self._received or self._failed_requests or self._sent
        if self.step >= 0 and (self._loads or self._saves > 0 or reported):
            self._log.emit(
                ev.WorkerStepped(
                    at=self._log.now(),
                    step=self.step,
                    worker=self._rank,
                    started=self._started,
                    loaded_blocks=self._loads,
                    layers=self._layers_waited,
                    saves=self._saves,
                    saved=self._saved,
                    failed_blocks=sorted(self._failed_blocks),
                    received=sorted(map(cut_id, self._received)),
                    failed=sorted(map(cut_id, self._failed_requests)),
                    sent=sorted(map(cut_id, self._sent)),
                )
            )
        self._clear()

    def _unhook_layers(self) -> None:
        if self._layers is not None:
            self._layers.remove()
            self._layers = None


class WorkerObserver(WorkerJournal):
    """Observes the connector of a worker in its own process, into its own journal."""

    def __init__(self, connector: Any, config: Any, sink: Sink, version: str) -> None:
        super().__init__(sink, version, "worker", identity(config))
        self._watch = WorkerWatch(
            connector,
            self._log,
            self._hook_failed,
            block_size=int(config.cache_config.block_size),
            rank=int(self._configuration["rank"] or 0),
            raised=self._raised,
        )
        self.begin((Hook("", "clear_connector_metadata", (), after="at_rest"),), connector)

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self._log.emit(ev.HookFailed(self._log.now(), hook, failure(error), removed))
        if removed:
            logger.warning(
                "kvledger observes this worker no longer: its hook on %s kept failing, at last with %s",
                hook,
                type(error).__name__,
            )
            self.stop(f"the observer of {hook} kept failing")

    def _raised(self, method: str, error: Exception) -> None:
        self._log.emit(ev.EngineRaised(self._log.now(), method, type(error).__name__, False))


def identity(config: Any) -> dict[str, ev.Setting]:
    """Which engine the worker belongs to: the transfer id that both share, and the worker's rank."""
    return {"transfer": transfer_of(config), "rank": int(config.parallel_config.rank)}


def transfer_of(config: Any) -> str | None:
    """The id that an engine's scheduler and workers share with no other engine; None without a connector."""
    transfer = getattr(config, "kv_transfer_config", None)
    name = getattr(transfer, "engine_id", None)
    return None if name is None else str(name)


def worker_in_this_process(config: Any) -> Any:
    """The worker side of an engine's connector, if the worker runs in this process; else None."""
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
    """vLLM's class that creates both sides of a connector, and the role of a worker; None before 0.10."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    except ImportError:
        return None
    if not hasattr(KVConnectorFactory, "create_connector"):
        return None
    return KVConnectorFactory, KVConnectorRole.WORKER
