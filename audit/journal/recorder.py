"""What stands between the hooks and the journal, in the engine's process.

:meth:`Recorder.record` only appends to a bounded queue. A daemon thread wakes by time, takes what
is there in small batches and writes it; between two batches it is in a system call, without the
GIL. Rules of this file:

- Nothing raises into the engine and nothing makes it wait. What can't be kept is counted.
- Events are refused from the first that is lost until :meth:`Recorder.restart`, so that the
  :class:`~kvledger.audit.events.Gap` stands where the loss is.
- The observer has one duty: look at ``wants_snapshot`` once a step and then call ``restart``.
- A forked child records nothing, and holds nothing of its parent's open.

One thread records (the scheduler's); counters are exact then.
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
from collections.abc import Callable, Sequence
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import NamedTuple, cast

from msgspec import Raw
from msgspec.msgpack import Encoder

from ..events import EngineStarted, EngineStopped, Event, Gap, Snapshot
from .writer import JournalWriter, Limits

logger = logging.getLogger("kvledger")

BATCH_EVENTS = 1024
"""Events encoded at once: some 0.3 ms of the GIL, and after each batch it has to be waited for again."""

CAPACITY_EVENTS = 65536
EARLY = 1 / 8
"""Of a full queue: with so much in it the writer's thread is woken before its time."""

WRITE_SECONDS = 1.0
"""Between two writes. Each wakes a thread whose code and data are cold by then: that, and not what there
is to write, is most of its cost."""

CLOSE_SECONDS = 5.0
"""Longest that the end of the process is held up by a disk that does not answer."""

OVERFLOW = "the recorder was full"


class _Restart(NamedTuple):
    """A segment begins here."""

    gap: Gap | None
    started: EngineStarted
    snapshot: Snapshot


class _Flush(NamedTuple):
    """Everything before this is written when ``done`` is set."""

    done: threading.Event


class _Close(NamedTuple):
    reason: str
    at: int


_MARKS = frozenset((_Restart, _Flush, _Close))
_Item = Event | _Restart | _Flush | _Close


class Recorder:
    """Writes events to the journal in ``folder``, which is made at the first of them.

    ``wants_snapshot``: :meth:`restart` should be called at the next step boundary; True at first.
    ``on_exit``: called before the recorder closes itself at the end of the process, for what the
    observer still has to say. A folder that can't be made or locked makes the recorder inert.
    """

    def __init__(
        self,
        folder: str | Path,
        limits: Limits | None = None,
        capacity_events: int = CAPACITY_EVENTS,
        flush_seconds: float = WRITE_SECONDS,
    ) -> None:
        self.folder = Path(folder)
        self.wants_snapshot = True
        self.on_exit: Callable[[], object] | None = None
        self.failures = 0
        self.writer_seconds = 0.0
        self._limits = limits
        self._full_capacity = capacity_events
        self._take_up_to(capacity_events)
        self._flush_seconds = flush_seconds
        self._queue: deque[_Item] = deque()
        self._encode = Encoder().encode
        self._open = True
        self._stopped = False
        self._overflowed = False
        self._refused = 0
        self._told = 0
        self._restarts = 0
        self._restarts_done = 0
        self._unwritten = 0
        self._taken = 0
        self._epoch: float | None = None
        self._writer: JournalWriter | None = None
        self._sleep = threading.Lock()  # an Event's wait is Python, and cold whenever it comes
        self._sleep.acquire()
        self._finalizer: multiprocessing_util.Finalize | None = None
        self._thread = threading.Thread(target=self._run, name="kvledger-writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._fail(error)
            return
        _recorders.add(self)
        atexit.register(self._exit)
        # A forked multiprocessing child, as vLLM's engine core is, ends without atexit.
        self._finalizer = multiprocessing_util.Finalize(None, self._exit, exitpriority=100)

    # --- the engine's side --------------------------------------------------------------------------

    def keep(self, numbers: list[int]) -> list[int]:
        """A copy for an event, encoded: the garbage collector walks lists that wait to be written, each time.

        Never raises: what can't be encoded is lost when it is written.
        """
        try:
            return cast("list[int]", Raw(self._encode(numbers)))
        except Exception:
            return numbers.copy()

    def record(self, event: Event) -> None:
        """Take one event. Never raises, never waits."""
        queue = self._queue
        if len(queue) < self._early:
            queue.append(event)
        elif len(queue) < self._capacity:
            queue.append(event)
            self._wake()
        else:
            self._refuse()

    def record_all(self, events: Sequence[Event]) -> None:
        """Take several. Never raises, never waits."""
        queue = self._queue
        if len(queue) + len(events) <= self._early:
            queue.extend(events)
        else:
            for event in events:
                self.record(event)

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        """Begin a segment here with these two; before them, say what was refused."""
        if not self._open:
            return
        lost = self._refused - self._told
        self._told += lost
        gap = Gap(started.at, lost, OVERFLOW) if lost else None
        self._epoch = time.monotonic() - started.at / 1e6
        self._queue.append(_Restart(gap, started, snapshot))
        # The writer's thread reads these in the opposite order, so it never asks twice for one.
        self._restarts += 1
        self._overflowed = False
        self._take_up_to(self._full_capacity)
        self.wants_snapshot = False

    def flush(self, timeout: float | None = 5.0) -> bool:
        """Wait until everything recorded before is written or lost. False: not within ``timeout``."""
        if not self._open:
            return not self._thread.is_alive()
        done = threading.Event()
        self._queue.append(_Flush(done))
        self._wake()
        return done.wait(timeout)

    def close(self, reason: str = "exit", timeout: float = CLOSE_SECONDS) -> None:
        """Write what is queued, and EngineStopped unless that came already. Idempotent."""
        if not self._open:
            return
        self._shut()
        atexit.unregister(self._exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
        self._queue.append(_Close(reason, _now(self._epoch)))
        self._wake()
        self._thread.join(timeout)

    @property
    def recorded_events(self) -> int:
        """Events that the writer's thread has taken over; some of them may be lost since."""
        return self._taken

    @property
    def written_events(self) -> int:
        """Events in the journal, Gaps and restarts included."""
        return self._writer.written_events if self._writer is not None else 0

    @property
    def lost_events(self) -> int:
        """Events refused by a full queue, or taken and not written."""
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
        """End the writer thread's sleep, or its next."""
        with contextlib.suppress(RuntimeError):  # somebody else was faster
            if self._sleep.locked():
                self._sleep.release()

    def _refuse(self) -> None:
        self._refused += 1
        self._overflowed = True
        self._take_up_to(0)

    def _take_up_to(self, events: int) -> None:
        """So many may be queued; 0 refuses everything."""
        self._capacity = events
        self._early = int(events * EARLY)

    def _exit(self) -> None:
        """At the end of the process."""
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
        except Exception as error:
            self._fail(error)
        finally:
            self.writer_seconds = time.thread_time()
            if self._writer is not None:
                self._writer.close()

    def _drain(self) -> bool:
        """Write everything that is queued now; False after the last there will ever be."""
        queue = self._queue
        while queue:
            taken = [queue.popleft() for _ in range(min(len(queue), BATCH_EVENTS))]
            if _MARKS.isdisjoint(map(type, taken)):
                self._write(cast("list[Event]", taken))
            elif not self._write_up_to_mark(taken):
                return False
            self._ask()
        if self._writer is not None:
            self._writer.idle()
        self._ask()
        return True

    def _write_up_to_mark(self, taken: list[_Item]) -> bool:
        """Write what was taken before the first mark, and do what that says; False after the last.

        What comes after it is queued again, the mark too while there is something to write.
        """
        place = [kind in _MARKS for kind in map(type, taken)].index(True)
        self._queue.extendleft(reversed(taken[place:]))
        if place:
            self._write(cast("list[Event]", taken[:place]))
        return self._obey(cast("_Restart | _Flush | _Close", self._queue.popleft()))

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

    def _obey(self, mark: _Restart | _Flush | _Close) -> bool:
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
            untold = self._refused - self._told
            self._told += untold
            at = max(mark.at, self._writer.at)
            if untold:
                self._write([Gap(at, untold, OVERFLOW)])
            if not self._stopped:
                self._write([EngineStopped(at, mark.reason)])
        return False

    def _ask(self) -> None:
        """Ask the observer for a snapshot, unless one is on its way.

        After an overflow only when the queue has room again: a disk that stays stuck would
        otherwise cost the engine a snapshot every step.
        """
        if self.wants_snapshot or self._restarts != self._restarts_done or not self._open:
            return
        drained = self._overflowed and len(self._queue) <= self._full_capacity // 2
        if drained or (self._writer is not None and self._writer.wants_rotation):
            self.wants_snapshot = True

    # --- out of use ---------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Be inert from now on, and say so once."""
        self._shut()
        queue = self._queue
        while queue:
            item = queue.popleft()
            if isinstance(item, _Flush):
                item.done.set()
            elif not isinstance(item, _Close):
                self._unwritten += 2 if isinstance(item, _Restart) else 1
        self.failures += 1
        logger.warning("kvledger records nothing in %s: %r", self.folder, error)

    def _shut(self) -> None:
        self._open = False
        self._take_up_to(0)
        self.wants_snapshot = False

    def _mute(self) -> None:
        """In a forked child: the journal is the parent's, and so is the lock."""
        self._shut()
        self.on_exit = None
        self._queue = deque()
        if self._writer is not None:
            self._writer.abandon()


class MemoryRecorder:
    """A recorder without a journal: :meth:`take` gives what was recorded since the last time."""

    failures = 0
    written_bytes = 0
    write_failures = 0
    writer_seconds = 0.0

    def __init__(self, capacity_events: int = 1 << 20) -> None:
        self.wants_snapshot = True
        self.on_exit: Callable[[], object] | None = None
        self.lost_events = 0
        self._events: list[Event] = []
        self._full_capacity = capacity_events
        self._capacity = capacity_events
        self._taken = 0
        self._told = 0
        self._open = True
        self._stopped = False
        self._epoch: float | None = None

    def keep(self, numbers: list[int]) -> list[int]:
        """A copy for an event."""
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
        """Take one event. Never raises, never waits."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            self._capacity = 0
            self.lost_events += 1

    def record_all(self, events: Sequence[Event]) -> None:
        """Take several. Never raises, never waits."""
        for event in events:
            self.record(event)

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        """Begin anew here with these two; before them, say what was refused."""
        if not self._open:
            return
        self._tell_loss(started.at)
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
        """There is nothing to wait for."""
        return True

    def close(self, reason: str = "exit", timeout: float = 0.0) -> None:
        """Add EngineStopped unless it is there already; then refuse everything. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._capacity = 0
        self.wants_snapshot = False
        at = _now(self._epoch)
        self._tell_loss(at)
        stopped = type(self._events[-1]) is EngineStopped if self._events else self._stopped
        if self._epoch is not None and not stopped:
            self._events.append(EngineStopped(at, reason))

    def _tell_loss(self, at: int) -> None:
        lost = self.lost_events - self._told
        self._told += lost
        if lost:
            self._events.append(Gap(at, lost, OVERFLOW))


def _now(epoch: float | None) -> int:
    """Microseconds since the engine started, as far as we were told when that was."""
    return 0 if epoch is None else int((time.monotonic() - epoch) * 1e6)


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _mute_all() -> None:
    with contextlib.suppress(Exception):
        for recorder in list(_recorders):
            recorder._mute()


os.register_at_fork(after_in_child=_mute_all)
