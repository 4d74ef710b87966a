"""Level ``content`` in a worker's own process: the model runner is observed into a journal of its own.

The worker counts the steps that it executes, from 1 after the warm-up, as the scheduler counts its steps. The
configuration carries ``engine_key``, by which a reader finds the journals of one engine.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ..configuration import engine_key
from ..connectors.worker_side import identity, worker_in_this_process
from ..step_log import Sink, StepLog
from .options import options
from .runner_watch import RunnerWatch

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

AFTER_STEP = (
    Hook("", "execute_model", (), after="at_rest"),
    Hook("", "sample_tokens", (), after="at_rest", optional=True),
)


class ContentObserver:
    """Observes the model runner of one worker. Raises :class:`UnknownLayout`."""

    def __init__(self, worker: Any, sink: Sink, version: str) -> None:
        runner = worker.model_runner
        config = runner.vllm_config
        self._sink, self._version = sink, version
        self._configuration = identity(config) | {"engine_key": engine_key(config), "content": True}
        self._log = StepLog(sink)
        self._stopped = False
        self._watch = RunnerWatch(
            runner,
            self._log,
            self._failed,
            rank=int(self._configuration["rank"] or 0),
            worker=worker,
            connector=worker_in_this_process(config),
            seen_from_start=True,
            options=options(),
        )
        self._end = Hooks(AFTER_STEP, runner, self, _ignore)
        self._restart()

    def at_rest(self, *_: Any, **__: Any) -> None:
        """A step ended: emit a snapshot if the sink wants one."""
        if self._sink.wants_snapshot:
            self._restart()

    def stop(self, reason: str) -> None:
        """Restore the model runner and emit ``EngineStopped``. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._end.remove()
        self._watch.remove()
        self._log.emit(ev.EngineStopped(self._log.now(), reason))

    def _failed(self, hook: str, error: Exception, removed: bool) -> None:
        """A hook failed, so some writes may not have been seen: nothing is verified from now on."""
        logger.warning("kvledger checks the contents of blocks no longer: %s failed with %r", hook, error)
        self._stopped = True
        self._end.remove()
        self._watch.drop()
        now, watch = self._log.now(), self._watch
        sentence = (
            f"The contents of blocks are checked no longer: the hook on {hook} failed with "
            f"{type(error).__name__}."
        )
        self._log.emit(ev.ContentWatched(now, watch.step, watch.rank, 0, [], "", 0.0, [sentence]))
        self._log.emit(ev.EngineStopped(now, f"the observer of {hook} failed"))

    def _restart(self) -> None:
        now = self._log.now()
        self._log.restart(
            ev.EngineStarted(
                at=now,
                wall_seconds=time.time(),
                engine="vllm",
                version=self._version,
                adapter="content",
                level="worker",
                process_id=os.getpid(),
                configuration=self._configuration,
            ),
            ev.Snapshot(now, self._watch.step, [], 0),
        )
        self._log.emit(self._watch.began())


def _ignore(*_: Any) -> None:
    """The watch's own hooks report failures."""
