"""The bytes of a journal: a segment's header, its frames, its names, and the writer's lock.

Functions here read and make bytes; ``writer.py`` and ``reader.py`` decide when. ``docs/journal.md``
describes the format in prose. Its rules:

- A segment is a header line and frames, each frame a length, a CRC32 and a msgpack payload.
- The header contains the schema and a CRC32, so a flipped bit is read as damage and not as a newer schema.
- A frame is decoded only if it is whole and its checksum matches.
- A frame of length 0 is damage. A file system may leave a run of zero bytes after a power cut, and the
  CRC32 of nothing is 0, so zeros would otherwise read as valid empty frames.
"""

from __future__ import annotations

import enum
import fcntl
import math
import os
import re
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Annotated
from zlib import crc32

import msgspec

from ..errors import JournalError
from ..events import SCHEMA, AnyEvent
from .safe_open import NotAFile, open_file, reading

MAGIC = b"kvledger journal "
FRAME = struct.Struct("<II")
"""Stands before every payload: its length in bytes and its CRC32."""

MAX_PAYLOAD_BYTES = 64 << 20
"""A longer frame is damage. This bounds how much memory a flipped bit can make a reader allocate."""

LARGE_BATCH_BYTES = 1 << 20
"""A larger batch holds at most ``LARGE_BATCH_EVENTS``. The writer ends a batch at 64 KiB, except for an event
that is larger by itself, and for the two events that begin a segment."""

LARGE_BATCH_EVENTS = 2

LARGEST_EVENT_BYTES = 8 << 20
"""No event is larger, except a Snapshot."""

MOST_SNAPSHOT_ROWS = 1 << 20
"""The most open requests in a Snapshot that is larger than ``LARGEST_EVENT_BYTES``."""

FILE_MODE = 0o640
"""Permissions of a journal's files: request ids are clients' text, so not everybody may read them."""

LOCK = "lock"
"""Name of the file that the writer keeps locked while it lives."""

HEARTBEAT_SECONDS = 60
"""How often a living writer touches its lock file."""

HEARTBEAT = b"heartbeat %d\n" % HEARTBEAT_SECONDS
"""What the lock file holds while a writer keeps it: a killed writer leaves it, one that closes removes it."""

_HEARTBEAT = re.compile(rb"heartbeat (\d{1,6})\n")
_NAME = re.compile(r"(\d{8,})\.kvl")
_HEADER_LINE = re.compile(re.escape(MAGIC) + rb"(\d{1,9}) ([0-9a-f]{8})\n")
_HEADER_BYTES = 64
_READ_BYTES = 1 << 20


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One batch: its number, the number of its first event, its events."""

    batch: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    first_event: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    events: list[AnyEvent]


class TailState(enum.Enum):
    """How the readable part of a segment ends."""

    WHOLE = "at the end of the file"
    SHORT = "in a frame that is not whole"
    BAD = "in a frame that is damaged"


def segment_name(number: int) -> str:
    """``00000001.kvl`` for 1."""
    return f"{number:08d}.kvl"


def segment_number(path: Path) -> int | None:
    """1 for ``00000001.kvl``; None if the file is not named like a segment."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def segments(folder: Path) -> dict[int, Path]:
    """The segments in ``folder`` by number, oldest first. Raises OSError if it can't be listed."""
    by_number: dict[int, Path] = {}
    for name in os.listdir(folder):
        number = segment_number(Path(name))
        if number is not None:
            by_number[number] = folder / name
    return dict(sorted(by_number.items()))


def header(schema: int) -> bytes:
    """The first line of a segment, in every schema: magic, schema, and the CRC32 of both."""
    line = MAGIC + b"%d" % schema
    return line + b" %08x\n" % crc32(line)


HEADER = header(SCHEMA)


def frame(payload: bytes) -> bytes:
    """A payload, preceded by its length and checksum."""
    return FRAME.pack(len(payload), crc32(payload)) + payload


def read_header(descriptor: int, name: str) -> tuple[int, TailState]:
    """The offset of the first frame of an open segment, and WHOLE if the header is intact.

    Raises :class:`JournalError` for a schema newer than ours.
    """
    data = os.pread(descriptor, _HEADER_BYTES, 0)
    line = _HEADER_LINE.match(data)
    if line is None:
        return 0, TailState.SHORT if HEADER.startswith(data) else TailState.BAD
    schema = int(line.group(1))
    if line.group() != header(schema):
        return 0, TailState.BAD
    if schema > SCHEMA:
        raise newer_schema(name, f"schema {schema}")
    return line.end(), TailState.WHOLE


def newer_schema(name: str, what: str) -> JournalError:
    """The error for a segment that only a later kvledger can read."""
    return JournalError(
        f"{name} was written with {what} and this kvledger reads up to schema {SCHEMA}; "
        "read it with the version that wrote it, or a later one."
    )


def frames(descriptor: int, offset: int) -> Generator[tuple[int, memoryview], None, TailState]:
    """Yields (end offset, payload) of every intact frame from ``offset`` on; returns how they end.

    Each frame is judged by the bytes of a single read: between two reads a live writer may cut off a
    half-written frame and write another in its place.
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
                return TailState.BAD
            if end > len(data):
                wanted = max(_READ_BYTES, FRAME.size + length)
                break
            payload = data[start:end]
            if crc32(payload) != checksum:
                if position:
                    at_end = False  # read this frame again by itself
                    break
                last = not os.pread(descriptor, 1, offset + end)
                return TailState.SHORT if last else TailState.BAD
            yield offset + end, payload
            position = end
        offset += position
        if at_end and position == len(data):
            return TailState.WHOLE
        if at_end and not position:
            return TailState.SHORT


def take_lock(folder: Path) -> int:
    """Lock ``folder`` for writing for as long as the returned descriptor is open.

    A flock belongs to the open file and not to the process: a process may ask whether its own journal is
    live without losing the lock, and the system releases the lock when the process is killed. Raises
    OSError if another writer holds the lock.
    """
    descriptor = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def gone_by(path: Path) -> float:
    """Unix time by which the writer that was killed was gone; infinity if that is not known.

    Two intervals after the last heartbeat: the writer's thread may have been late.
    """
    try:
        with reading(path / LOCK) as file:
            beating = _HEARTBEAT.fullmatch(file.read(64))
            return os.fstat(file.fileno()).st_mtime + 2 * int(beating[1]) if beating else math.inf
    except OSError:
        return math.inf


def is_live(folder: Path) -> bool:
    """Whether the writer of this journal is alive, even if it writes nothing."""
    try:
        descriptor = open_file(folder / LOCK)
    except (FileNotFoundError, NotADirectoryError, NotAFile):
        return False
    except OSError as error:
        raise JournalError(f"{folder / LOCK} can't be opened: {error.strerror}.") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise JournalError(f"{folder / LOCK} can't be locked: {error.strerror}.") from error
    finally:
        os.close(descriptor)
    return False
