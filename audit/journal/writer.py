"""Writing a journal: segments, their bounds, and what becomes of events that can't be written.

Used by one thread. After the constructor nothing here raises: an event that can't be written is
counted and lost. Rules of this file:

- Numbers run on over losses, so the numbers alone tell how much is missing even where the
  :class:`~kvledger.audit.events.Gap` that says so could not be written either.
- A segment gets its name with its first batch inside, in one rename. So a reader that sees a
  segment may leave the one before for good, and finds EngineStarted and Snapshot in it.
- Until a new segment stands the old one stays in use: a failed rotation costs one batch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from ..events import AnyEvent, Event, Gap
from .format import HEADER, MAX_PAYLOAD_BYTES, segment_name, segments, take_lock
from .format import frame as framed

BATCH_BYTES = 64 << 10
"""A batch ends above this size, which bounds what a reader decodes and the GIL is held for."""

_MARGIN = 1.25
"""Events may be larger than those of the last batch were."""

RETRY_SECONDS = 1.0
"""After a rotation failed, how long until the next is asked for; each costs a snapshot."""

_LOCK_TRIES = 10
_ARRAY = struct.Struct(">BI")
_PREFIX_BYTES = 19
"""At most what a payload has before its array of events."""

_EVENTS = frozenset(get_args(AnyEvent))


class _Batch(NamedTuple):
    """Events for one frame, as a msgpack array. ``at`` is the last one's."""

    events: int
    encoded: bytes
    at: int


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one journal.

    ``segment_bytes``: rotation is asked for above it; a segment may exceed it by what comes until
    the next step boundary. ``folder_bytes``: held always. ``age_seconds``: a segment closed longer
    ago is removed, and a segment older than that is rotated; None keeps all that fits.
    """

    segment_bytes: int = 16 << 20
    folder_bytes: int = 256 << 20
    age_seconds: float | None = None


class JournalWriter:
    """Appends batches of events to the segments of one folder, which is its alone.

    Raises OSError if the folder can't be made, is locked, or holds a journal already.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder = folder
        self.limits = limits or Limits()
        self.written_events = 0
        self.lost_events = 0
        self.written_bytes = 0
        self.write_failures = 0
        self.at = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        if segments(folder):
            os.close(self._lock)
            raise FileExistsError(errno.EEXIST, "there is a journal already", str(folder))
        self._encode = msgspec.msgpack.Encoder().encode
        self._closed: list[tuple[Path, int, float]] = []  # path, bytes, when closed; oldest first
        self._closed_bytes = 0
        self._current = -1
        self._number = 0
        self._bytes = 0
        self._opened = 0.0
        self._rotating = True
        self._spoiled = False
        self._retry_at = 0.0
        self._event_bytes = 0.0  # of the last batch, one with another
        self._batch = 0
        self._event = 0
        self._untold_events = 0
        self._untold_reason = ""

    @property
    def wants_rotation(self) -> bool:
        """Whether a segment should begin, so that EngineStarted and Snapshot are needed."""
        if self._rotating:
            return False
        now = time.monotonic()
        age = self.limits.age_seconds
        return now >= self._retry_at and (
            self._current < 0
            or self._spoiled
            or self._bytes >= self.limits.segment_bytes
            or (age is not None and now - self._opened >= age)
        )

    def rotate(self) -> None:
        """The next batch begins a segment; its first events are EngineStarted and Snapshot."""
        self._rotating = True

    def write(self, events: list[Event]) -> None:
        """Append ``events``. What can't be written is lost and counted."""
        expected_bytes = max(1.0, self._event_bytes * _MARGIN)
        many = max(1, int(BATCH_BYTES / expected_bytes))
        for start in range(0, len(events) or 1, many):
            part = events[start : start + many]
            batch = self._encode_at_once(part)
            if batch is not None:
                self._append(batch)
            else:
                self._write_singly(part)

    def _encode_at_once(self, events: list[Event]) -> _Batch | None:
        """All in one call, as cold objects are best touched once.

        None: they are more than a batch, or one of them can't be encoded.
        """
        if not events or not _EVENTS.issuperset(map(type, events)):
            return None
        try:
            encoded = self._encode(events)
        except Exception:  # a value of the host that is no plain number
            return None
        return _Batch(len(events), encoded, events[-1].at) if len(encoded) <= BATCH_BYTES else None

    def _write_singly(self, events: list[Event]) -> None:
        """As :meth:`write`, one event after the other."""
        good: list[bytes] = []
        at, total = self.at, 0
        for event in events:
            try:
                one, its = self._encode(event), event.at
            except Exception as error:
                self._append_all(good, at)
                good, total = [], 0
                self._lose(1, f"an event can't be encoded: {type(error).__name__}")
                continue
            if total + len(one) > BATCH_BYTES and len(good) >= 2:
                self._append_all(good, at)
                good, total = [], 0
            good.append(one)
            at, total = its, total + len(one)
        if good:
            self._append_all(good, at)
        else:
            self._tell_untold()

    def _append_all(self, encoded: list[bytes], at: int) -> None:
        if encoded:
            array = _ARRAY.pack(0xDD, len(encoded)) + b"".join(encoded)
            self._append(_Batch(len(encoded), array, at))

    def idle(self) -> None:
        """Nothing came for a while: say what is untold, and remove what is too old."""
        self._tell_untold()
        self._expire()

    def close(self) -> None:
        """Say what is untold, close, give up the lock. Idempotent."""
        if self._lock < 0:
            return
        if self._current >= 0:
            self._tell_loss()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and write nothing, as a forked child must."""
        for descriptor in (self._current, self._lock):
            if descriptor >= 0:
                _close(descriptor)
        self._current = self._lock = -1

    # --- one batch ----------------------------------------------------------------------------------

    def _append(self, batch: _Batch) -> None:
        if self._rotating:
            self._rotating = False
            self._begin_segment(batch)
        elif self._current < 0:
            self._lose(batch.events, "no segment could be begun")
        elif self._tell_loss():
            self._continue_segment(batch)
        else:
            self._lose(batch.events, self._untold_reason)
        self.at = batch.at
        self._event_bytes = len(batch.encoded) / batch.events

    def _tell_untold(self) -> None:
        if not self._rotating and self._current >= 0:
            self._tell_loss()

    def _tell_loss(self) -> bool:
        """Write the Gap that is owed, if any. False: it is still owed."""
        if not self._untold_events:
            return True
        untold, self._untold_events = self._untold_events, 0
        event = self._event
        gap = Gap(self.at, untold, self._untold_reason)
        if self._continue_segment(_Batch(1, self._encode([gap]), gap.at)):
            self._spoiled = True
            self._untold_reason = ""
            return True
        # A Gap that was not written is itself no loss.
        self._event = event
        self.lost_events -= 1
        self._untold_events = untold
        return False

    def _continue_segment(self, batch: _Batch) -> bool:
        data = self._frame(batch)
        if data is None:
            return False
        if not self._make_room(len(data)):
            self._lose(batch.events, "the journal's size bound is reached")
            return False
        try:
            _write_all(self._current, data)
        except OSError as error:
            self._failed(batch.events, error)
            self._cut()
            return False
        self._bytes += len(data)
        self._wrote(batch.events, len(data))
        return True

    def _begin_segment(self, batch: _Batch) -> None:
        if self._current >= 0:
            self._tell_loss()
        data = self._frame(batch)
        if data is None:
            return
        path = self.folder / segment_name(self._number + 1)
        draft = path.with_suffix(".new")
        self._make_room(len(HEADER) + len(data))
        descriptor = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(draft, flags, 0o644)
            _write_all(descriptor, HEADER + data)
            os.rename(draft, path)
        except OSError as error:
            self._failed(batch.events, error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if descriptor >= 0:
                _close(descriptor)
                _unlink(draft)
            return
        self._end_segment()
        self._current = descriptor
        self._number += 1
        self._bytes = len(HEADER) + len(data)
        self._opened = time.monotonic()
        self._spoiled = False
        # What is still untold is told by the jump in the numbers.
        self._untold_events, self._untold_reason = 0, ""
        self._wrote(batch.events, self._bytes)
        self._make_room(0)
        self._expire()

    def _frame(self, batch: _Batch) -> bytes | None:
        if len(batch.encoded) > MAX_PAYLOAD_BYTES - _PREFIX_BYTES:
            self._lose(batch.events, "an event is too large")
            return None
        encode = self._encode
        return framed(b"\x93" + encode(self._batch) + encode(self._event) + batch.encoded)

    # --- the count ----------------------------------------------------------------------------------

    def _wrote(self, events: int, size: int) -> None:
        self._batch += 1
        self._event += events
        self.written_events += events
        self.written_bytes += size

    def _failed(self, events: int, error: OSError) -> None:
        self.write_failures += 1
        self._lose(events, error.strerror or type(error).__name__)

    def _lose(self, events: int, reason: str) -> None:
        if not events:
            return
        self._batch += 1
        self._event += events
        self.lost_events += events
        self._untold_events += events
        self._untold_reason = self._untold_reason or reason

    # --- the files ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Remove a half-written frame; if even that fails, the segment ends here."""
        try:
            os.ftruncate(self._current, self._bytes)
        except OSError:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._current < 0:
            return
        _close(self._current)
        self._current = -1
        path = self.folder / segment_name(self._number)
        self._closed.append((path, self._bytes, time.monotonic()))
        self._closed_bytes += self._bytes

    def _make_room(self, wanted: int) -> bool:
        """Remove the oldest segments, never the current, until ``wanted`` bytes more fit."""
        current = self._bytes if self._current >= 0 else 0
        bound = self.limits.folder_bytes - wanted - current
        while self._closed_bytes > bound and self._remove_oldest():
            pass
        return self._closed_bytes <= bound

    def _expire(self) -> None:
        age = self.limits.age_seconds
        if age is None:
            return
        long_ago = time.monotonic() - age
        while self._closed and self._closed[0][2] < long_ago and self._remove_oldest():
            pass

    def _remove_oldest(self) -> bool:
        if not self._closed:
            return False
        path, size, _ = self._closed[0]
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self.write_failures += 1
            return False
        del self._closed[0]
        self._closed_bytes -= size
        return True


def _lock(folder: Path) -> int:
    """A reader that asks whether we live holds the lock for an instant: try more than once."""
    for _ in range(_LOCK_TRIES - 1):
        try:
            return take_lock(folder)
        except BlockingIOError:
            time.sleep(0.01)
    return take_lock(folder)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the data is in the page cache or lost; nothing is left to do
        os.close(descriptor)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # a draft that stays is no segment; the next one replaces it
        path.unlink()
