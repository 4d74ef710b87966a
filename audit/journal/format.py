"""The bytes of a journal: a segment's header, its frames, its names, and the writer's lock.

Knows nothing of who writes or reads. ``docs/journal.md`` is the same in prose. Rules of the format:

- A segment is a header line and frames, each frame a length, a CRC32 and a msgpack payload.
- The header names the schema and bears a CRC32 of its own: one flipped bit is damage, not "newer".
- A frame counts only when it is whole and its checksum fits; nothing else is ever decoded.
- An empty payload is no frame: the zeros that a file system may leave after a power cut would
  otherwise look like a run of valid empty frames (the CRC32 of nothing is 0).
"""

from __future__ import annotations

import enum
import fcntl
import os
import re
import struct
from collections.abc import Generator
from pathlib import Path
from zlib import crc32

import msgspec

from ..errors import LedgerError
from ..events import SCHEMA, AnyEvent

MAGIC = b"kvledger journal "
FRAME = struct.Struct("<II")
"""Before every payload: its length in bytes and its CRC32."""

MAX_PAYLOAD_BYTES = 64 << 20
"""A length above this is damage; it bounds what a flipped bit can make a reader allocate."""

LOCK = "lock"
_NAME = re.compile(r"(\d{8,})\.kvl")
_HEADER_LINE = re.compile(re.escape(MAGIC) + rb"(\d{1,9}) ([0-9a-f]{8})\n")
_HEADER_BYTES = 64
_READ_BYTES = 1 << 20


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One batch: its number, the number of its first event, its events."""

    batch: int
    first_event: int
    events: list[AnyEvent]


class Tail(enum.Enum):
    """How the readable part of a segment ends."""

    WHOLE = "at the end of the file"
    SHORT = "in a frame that is not whole"
    BAD = "in a frame that is damaged"


def segment_name(number: int) -> str:
    """``00000001.kvl`` for 1."""
    return f"{number:08d}.kvl"


def segment_number(path: Path) -> int | None:
    """1 for ``00000001.kvl``; None for a name that no writer gives."""
    named = _NAME.fullmatch(path.name)
    return int(named.group(1)) if named else None


def segments(folder: Path) -> dict[int, Path]:
    """The segments in ``folder`` by number, oldest first. OSError if it can't be listed."""
    found: dict[int, Path] = {}
    for name in os.listdir(folder):
        number = segment_number(Path(name))
        if number is not None:
            found[number] = folder / name
    return dict(sorted(found.items()))


def header(schema: int) -> bytes:
    """The first line of a segment, in every schema: magic, schema, CRC32 of the two."""
    line = MAGIC + b"%d" % schema
    return line + b" %08x\n" % crc32(line)


HEADER = header(SCHEMA)


def frame(payload: bytes) -> bytes:
    """A payload with its length and checksum."""
    return FRAME.pack(len(payload), crc32(payload)) + payload


def read_header(descriptor: int, name: str) -> tuple[int, Tail]:
    """Where the frames of an open segment begin, and WHOLE if the header is right.

    Raises :class:`LedgerError` for a schema newer than ours.
    """
    data = os.pread(descriptor, _HEADER_BYTES, 0)
    line = _HEADER_LINE.match(data)
    if line is None:
        return 0, Tail.SHORT if HEADER.startswith(data) else Tail.BAD
    schema = int(line.group(1))
    if line.group() != header(schema):
        return 0, Tail.BAD
    if schema > SCHEMA:
        raise newer_schema(name, f"schema {schema}")
    return line.end(), Tail.WHOLE


def newer_schema(name: str, what: str) -> LedgerError:
    """What to say of a segment that only a later kvledger can read."""
    return LedgerError(
        f"{name} was written with {what} and this kvledger reads up to schema {SCHEMA}; "
        "read it with the version that wrote it, or a later one."
    )


def frames(descriptor: int, offset: int) -> Generator[tuple[int, memoryview], None, Tail]:
    """(end offset, payload) of every good frame from ``offset`` on; returns how that ends.

    A frame is believed or rejected from one read of its own: a live writer may cut off a
    half-written frame and write another in its place between two reads.
    """
    wanted = _READ_BYTES
    while True:
        data = memoryview(os.pread(descriptor, wanted, offset))
        at_end = len(data) < wanted
        wanted = _READ_BYTES
        position = 0
        while True:
            start = position + FRAME.size
            if start > len(data):
                break
            length, checksum = FRAME.unpack_from(data, position)
            end = start + length
            if not 0 < length <= MAX_PAYLOAD_BYTES:
                return Tail.BAD
            if end > len(data):
                wanted = max(_READ_BYTES, FRAME.size + length)
                break
            payload = data[start:end]
            if crc32(payload) != checksum:
                if position:
                    at_end = False  # judge it from a read of its own
                    break
                last = not os.pread(descriptor, 1, offset + end)
                return Tail.SHORT if last else Tail.BAD
            yield offset + end, payload
            position = end
        offset += position
        if at_end and position == len(data):
            return Tail.WHOLE
        if at_end and not position:
            return Tail.SHORT


def take_lock(folder: Path) -> int:
    """Lock ``folder`` for writing for as long as the returned descriptor is open.

    flock belongs to the open file and not to the process: a process may ask about its own journal
    without losing the lock, and a kill releases it. Raises OSError if it is taken.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_live(folder: Path) -> bool:
    """Whether the writer of this journal is alive, quiet or not."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LedgerError(f"{folder / LOCK} can't be opened: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise LedgerError(f"{folder / LOCK} can't be locked: {error.strerror}.") from error
    finally:
        os.close(descriptor)
    return False
