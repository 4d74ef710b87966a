"""Decode one batch: within bounds on memory, and without events that no engine can have emitted.

A frame's checksum says that its bytes are as they were written. Who may write to a journal's folder can
write any bytes, and a reader must neither run out of memory over them nor pass on an event that makes the
code behind it loop or fail. So a batch is refused as a whole, with a sentence, if

- it is larger than the writer's batches and holds more events than they do (``format.py`` has the bounds),
- it does not decode as events, or
- an event in it is impossible (``audit/journal/possible_events.py``).

Text in the events is made printable (``audit/text.py``).
"""

from __future__ import annotations

import re
from typing import get_args

import msgspec

from ..events import Snapshot
from ..pool_calls import AnyEvent
from ..text import clean
from .format import (
    LARGE_BATCH_BYTES,
    LARGE_BATCH_EVENTS,
    LARGEST_EVENT_BYTES,
    MOST_SNAPSHOT_ROWS,
    Payload,
)
from .possible_events import impossible

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
