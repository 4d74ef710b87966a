"""Read the journals of an engine's workers together with the engine's own journal.

Workers' journals are in the same folder; both have the same ``transfer`` in their configuration. A worker's
step is audited after the engine's events have planned that step and before its output, so no clocks are
compared. If a worker writes its step later than that, the step is audited late.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import LedgerError
from ..events import (
    BlocksFailed,
    BlocksMoved,
    BlocksSketched,
    Census,
    ContentCounted,
    ContentWatched,
    Delivered,
    DeliveredWhole,
    EngineRaised,
    EngineStarted,
    Event,
    Gap,
    HitsVerified,
    HookFailed,
    LoadFailed,
    Repeated,
    ScrubDiffered,
    WorkerStepped,
    WorkerWeights,
)
from ..journal.catalogue import WORKER, Catalogue
from ..journal.reader import Position, Reader

AFTER_PLANNING: tuple[type[Event], ...] = (
    *(Delivered, DeliveredWhole, LoadFailed, BlocksFailed, Repeated, Census),
)
"""Events that an engine emits between two calls of its scheduler, never while it plans a step."""


MOST_REMEMBERED = 10_000

WorkerEvent = (
    WorkerStepped
    | ContentWatched
    | HitsVerified
    | ContentCounted
    | ScrubDiffered
    | BlocksMoved
    | BlocksSketched
)
"""What a worker emits in its steps, and the ledger of its engine reads."""


class _Identity(NamedTuple):
    """What tells one engine's journals from those of others; None: the engine does not have it."""

    transfer: object
    engine_key: object

    def is_of(self, other: _Identity) -> bool:
        """Whether both may be of one engine, and have something in common."""
        pairs = list(zip(self, other, strict=True))
        alike = any(mine == theirs is not None for mine, theirs in pairs)
        return alike and not any(
            mine != theirs for mine, theirs in pairs if mine is not None and theirs is not None
        )


_identities: dict[Path, _Identity] = {}
"""The identities of workers' journals of other engines, of which restarts leave many."""


class Progress(msgspec.Struct):
    """How far one worker's journal was audited. Another reader can go on from here."""

    start: Position = Position()
    """Where the batch with the first event that was not audited begins."""
    steps: int = 0
    """Steps of lower event numbers were audited."""
    unplaced: int = 0
    """Exceptions and calls of lower event numbers were audited."""


class _Read(NamedTuple):
    """An event that was read and not yet audited: its number, and where its batch begins."""

    event: WorkerEvent
    number: int
    start: Position
    progress: Progress


class _Call(NamedTuple):
    """A call that changes weights, or an exception, not yet audited: its Unix time and its number."""

    at: float
    event: WorkerWeights | EngineRaised
    number: int
    progress: Progress


class WorkerJournals:
    """The workers' journals in the same folder as the engine's journal at ``path``."""

    def __init__(self, path: Path) -> None:
        self.next_step = -1
        """The first step that is read and not yet returned by :meth:`upto`; -1 if there is none."""
        self.calls: deque[_Call] = deque()
        """Calls that change weights, and exceptions that left connectors, in the order of time, that are read
        and not yet returned."""
        self.progress: dict[str, Progress] = {}
        """How far each worker's journal was audited, by its name."""
        self.began: dict[str, float] = {}
        """From which Unix time each worker's journal counts."""
        self._folder = path.parent if path.is_dir() else None
        """Where workers' journals are; None if a single segment is read."""
        self._readers: dict[str, Reader | None] = {}
        """A reader for each worker's journal, by its name; None once it is no longer read."""
        self._steps: deque[_Read] = deque()
        """Workers' steps that are read and not yet returned, in the order of steps."""

    def beside(self) -> bool:
        """Whether there are journals of any worker in the folder."""
        with contextlib.suppress(OSError):
            return self._folder is not None and bool(Catalogue(self._folder).named(WORKER))
        return False

    def poll(self, transfer: object, engine_key: object = None) -> None:
        """Read what the workers with this ``transfer``, or this ``engine_key``, have written by now."""
        if self._folder is None or (transfer is None and engine_key is None):
            return
        identity = _Identity(transfer, engine_key)
        new_steps: list[_Read] = []
        with contextlib.suppress(OSError):
            for path in Catalogue(self._folder).named(WORKER):
                reader = self._reader(path, identity)
                if reader is not None:
                    new_steps += self._read(reader, self.progress[path.name], identity)
        if new_steps:
            self._steps = deque(sorted([*self._steps, *new_steps], key=_step))
            self.next_step = self._steps[0].event.step

    def upto(self, step: int) -> Iterator[WorkerEvent]:
        """Yield workers' steps up to ``step``, each once."""
        while self._steps and self._steps[0].event.step <= step:
            read = self._steps.popleft()
            read.progress.start, read.progress.steps = read.start, read.number + 1
            yield read.event
        self.next_step = self._steps[0].event.step if self._steps else -1

    def calls_until(self, at: float) -> Iterator[tuple[float, WorkerWeights | EngineRaised]]:
        """Yield workers' calls and exceptions up to a Unix time, each once with its own."""
        while self.calls and self.calls[0].at <= at:
            call = self.calls.popleft()
            call.progress.unplaced = call.number + 1
            yield call.at, call.event

    def _reader(self, path: Path, identity: _Identity) -> Reader | None:
        if path.name not in self._readers:
            if identity.is_of(_identities.get(path, identity)):
                progress = self.progress.setdefault(path.name, Progress())
                self._readers[path.name] = Reader(path, progress.start)
            else:
                self._readers[path.name] = None
        return self._readers[path.name]

    def _read(self, reader: Reader, progress: Progress, identity: _Identity) -> Iterator[_Read]:
        """Yield a worker's new steps. A journal that lost events is not read on: it may lack a step."""
        try:
            for batch in reader.poll():
                for number, event in enumerate(batch.events, batch.first_event):
                    if isinstance(event, WorkerEvent):
                        if number >= progress.steps:
                            yield _Read(event, number, batch.start, progress)
                    elif isinstance(event, EngineRaised | WorkerWeights):
                        if number < progress.unplaced:
                            continue
                        began = self.began.get(reader.path.name, 0.0)
                        call = _Call(began + event.at / 1e6, event, number, progress)
                        self.calls = deque(sorted([*self.calls, call], key=lambda each: each.at))
                    elif isinstance(event, Gap | HookFailed) or _is_of_another_engine(event, identity):
                        if isinstance(event, EngineStarted):
                            _remember(reader.path, _identity(event))
                            del self.progress[reader.path.name]
                        self._stop_reading(reader.path.name)
                        return
                    elif isinstance(event, EngineStarted):
                        self.began[reader.path.name] = event.began_seconds
        except LedgerError:
            self._stop_reading(reader.path.name)

    def _stop_reading(self, name: str) -> None:
        reader = self._readers.get(name)
        if reader is not None:
            reader.close()
        self._readers[name] = None

    def close(self) -> None:
        """Close the files. A later :meth:`poll` does not read on in them."""
        for name in self._readers:
            self._stop_reading(name)


def _remember(path: Path, identity: _Identity) -> None:
    """Note whose worker's journal this is, so that no other engine's audit opens it again."""
    if len(_identities) >= MOST_REMEMBERED:
        _identities.clear()
    _identities[path] = identity


def _identity(started: EngineStarted) -> _Identity:
    settings = started.configuration
    return _Identity(settings.get("transfer"), settings.get("engine_key"))


def _is_of_another_engine(event: Event, identity: _Identity) -> bool:
    return isinstance(event, EngineStarted) and not identity.is_of(_identity(event))


def _step(read: _Read) -> int:
    return read.event.step
