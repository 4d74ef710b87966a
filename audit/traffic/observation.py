"""Observes schedulers in this process as kvledger observes those of engines; events stay in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..events import Event
from ..journal.memory_recorder import MemoryRecorder


class Observation:
    """Call it with each scheduler, before its first request.

    ``level`` "": blocks, or tokens where a release's blocks are out of reach. ``clock``: nanoseconds.
    """

    def __init__(
        self,
        level: str = "tokens",
        *,
        clock: Callable[[], int] | None = None,
        sink: MemoryRecorder | None = None,
        version: str = "",
    ) -> None:
        self.level = level
        self.sink = sink or MemoryRecorder()
        """Keeps the events until they are taken."""
        self.schedulers: list[Any] = []
        """The observed schedulers, in order."""
        self.observers: list[Any] = []
        """The observer of each."""
        self._how: dict[str, Any] = {"version": version} | ({"clock": clock} if clock is not None else {})

    def __call__(self, scheduler: Any) -> None:
        from ..engines import blocks_out_of_reach, choose, host_version

        self.level = self.level or ("tokens" if blocks_out_of_reach(scheduler) else "blocks")
        how = {**self._how, "version": self._how["version"] or host_version(), "level": self.level}
        self.schedulers.append(scheduler)
        self.observers.append(choose(scheduler)(scheduler, self.sink, **how))
        self.observers[-1].start()

    def take(self) -> list[Event]:
        """The events since the last call."""
        return self.sink.take()

    def stop(self, reason: str = "exit") -> list[Event]:
        """End the observation; the events that were not taken yet."""
        for observer in self.observers:
            observer.stop(reason)
        return self.take()
