"""Kept block traces: what ``kvledger whatif`` needs of a journal, in a file that it reads instead.

The file stands beside the journal's kept rows; ``trace_keeper.py`` writes it. It has the parts of the block
trace, compressed, and the state of the reader behind them, so ``whatif`` reads the parts and only the newest
batches of the journal. A kept trace stays when its journal is removed.

    kvledger block trace <schema> <CRC32 of the head, eight hexadecimal digits> <where it begins> <its bytes>
    the parts
    the head, in msgpack
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import msgspec

from ..analysis.block_trace import BlockTrace
from ..analysis.trace_bytes import decode
from ..analysis.trace_parts import PartReader, PartsJoined, ReaderState, TracePart
from ..analysis.trace_sample import Sample, take_sample
from ..errors import LedgerError
from ..journal.hosts import engine_name
from ..journal.reader import Position, Reader
from . import checkpoint
from .kept_files import FOLDER

SCHEMA = 1
SUFFIX = ".blocktrace"
LINE_BYTES = 64
_LINE = re.compile(rb"kvledger block trace (\d{1,9}) ([0-9a-f]{8}) (\d{1,12}) (\d{1,10}) *\n")


def first_line(payload: bytes, offset: int) -> bytes:
    """The first line of a file whose head ``payload`` is at ``offset``."""
    line = b"kvledger block trace %d %08x %d %d" % (SCHEMA, crc32(payload), offset, len(payload))
    return line.ljust(LINE_BYTES - 1) + b"\n"


class DamagedTrace(LedgerError):
    """A part of a kept trace is not what was written."""


class PartEntry(msgspec.Struct, frozen=True, array_like=True):
    """One part in the file. ``lives`` and ``requests``: how many began in it or before."""

    offset: int
    bytes: int
    checksum: int
    lives: int
    requests: int


NO_PART = PartEntry(0, 0, 0, 0, 0)


class Head(msgspec.Struct):
    """What is known without the parts.

    ``position``: where the journal goes on; ``beginning`` tells the journal from another with its name.
    ``until_seconds``: Unix time of the last event. ``dropped``: the last part that is not here any more.
    """

    journal: str
    position: Position
    beginning: bytes
    until_seconds: float
    state: ReaderState
    parts: list[PartEntry]
    dropped: PartEntry = NO_PART


class KeptTrace:
    """A kept trace that is open for reading."""

    def __init__(self, path: Path, file: BinaryIO, head: Head) -> None:
        self.path = path
        """The file, for messages."""
        self.head = head
        """Where the parts are in the file, and what is known without them."""
        self._file = file
        """The open file; the caller closes it."""

    def part(self, entry: PartEntry) -> TracePart:
        """One part. Raises LedgerError."""
        return decode(self.bytes_of(entry), self.head.state.began_seconds)

    def bytes_of(self, entry: PartEntry) -> bytes:
        """The bytes of a part, as they are in the file. Raises LedgerError."""
        self._file.seek(entry.offset)
        data = self._file.read(entry.bytes)
        if crc32(data) != entry.checksum:
            raise DamagedTrace(f"{self.path} is damaged.")
        return data


def place(journal: Path) -> Path:
    """Where the kept trace of a journal is."""
    return journal.parent / FOLDER / f"{journal.name}{SUFFIX}"


def is_kept(path: Path) -> bool:
    """Whether this is the path of a kept trace."""
    return path.suffix == SUFFIX


def until(path: Path) -> float:
    """Unix time of the last event in a kept trace; 0 if it can't be read."""
    with _opened(path) as kept:
        return 0.0 if kept is None else kept.head.until_seconds


class LoadedTrace(NamedTuple):
    """A block trace, its sample if one was taken, and the Unix time from which its times count."""

    trace: BlockTrace
    sample: Sample | None
    began_seconds: float


def kept_trace(path: Path, share: float | None = None) -> LoadedTrace | None:
    """The block trace of a journal that has a kept one, or of a kept trace at ``path`` whose journal is gone.

    None if there is none that can be used. ``share``: take a sample of so many of the blocks. Raises
    LedgerError if it is damaged, or the journal can't be read.
    """
    if is_kept(path):
        with _opened(path) as kept:
            if kept is None:
                raise LedgerError(f"{path} is damaged, or another version of kvledger wrote it.")
            return _whole(kept, reader_of(path, kept.head), share)
    with open_trace(path) as kept:
        if kept is None:
            return None
        reader = reader_of(path, kept.head)
        with Reader(path, kept.head.position) as journal:
            for batch in journal.poll():
                for event in batch.events:
                    reader.feed(event)
        try:
            return _whole(kept, reader, share)
        except DamagedTrace:
            return None


def _whole(kept: KeptTrace, reader: PartReader, share: float | None) -> LoadedTrace:
    """The parts, and what ``reader`` has read beyond them."""
    dropped, rest, trace, sample = kept.head.dropped, reader.rest(), reader.finish(), None
    if share is None:
        joined = PartsJoined(dropped.lives)
        for part in chain(map(kept.part, kept.head.parts), (rest,)):
            joined.add(part)
        trace = joined.into(trace)
    else:
        last_first = chain((rest,), map(kept.part, reversed(kept.head.parts)))
        trace, sample = take_sample(trace, last_first, share, dropped.lives)
    if dropped.requests:
        trace.doubts.append(
            f"the {dropped.requests:,} oldest requests were dropped from the kept block trace"
        )
    return LoadedTrace(trace, sample, reader.began_seconds)


def reader_of(path: Path, head: Head | None) -> PartReader:
    """A reader that goes on behind the kept trace."""
    state = head.state if head is not None else None
    return PartReader(str(path), partial(engine_name, path=path), state)


@contextlib.contextmanager
def open_trace(journal: Path) -> Iterator[KeptTrace | None]:
    """The kept trace of a journal, if it is of this journal."""
    with _opened(place(journal)) if journal.is_dir() else contextlib.nullcontext() as kept:
        if kept is not None:
            beginning = checkpoint.beginning(journal, kept.head.position.segment)
            if beginning not in (kept.head.beginning, b""):
                kept = None
        yield kept


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[KeptTrace | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    with open(descriptor, "rb") as file:
        yield _kept(path, file)


def _kept(path: Path, file: BinaryIO) -> KeptTrace | None:
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        line = _LINE.fullmatch(file.read(LINE_BYTES))
        if line is None or int(line[1]) != SCHEMA:
            return None
        file.seek(int(line[3]))
        payload = file.read(int(line[4]))
        if crc32(payload) != int(line[2], 16):
            return None
        return KeptTrace(path, file, msgspec.msgpack.decode(payload, type=Head))
    except (OSError, msgspec.MsgspecError):
        return None
