"""The journals of an engine's workers, read along with the engine's own.

They lie beside it, and are known by the transfer that both name (``engines/workers.py``). A worker's step
is told when the engine's own events have got past the planning of that step, and before its output: so
no clock is compared. What comes late, because a worker writes when it likes, is told late.

The outer ring: this module reads files.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ..errors import LedgerError
from ..events import (
    Census,
    Delivered,
    DeliveredWhole,
    EngineStarted,
    Event,
    Gap,
    HookFailed,
    LoadFailed,
    Repeated,
    WorkerStepped,
)
from ..journal.folder import is_workers
from ..journal.reader import Reader

AFTER_PLANNING: tuple[type[Event], ...] = (Delivered, DeliveredWhole, LoadFailed, Repeated, Census)
"""An engine tells these between two calls of its scheduler, never while it plans a step."""


class WorkerJournals:
    """The workers' journals beside the engine's at ``path``.

    ``next_step`` is the step that is to be told next; -1: there is none.
    """

    def __init__(self, path: Path) -> None:
        self.next_step = -1
        self._folder = path.parent if path.is_dir() else None
        self._readers: dict[Path, Reader | None] = {}
        self._steps: deque[WorkerStepped] = deque()

    def poll(self, transfer: object) -> None:
        """Read what workers of this transfer have written by now."""
        if self._folder is None or transfer is None:
            return
        came: list[WorkerStepped] = []
        with contextlib.suppress(OSError):
            for path in sorted(filter(is_workers, self._folder.iterdir())):
                came += self._read(path, transfer)
        if came:
            self._steps = deque(sorted([*self._steps, *came], key=_step))
            self.next_step = self._steps[0].step

    def upto(self, step: int) -> Iterator[WorkerStepped]:
        """Workers' steps up to ``step``, each once."""
        while self._steps and self._steps[0].step <= step:
            yield self._steps.popleft()
        self.next_step = self._steps[0].step if self._steps else -1

    def _read(self, path: Path, transfer: object) -> Iterator[WorkerStepped]:
        """Nothing more of a worker whose events were lost: what is missing might have been done."""
        try:
            reader = self._readers.setdefault(path, Reader(path))
            for batch in reader.poll() if reader is not None else ():
                for event in batch.events:
                    if isinstance(event, WorkerStepped):
                        yield event
                    elif isinstance(event, Gap | HookFailed) or _is_anothers(event, transfer):
                        self._let_go(path)
                        return
        except LedgerError:
            self._let_go(path)

    def _let_go(self, path: Path) -> None:
        reader = self._readers.get(path)
        if reader is not None:
            reader.close()
        self._readers[path] = None

    def close(self) -> None:
        """Let the files go."""
        for path in self._readers:
            self._let_go(path)


def _is_anothers(event: Event, transfer: object) -> bool:
    return isinstance(event, EngineStarted) and event.configuration.get("transfer") != transfer


def _step(event: WorkerStepped) -> int:
    return event.step
