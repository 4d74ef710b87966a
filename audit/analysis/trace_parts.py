"""A block trace in parts, so that it can be kept, continued, and made whole again.

:class:`PartReader` reads a journal as :class:`TraceReader` does and gives up what it has read as a
:class:`TracePart`. It keeps the open requests only, so its memory is bounded. The state between two parts is
plain data, from which another process goes on. :class:`PartsJoined` makes the parts one trace again, which
equals the trace that one reader makes of the whole journal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from .. import events as ev
from ..ledger.blocks.pool_contents import PoolContents
from .block_trace import DROP, RESET, BlockTrace, Operation, TraceLife, TraceReader, TraceRequest, _Table


class TracePart(msgspec.Struct):
    """Some operations, and the lives and requests that ended meanwhile, by their index in the whole trace.

    The operations and ``TraceLife.request`` refer to the whole trace, too.
    """

    operations: list[Operation] = []
    lives: dict[int, TraceLife] = {}
    requests: dict[int, TraceRequest] = {}

    def absorb(self, later: TracePart) -> None:
        """Add the part that follows."""
        self.operations += later.operations
        self.lives.update(later.lives)
        self.requests.update(later.requests)


class ReaderState(msgspec.Struct):
    """A :class:`PartReader` between two parts.

    ``trace`` has no operations, and the open lives and requests only. ``lives`` and ``requests`` are their
    indices in the whole trace, ``next_life`` and ``next_request`` those of the next new ones. The other
    fields are the reader's; a table is its life and its blocks.
    """

    trace: BlockTrace
    lives: list[int]
    requests: list[int]
    next_life: int
    next_request: int
    started: ev.EngineStarted | None
    began_seconds: float
    pool_seen: bool
    numbers: dict[int, int]
    sequences: dict[int, int]
    tables: dict[int, tuple[int, list[int]]]
    unadmitted: dict[int, list[int]]
    admissions: dict[int, list[ev.Admitted]]
    hash_of: dict[int, int]
    owner: dict[int, int]
    unknown_hashes: int
    lost: int
    last_life: dict[int, int]


class PartReader(TraceReader):
    """Reads a journal, or goes on from a state, and gives up what it has read from time to time."""

    def __init__(
        self,
        path: str = "",
        name_of: Callable[[ev.EngineStarted], str] = attrgetter("name"),
        state: ReaderState | None = None,
    ) -> None:
        super().__init__(path, name_of)
        self._carried_lives: list[int] = []
        """The index in the whole trace of each life that was open at the last cut."""
        self._carried_requests: list[int] = []
        self._next_life = self._next_request = 0
        """The index in the whole trace of the first life and the first request since the last cut."""
        if state is not None:
            self._restore(state)

    def cut(self) -> TracePart:
        """What was read since the last cut; open requests stay here."""
        trace, open_requests = self.trace, sorted(set(self._numbers.values()))
        kept = set(open_requests)
        open_lives = [number for number, life in enumerate(trace.lives) if life.request in kept]
        part = self._part(kept)
        self._renumber(open_requests, open_lives)
        return part

    def rest(self) -> TracePart:
        """What was read since the last cut, with the open requests; nothing can be read afterwards."""
        return self._part(set())

    def state(self) -> ReaderState:
        """The state after a cut."""
        return ReaderState(
            replace(self.trace, doubts=list(self.trace.doubts)),
            self._carried_lives,
            self._carried_requests,
            self._next_life,
            self._next_request,
            self.started,
            self.began_seconds,
            self._pool_seen,
            self._numbers,
            self._sequences,
            {number: (table.life, table.blocks) for number, table in self._tables.items()},
            {number: list(waiting) for number, waiting in self._unadmitted.items()},
            {number: list(waiting) for number, waiting in self._admissions.items()},
            {block: ids[-1] for block, ids in self._contents.hashes.items()},
            self._contents.owner,
            self._unknown_hashes,
            self._lost,
            self._last_life,
        )

    def _restore(self, state: ReaderState) -> None:
        self.trace = replace(state.trace, doubts=list(state.trace.doubts))
        self._carried_lives, self._next_life = state.lives, state.next_life
        self._carried_requests, self._next_request = state.requests, state.next_request
        self.started = state.started
        if self.started is not None:
            self.trace.engine = self._name_of(self.started)  # it says where the journal is now
        self.began_seconds, self._pool_seen = state.began_seconds, state.pool_seen
        self._continued = bool(state.next_life or state.lives)
        self._numbers, self._sequences = state.numbers, state.sequences
        self._tables = {number: _Table(life, blocks) for number, (life, blocks) in state.tables.items()}
        self._unadmitted = {number: deque(waiting) for number, waiting in state.unadmitted.items()}
        self._admissions = {number: deque(waiting) for number, waiting in state.admissions.items()}
        hashes: dict[int, tuple[int, ...]] = {block: (one,) for block, one in state.hash_of.items()}
        self._contents = PoolContents(hashes, state.owner)
        self._unknown_hashes, self._lost, self._last_life = state.unknown_hashes, state.lost, state.last_life

    # --- indices ------------------------------------------------------------------------------------

    def _life_indices(self) -> list[int]:
        """The index in the whole trace of each life."""
        new = len(self.trace.lives) - len(self._carried_lives)
        return [*self._carried_lives, *range(self._next_life, self._next_life + new)]

    def _request_indices(self) -> list[int]:
        new = len(self.trace.requests) - len(self._carried_requests)
        return [*self._carried_requests, *range(self._next_request, self._next_request + new)]

    def _part(self, kept: set[int]) -> TracePart:
        """Everything but the records of the ``kept`` requests, whose indices are those of ``trace``."""
        trace, life_at, request_at = self.trace, self._life_indices(), self._request_indices()
        operations = [
            (kind, life if kind in (DROP, RESET) else life_at[life], first, second)
            for kind, life, first, second in trace.operations
        ]
        lives = {
            life_at[number]: replace(life, request=request_at[life.request])
            for number, life in enumerate(trace.lives)
            if life.request not in kept
        }
        requests = {
            request_at[number]: request for number, request in enumerate(trace.requests) if number not in kept
        }
        return TracePart(operations, lives, requests)

    def _renumber(self, requests: list[int], lives: list[int]) -> None:
        """Keep only these requests and lives."""
        trace, life_at, request_at = self.trace, self._life_indices(), self._request_indices()
        self._next_life += len(trace.lives) - len(self._carried_lives)
        self._next_request += len(trace.requests) - len(self._carried_requests)
        self._carried_lives = [life_at[number] for number in lives]
        self._carried_requests = [request_at[number] for number in requests]
        new_request = {number: place for place, number in enumerate(requests)}
        new_life = {number: place for place, number in enumerate(lives)}
        self._continued = self._continued or bool(trace.operations)
        kept_lives = [replace(trace.lives[n], request=new_request[trace.lives[n].request]) for n in lives]
        kept_requests = [trace.requests[number] for number in requests]
        trace.operations, trace.lives, trace.requests = [], kept_lives, kept_requests
        self._numbers = {number: new_request[place] for number, place in self._numbers.items()}
        self._last_life = {number: new_life[life] for number, life in self._last_life.items()}
        self._unadmitted = {
            number: deque(new_life[life] for life in waiting) for number, waiting in self._unadmitted.items()
        }
        for table in self._tables.values():
            table.life = new_life[table.life]


class PartsJoined:
    """Adds up parts, in their order."""

    def __init__(self, first_life: int = 0) -> None:
        self._first_life = first_life
        """Lives before this one began in parts that are gone."""
        self._whole = TracePart()

    def add(self, part: TracePart) -> None:
        """Add the next part."""
        self._whole.absorb(part)

    def into(self, trace: BlockTrace) -> BlockTrace:
        """``trace`` with the operations, lives and requests of all parts."""
        whole, first = self._whole, self._first_life
        lives = sorted(number for number in whole.lives if number >= first)
        requests = sorted(whole.requests)
        if lives == list(range(len(lives))) and requests == list(range(len(requests))):
            found = [whole.lives[number] for number in lives], [whole.requests[n] for n in requests]
            return replace(trace, operations=whole.operations, lives=found[0], requests=found[1])
        return replace(
            trace,
            operations=list(_renumbered(whole.operations, {life: place for place, life in enumerate(lives)})),
            lives=_renumbered_lives([whole.lives[life] for life in lives], requests),
            requests=[whole.requests[number] for number in requests],
        )


def _renumbered(operations: Iterable[Operation], place_of: dict[int, int]) -> Iterable[Operation]:
    """The operations of the known lives, and those that concern no life."""
    for kind, life, first, second in operations:
        if kind in (DROP, RESET):
            yield kind, life, first, second
        elif life in place_of:
            yield kind, place_of[life], first, second


def _renumbered_lives(lives: list[TraceLife], requests: list[int]) -> list[TraceLife]:
    place_of = {number: place for place, number in enumerate(requests)}
    return [replace(life, request=place_of[life.request]) for life in lives]
