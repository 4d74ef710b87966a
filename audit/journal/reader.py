"""The reader of a journal: batches in order, and a Gap for all that is missing.

Rules of this file:

- Never a wrong event, never a silent loss: wherever numbers jump, bytes are damaged or the tail is
  torn, a synthesized :class:`~kvledger.audit.events.Gap` stands in the stream and a
  :class:`Damage` says where. (Where the writer's own Gap explains a jump, that one stands.)
- After damage inside a segment reading goes on at the next one, which begins with a snapshot.
- Nobody waits for anybody: segments may be added, and the oldest removed, while we read.
- What a live writer has half written is "not yet"; of a dead one it is a torn tail. Whether it
  lives is asked before its last bytes are read, so that none can come in between.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from ..errors import LedgerError
from ..events import AnyEvent, EngineStopped, Gap
from .format import Payload, Tail, frames, is_live, newer_schema, read_header, segment_number, segments

TORN = "torn tail"
CORRUPT = "corrupt segment"
UNREADABLE = "unreadable batch"
DISORDER = "numbers out of order"
REMOVED = "segments removed"
UNWRITTEN = "not written"

_TAGS = frozenset(event.__struct_config__.tag for event in get_args(AnyEvent))


class Position(msgspec.Struct, frozen=True):
    """Where the next batch is, and the numbers it should have (``event`` -1: any).

    ``Position(segment=n, event=-1)`` begins at that segment and asks nothing of what came before.
    ``at`` is that of the last event read; -1 when there was none.
    """

    segment: int = 1
    offset: int = 0
    batch: int = 0
    event: int = 0
    at: int = -1


class Damage(msgspec.Struct, frozen=True):
    """Something is missing from byte ``offset`` of a segment on. ``lost_events`` -1: not known."""

    segment: str
    offset: int
    reason: str
    lost_events: int

    def __str__(self) -> str:
        lost = "an unknown number of" if self.lost_events < 0 else self.lost_events
        return f"{self.reason} at {self.segment} byte {self.offset}: {lost} events lost"


class Batch(NamedTuple):
    """Events that were written at once. ``start`` leads back to just before them."""

    first_event: int
    events: list[AnyEvent]
    start: Position
    begins_segment: bool


class Reader:
    """Reads one journal folder, or one segment file of any name.

    ``position`` is where the next :meth:`poll` goes on; ``damage`` what was found missing so far;
    ``ended``: the writer is gone and everything was read; ``stopped``: the last event says that
    observation ended in good order (else the engine was killed, and what it had not yet written is
    missing). Raises :class:`LedgerError` for a newer schema, and for a file that is no segment.
    """

    def __init__(self, path: str | Path, start: Position | None = None) -> None:
        self.path = Path(path)
        self.damage: list[Damage] = []
        self.ended = False
        self.stopped = False
        self._single = not self.path.is_dir()
        self.position = start or Position(event=-1 if self._single else 0)
        self._file: FileIO | None = None
        self._frames_at = 0
        self._name = ""
        self._jumped_from: Position | None = None
        self._skipping = False
        self._broken: list[tuple[str, int, str]] = []
        self._decode = msgspec.msgpack.Decoder(Payload).decode

    def poll(self) -> Iterator[Batch]:
        """Every batch that is complete by now, in order."""
        if self.ended:
            return
        live = self._is_live()
        while self._file is not None or self._open_next():
            tail = yield from self._read_segment()
            later = self._has_later()
            if later:
                # Nothing is appended here any more; read what came before the later one stood.
                tail = yield from self._read_segment()
            elif live and tail is not Tail.BAD:
                return
            if tail is not Tail.WHOLE:
                self._break(CORRUPT if tail is Tail.BAD else TORN)
                self._skipping = True
            if later:
                self._leave()
                continue
            if self._broken:
                yield self._gap(-1, 0)
                self.position = replace(self.position, event=-1)
            break
        if not live:
            self.ended = True
            self.close()

    @property
    def resumable(self) -> Position:
        """Where another reader would go on exactly as this one.

        That is ``position``, but before what is damaged and not yet told as a Gap, and after the
        segment whose damage was told.
        """
        if not self._broken:
            after = replace(self.position, segment=self.position.segment + 1, offset=0)
            return after if self._skipping else self.position
        name, offset, _ = self._broken[0]
        segment = segment_number(Path(name)) or self.position.segment
        return replace(self.position, segment=segment, offset=offset)

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

    def _has_later(self) -> bool:
        return any(number > self.position.segment for number in self._listed())

    def _open_next(self) -> bool:
        """Open the first segment not yet left; False when there is none."""
        for number, path in self._listed().items():
            if number < self.position.segment:
                continue
            try:
                self._file = FileIO(path)
            except FileNotFoundError:  # the writer removed it since it was listed
                if self._single:
                    raise LedgerError(f"There is no {path}.") from None
                continue
            except OSError as error:
                raise LedgerError(f"{path} can't be opened: {error.strerror}.") from error
            self._name = path.name
            self._frames_at = 0
            self._jumped_from = None
            if number > self.position.segment:
                self._jumped_from = self.position
                self.position = replace(self.position, segment=number, offset=0)
                self._skipping = False
            return True
        return False

    def _leave(self) -> None:
        self.close()
        self._skipping = False
        self.position = replace(self.position, segment=self.position.segment + 1, offset=0)

    def _read_segment(self) -> Generator[Batch, None, Tail]:
        assert self._file is not None
        if self._skipping:
            return Tail.WHOLE
        if not self._frames_at:
            self._frames_at, tail = read_header(self._file.fileno(), self._name)
            if tail is Tail.BAD and self._single:
                raise LedgerError(f"{self.path} is not a kvledger journal.")
            if tail is not Tail.WHOLE:
                return tail
            self.position = replace(self.position, offset=max(self.position.offset, self._frames_at))
        if self._file.seek(0, os.SEEK_END) < self.position.offset:
            return Tail.SHORT
        found = frames(self._file.fileno(), self.position.offset)
        while True:
            try:
                end, data = next(found)
            except StopIteration as stop:
                return Tail(stop.value)
            try:
                payload = self._decode(data)
            except (msgspec.DecodeError, ValueError):
                _refuse_newer(self._name, data)
                self._break(UNREADABLE)
                self.position = replace(self.position, offset=end)
                continue
            expected = self.position
            if payload.batch < expected.batch or payload.first_event < expected.event:
                self._break(DISORDER)
                return Tail.BAD
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
                return None  # the writer says so itself
            self._break(REMOVED if self._jumped_from is not None else UNWRITTEN)
        return self._gap(missing, first.at)

    def _break(self, reason: str) -> None:
        place = (self._name, self.position.offset)
        if not any(broken[:2] == place for broken in self._broken):
            self._broken.append((*place, reason))

    def _gap(self, lost_events: int, at: int) -> Batch:
        """What stands in the stream for everything that is broken so far."""
        name, offset, reason = self._broken[-1]
        self._note(lost_events)
        if reason in (CORRUPT, UNREADABLE, DISORDER):
            reason = f"{reason} {name} at byte {offset}"
        position = self._jumped_from or self.position
        gap = Gap(position.at if position.at >= 0 else at, lost_events, reason)
        return Batch(max(position.event, 0), [gap], position, False)

    def _note(self, lost_events: int) -> None:
        """Every break becomes a Damage; the last one bears the count, which covers them all."""
        broken, self._broken = self._broken, []
        for place in broken[:-1]:
            self.damage.append(Damage(*place, -1))
        self.damage.append(Damage(*broken[-1], lost_events))


def _segments(folder: Path) -> dict[int, Path]:
    try:
        return segments(folder)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise LedgerError(f"{folder} can't be listed: {error.strerror}.") from error


def _refuse_newer(name: str, data: memoryview) -> None:
    """A whole batch that does not decode: raise if an event in it has a tag that we don't know."""
    try:
        _, _, events = msgspec.msgpack.decode(data)
        unknown = {event[0] for event in events} - _TAGS
    except (msgspec.DecodeError, TypeError, ValueError, LookupError):
        return
    if unknown:
        raise newer_schema(name, f"a newer schema (event tag {sorted(unknown)[0]})")
