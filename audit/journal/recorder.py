"""The queue between the hooks and the journal, in the engine's process, and the thread that writes it.

:meth:`Recorder.record` only appends to a bounded queue. A daemon thread wakes about once a second, takes
the queued events in small batches and gives them to a :class:`JournalWriter`; between two batches it is in
a system call, without the GIL. Rules of this file:

- Nothing raises into the engine, and the engine never waits. Events that can't be kept are counted.
- After the first lost event all events are refused until :meth:`Recorder.restart`, so that the
  :class:`~kvledger.audit.events.Gap` stands where the loss is.
- The observer must look at ``wants_snapshot`` once a step, and call ``restart`` if it is true.
- A forked child records nothing and keeps none of its parent's files open.

The counters are exact if a single thread records, which is the scheduler's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import NamedTuple, cast

from msgspec import Raw
from msgspec.msgpack import Encoder

from ..events import EngineStarted, EngineStopped, Event, Gap, Numbers, Snapshot
from .writer import JournalWriter, Limits

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 1024
"""Most events encoded at once. Encoding them holds the GIL for about 0.3 ms."""

CAPACITY_EVENTS = 65536
"""Most events in the queue."""

WAKE_FRACTION = 1 / 8
"""The writer's thread is woken early once the queue is filled to this fraction of its capacity."""

WRITE_SECONDS = 1.0
"""Seconds between two writes. Waking the thread, whose code and data are no longer in the CPU's caches,
costs more than the writing, so it is woken rarely."""

CLOSE_SECONDS = 5.0
"""Longest time that a disk which does not answer may delay the end of the process."""

OVERFLOW = "the recorder was full"


class _Restart(NamedTuple):
    """Queued where a segment begins."""

    gap: Gap | None
    started: EngineStarted
    snapshot: Snapshot


class _Flush(NamedTuple):
    """Queued by :meth:`Recorder.flush`; ``done`` is set when everything before it was written."""

    done: threading.Event


class _Close(NamedTuple):
    """Queued last, by :meth:`Recorder.close`."""

    reason: str
    at: int


_MARKS = frozenset((_Restart, _Flush, _Close))
_Item = Event | _Restart | _Flush | _Close


class Recorder:
    """Writes events to the journal in ``folder``, which is made with the first event.

    If the folder can't be made or locked, the recorder warns once and records nothing.
    """

    def __init__(
        self,
        folder: str | Path,
        limits: Limits | None = None,
        capacity_events: int = CAPACITY_EVENTS,
        flush_seconds: float = WRITE_SECONDS,
    ) -> None:
        self.folder = Path(folder)
        """The journal's folder."""
        self.wants_snapshot = True
        """Whether the observer should call :meth:`restart` at the next step boundary; true at first."""
        self.on_exit: Callable[[], object] | None = None
        """Called at the end of the process before the recorder closes, so the observer can emit the rest."""
        self.failures = 0
        """How often the recorder failed and gave up: 0 or 1."""
        self.writer_seconds = 0.0
        """CPU seconds that the writer's thread has used."""
        self._limits = limits
        """The journal's bounds; None for the defaults."""
        self._full_capacity = capacity_events
        """Most events in the queue while nothing was lost."""
        self._set_capacity(capacity_events)
        self._flush_seconds = flush_seconds
        """Longest time between two writes."""
        self._queue: deque[_Item] = deque()
        """What the writer's thread has still to write, in order."""
        self._encode = Encoder().encode
        """Encodes the lists of numbers in events, in the engine's thread."""
        self._open = True
        """Whether events are accepted."""
        self._stopped = False
        """Whether the last event written is EngineStopped."""
        self._overflowed = False
        """Whether the queue was full and no restart has come since."""
        self._refused = 0
        """Events refused because the queue was full."""
        self._refused_reported = 0
        self._restarts = 0
        """How often :meth:`restart` was called."""
        self._restarts_done = 0
        """How many of these restarts the writer's thread has carried out."""
        self._recreated = False
        """Whether files of the journal were moved or removed, which is logged once."""
        self._not_recreated = ""
        """Why it could last not be made again, which is logged once."""
        self._unwritten = 0
        """Events lost because the writer failed or could not be made."""
        self._taken = 0
        """Events that the writer's thread has taken from the queue."""
        self._epoch: float | None = None
        """The monotonic clock when the engine started; None before the first restart."""
        self._writer: JournalWriter | None = None
        """Writes the journal; made with the first event."""
        self._sleep = threading.Lock()
        """Locked while the writer's thread sleeps; released to wake it. Waiting for an Event runs Python
        code, waiting for a lock does not."""
        self._sleep.acquire()
        self._finalizer: multiprocessing_util.Finalize | None = None
        """Closes the recorder at the end of a multiprocessing child."""
        self._thread = threading.Thread(target=self._run, name="kvledger-writer", daemon=True)
        """The writer's thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._fail(error)
            return
        _recorders.add(self)
        atexit.register(self._exit)
        # A forked multiprocessing child, such as vLLM's engine core, ends without calling atexit functions.
        self._finalizer = multiprocessing_util.Finalize(None, self._exit, exitpriority=100)

    # --- the engine's side --------------------------------------------------------------------------

    def keep(self, numbers: list[int]) -> Numbers:
        """A copy of ``numbers`` for an event, already encoded.

        Each garbage collection walks all lists in the queue, and does not walk bytes. Never raises: an
        event with numbers that can't be encoded is lost when it is written.
        """
        try:
            return Raw(self._encode(numbers))
        except Exception:
            return numbers.copy()

    def record(self, event: Event) -> None:
        """Queue one event. Never raises, never waits."""
        queue = self._queue
        if len(queue) < self._wake_above:
            queue.append(event)
        elif len(queue) < self._capacity:
            queue.append(event)
            self._wake()
        else:
            self._refuse()

    def record_all(self, events: Sequence[Event]) -> None:
        """Queue several events. Never raises, never waits."""
        queue = self._queue
        if len(queue) + len(events) <= self._wake_above:
            queue.extend(events)
        else:
            for event in events:
                self.record(event)

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        """Begin a segment with these two events; if events were refused, a Gap comes before them."""
        if not self._open:
            return
        lost = self._refused - self._refused_reported
        self._refused_reported += lost
        gap = Gap(started.at, lost, OVERFLOW) if lost else None
        self._epoch = time.monotonic() - started.at / 1e6
        self._queue.append(_Restart(gap, started, snapshot))
        # The writer's thread reads these in the opposite order, so it never asks for a second snapshot.
        self._restarts += 1
        self._overflowed = False
        self._set_capacity(self._full_capacity)
        self.wants_snapshot = False

    def flush(self, timeout: float | None = 5.0) -> bool:
        """Wait until all events recorded so far are written or lost; returns False on a timeout."""
        if not self._open:
            return not self._thread.is_alive()
        done = threading.Event()
        self._queue.append(_Flush(done))
        self._wake()
        return done.wait(timeout)

    def close(self, reason: str = "exit", timeout: float = CLOSE_SECONDS) -> None:
        """Write the queue, and EngineStopped unless it was recorded already. Idempotent."""
        if not self._open:
            return
        self._shut()
        atexit.unregister(self._exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._queue.append(_Close(reason, microseconds_since(self._epoch)))
        self._wake()
        self._thread.join(timeout)

    @property
    def recorded_events(self) -> int:
        """Events that the writer's thread has taken from the queue; some may have been lost since."""
        return self._taken

    @property
    def written_events(self) -> int:
        """Events in the journal, Gaps and restarts included."""
        return self._writer.written_events if self._writer is not None else 0

    @property
    def lost_events(self) -> int:
        """Events refused by a full queue, and events that could not be written."""
        lost = self._refused + self._unwritten
        return lost + self._writer.lost_events if self._writer is not None else lost

    @property
    def written_bytes(self) -> int:
        """Bytes appended to the journal."""
        return self._writer.written_bytes if self._writer is not None else 0

    @property
    def write_failures(self) -> int:
        """Writes, rotations and removals that failed."""
        return self._writer.write_failures if self._writer is not None else 0

    def _wake(self) -> None:
        """Wake the writer's thread, or keep it from falling asleep next time."""
        with contextlib.suppress(RuntimeError):  # another thread has released it meanwhile
            if self._sleep.locked():
                self._sleep.release()

    def _refuse(self) -> None:
        self._refused += 1
        self._overflowed = True
        self._set_capacity(0)

    def _set_capacity(self, events: int) -> None:
        """Set how many events may be queued; 0 refuses all."""
        self._capacity = events
        self._wake_above = int(events * WAKE_FRACTION)

    def _exit(self) -> None:
        """Let the observer emit the rest and close; called at the end of the process."""
        if not self._open:
            return
        try:
            if self.on_exit is not None:
                self.on_exit()
        except Exception as error:
            logger.warning("kvledger: the observer failed at exit: %r", error)
        self.close()

    # --- the writer's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._drain():
                self.writer_seconds = time.thread_time()
                self._sleep.acquire(timeout=self._flush_seconds)
        except BaseException as error:  # a SystemExit would end this thread without a word
            self._fail(error)
        finally:
            self.writer_seconds = time.thread_time()
            if self._writer is not None:
                self._writer.close()

    def _drain(self) -> bool:
        """Write everything that is queued now; returns False once the recorder was closed."""
        queue = self._queue
        while queue:
            items = [queue.popleft() for _ in range(min(len(queue), BATCH_EVENTS))]
            if _MARKS.isdisjoint(map(type, items)):
                self._write(cast("list[Event]", items))
            elif not self._write_up_to_mark(items):
                return False
            self._ask_for_snapshot()
        if self._writer is not None:
            self._writer.idle()
            if self._writer.removed:
                self._recreate(self._writer)
        self._ask_for_snapshot()
        return True

    def _recreate(self, writer: JournalWriter) -> None:
        """Begin again in a folder that was removed. If it can't be made now, the next time."""
        try:
            writer.recreate()
        except OSError as error:
            writer.write_failures += 1
            if repr(error) != self._not_recreated:
                self._not_recreated = repr(error)
                logger.warning("kvledger can't make the journal %s again: %r", self.folder, error)
            return
        if not self._recreated:
            self._recreated = True
            logger.warning(
                "kvledger: files of the journal %s were moved, removed or cut while the engine runs: what "
                "was in them may be lost. A new segment begins with the next step.",
                self.folder,
            )

    def _write_up_to_mark(self, items: list[_Item]) -> bool:
        """Write the events before the first mark and carry out the mark; returns False if it closes.

        Everything after the mark is queued again, and so is the mark while the events are written.
        """
        place = [kind in _MARKS for kind in map(type, items)].index(True)
        self._queue.extendleft(reversed(items[place:]))
        if place:
            self._write(cast("list[Event]", items[:place]))
        return self._carry_out(cast("_Restart | _Flush | _Close", self._queue.popleft()))

    def _write(self, events: list[Event]) -> None:
        self._taken += len(events)
        if self._writer is None:
            try:
                self._writer = JournalWriter(self.folder, self._limits)
            except OSError:
                self._unwritten += len(events)
                raise
        self._writer.write(events)
        self._stopped = type(events[-1]) is EngineStopped

    def _carry_out(self, mark: _Restart | _Flush | _Close) -> bool:
        if isinstance(mark, _Restart):
            if mark.gap is not None:
                self._write([mark.gap])
            if self._writer is not None:
                self._writer.rotate()
            self._write([mark.started, mark.snapshot])
            self._restarts_done += 1
            return True
        if isinstance(mark, _Flush):
            if self._writer is not None:
                self._writer.idle()
            mark.done.set()
            return True
        if self._writer is not None:
            lost = self._refused - self._refused_reported
            self._refused_reported += lost
            at = max(mark.at, self._writer.at)
            if lost:
                self._write([Gap(at, lost, OVERFLOW)])
            if not self._stopped:
                self._write([EngineStopped(at, mark.reason)])
        return False

    def _ask_for_snapshot(self) -> None:
        """Ask the observer for a snapshot if a segment should begin, unless one is already queued.

        After an overflow it is asked only once half the queue is free; otherwise a disk that does not
        answer would cost the engine a snapshot every step.
        """
        if self.wants_snapshot or self._restarts != self._restarts_done or not self._open:
            return
        drained = self._overflowed and len(self._queue) <= self._full_capacity // 2
        if drained or (self._writer is not None and self._writer.wants_rotation):
            self.wants_snapshot = True

    # --- giving up ---------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Record nothing from now on, and log a warning."""
        self._shut()
        queue = self._queue
        while queue:
            item = queue.popleft()
            if isinstance(item, _Flush):
                item.done.set()
            elif not isinstance(item, _Close):
                self._unwritten += 2 if isinstance(item, _Restart) else 1
        logger.warning("kvledger records nothing in %s: %r", self.folder, error)
        self.failures += 1

    def _shut(self) -> None:
        self._open = False
        self._set_capacity(0)
        self.wants_snapshot = False

    def _stop_in_child(self) -> None:
        """Stop recording in a forked child: the journal and its lock belong to the parent."""
        self._shut()
        self.on_exit = None
        self._queue = deque()
        if self._writer is not None:
            self._writer.abandon()


def microseconds_since(epoch: float | None) -> int:
    """Microseconds since the engine started; 0 if that is not known."""
    return 0 if epoch is None else int((time.monotonic() - epoch) * 1e6)


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def flush_all(timeout: float) -> None:
    """Wait, for so many seconds at most, until every recorder of this process has written its events."""
    until = time.monotonic() + timeout
    for recorder in list(_recorders):
        recorder.flush(max(0.0, until - time.monotonic()))


def _stop_all_in_child() -> None:
    with contextlib.suppress(Exception):
        for recorder in list(_recorders):
            recorder._stop_in_child()


os.register_at_fork(after_in_child=_stop_all_in_child)


# --- A recorder that keeps its events in memory, for ``attach`` and for tests: no thread, no journal.


def write_journal(folder: Path, batches: Iterable[list[Event]]) -> JournalWriter:
    """Write what a :class:`MemoryRecorder` returned as one segment, which is still open. Raises OSError."""
    writer = JournalWriter(folder, Limits(segment_bytes=1 << 40, folder_bytes=1 << 40))
    writer.rotate()
    for events in batches:
        writer.write(events)
    return writer


class MemoryRecorder:
    """A recorder without a journal: :meth:`take` returns the events recorded since the last call."""

    failures = 0
    written_bytes = 0
    write_failures = 0
    writer_seconds = 0.0

    def __init__(self, capacity_events: int = 1 << 20) -> None:
        self.wants_snapshot = True
        """Whether the observer should call :meth:`restart` at the next step boundary; true at first."""
        self.on_exit: Callable[[], object] | None = None
        """Never called: there is no journal to complete at the end of the process."""
        self.lost_events = 0
        """Events refused because too many were kept."""
        self._events: list[Event] = []
        """Events since the last :meth:`take`."""
        self._full_capacity = capacity_events
        """Most events kept while nothing was lost."""
        self._capacity = capacity_events
        """Most events kept now; 0 after a loss."""
        self._taken = 0
        """Events that :meth:`take` has returned so far."""
        self._lost_reported = 0
        self._open = True
        """Whether events are accepted."""
        self._stopped = False
        """Whether the last event that :meth:`take` returned is EngineStopped."""
        self._epoch: float | None = None
        """The monotonic clock when the engine started; None before the first restart."""

    def keep(self, numbers: list[int]) -> list[int]:
        """A copy of ``numbers`` for an event."""
        return numbers.copy()

    @property
    def recorded_events(self) -> int:
        """Events accepted."""
        return self._taken + len(self._events)

    @property
    def written_events(self) -> int:
        """Events accepted: nothing can go wrong after that."""
        return self.recorded_events

    def record(self, event: Event) -> None:
        """Queue one event. Never raises, never waits."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self._capacity = 0
            self.lost_events += 1

    def record_all(self, events: Sequence[Event]) -> None:
        """Queue several events. Never raises, never waits."""
        for event in events:
            self.record(event)

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        """Begin again with these two events; if events were refused, a Gap comes before them."""
        if not self._open:
            return
        self._report_loss(started.at)
        self._epoch = time.monotonic() - started.at / 1e6
        self._events += (started, snapshot)
        self._capacity = self._full_capacity
        self.wants_snapshot = False

    def take(self) -> list[Event]:
        """Everything recorded since the last call."""
        events, self._events = self._events, []
        self._taken += len(events)
        if events:
            self._stopped = type(events[-1]) is EngineStopped
        if self._open and not self._capacity:
            self.wants_snapshot = True
        return events

    def flush(self, timeout: float | None = None) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def close(self, reason: str = "exit", timeout: float = 0.0) -> None:
        """Add EngineStopped unless it was recorded already, and refuse everything after it. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._capacity = 0
        self.wants_snapshot = False
        at = microseconds_since(self._epoch)
        self._report_loss(at)
        stopped = type(self._events[-1]) is EngineStopped if self._events else self._stopped
        if self._epoch is not None and not stopped:
            self._events.append(EngineStopped(at, reason))

    def _report_loss(self, at: int) -> None:
        lost = self.lost_events - self._lost_reported
        self._lost_reported += lost
        if lost:
            self._events.append(Gap(at, lost, OVERFLOW))
