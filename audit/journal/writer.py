"""Write a journal: append batches, rotate segments, hold the size bounds, count what can't be written.

Used by one thread, that of ``recorder.py``. After the constructor no method raises: an event that can't be
written is lost and counted. Rules of this file:

- Lost events use up numbers too, so a reader sees how many are missing even if the
  :class:`~kvledger.audit.events.Gap` could not be written either.
- A segment is written under another name with its first batch, and then renamed. So a reader that sees a
  segment finds EngineStarted and Snapshot in it, and nothing is appended to the segment before.
- If files are moved, removed or cut under the writer, a new segment begins, if need be in a new folder.
- The old segment stays in use until the new one has its name: a failed rotation costs one batch.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from ..events import AnyEvent, Event, Gap, Snapshot
from .format import (
    FILE_MODE,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    LARGEST_EVENT_BYTES,
    LOCK,
    MAX_PAYLOAD_BYTES,
    segment_name,
    segments,
    take_lock,
)
from .format import frame as framed
from .safe_open import NotAFile, create_file

BATCH_BYTES = 64 << 10
"""A batch ends above this size, which bounds how long encoding and decoding it hold the GIL."""

_MARGIN = 1.25
"""Expect events to be this much larger than those of the last batch."""

CLOCK_SECONDS = 1.0
"""A segment ends when the machine's clock was corrected by more: the next one begins with the right time."""

RETRY_SECONDS = 1.0
"""How long to wait after a failed rotation before asking for another, which costs the engine a snapshot."""

_LOCK_TRIES = 10
_ARRAY = struct.Struct(">BI")
_PREFIX_BYTES = 19
"""The most bytes that a payload has before its array of events."""

_EVENTS = frozenset(get_args(AnyEvent))


def _clock() -> float:
    """What the wall clock is ahead of the monotonic clock."""
    return time.time() - time.monotonic()


class _Batch(NamedTuple):
    """Events for one frame, as a msgpack array. ``at`` is the time of the last event."""

    events: int
    encoded: bytes
    at: int


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one journal.

    ``segment_bytes``: a larger segment should end; it grows until the observer's next step boundary.
    ``folder_bytes``: the most that all segments take, always held.
    ``age_seconds``: an older segment should end, and one that ended longer ago is removed; None: no bound.
    """

    segment_bytes: int = 16 << 20
    folder_bytes: int = 256 << 20
    age_seconds: float | None = None


class JournalWriter:
    """Appends batches of events to the segments of one folder, to which nobody else writes.

    Raises OSError if the folder can't be made, is locked, or holds a journal already.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder = folder
        """Where the segments are."""
        self.limits = limits or Limits()
        """The bounds of this journal."""
        self.written_events = 0
        """Events written so far, Gaps included."""
        self.lost_events = 0
        """Events that could not be written."""
        self.written_bytes = 0
        """Bytes written so far, headers included."""
        self.write_failures = 0
        """Writes, rotations and removals that failed."""
        self.at = 0
        """Time of the last event, written or lost."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        """Descriptor of the locked file; -1 once closed."""
        if segments(folder):
            os.close(self._lock)
            raise FileExistsError(errno.EEXIST, "there is a journal already", str(folder))
        self._encode = msgspec.msgpack.Encoder().encode
        self._closed: list[tuple[Path, int, float]] = []
        """Segments that have ended, the oldest first: path, bytes, and when they ended."""
        self._closed_bytes = 0
        """Bytes of the segments that have ended."""
        self._current = -1
        """Descriptor of the segment that is appended to; -1 if there is none."""
        self._number = 0
        """Number of the segment begun last."""
        self._bytes = 0
        """Bytes of the segment that is appended to."""
        self._opened = 0.0
        """When that segment was begun, by the monotonic clock."""
        self._clock = 0.0
        """What the wall clock was ahead of the monotonic clock then."""
        self._rotating = True
        """Whether the next batch begins a segment."""
        self._has_gap = False
        """Whether a Gap stands in the current segment, so that a new one with a snapshot should begin."""
        self._retry_at = 0.0
        """When another rotation may be asked for, by the monotonic clock."""
        self._beat_at = 0.0
        """When the lock file is to be touched next, by the monotonic clock."""
        self._event_bytes = 0.0
        """Mean size of an event in the last batch."""
        self._batch = 0
        self._event = 0
        self._unreported_events = 0
        """Lost events that no Gap covers yet."""
        self._unreported_reason = ""
        """Why the first of them was lost."""

    @property
    def wants_rotation(self) -> bool:
        """Whether a new segment should begin, for which EngineStarted and Snapshot are needed."""
        if self._rotating:
            return False
        now = time.monotonic()
        age = self.limits.age_seconds
        return now >= self._retry_at and (
            self._current < 0
            or self._has_gap
            or self._bytes >= self.limits.segment_bytes
            or (age is not None and now - self._opened >= age)
            or abs(_clock() - self._clock) > CLOCK_SECONDS
        )

    def rotate(self) -> None:
        """Begin a segment with the next batch, whose first events must be EngineStarted and Snapshot."""
        self._rotating = True

    def write(self, events: list[Event]) -> None:
        """Append ``events``. Events that can't be written are lost and counted."""
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
        """Encode all events in one call, which touches each of them once.

        Returns None if they are larger than a batch, or if one of them can't be encoded.
        """
        if not events or not _EVENTS.issuperset(map(type, events)):
            return None
        try:
            encoded = self._encode(events)
        except Exception:  # the engine gave a value that is not a plain number
            return None
        return _Batch(len(events), encoded, events[-1].at) if len(encoded) <= BATCH_BYTES else None

    def _write_singly(self, events: list[Event]) -> None:
        """Like :meth:`write`, encoding one event after the other."""
        encoded: list[bytes] = []
        at, total = self.at, 0
        for event in events:
            refused = ""
            try:
                data, event_at = self._encode_alone(event), event.at
                if len(data) > LARGEST_EVENT_BYTES and type(event) is not Snapshot:
                    refused = "an event is too large"
            except Exception as error:
                refused = f"an event can't be encoded: {type(error).__name__}"
            if refused:
                self._append_all(encoded, at)
                encoded, total = [], 0
                self._lose(1, refused)
                continue
            if total + len(data) > BATCH_BYTES and len(encoded) >= 2:
                self._append_all(encoded, at)
                encoded, total = [], 0
            encoded.append(data)
            at, total = event_at, total + len(data)
        if encoded:
            self._append_all(encoded, at)
        else:
            self._report_loss_if_open()

    def _encode_alone(self, event: Event) -> bytes:
        """Encode one event. A surrogate in its text, which no encoding has, becomes ``\\ud800``."""
        try:
            return self._encode(event)
        except UnicodeEncodeError:
            return self._encode(_encodable(msgspec.to_builtins(event)))

    def _append_all(self, encoded: list[bytes], at: int) -> None:
        if encoded:
            array = _ARRAY.pack(0xDD, len(encoded)) + b"".join(encoded)
            self._append(_Batch(len(encoded), array, at))

    @property
    def removed(self) -> bool:
        """Whether somebody has removed the lock or the segment that is appended to, or cut the segment."""
        if self._lock < 0:
            return False
        if self._current >= 0 and _size(self._current) < self._bytes:
            return True
        paths = [(self._lock, self.folder / LOCK)]
        if self._current >= 0:
            paths.append((self._current, self.folder / segment_name(self._number)))
        return any(_gone(descriptor, path) for descriptor, path in paths)

    def recreate(self) -> None:
        """Make the folder again after it was removed; the next segment is to be begun by a rotation.

        Raises OSError if the folder can't be made or locked.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if _gone(self._lock, self.folder / LOCK):
            lock = _lock(self.folder)
            _close(self._lock)
            self._lock, self._beat_at = lock, 0.0
        if self._current >= 0:
            _close(self._current)
            self._current = -1
        # One that was given a higher number must not hide the next segment from readers.
        self._number = max(self._number, *segments(self.folder), 0)
        self._closed = [closed for closed in self._closed if closed[0].exists()]
        self._closed_bytes = sum(size for _, size, _ in self._closed)
        self._retry_at = 0.0

    def idle(self) -> None:
        """Report losses, remove segments that are too old, and show that the writer lives.

        Called about once a second, when there is nothing to write.
        """
        self._report_loss_if_open()
        self._expire()
        self._beat()

    def _beat(self) -> None:
        """Touch the lock file if it is time, so that a reader knows by when a killed engine was gone."""
        now = time.monotonic()
        if now >= self._beat_at and self._lock >= 0:
            self._beat_at = now + HEARTBEAT_SECONDS
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, HEARTBEAT, 0)

    def close(self) -> None:
        """Report losses, close the segment and release the lock. Idempotent."""
        if self._lock < 0:
            return
        if self._current >= 0:
            self._report_loss()
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors without writing, as a forked child must."""
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
        elif self._report_loss():
            self._continue_segment(batch)
        else:
            self._lose(batch.events, self._unreported_reason)
        self.at = batch.at
        self._event_bytes = len(batch.encoded) / batch.events

    def _report_loss_if_open(self) -> None:
        if not self._rotating and self._current >= 0:
            self._report_loss()

    def _report_loss(self) -> bool:
        """Write a Gap for the losses that none covers yet. Returns False if it could not be written."""
        if not self._unreported_events:
            return True
        lost, self._unreported_events = self._unreported_events, 0
        event = self._event
        gap = Gap(self.at, lost, self._unreported_reason)
        if self._continue_segment(_Batch(1, self._encode([gap]), gap.at)):
            self._has_gap = True
            self._unreported_reason = ""
            return True
        # A Gap that was not written does not count as a lost event.
        self._event = event
        self.lost_events -= 1
        self._unreported_events = lost
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
            self._report_loss()
        data = self._frame(batch)
        if data is None:
            return
        path = self.folder / segment_name(self._number + 1)
        draft = path.with_suffix(".new")
        self._make_room(len(HEADER) + len(data))
        descriptor = -1
        try:
            descriptor = create_file(draft, FILE_MODE)
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
        self._opened, self._clock = time.monotonic(), _clock()
        self._has_gap = False
        # The jump in the numbers reports the losses that no Gap covers.
        self._unreported_events, self._unreported_reason = 0, ""
        self._wrote(batch.events, self._bytes)
        self._make_room(0)
        self._expire()

    def _frame(self, batch: _Batch) -> bytes | None:
        if len(batch.encoded) > MAX_PAYLOAD_BYTES - _PREFIX_BYTES:
            self._lose(batch.events, "an event is too large")
            return None
        encode = self._encode
        return framed(b"\x93" + encode(self._batch) + encode(self._event) + batch.encoded)

    # --- counts -------------------------------------------------------------------------------------

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
        self._unreported_events += events
        self._unreported_reason = self._unreported_reason or reason

    # --- the files ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Remove a half-written frame; if that fails too, end the segment."""
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
        """Remove the oldest segments, never the current one, until ``wanted`` more bytes fit."""
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


def _encodable(value: Any) -> Any:
    """Plain data whose text can be encoded."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def _lock(folder: Path) -> int:
    """Lock the folder. Tries repeatedly: a reader that asks if the writer is alive holds the lock briefly.

    What is no file there, in a folder to which nobody else writes, is removed.
    """
    for _ in range(_LOCK_TRIES - 1):
        try:
            return take_lock(folder)
        except BlockingIOError:
            time.sleep(0.01)
        except NotAFile:
            path = folder / LOCK
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    return take_lock(folder)


def _gone(descriptor: int, path: Path) -> bool:
    """Whether ``path`` no longer names the open file; False if that can't be found out."""
    try:
        found, opened = os.stat(path), os.fstat(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino)


def _size(descriptor: int) -> float:
    """The bytes of an open file; infinity if that can't be found out."""
    try:
        return os.fstat(descriptor).st_size
    except OSError:
        return math.inf


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the data is in the page cache or lost; there is nothing left to do
        os.close(descriptor)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # a draft that stays is not read; the next one replaces it
        path.unlink()
