"""Rows of the table of steps: what each step scheduled, and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from ...audit import events as ev
from ...audit.analysis.block_states import BlockStates, Occupancy, Stay
from ...audit.analysis.step_times import NO_WORK, STEP_HANDLERS, StepTimes, Work
from ...audit.ledger.blocks.contents import Contents

Row = tuple[str | int | float | None, ...]


class StepRow(msgspec.Struct):
    """A step, or equal steps in a row. ``left`` of its steps have no known end so far."""

    step: int
    at: int
    times: int
    requests: int
    tokens: int
    drafts: int
    left: int
    took_us: int = 0

    def values(self) -> Row:
        """The row, without the engine's name."""
        took = self.took_us / 1e6 if self.took_us else None
        return (self.step, self.at / 1e6, self.times, self.requests, self.tokens, self.drafts, took)


class Observation(NamedTuple):
    """Steps that were timed together. ``begin`` and ``end`` are equal where the time is not known."""

    steps: int
    begin: int
    end: int
    work: Work


class ObservedSteps(StepTimes):
    """Keeps the observations until they are taken."""

    observations: list[Observation] = msgspec.field(default_factory=list)

    def take(self) -> list[Observation]:
        """The observations since the last call."""
        taken, self.observations = self.observations, []
        return taken

    def _observe(self, begin: int, end: int, work: Work) -> None:
        whole = self.repeated + work if self.repeated_at >= 0 else work
        self.observations.append(Observation(whole.steps, begin, max(begin, end), whole))
        super()._observe(begin, end, work)

    def _repeat_unobserved(self, times: int) -> None:
        self.observations.append(Observation(times - min(self.skip, times), 0, 0, NO_WORK))
        super()._repeat_unobserved(times)


class StepRows:
    """Makes the rows of one journal, in the order of time.

    A row is complete when all its steps have been delivered. Steps that are observed together (an
    observation of :class:`~kvledger.audit.analysis.step_times.StepTimes`) give their time to the last row of
    them, so the times of all rows sum to the engine's time.
    """

    def __init__(self) -> None:
        self._times = ObservedSteps()
        self._scheduled: dict[int, tuple[int, int]] = {}
        """By request: its tokens and draft tokens in each step, until a step changes them."""
        self._step = 0
        """Number of the last step that was scheduled."""
        self._open: deque[StepRow] = deque()
        """Rows with steps that have not been delivered, oldest first."""

    def feed(self, events: Iterable[ev.Event]) -> list[Row]:
        """The rows that are complete after these events."""
        done: list[Row] = []
        for event in events:
            row = self._row(event)
            if row is not None:
                self._open.append(row)
            handler = STEP_HANDLERS.get(type(event))
            if handler is None:
                continue
            pending = len(self._times.pending)
            handler(self._times, event)
            done += self._place()
            emptied = type(event) is ev.Snapshot and pending and not self._times.pending
            if self._times.lost or emptied:
                done += self.finish()
        return done

    def finish(self) -> list[Row]:
        """The rows that never became complete."""
        rows = [row.values() for row in self._open]
        self._open.clear()
        return rows

    def _place(self) -> list[Row]:
        """Give the new observations to their rows."""
        done: list[Row] = []
        for steps, begin, end, _ in self._times.take():
            took_us = end - begin
            while steps and self._open:
                row = self._open[0]
                part = min(steps, row.left)
                row.left -= part
                steps -= part
                if row.left == 0:
                    self._open.popleft()
                    row.took_us += 0 if steps and self._open else took_us
                    done.append(row.values())
                elif not steps:
                    row.took_us += took_us
        return done

    def _row(self, event: ev.Event) -> StepRow | None:
        """A row for a scheduled step, or for the repeats of the last one."""
        times = 1
        match event:
            case ev.Snapshot():
                self._scheduled, self._step = {}, event.step
                return None
            case ev.Stepped():
                for request in ev.numbers(event.dropped):
                    self._scheduled.pop(request, None)
                changed = ev.numbers(event.changed)
                for i in range(0, len(changed), 4):
                    self._scheduled[changed[i]] = changed[i + 1], changed[i + 2]
                step = self._step = event.step
            case ev.Repeated():
                step, times = self._step + 1, event.times
                self._step += times
            case _:
                return None
        tokens = sum(tokens for tokens, _ in self._scheduled.values())
        drafts = sum(drafts for _, drafts in self._scheduled.values())
        return StepRow(step, event.at, times, len(self._scheduled), tokens, drafts, left=times)


# --- Rows of the tables about blocks: content that stayed in a block, and the states of all blocks by
# second.


class BlockRows:
    """Makes the rows of one journal, in the order of time."""

    def __init__(self) -> None:
        self.states = BlockStates()
        """The states of all blocks after the last event."""
        self._contents = Contents()
        """What they contain."""
        self._stays: list[Row] = []
        """Rows of content that left its block since the last call."""
        self._request_ids: dict[int, str] = {}
        """The id of each request, by the request's number."""
        self._second: Occupancy | None = None
        """The last occupancy of the second that is not over, with that second's sums."""

    def feed(self, events: Iterable[ev.Event]) -> tuple[list[Row], list[Row]]:
        """The rows of stays that ended and of seconds that are over, without the engine's name."""
        seconds: list[Row] = []
        for event in events:
            if type(event) is ev.RequestAdded:
                self._request_ids[event.request] = event.request_id
            elif type(event) is ev.Snapshot:
                self._request_ids |= {row.request: row.request_id for row in event.rows}
            occupancy = self.states.feed(event, self._contents.read(event))
            if occupancy is not None:
                seconds += self._add(occupancy)
                for stay in self.states.ended:
                    self._left(stay)
        stays, self._stays = self._stays, []
        return stays, seconds

    def finish(self) -> tuple[list[Row], list[Row]]:
        """The rows of content that is still in the cache, and of the last second."""
        for stay in self.states.open_stays():
            self._left(stay)
        return self._stays, [_second(self._second)] if self._second is not None else []

    def _add(self, new: Occupancy) -> Iterator[Row]:
        old, self._second = self._second, new
        if old is None:
            return
        if old.at // 1_000_000 != new.at // 1_000_000:
            yield _second(old)
            return
        sums = (old.allocated + new.allocated, old.evicted + new.evicted, old.hits + new.hits)
        self._second = Occupancy(new.at, new.running, new.cached, new.empty, new.unknown, *sums)

    def _left(self, stay: Stay) -> None:
        ended, released = stay.left_at, stay.released_at
        self._stays.append(
            (
                stay.pool,
                stay.block,
                self._request_ids.get(stay.request),
                _at(stay.cached_at),
                _at(ended),
                stay.left_by or None,
                stay.hits,
                _at(released),
                (ended - released) / 1e6 if ended >= 0 and released >= 0 else None,
            )
        )


def _second(row: Occupancy) -> Row:
    return (row.at // 1_000_000, *(getattr(row, name) for name in row.__struct_fields__[1:]))


def _at(microseconds: int) -> float | None:
    return microseconds / 1e6 if microseconds >= 0 else None
