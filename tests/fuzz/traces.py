"""Journals as data that can be mutated: segments, frames, and bytes; and the originals to start from."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from msgspec.structs import replace
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.events import EngineStopped, Snapshot
from kvledger.audit.journal.writer import JournalWriter

ARCHIVES = Path(__file__).parents[1] / "audit" / "replay" / "journals"
LARGEST_BYTES = 48 << 10
"""Larger journals are left out of the originals, because each is read thousands of times."""

FRAME = struct.Struct("<II")


@dataclass
class Segment:
    """What stands under one name in a journal's folder."""

    name: str
    header: bytes = b""
    frames: list[bytes] = field(default_factory=list)
    """Whole frames: length, checksum and payload."""
    tail: bytes = b""
    """What follows the last whole frame."""
    special: str = ""
    """``fifo``, ``folder``, ``loop`` or ``dangling`` instead of a file."""

    @property
    def data(self) -> bytes:
        return self.header + b"".join(self.frames) + self.tail

    def copy(self) -> Segment:
        return Segment(self.name, self.header, list(self.frames), self.tail, self.special)


@dataclass
class Trace:
    """One journal."""

    name: str
    segments: list[Segment]

    def copy(self) -> Trace:
        return Trace(self.name, [segment.copy() for segment in self.segments])

    def write(self, folder: Path) -> None:
        """Write the journal into a new folder; of two segments with one name the later stays."""
        folder.mkdir(parents=True)
        for segment in {segment.name: segment for segment in self.segments}.values():
            path = folder / segment.name
            if segment.special == "fifo":
                os.mkfifo(path)
            elif segment.special == "folder":
                path.mkdir()
            elif segment.special == "loop":
                path.symlink_to(path)
            elif segment.special == "dangling":
                path.symlink_to(folder / "nothing")
            else:
                path.write_bytes(segment.data)


def parsed(name: str, data: bytes) -> Segment:
    """A segment's bytes as header, frames and tail."""
    place = data.index(b"\n") + 1
    segment = Segment(name, data[:place])
    while place + FRAME.size <= len(data):
        length, _ = FRAME.unpack_from(data, place)
        end = place + FRAME.size + length
        if end > len(data):
            break
        segment.frames.append(data[place:end])
        place = end
    segment.tail = data[place:]
    return segment


def payload(frame: bytes) -> bytes:
    """The msgpack in a frame."""
    return frame[FRAME.size :]


def framed(data: bytes) -> bytes:
    """A frame with a valid checksum."""
    return FRAME.pack(len(data), crc32(data)) + data


# --- originals ----------------------------------------------------------------------------------------


def originals() -> list[Trace]:
    """Journals of real schedulers by level and release, and histories in several segments."""
    return [*_archived(), *_rotated()]


def _archived() -> list[Trace]:
    traces: dict[str, Trace] = {}
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(archive) as opened:
            for member in sorted(opened.getmembers(), key=lambda member: member.name):
                path = Path(member.name)
                if path.suffix != ".kvl" or not path.parent.name.startswith("engine-"):
                    continue
                file = opened.extractfile(member)
                assert isinstance(file, io.BufferedReader)
                name = str(path.parent)
                trace = traces.setdefault(name, Trace(name, []))
                trace.segments.append(parsed(path.name, file.read()))
    return [t for t in traces.values() if sum(len(s.data) for s in t.segments) <= LARGEST_BYTES]


def _rotated() -> list[Trace]:
    """Each golden history of one request, once in each of four segments."""
    traces = []
    with tempfile.TemporaryDirectory() as place:
        for number, golden in enumerate(GOLDEN):
            folder = Path(place) / str(number)
            writer = JournalWriter(folder)
            for request in range(4):
                writer.rotate()
                writer.write([replace(journals.STARTED, configuration={"model": "m"}), Snapshot(0, 0, [], 0)])
                writer.write(
                    events(golden.prompt_tokens, golden.words, request=request, pooling=golden.pooling)
                )
            writer.write([EngineStopped(9_000_000, "shutdown")])
            writer.close()
            segments = [parsed(path.name, path.read_bytes()) for path in sorted(folder.glob("*.kvl"))]
            traces.append(Trace(golden.title, segments))
    return traces
