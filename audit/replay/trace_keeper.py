"""Keep the block trace of a journal in a file, see ``kept_traces.py``, and add to it what was recorded since.

The file is written whole under another name, synced, and renamed. Its parts are copied as bytes, so each
event is read once. Its oldest parts are dropped where it would be larger than ``MOST_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec
from msgspec.structs import replace

from ..analysis.block_trace import NoBlockTrace
from ..analysis.trace_bytes import encode
from ..analysis.trace_parts import TracePart
from ..errors import LedgerError
from ..journal.format import FILE_MODE, segments
from ..journal.reader import Batch, Reader
from . import checkpoint
from .kept_files import replaced
from .kept_traces import (
    LINE_BYTES,
    NO_PART,
    DamagedTrace,
    Head,
    KeptTrace,
    PartEntry,
    first_line,
    open_trace,
    place,
    reader_of,
)

PART_OPERATIONS = 250_000
"""A part is encoded when it has so many operations."""

SMALL_BYTES = 256 << 10
"""A last part that is smaller grows, so that a file that is continued often has few parts."""

MOST_BYTES = 256 << 20
"""The most bytes of the parts of one journal: as many as a journal itself may have by default."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`keep` did. ``problem``: why there is no kept trace; "" if there is one."""

    bytes: int = 0
    requests: int = 0
    problem: str = ""


def keep(journal: Path) -> Kept:
    """Write the kept trace of a journal, or continue the one that is there. Raises LedgerError."""
    if not journal.is_dir():
        return Kept(problem="a single segment has no kept block trace")
    try:
        with open_trace(journal) as kept:
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
        """The journal, and its kept trace; None: there is none to continue."""
        head = kept.head if kept is not None else None
        self._position = head.position if head is not None else None
        """Where the journal is read on; None: from its beginning."""
        self._until = head.until_seconds if head is not None else 0.0
        """Unix time of the last event that was read; 0.0: none was."""
        self._dropped = head.dropped if head is not None else NO_PART
        """The last part that was dropped because the file was too large; ``NO_PART``: none was."""
        self._entries = list(head.parts) if head is not None else []
        """The parts that the file will have, oldest first."""
        self._reader = reader_of(journal, head)
        """Makes the parts; it goes on where the kept trace ends."""
        self._small: TracePart | None = None
        """The last part of the kept trace, if it is small: it is written again, with what follows."""

    def written(self) -> Kept:
        """Read, write, and say how much there is now."""
        path, began = place(self._journal), self._position
        batches = self._batches()
        first = next(batches, None)
        if first is not None:
            with replaced(path, FILE_MODE, "no block trace is kept") as file:
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
        file.write(first_line(payload, offset))
