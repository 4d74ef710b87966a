"""Read a journal: batches in order, with a Gap wherever events are missing.

Finding journals is in ``host_folders.py``, the bytes in ``format.py``. Rules of this file:

- No event is wrong and no loss is silent. Where event numbers jump, bytes are damaged or the tail is
  torn, the reader puts a :class:`~kvledger.audit.events.Gap` into the stream, and a :class:`Damage` has
  the place. Where the writer's own Gap explains a jump in the numbers, the reader adds none.
- After damage inside a segment, the reader goes on at the next segment, which begins with a snapshot.
- Reader and writer never wait for each other: segments may be added, and the oldest removed, meanwhile.
- A half-written frame of a live writer is not complete yet; that of a dead writer is a torn tail. The
  reader asks whether the writer is alive *before* it reads the last bytes, so that no batch is missed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from ..errors import JournalError
from ..events import REMOVED, AnyEvent, EngineStopped, Gap, Snapshot
from ..text import clean
from .format import (
    LARGE_BATCH_BYTES,
    LARGE_BATCH_EVENTS,
    LARGEST_EVENT_BYTES,
    MOST_SNAPSHOT_ROWS,
    Payload,
    TailState,
    frames,
    is_live,
    newer_schema,
    read_header,
    segment_number,
    segments,
)
from .possible_events import impossible
from .safe_open import NotAFile, reading

# --- Decode one batch: within bounds on memory, and without events that no engine can have emitted.
#
# A frame's checksum says that its bytes are as they were written. Who may write to a journal's folder can
# write any bytes, and a reader must neither run out of memory over them nor pass on an event that makes the
# code behind it loop or fail. So a batch is refused as a whole, with a sentence, if
#
# - it is larger than the writer's batches and holds more events than they do (``format.py`` has the bounds),
# - it does not decode as events, or
# - an event in it is impossible (``audit/journal/possible_events.py``).
#
# Text in the events is made printable (``audit/text.py``).

_TAGS = frozenset(event.__struct_config__.tag for event in get_args(AnyEvent))
_SNAPSHOT_TAG = Snapshot.__struct_config__.tag
_INTEGER_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""How many bytes follow the first byte of a msgpack integer."""

_PLACE = re.compile(r" - at `\$\[2\]\[(\d+)\]\S*`")


class UnreadableBatch(Exception):
    """A batch that is not decoded; the text says why in one phrase."""


class NewerBatch(Exception):
    """A batch with an event whose tag only a newer schema has; the text names the tag."""


class _Shell(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch whose events are not decoded."""

    batch: int
    first_event: int
    events: list[msgspec.Raw]


_decode = msgspec.msgpack.Decoder(Payload).decode
_decode_shell = msgspec.msgpack.Decoder(_Shell).decode


def decode_batch(data: memoryview) -> Payload:
    """The batch in ``data``. Raises :class:`UnreadableBatch` and :class:`NewerBatch`."""
    if len(data) > LARGE_BATCH_BYTES:
        _check_size(data)
    try:
        payload = _decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if len(data) <= LARGEST_EVENT_BYTES:
            _refuse_newer(data)
        raise UnreadableBatch(_phrase(error)) from None
    if phrase := impossible(payload.events):
        raise UnreadableBatch(phrase)
    clean(payload.events)
    return payload


def _check_size(data: memoryview) -> None:
    """Refuse a large batch that would take much more memory than its bytes."""
    count = _event_count(data)
    if not 0 <= count <= LARGE_BATCH_EVENTS:
        raise UnreadableBatch(f"a batch of {len(data):,} bytes holds more than {LARGE_BATCH_EVENTS} events")
    if len(data) <= LARGEST_EVENT_BYTES:
        return
    try:
        events = _decode_shell(data).events
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableBatch(_phrase(error)) from None
    for raw in events:
        event = memoryview(raw)
        if len(event) > LARGEST_EVENT_BYTES and not _is_small_snapshot(event):
            raise UnreadableBatch(f"an event of {len(event):,} bytes is no snapshot of an engine")


def _is_small_snapshot(event: memoryview) -> bool:
    """Whether an encoded event is a Snapshot with no more rows than a reader accepts."""
    if event[0] & 0xF0 != 0x90 or event[1] != _SNAPSHOT_TAG:
        return False
    place = 2
    for _ in range(2):  # at, step
        place += 1 + _INTEGER_BYTES.get(event[place], 0)
    return 0 <= _array_length(event, place) <= MOST_SNAPSHOT_ROWS


def _event_count(data: memoryview) -> int:
    """How many events a batch says it holds; -1 if that can't be told."""
    place = 1
    for _ in range(2):  # the numbers of the batch and of its first event
        place += 1 + _INTEGER_BYTES.get(data[place], 0)
    return _array_length(data, place)


def _array_length(data: memoryview, place: int) -> int:
    """The length in the header of a msgpack array; -1 if there is no array."""
    code = data[place]
    if code & 0xF0 == 0x90:
        return code & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(code)
    return -1 if width is None else int.from_bytes(data[place + 1 : place + 1 + width], "big")


def _refuse_newer(data: memoryview) -> None:
    """Raise :class:`NewerBatch` if a batch did not decode because an event in it has an unknown tag."""
    try:
        tags = [msgspec.msgpack.decode(_tag_of(event)) for event in _decode_shell(data).events]
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError):
        return
    if all(type(tag) is int and tag >= 0 for tag in tags) and (unknown := set(tags) - _TAGS):
        raise NewerBatch(f"event tag {min(unknown)}")


def _tag_of(event: msgspec.Raw) -> bytes:
    """The encoded first item of an encoded event. Raises ValueError if it is not an array."""
    data = bytes(memoryview(event)[:16])
    header = {0xDC: 3, 0xDD: 5}.get(data[0], 1)
    if header == 1 and data[0] & 0xF0 != 0x90:
        raise ValueError("not an array")
    return data[header : header + 1 + _INTEGER_BYTES.get(data[header], 0)]


def _phrase(error: Exception) -> str:
    """A decoder's message, with the number of the event in the batch instead of a path."""
    return _PLACE.sub(lambda match: f" in event {int(match[1]) + 1} of the batch", str(error))


# Reasons of a Damage.
TORN = "torn tail"
CORRUPT = "corrupt segment"
UNREADABLE = "unreadable batch"
DISORDER = "numbers out of order"
UNWRITTEN = "not written"


class Position(msgspec.Struct, frozen=True):
    """Where the next batch is: segment, byte offset, and the numbers it should have.

    ``event`` -1 accepts any number: ``Position(segment=n, event=-1)`` begins at segment n, whatever came
    before. ``at`` is the time of the last event read; -1 before the first.
    """

    segment: int = 1
    offset: int = 0
    batch: int = 0
    event: int = 0
    at: int = -1


class Damage(msgspec.Struct, frozen=True):
    """Events are missing from byte ``offset`` of a segment on. ``lost_events`` -1: not known how many.

    ``detail`` says what is wrong there, if more than the ``reason`` is known.
    """

    segment: str
    offset: int
    reason: str
    lost_events: int
    detail: str = ""

    def __str__(self) -> str:
        events = "an unknown number of" if self.lost_events < 0 else self.lost_events
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.reason} at {self.segment} byte {self.offset}{detail}: {events} events lost"


class _Place(NamedTuple):
    """A damaged place that no Gap covers yet."""

    segment: str
    offset: int
    reason: str
    detail: str


class Batch(NamedTuple):
    """Events that were written at once. A reader that starts at ``start`` reads this batch first."""

    first_event: int
    events: list[AnyEvent]
    start: Position
    begins_segment: bool


class Reader:
    """Reads one journal folder, or one segment file of any name.

    Raises :class:`JournalError` for a newer schema, and for a file that is not a segment.
    """

    def __init__(self, path: str | Path, start: Position | None = None) -> None:
        self.path = Path(path)
        """The journal's folder, or the segment file."""
        self.damage: list[Damage] = []
        """What was missing or damaged so far."""
        self.ended = False
        """Whether the writer is gone and everything was read."""
        self.stopped = False
        """Whether the last event is EngineStopped; if the journal ended without it, the engine was killed."""
        self.continues = False
        """Whether a single segment was read to its end, and later segments of its journal lie beside it."""
        self._single = not self.path.is_dir()
        """Whether ``path`` is a single segment file."""
        self.position = start or Position(event=-1 if self._single else 0)
        """Where the next :meth:`poll` continues."""
        self._file: FileIO | None = None
        self._frames_at = 0
        """Offset of the first frame in the open segment; 0 before its header was read."""
        self._name = ""
        """File name of the segment opened last."""
        self._jumped_from: Position | None = None
        """The position before segments that were removed; None unless the reader has just skipped some."""
        self._skipping = False
        """Whether the rest of the open segment is skipped because of damage."""
        self._broken: list[_Place] = []
        """Damaged places that no Gap in the stream covers yet."""

    def poll(self) -> Iterator[Batch]:
        """Yield every batch that is complete by now, in order."""
        if self.ended:
            return
        live = self._is_live()
        while self._file is not None or self._open_next():
            tail = yield from self._read_segment()
            has_later = self._has_later()
            if has_later:
                # The writer has left this segment; read what it appended before it did.
                tail = yield from self._read_segment()
            elif live and tail is not TailState.BAD:
                return
            if tail is TailState.WHOLE and not self._skipping and self.position.offset <= self._frames_at:
                tail = TailState.BAD  # the writer begins no segment without a batch
            if tail is not TailState.WHOLE:
                self._break(CORRUPT if tail is TailState.BAD else TORN)
                self._skipping = True
            if has_later:
                self._leave()
                continue
            if self._broken:
                yield self._gap(-1, 0)
                self.position = replace(self.position, event=-1)
            break
        else:
            if self._broken and not live:  # what is last has a segment's name and is no file
                yield self._gap(-1, 0)
        if not live:
            self.ended = True
            self.continues = self._single and self._has_sibling()
            self.close()

    @property
    def resumable(self) -> Position:
        """Where another reader would continue exactly as this one.

        That is ``position``, with two exceptions: the start of a damaged place that no Gap covers yet, and
        the next segment if the rest of this one is skipped.
        """
        if not self._broken:
            after = replace(self.position, segment=self.position.segment + 1, offset=0)
            return after if self._skipping else self.position
        first = self._broken[0]
        segment = segment_number(Path(first.segment)) or self.position.segment
        return replace(self.position, segment=segment, offset=first.offset)

    def close(self) -> None:
        """Close the open segment. Idempotent; a later poll opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- segments -----------------------------------------------------------------------------------

    def _listed(self) -> dict[int, Path]:
        if self._single:
            return {segment_number(self.path) or 1: self.path}
        return _segments(self.path)

    def _is_live(self) -> bool:
        if not self._single:
            return is_live(self.path)
        number = segment_number(self.path)
        folder = self.path.parent
        return number is not None and number == max(_segments(folder), default=0) and is_live(folder)

    def _has_sibling(self) -> bool:
        number = segment_number(self.path)
        return number is not None and number < max(_segments(self.path.parent), default=0)

    def _has_later(self) -> bool:
        return any(number > self.position.segment for number in self._listed())

    def _open_next(self) -> bool:
        """Open the first segment that was not yet left; returns False if there is none."""
        for number, path in self._listed().items():
            if number < self.position.segment:
                continue
            try:
                self._file = reading(path)
            except FileNotFoundError:  # the writer has removed it since it was listed
                if self._single:
                    raise JournalError(f"There is no {path}.") from None
                continue
            except NotAFile as error:
                if self._single:
                    raise JournalError(f"{path} is not a kvledger journal: {error.strerror}.") from error
                self._pass_over(path.name, number, error.strerror or "")
                continue
            except OSError as error:
                raise JournalError(f"{path} can't be opened: {error.strerror}.") from error
            self._name = path.name
            self._frames_at = 0
            self._jumped_from = None
            if number > self.position.segment:
                self._jumped_from = self.position
                self.position = replace(self.position, segment=number, offset=0)
                self._skipping = False
            return True
        return False

    def _pass_over(self, name: str, number: int, detail: str) -> None:
        """Go on behind what has the name of segment ``number`` and is no file."""
        self._name = name
        self.position = replace(self.position, segment=number, offset=0)
        self._break(CORRUPT, detail)
        self.position = replace(self.position, segment=number + 1)
        self._skipping = False

    def _leave(self) -> None:
        self.close()
        self._skipping = False
        self.position = replace(self.position, segment=self.position.segment + 1, offset=0)

    def _read_segment(self) -> Generator[Batch, None, TailState]:
        assert self._file is not None
        if self._skipping:
            return TailState.WHOLE
        if not self._frames_at:
            self._frames_at, tail = read_header(self._file.fileno(), self._name)
            if tail is TailState.BAD and self._single:
                raise JournalError(f"{self.path} is not a kvledger journal.")
            if tail is not TailState.WHOLE:
                return tail
            self.position = replace(self.position, offset=max(self.position.offset, self._frames_at))
        if self._file.seek(0, os.SEEK_END) < self.position.offset:
            return TailState.SHORT
        frames_left = frames(self._file.fileno(), self.position.offset)
        while True:
            try:
                end, data = next(frames_left)
            except StopIteration as stop:
                return TailState(stop.value)
            try:
                payload = decode_batch(data)
            except NewerBatch as error:
                raise newer_schema(self._name, f"a newer schema ({error})") from None
            except UnreadableBatch as error:
                self._break(UNREADABLE, str(error))
                self.position = replace(self.position, offset=end)
                continue
            expected = self.position
            if payload.batch < expected.batch or payload.first_event < expected.event:
                self._break(DISORDER)
                return TailState.BAD
            if payload.events:
                yield from self._read_batch(payload, end)

    # --- batches ------------------------------------------------------------------------------------

    def _read_batch(self, payload: Payload, end: int) -> Iterator[Batch]:
        first, events = payload.first_event, payload.events
        if self._broken or self.position.event not in (first, -1):
            gap = self._missing_before(first, events[0])
            self.position = replace(self.position, event=first)
            if gap is not None:
                yield gap
        last = events[-1]
        start = self.position
        self._jumped_from = None
        self.position = Position(start.segment, end, payload.batch + 1, first + len(events), last.at)
        self.stopped = type(last) is EngineStopped
        yield Batch(first, events, start, start.offset == self._frames_at)

    def _missing_before(self, first_event: int, first: AnyEvent) -> Batch | None:
        expected = self.position.event
        missing = first_event - expected if expected >= 0 else -1
        if not missing:
            self._note(0)
            return None
        if not self._broken:
            if type(first) is Gap and first.lost_events >= missing:
                return None  # the writer's own Gap covers it
            self._break(REMOVED if self._jumped_from is not None else UNWRITTEN)
        return self._gap(missing, first.at)

    def _break(self, reason: str, detail: str = "") -> None:
        place = (self._name, self.position.offset)
        if not any(broken[:2] == place for broken in self._broken):
            self._broken.append(_Place(*place, reason, detail))

    def _gap(self, lost_events: int, at: int) -> Batch:
        """The Gap for everything that is damaged and not yet covered."""
        name, offset, reason, detail = self._broken[-1]
        self._note(lost_events)
        if reason in (CORRUPT, UNREADABLE, DISORDER):
            reason = f"{reason} {name} at byte {offset}" + (f": {detail}" if detail else "")
        position = self._jumped_from or self.position
        gap = Gap(position.at if position.at >= 0 else at, lost_events, reason)
        return Batch(max(position.event, 0), [gap], position, False)

    def _note(self, lost_events: int) -> None:
        """Turn every damaged place into a Damage; the last one counts the events lost in all of them."""
        broken, self._broken = self._broken, []
        for place in broken:
            lost = lost_events if place is broken[-1] else -1
            self.damage.append(Damage(place.segment, place.offset, place.reason, lost, place.detail))


def _segments(folder: Path) -> dict[int, Path]:
    try:
        return segments(folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise JournalError(f"{folder} can't be listed: {error.strerror}.") from error
