"""Level ``content`` for an engine whose worker runs in the process of its scheduler.

The events go to the engine's own log. The step of a ``SchedulerOutput`` is found by the object itself,
because an asynchronous scheduler may plan a step before the worker has executed the one before.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Protocol

from ... import events as ev
from ...hooks import Hook, Hooks
from ...text import failure
from ..configuration import engine_key
from ..connectors.worker_side import identity, worker_in_this_process
from ..step_log import Sink, StepLog
from ..worker_journal import WorkerJournal
from .layout import UnknownLayout
from .options import options
from .runner_watch import RunnerWatch

logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""


class Observer(Protocol):
    """The observer of the engine's scheduler."""

    scheduler: Any
    log: StepLog
    step: int


STEPS_KEPT = 8
"""More than the steps that a scheduler runs ahead of a worker in its process."""


def worker_of(engine_core: Any) -> Any:
    """The worker of an engine core, if it runs in this process and has a model runner; else None."""
    executor = getattr(engine_core, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    worker = getattr(wrapper, "worker", wrapper)
    return worker if getattr(worker, "model_runner", None) is not None else None


class AttachedContent:
    """Observes the model runner of an engine in this process."""

    def __init__(self, observer: Observer, worker: Any, connector: Any) -> None:
        """Raises :class:`UnknownLayout`, or ImportError without torch."""
        from .runner_watch import RunnerWatch

        self._observer = observer
        self._planned: deque[tuple[object, int]] = deque(maxlen=STEPS_KEPT)
        """The last SchedulerOutputs, with their steps."""
        self._scheduling = Hooks(
            (Hook("", "schedule", (), after="planned"),), observer.scheduler, self, self._failed
        )
        """The hook on the scheduler, which tells the step of each SchedulerOutput."""
        self.watch: RunnerWatch | None = RunnerWatch(
            worker.model_runner,
            observer.log,
            self._failed,
            rank=int(observer.scheduler.vllm_config.parallel_config.rank),
            worker=worker,
            connector=connector,
            step_of=self._step_of,
            seen_from_start=observer.step == 0 and not observer.scheduler.requests,
            options=options(),
        )
        """Observes the model runner; None after the end."""

    def planned(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``schedule`` returned."""
        self._planned.append((result, self._observer.step))

    def _step_of(self, output: Any) -> int:
        for planned, step in reversed(self._planned):
            if planned is output:
                return int(step)
        raise LookupError("the step of a SchedulerOutput is not known")

    def begin_segment(self) -> None:
        """A segment of the journal begins."""
        if self.watch is not None:
            self._observer.log.emit(self.watch.began())

    def emit_counts(self) -> None:
        """Emit what was counted and not emitted yet."""
        if self.watch is not None:
            self.watch.emit_counts()

    def remove(self) -> None:
        """Restore the model runner and the scheduler."""
        self._scheduling.remove()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.remove()

    def _failed(self, hook: str, error: Exception, removed: bool) -> None:
        """A hook failed, so some writes may not have been seen: nothing is verified from now on."""
        logger.warning("kvledger checks the contents of blocks no longer: %s failed with %r", hook, error)
        watch, self.watch = self.watch, None
        self._scheduling.remove()
        if watch is not None:
            watch.drop()
        refuse(self._observer, f"the hook on {hook} failed with {type(error).__name__}")


def refuse(observer: Observer, reason: str) -> None:
    """Emit that no contents are checked, and why."""
    sentence = f"The contents of blocks are not checked: {reason}."
    observer.log.emit(ev.ContentWatched(observer.log.now(), observer.step, 0, 0, [], "", 0.0, [sentence]))


def watch_content(observer: Observer, worker: Any, connector: Any) -> AttachedContent | None:
    """Observe the contents of blocks, or say why not: the engine is then observed at level ``blocks``."""
    try:
        if worker is None:
            raise UnknownLayout("the engine's worker does not run in this process")
        return AttachedContent(observer, worker, connector)
    except Exception as error:  # the engine runs on, observed at level blocks
        reason = str(error) if isinstance(error, UnknownLayout) else failure(error)
        logger.warning("kvledger does not check the contents of blocks: %s", reason)
        refuse(observer, reason)
        return None


# --- Level ``content`` in a worker's own process: the model runner is observed into a journal of its own.
#
# The worker counts the steps that it executes, from 1 after the warm-up, as the scheduler counts its steps.
# The configuration carries ``engine_key``, by which a reader finds the journals of one engine.

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
