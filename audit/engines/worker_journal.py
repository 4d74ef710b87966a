"""The journal of a worker in its own process: how it begins, goes on after a rotation, and ends."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from .. import events as ev
from ..hooks import Hook, Hooks
from .step_log import Sink, StepLog


class Watch(Protocol):
    """What observes the worker: the present step, and the end of the observation."""

    step: int

    def remove(self) -> None: ...


class WorkerJournal:
    """Observes one worker into a journal of its own. A subclass has the watch, and calls :meth:`begin`."""

    _watch: Watch

    def __init__(
        self, sink: Sink, version: str, adapter: str, configuration: Mapping[str, ev.Setting]
    ) -> None:
        self._sink = sink
        """The recorder of the worker's journal."""
        self._version = version
        self._adapter = adapter
        """What observes the worker: its connector's side, or its contents."""
        self._configuration = dict(configuration)
        self._log = StepLog(sink)
        self._stopped = False
        """Whether the journal has its end."""

    def begin(self, table: tuple[Hook, ...], host: Any) -> None:
        """Begin the journal. The hooks of ``table`` call :meth:`at_rest` at the end of each step."""
        self._end = Hooks(table, host, self, _ignore)
        self.restart()

    def at_rest(self, *_: Any, **__: Any) -> None:
        """A step ended: emit a snapshot if the sink wants one."""
        if self._sink.wants_snapshot:
            self.restart()

    def stop(self, reason: str) -> None:
        """Restore what is observed and emit ``EngineStopped``. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._end.remove()
        self._watch.remove()
        self._log.emit(ev.EngineStopped(self._log.now(), reason))

    def restart(self) -> None:
        """Emit what a segment begins with."""
        now = self._log.now()
        self._log.restart(
            ev.EngineStarted(
                at=now,
                wall_seconds=time.time(),
                engine="vllm",
                version=self._version,
                adapter=self._adapter,
                level="worker",
                process_id=os.getpid(),
                configuration=self._configuration,
            ),
            ev.Snapshot(now, self._watch.step, [], 0),
        )


def _ignore(*_: Any) -> None:
    """The watch's own hooks report failures."""
