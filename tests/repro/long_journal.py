"""Writes a journal of very many requests with a fault amid them: `python -m tests.repro.long_journal`.

One engine is recorded for two stretches, between which it is idle and its cache is empty: an ordinary crowd,
and a crowd with the fault. The ordinary stretch is then written again and again with other numbers: each copy
has requests, steps, times and block hashes of its own. So the journal is what a long run of this engine would
leave, and costs minutes where the scheduler would take hours.

Every event goes through the journal's own writer, one stretch to a segment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.repro.crowds import ATTEMPTS, Recording, start
from tests.repro.faults import FAULTS, Fault

from kvledger.audit import events as ev
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter, Limits

Shift = Callable[[Any], Any]


class Stretch:
    """The events of one segment, which can be written once more with other numbers."""

    def __init__(self, events: Sequence[Any]) -> None:
        added = [event.request for event in events if type(event) is ev.RequestAdded]
        steps = [event.step for event in events if type(event) is ev.Stepped]
        self.events = [msgspec.structs.asdict(event) | {"": type(event)} for event in events]
        self.first_request = min(added)
        self.requests = len(added)
        self.first_step = min(steps) - 1
        self.steps = max(steps) - self.first_step
        self.began = events[0].at
        self.lasts = events[-1].at - self.began + 1

    def renumbered(self, request: int, step: int, at: int, salt: int) -> list[ev.Event]:
        """The events with request numbers from ``request``, steps from ``step`` and times from ``at`` on."""
        numbers = _Numbers(request - self.first_request, step - self.first_step, at - self.began, salt)
        return [numbers.event(fields) for fields in self.events]


class _Numbers:
    """Adds the same offsets to the numbers of each event."""

    def __init__(self, requests: int, steps: int, at: int, salt: int) -> None:
        self._requests = requests
        self._salt = salt
        self._fields: dict[str, Shift] = {
            "at": lambda number: number + at,
            "request": self._request,
            "request_id": self._request_id,
            "step": self._step,
            "looked_up_step": self._step,
            "wall_seconds": lambda seconds: seconds + at / 1e6,
        }
        self._lists: dict[tuple[type[Any], str], Shift] = {
            (ev.Stepped, "changed"): lambda rows: self._column(rows, 4),
            (ev.Stepped, "dropped"): lambda rows: self._column(rows, 1),
            (ev.Delivered, "changed"): lambda rows: self._column(rows, 2),
            (ev.Delivered, "ignored"): lambda rows: self._column(rows, 1),
            (ev.DeliveredWhole, "requests"): lambda rows: self._column(rows, 1),
            (ev.Census, "rows"): lambda rows: self._column(rows, 5),
            (ev.Census, "waiting_rows"): lambda rows: self._column(rows, 5),
            (ev.BlocksCached, "rows"): self._cached,
            (ev.PoolCalls, "rows"): self._calls,
            (ev.StoreKeys, "keys"): lambda keys: [key ^ salt for key in keys],
        }
        self._steps = steps

    def event(self, fields: dict[str, Any]) -> ev.Event:
        """One event with the new numbers."""
        kind = fields[""]
        changed = {
            name: shift(value)
            for name, value in fields.items()
            if name and (shift := self._lists.get((kind, name)) or self._fields.get(name)) is not None
        }
        merged = fields | changed
        del merged[""]
        event: ev.Event = kind(**merged)
        return event

    def _request(self, number: int) -> int:
        return number + self._requests if number >= 0 else number

    def _request_id(self, request_id: str) -> str:
        """Another id of the same form."""
        stem, _, end = request_id.rpartition("-")
        return f"{stem}-{(int(end, 16) + self._salt) & 0xFFFFFFFF:08x}"

    def _step(self, number: int) -> int:
        return number + self._steps if number >= 0 else number

    def _column(self, rows: Sequence[int], width: int) -> list[int]:
        shifted = list(rows)
        shifted[::width] = map(self._request, shifted[::width])
        return shifted

    def _hash(self, number: int) -> int:
        return number ^ self._salt

    def _cached(self, rows: Sequence[int]) -> list[int]:
        shifted, place = list(rows), 0
        while place < len(shifted):
            shifted[place] = self._request(shifted[place])
            blocks, place = shifted[place + 3], place + 4
            hashes = slice(place + 1, place + 3 * blocks, 3)
            shifted[hashes] = map(self._hash, shifted[hashes])
            place += 3 * blocks
        return shifted

    def _calls(self, rows: Sequence[int]) -> list[int]:
        shifted, place = list(rows), 0
        while place < len(shifted):
            code, follow = shifted[place] % 8, shifted[place + 4]
            shifted[place + 1] = self._request(shifted[place + 1])
            if code == ev.IN_STEP:
                shifted[place + 3] = self._step(shifted[place + 3])
            place += ev.HEAD
            end = place + follow
            if code == ev.CACHED:
                shifted[place + 1 : end : 3] = map(self._hash, shifted[place + 1 : end : 3])
            elif code == ev.ALLOCATED_EACH:
                half = place + follow // 2
                shifted[half:end] = map(self._request, shifted[half:end])
            elif code == ev.TABLES_REPORTED:
                self._tables(shifted, place, end)
            place = end
        return shifted

    def _tables(self, rows: list[int], place: int, end: int) -> None:
        while place < end:
            rows[place] = self._request(rows[place])
            place += 4 + rows[place + 3]


def stretches(fault: Fault, level: str, requests: int, seed: int = 0) -> tuple[Stretch, Stretch]:
    """An ordinary stretch of about ``requests`` requests, and one with the fault, of one engine."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Path(folder), level)
        crowd = start(fault, recording, random.Random(seed))
        for faulty in (False, True):
            if faulty:
                recording.begin_segment()
            end = crowd.added + requests
            while crowd.added < end - requests // 2:
                crowd.arrive()
            for _ in range(ATTEMPTS if faulty else 0):
                fault.history(crowd)
                if recording.found(fault.finding):
                    break
            while crowd.added < end:
                crowd.arrive()
            crowd.driver.run()
            assert crowd.driver.reset_prefix_cache()
        recording.close()
        assert recording.found(fault.finding)
        ordinary, with_fault = _segments(Path(folder))
    stopped = with_fault[-1]
    assert type(stopped) is ev.EngineStopped
    return Stretch(ordinary), Stretch(with_fault[:-1])


def _segments(folder: Path) -> list[list[Any]]:
    segments: list[list[Any]] = []
    with Reader(folder) as reader:
        for batch in reader.poll():
            if batch.begins_segment:
                segments.append([])
            segments[-1] += batch.events
    return segments


def write(folder: Path, ordinary: Stretch, faulty: Stretch, requests: int, place: float = 0.5) -> int:
    """Write copies of the ordinary stretch, with the faulty one amid them; returns the number of requests.

    ``place``: how much of the journal comes before the fault, from 0 to 1.
    """
    writer = JournalWriter(folder, Limits(folder_bytes=1 << 40))
    dice = random.Random(1)
    copies = max(0, (requests - faulty.requests) // ordinary.requests)
    request = step = at = 0
    for number in range(copies + 1):
        stretch = faulty if number == round(copies * place) else ordinary
        writer.rotate()
        writer.write(stretch.renumbered(request, step, at, dice.getrandbits(63)))
        request, step, at = request + stretch.requests, step + stretch.steps, at + stretch.lasts
    writer.write([ev.EngineStopped(at, "shutdown")])
    writer.close()
    assert not writer.lost_events
    return request


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one journal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=list(FAULTS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--stretch", type=int, default=1000, help="requests in one stretch")
    parser.add_argument("--level", choices=("blocks", "tokens"), default="tokens")
    options = parser.parse_args(arguments)
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        ordinary, faulty = stretches(FAULTS[options.fault], options.level, options.stretch)
        written = write(options.folder, ordinary, faulty, options.requests)
    size = sum(path.stat().st_size for path in options.folder.glob("*.kvl"))
    print(json.dumps({"requests": written, "bytes": size}), file=stdout, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # LMCache may have left threads
