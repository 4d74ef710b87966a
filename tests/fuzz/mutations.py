"""Random changes to a trace: of bytes, of frames, of segments, and of events under valid checksums."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, get_args

import msgspec
from tests.fuzz.traces import FRAME, Segment, Trace, framed, payload

from kvledger.audit.events import AnyEvent
from kvledger.audit.journal.format import segment_name

Mutation = Callable[[Random, Trace], None]
"""Changes a trace in place. Raises LookupError if the trace has nothing to change."""

TAGS = [kind.__struct_config__.tag for kind in get_args(AnyEvent)]
FIELDS = {kind.__struct_config__.tag: len(kind.__struct_fields__) for kind in get_args(AnyEvent)}

INTEGERS = (-(2**63), -(2**31), -65, -8, -2, -1, 0, 1, 2, 3, 7, 16, 255, 1 << 12, 1 << 20, 1 << 31, 1 << 53)
LARGE = (1 << 62, 2**63 - 1, 2**64 - 1)
TEXTS = (
    "",
    "x",
    "blocks",
    "reset",
    "failed",
    "r-0",
    "\x1b[2J\x9b",
    "a\nb\r\t\x00",
    "\u202etxt\u2066",
    '"',
    "i" * 999,
)
OTHERS = (
    None,
    True,
    False,
    0.5,
    -1e300,
    float("nan"),
    float("inf"),
    b"",
    b"\x00\xff",
    [],
    {},
    [[]],
    ["x"],
    {"a": 1},
)


# --- bytes ------------------------------------------------------------------------------------------------


def _place(random: Random, trace: Trace) -> tuple[Segment, bytearray, int]:
    segment = random.choice([segment for segment in trace.segments if segment.data])
    data = bytearray(segment.data)
    return segment, data, random.randrange(len(data))


def _put(segment: Segment, data: bytes | bytearray) -> None:
    segment.header, segment.frames, segment.tail = bytes(data), [], b""


def flip_bits(random: Random, trace: Trace) -> None:
    segment, data, place = _place(random, trace)
    data[place] ^= random.randrange(1, 256)
    _put(segment, data)


def insert_bytes(random: Random, trace: Trace) -> None:
    segment, data, place = _place(random, trace)
    data[place:place] = random.randbytes(random.randrange(1, 20))
    _put(segment, data)


def delete_bytes(random: Random, trace: Trace) -> None:
    segment, data, place = _place(random, trace)
    del data[place : place + random.randrange(1, 200)]
    _put(segment, data)


def zero_bytes(random: Random, trace: Trace) -> None:
    segment, data, place = _place(random, trace)
    length = min(random.choice((1, 8, 64, 4096)), len(data) - place)
    data[place : place + length] = bytes(length)
    _put(segment, data)


def cut(random: Random, trace: Trace) -> None:
    segment, data, place = _place(random, trace)
    _put(segment, data[:place])


# --- frames -----------------------------------------------------------------------------------------------


def _frame(random: Random, trace: Trace) -> tuple[Segment, int]:
    segment = random.choice([segment for segment in trace.segments if segment.frames])
    return segment, random.randrange(len(segment.frames))


def drop_frame(random: Random, trace: Trace) -> None:
    segment, place = _frame(random, trace)
    del segment.frames[place]


def repeat_frame(random: Random, trace: Trace) -> None:
    segment, place = _frame(random, trace)
    into, there = _frame(random, trace)
    into.frames.insert(there, segment.frames[place])


def swap_frames(random: Random, trace: Trace) -> None:
    (one, first), (other, second) = _frame(random, trace), _frame(random, trace)
    one.frames[first], other.frames[second] = other.frames[second], one.frames[first]


def move_frame(random: Random, trace: Trace) -> None:
    segment, place = _frame(random, trace)
    frame = segment.frames.pop(place)
    into = random.choice(trace.segments)
    into.frames.insert(random.randrange(len(into.frames) + 1), frame)


def wrong_length(random: Random, trace: Trace) -> None:
    segment, place = _frame(random, trace)
    frame = segment.frames[place]
    length, checksum = FRAME.unpack_from(frame)
    length = random.choice((0, 1, length - 1, length + 1, 1 << 20, 1 << 27, (1 << 32) - 1)) % (1 << 32)
    segment.frames[place] = FRAME.pack(length, checksum) + payload(frame)


def wrong_checksum(random: Random, trace: Trace) -> None:
    segment, place = _frame(random, trace)
    frame = segment.frames[place]
    segment.frames[place] = FRAME.pack(len(payload(frame)), random.getrandbits(32)) + payload(frame)


# --- segments ---------------------------------------------------------------------------------------------


def drop_segment(random: Random, trace: Trace) -> None:
    del trace.segments[random.randrange(len(trace.segments))]


def swap_segments(random: Random, trace: Trace) -> None:
    one, other = random.choice(trace.segments), random.choice(trace.segments)
    one.name, other.name = other.name, one.name


def copy_segment(random: Random, trace: Trace) -> None:
    copied = random.choice(trace.segments).copy()
    copied.name = segment_name(random.randrange(12))
    trace.segments.append(copied)


def rename_segment(random: Random, trace: Trace) -> None:
    names = (
        segment_name(random.randrange(12)),
        segment_name(10**9),
        "00000001.kvl.bak",
        "1.kvl",
        "00000002.new",
    )
    random.choice(trace.segments).name = random.choice(names)


def empty_segment(random: Random, trace: Trace) -> None:
    segment = random.choice(trace.segments)
    _put(segment, segment.header if random.random() < 0.5 else b"")


def special_segment(random: Random, trace: Trace) -> None:
    special = random.choice(("fifo", "folder", "loop", "dangling"))
    if random.random() < 0.5:
        random.choice(trace.segments).special = special
    else:
        trace.segments.append(Segment(segment_name(random.randrange(12)), special=special))


# --- events, with valid checksums ---------------------------------------------------------------------------


def _decoded(random: Random, trace: Trace) -> tuple[Segment, int, list[Any]]:
    segment, place = _frame(random, trace)
    batch = msgspec.msgpack.decode(payload(segment.frames[place]))
    return segment, place, batch


def _encode(segment: Segment, place: int, batch: list[Any]) -> None:
    segment.frames[place] = framed(msgspec.msgpack.encode(batch))


def _integer(random: Random, near: int = 0) -> int:
    kind = random.random()
    if kind < 0.4:
        return max(-(2**63), min(2**64 - 1, near + random.choice((-1000, -17, -1, 1, 2, 16, 1000))))
    return random.choice(LARGE) if kind < 0.45 else random.choice(INTEGERS)


def _value(random: Random) -> Any:
    kind = random.random()
    if kind < 0.5:
        return _integer(random)
    if kind < 0.7:
        return [_integer(random) for _ in range(random.randrange(12))]
    return random.choice(TEXTS) if kind < 0.85 else random.choice(OTHERS)


def _changed(random: Random, value: Any) -> Any:
    """Another value: most often of the same type."""
    if random.random() < 0.15:
        return _value(random)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _integer(random, value)
    if isinstance(value, str):
        return random.choice((*TEXTS, value + "x"))
    if isinstance(value, list):
        value = list(value)
        place = random.randrange(len(value) + 1)
        if place == len(value) or random.random() < 0.2:
            value.insert(place, _integer(random))
        elif random.random() < 0.3:
            del value[place]
        else:
            value[place] = _changed(random, value[place])
        return value
    if isinstance(value, dict) and value:
        return {**value, random.choice((*value, "new")): _value(random)}
    return _value(random)


def change_field(random: Random, trace: Trace) -> None:
    segment, place, batch = _decoded(random, trace)
    event = random.choice(batch[2])
    at = random.randrange(len(event)) if random.random() < 0.05 else random.randrange(1, len(event))
    event[at] = _changed(random, event[at])
    _encode(segment, place, batch)


def cut_or_lengthen_event(random: Random, trace: Trace) -> None:
    segment, place, batch = _decoded(random, trace)
    event = random.choice(batch[2])
    event[random.randrange(1, len(event) + 1) :] = [_value(random) for _ in range(random.randrange(3))]
    _encode(segment, place, batch)


def replace_event(random: Random, trace: Trace) -> None:
    """One event becomes another of any type with random fields, as many events as before."""
    segment, place, batch = _decoded(random, trace)
    batch[2][random.randrange(len(batch[2]))] = _any_event(random, batch)
    _encode(segment, place, batch)


def insert_event(random: Random, trace: Trace) -> None:
    """One event more, in the last batch, so that the numbers of events stay right."""
    segment, place, batch = _decoded(random, trace)
    batch[2].insert(random.randrange(len(batch[2]) + 1), _any_event(random, batch))
    _encode(segment, place, batch)


def swap_events(random: Random, trace: Trace) -> None:
    segment, place, batch = _decoded(random, trace)
    events = batch[2]
    one, other = random.randrange(len(events)), random.randrange(len(events))
    events[one], events[other] = events[other], events[one]
    _encode(segment, place, batch)


def copy_event(random: Random, trace: Trace) -> None:
    """An event of another batch in the place of one of this batch."""
    _, _, source = _decoded(random, trace)
    segment, place, batch = _decoded(random, trace)
    batch[2][random.randrange(len(batch[2]))] = random.choice(source[2])
    _encode(segment, place, batch)


def change_numbers(random: Random, trace: Trace) -> None:
    """Other numbers of a batch and its first event."""
    segment, place, batch = _decoded(random, trace)
    batch[random.randrange(2)] = _changed(random, batch[0])
    _encode(segment, place, batch)


def _any_event(random: Random, batch: list[Any]) -> list[Any]:
    tag = random.choice(TAGS)
    at = batch[2][0][1] if batch[2] else 0
    small = random.random() < 0.6
    fields = [
        random.randrange(-1, 9) if small and random.random() < 0.7 else _value(random)
        for _ in range(FIELDS[tag] - 1)
    ]
    return [tag, at, *fields]


BYTES: tuple[Mutation, ...] = (flip_bits, insert_bytes, delete_bytes, zero_bytes, cut)
FRAMES: tuple[Mutation, ...] = (
    drop_frame,
    repeat_frame,
    swap_frames,
    move_frame,
    wrong_length,
    wrong_checksum,
)
SEGMENTS: tuple[Mutation, ...] = (
    drop_segment,
    swap_segments,
    copy_segment,
    rename_segment,
    empty_segment,
    special_segment,
)
EVENTS: tuple[Mutation, ...] = (
    change_field,
    change_field,
    change_field,
    replace_event,
    insert_event,
    swap_events,
    copy_event,
    cut_or_lengthen_event,
    change_numbers,
)
LEVELS: dict[str, tuple[Mutation, ...]] = {
    "bytes": BYTES,
    "frames": FRAMES,
    "segments": SEGMENTS,
    "events": EVENTS,
}


def mutated(random: Random, trace: Trace) -> tuple[Trace, str, str]:
    """A changed copy of ``trace``, the level of the changes, and their names."""
    level = random.choices(list(LEVELS), (20, 20, 15, 45))[0]
    changed = trace.copy()
    names = []
    for _ in range(random.choice((1, 1, 2, 3))):
        mutation = random.choice(LEVELS[level])
        try:
            mutation(random, changed)
        except (LookupError, OverflowError, ValueError):  # an earlier change left nothing to change
            continue
        names.append(mutation.__name__)
    return changed, level, " ".join(names)
