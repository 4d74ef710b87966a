"""Level ``content`` in a worker's own process: the model runner is observed into a journal of its own.

The worker counts the steps that it executes, from 1 after the warm-up, as the scheduler counts its steps. The
configuration carries ``engine_key``, by which a reader finds the journals of one engine.
"""

from __future__ import annotations

import logging
from typing import Any

from ... import events as ev
from ...hooks import Hook
from ..configuration import engine_key
from ..connectors.worker_side import identity, worker_in_this_process
from ..step_log import Sink
from ..worker_journal import WorkerJournal
from .options import options
from .runner_watch import RunnerWatch

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

AFTER_STEP = (
    Hook("", "execute_model", (), after="at_rest"),
    Hook("", "sample_tokens", (), after="at_rest", optional=True),
)


class ContentObserver(WorkerJournal):
    """Observes the model runner of one worker. Raises :class:`UnknownLayout`."""

    def __init__(self, worker: Any, sink: Sink, version: str) -> None:
        runner = worker.model_runner
        config = runner.vllm_config
        of_engine = {"engine_key": engine_key(config), "content": True}
        super().__init__(sink, version, "content", identity(config) | of_engine)
        self._watch: RunnerWatch = RunnerWatch(
            runner,
            self._log,
            self._failed,
            rank=int(self._configuration["rank"] or 0),
            worker=worker,
            connector=worker_in_this_process(config),
            seen_from_start=True,
            options=options(),
        )
        self.begin(AFTER_STEP, runner)

    def restart(self) -> None:
        """Emit what a segment begins with."""
        super().restart()
        self._log.emit(self._watch.began())

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
