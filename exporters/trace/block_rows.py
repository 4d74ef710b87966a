"""Rows of the tables about blocks: content that stayed in a block, and the states of all blocks by second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...audit import events as ev
from ...audit.analysis.block_states import BlockStates, Occupancy, Stay
from ...audit.ledger.blocks.contents import Contents

Row = tuple[str | int | float | None, ...]


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
