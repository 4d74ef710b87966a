"""Kept block traces: what ``kvledger whatif`` needs of a journal, in a file that it reads instead.

:func:`keep` writes the file next to the journal's rollup, and adds to it what was recorded since. It has the
parts of the block trace, compressed, and the state of the reader behind them, so ``whatif`` reads the parts
and only the newest batches of the journal. A kept trace stays when its journal is removed.

    kvledger block trace <schema> <CRC32 of the head, eight hexadecimal digits> <where it begins> <its bytes>
    the parts
    the head, in msgpack

The file is written whole under another name, synced, and renamed. Its oldest parts are dropped where it would
be larger than ``MOST_BYTES``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import msgspec
from msgspec.structs import replace

from ..analysis.block_trace import BlockTrace, NoBlockTrace
from ..analysis.trace_bytes import decode, encode
from ..analysis.trace_parts import PartReader, PartsJoined, ReaderState, TracePart
from ..analysis.trace_sample import Sample, take_sample
from ..errors import LedgerError
from ..journal.format import FILE_MODE, segments
from ..journal.hosts import engine_name
from ..journal.reader import Batch, Position, Reader
from . import checkpoint
from .kept_files import FOLDER

SCHEMA = 1
SUFFIX = ".blocktrace"
PART_OPERATIONS = 250_000
"""A part is encoded when it has so many operations."""

SMALL_BYTES = 256 << 10
"""A last part that is smaller grows, so that a file that is continued often has few parts."""

MOST_BYTES = 256 << 20
"""The most bytes of the parts of one journal: as many as a journal itself may have by default."""

LINE_BYTES = 64
_LINE = re.compile(rb"kvledger block trace (\d{1,9}) ([0-9a-f]{8}) (\d{1,12}) (\d{1,10}) *\n")


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
        self.head = head
        self._file = file

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


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`keep` did. ``problem``: why there is no kept trace; "" if there is one."""

    bytes: int = 0
    requests: int = 0
    problem: str = ""


# --- reading --------------------------------------------------------------------------------------------


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
            return _whole(kept, _reader_of(path, kept.head), share)
    with _found(path) as kept:
        if kept is None:
            return None
        reader = _reader_of(path, kept.head)
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


def _reader_of(path: Path, head: Head | None) -> PartReader:
    """A reader that goes on behind the kept trace."""
    state = head.state if head is not None else None
    return PartReader(str(path), partial(engine_name, path=path), state)


@contextlib.contextmanager
def _found(journal: Path) -> Iterator[KeptTrace | None]:
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


# --- writing --------------------------------------------------------------------------------------------


def keep(journal: Path) -> Kept:
    """Write the kept trace of a journal, or continue the one that is there. Raises LedgerError."""
    if not journal.is_dir():
        return Kept(problem="a single segment has no kept block trace")
    try:
        with _found(journal) as kept:
            if kept is None and place(journal).exists() and 1 not in segments(journal):
                return Kept(
                    problem="its kept block trace can't be continued, and its first segments are gone"
                )
            try:
                return _Continued(journal, kept).written()
            except DamagedTrace:
                return _Continued(journal, None).written()
    except NoBlockTrace as error:
        return Kept(problem=str(error))
    except OSError as error:
        raise LedgerError(f"{place(journal)} can't be written: {error.strerror}.") from error


class _Continued:
    """Reads what a journal has beyond its kept trace, and writes both."""

    def __init__(self, journal: Path, kept: KeptTrace | None) -> None:
        self._journal, self._kept = journal, kept
        head = kept.head if kept is not None else None
        self._position = head.position if head is not None else None
        self._until = head.until_seconds if head is not None else 0.0
        self._dropped = head.dropped if head is not None else NO_PART
        self._entries = list(head.parts) if head is not None else []
        self._reader = _reader_of(journal, head)
        self._small: TracePart | None = None
        """The last part of the kept trace, if it is small: it is written again, with what follows."""

    def written(self) -> Kept:
        """Read, write, and say how much there is now."""
        path, began = place(self._journal), self._position
        batches = self._batches()
        first = next(batches, None)
        if first is not None:
            self._make_folder(path.parent)
            with _draft_of(path) as file:
                file.write(bytes(LINE_BYTES))
                self._copy(file)
                for batch in chain((first,), batches):
                    self._feed(batch, file)
                self._add(self._reader.cut(), file)
                self._drop_oldest()
                self._finish(file)
        elif began is None:
            return Kept(problem="it has no batch before its last one")
        size = sum(entry.bytes for entry in self._entries)
        return Kept(bytes=size, requests=self._reader.state().next_request - self._dropped.requests)

    def _batches(self) -> Iterator[Batch]:
        """What is new, without the last batch of a live engine, behind which a later reader goes on."""
        last: Batch | None = None
        with Reader(self._journal, self._position) as reader:
            for batch in reader.poll():
                if last is not None:
                    yield last
                last = batch
            if last is not None:
                self._position = reader.resumable if reader.ended else last.start
                if reader.ended:
                    yield last

    def _feed(self, batch: Batch, file: BinaryIO) -> None:
        for event in batch.events:
            self._reader.feed(event)
        self._until = max(self._until, self._reader.began_seconds + batch.events[-1].at / 1e6)
        if len(self._reader.trace.operations) >= PART_OPERATIONS:
            self._add(self._reader.cut(), file)

    # --- the file -----------------------------------------------------------------------------------

    @staticmethod
    def _make_folder(folder: Path) -> None:
        folder.mkdir(mode=checkpoint.FOLDER_MODE, parents=True, exist_ok=True)
        if folder.is_symlink():  # the engine's container may write beside the journals
            raise LedgerError(f"{folder} is a link, not a folder: no block trace is kept there.")

    def _copy(self, file: BinaryIO) -> None:
        """Copy the parts that are there; a small last one is read instead."""
        if self._kept is None or not self._entries:
            return
        if self._entries[-1].bytes < SMALL_BYTES:
            self._small = self._kept.part(self._entries.pop())
        for number, entry in enumerate(self._entries):
            self._entries[number] = replace(entry, offset=file.tell())
            file.write(self._kept.bytes_of(entry))

    def _add(self, part: TracePart, file: BinaryIO) -> None:
        """Write a part, together with the small one before it."""
        if self._small is not None:
            self._small.absorb(part)
            part, self._small = self._small, None
        state, data = self._reader.state(), encode(part, self._reader.began_seconds)
        entry = PartEntry(file.tell(), len(data), crc32(data), state.next_life, state.next_request)
        file.write(data)
        self._entries.append(entry)

    def _drop_oldest(self) -> None:
        while len(self._entries) > 1 and sum(entry.bytes for entry in self._entries) > MOST_BYTES:
            self._dropped = self._entries.pop(0)

    def _finish(self, file: BinaryIO) -> None:
        """Write the head behind the parts, and where it is into the first line."""
        assert self._position is not None
        head = Head(
            journal=self._journal.name,
            position=self._position,
            beginning=checkpoint.beginning(self._journal, self._position.segment),
            until_seconds=self._until,
            state=self._reader.state(),
            parts=self._entries,
            dropped=self._dropped,
        )
        payload, offset = msgspec.msgpack.encode(head), file.tell()
        file.write(payload)
        file.seek(0)
        line = b"kvledger block trace %d %08x %d %d" % (SCHEMA, crc32(payload), offset, len(payload))
        file.write(line.ljust(LINE_BYTES - 1) + b"\n")


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces ``path`` when it is whole and on disk."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{checkpoint.DRAFT}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, FILE_MODE), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
