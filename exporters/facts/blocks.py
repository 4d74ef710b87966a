"""Rows about blocks of one engine: what requests did with its prefix cache, and how its blocks were used.

``admissions`` and ``block_operations`` are the block trace that ``kvledger whatif`` replays and
``kvledger summary prefixes`` sums up; ``block_use`` has the sums of ``kvledger summary blocks`` by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from ...audit import events as ev
from ...audit.analysis.block_states import STATES, BlockStates, BlockUse, Quantiles
from ...audit.analysis.trace_reader import Change, RecordedRequest, TraceLife, TraceReader
from ...audit.analysis.turns import MOST_LIVE_BLOCKS, Past, Turn, TurnReader
from ...audit.figures.figure import LABELS, is_number
from ...audit.ledger.blocks.contents import CONTENT_EVENTS
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.windows import Window
from ..trace.time_series import MINUTE_TICKS, MOST, TICKS, Series, wider
from .schema import ADMISSIONS, BLOCK_OPERATIONS, BLOCK_USE, TURNS, Row

Key = TypeVar("Key")

TABLES = {
    "admissions": ADMISSIONS,
    "block_operations": BLOCK_OPERATIONS,
    "block_use": BLOCK_USE,
    "turns": TURNS,
}

OPERATIONS = (
    "admitted", "grew", "cached", "released", "dropped", "reset", "hit", "evicted", "cached_in_group",
)  # fmt: skip
"""The words for the kinds of changes, in their order."""

DISTRIBUTIONS = ("lifetimes", "idle", "reuse_seconds", "reuse_blocks")
COUNTS = ("allocated", "hits", "evicted", "never_hit")

LIFE_COUNTS = (
    "sequence_tokens", "resumed", "hit_blocks", "external_tokens", "preempted", "computed_tokens",
)  # fmt: skip
"""Fields of a life that are columns of ``admissions``, by the same name and in this order."""

MOST_BYTES = 256 << 20
"""The most bytes of the block operations of one journal: as many as a journal itself may have by default."""


class Bucket(msgspec.Struct):
    """A span of time: the blocks by state at its end, and what happened in it."""

    levels: dict[str, int]
    use: BlockUse

    def add(self, later: Bucket) -> None:
        """Add the span that follows."""
        self.use.follow(later.use)
        self.levels = later.levels


def put(buckets: dict[Key, Bucket], key: Key, bucket: Bucket) -> None:
    """Add a span to the one of its key, which it follows; or it is the first."""
    if key in buckets:
        buckets[key].add(bucket)
    else:
        buckets[key] = bucket


class BlockState(msgspec.Struct):
    """Where the rows of a journal go on. It consists of plain data, so a session can hold it."""

    reader: TraceReader = msgspec.field(default_factory=TraceReader)
    states: BlockStates = msgspec.field(default_factory=BlockStates)
    turns: TurnReader = msgspec.field(default_factory=lambda: TurnReader(most=MOST_LIVE_BLOCKS))
    place: int = -1
    """The bucket of the last event; -1: it is not in the window."""


def layout() -> str:
    """A checksum of what a :class:`BlockState` has, and of the columns of the tables."""
    kinds = (
        BlockState,
        TraceReader,
        RecordedRequest,
        TraceLife,
        BlockStates,
        BlockUse,
        TurnReader,
        Past,
    )
    names = [kind.__struct_fields__ for kind in kinds]
    columns = [[column.name for column in some] for some in TABLES.values()]
    return f"{crc32(repr((names, columns)).encode()):08x}"


class BlockRows:
    """Makes the rows of one journal, batch by batch, for a ``sink``.

    ``operations``: make those of the block trace, too. ``minutes``: a row of
    ``block_use`` for each minute, when it is over; else there are at most :data:`MOST` rows at the end.
    """

    def __init__(
        self,
        audit: EngineAudit,
        journal: str,
        sink: Callable[[str, Sequence[Row]], None],
        *,
        operations: bool,
        minutes: bool = False,
        state: BlockState | None = None,
    ) -> None:
        self.state = state or BlockState()
        """What was read so far."""
        self._audit = audit
        """The audit that reads the journal; it knows the clock and the window."""
        self._journal = journal
        self._sink = sink
        self._operations = operations
        """Whether the rows of the block trace are made."""
        self._minutes = minutes
        """Whether each minute is a row."""
        self._width = MINUTE_TICKS if minutes or state is not None else 1
        self._buckets: dict[int, Bucket] = {}
        """The buckets that are over, unless they are rows already."""
        if state is not None and not audit.window.holds(60.0 * state.place):
            state.states.taken()
            state.place = -1

    def add(self, events: Iterable[ev.Event]) -> None:
        """Add a batch."""
        began, window, reader = self._audit.began_seconds or 0.0, self._audit.window, self.state.reader
        read = self._audit.contents.read
        for event in events:
            changes = read(event)
            reader.feed(event, changes)
            if type(event) in CONTENT_EVENTS:
                wall = began + event.at / 1e6
                place = int(wall * TICKS) // self._width if window.holds(wall) else -1
                if place != self.state.place:
                    self._close()
                    self.state.place = int(wall * TICKS) // self._width if place >= 0 else -1
                self.state.states.feed(event, changes)
        self._trace_rows()

    def end(self) -> None:
        """Add the rows of requests that are open, and of the last bucket."""
        reader = self.state.reader
        reader.ended += reader.requests.values()
        reader.requests = {}
        self._trace_rows()
        self._close()
        self.state.place = -1
        self._sink("block_use", [self._use_row(place) for place in sorted(self._buckets)])

    def _trace_rows(self) -> None:
        reader, audit = self.state.reader, self._audit
        changes, ended = reader.taken()
        began_us, window = round(reader.began_seconds * 1e6), audit.window
        if ended and self._operations:
            rows = [row for one in ended for row in admission_rows(audit.name, self._journal, began_us, one)]
            self._sink("admissions", [row for row in rows if _inside(window, row[4])])
        if changes and self._operations:
            first = reader.changed - len(changes)
            rows = list(operation_rows(audit.name, self._journal, began_us, first, changes))
            self._sink("block_operations", [row for row in rows if _inside(window, row[2])])
        turns = self.state.turns.read(reader, changes, ended, (audit.name, self._journal))
        rows = [turn_row(turn) for turn in turns if window.holds(turn.ended_seconds)]
        if rows:
            self._sink("turns", rows)

    # --- the use over time --------------------------------------------------------------------------

    def _close(self) -> None:
        """The bucket is over."""
        states, place = self.state.states, self.state.place
        use = states.taken()
        if place < 0 or not states.seen or states.now is None:
            return
        put(self._buckets, place, Bucket(dict(states.now), use))
        if self._minutes:
            self._sink("block_use", [self._use_row(place)])
            self._buckets.clear()
        elif len(self._buckets) > MOST:
            self._coarsen()

    def _coarsen(self) -> None:
        width, before = wider(self._width), self._buckets
        factor, self._buckets, self._width = width // self._width, {}, width
        for place in sorted(before):
            put(self._buckets, place // factor, before[place])

    def _use_row(self, place: int) -> tuple[Any, ...]:
        bucket = self._buckets[place]
        use = bucket.use
        return (
            self._audit.name,
            self._journal,
            round(place * self._width * 1_000_000 / TICKS),
            round(self._width * 1_000_000 / TICKS),
            use.blocks,
            use.most_running,
            *(bucket.levels[state] for state in STATES),
            *(use.microseconds[state] for state in STATES),
            use.cached,
            *(getattr(use, name) for name in COUNTS),
            *(_numbers(getattr(use, name)) for name in DISTRIBUTIONS),
        )


def _inside(window: Window, us: Any) -> bool:
    """Whether a row with this time is in the window; None: its request is open."""
    if us is None:
        return window.until is None
    return window.holds(us / 1e6)


def _numbers(found: Quantiles) -> list[tuple[float, int]]:
    return [(found.number(bucket), found.counts[bucket]) for bucket in sorted(found.counts)]


# --- the block trace ------------------------------------------------------------------------------------


def admission_rows(
    engine: str, journal: str, began_us: int, request: RecordedRequest
) -> Iterator[tuple[Any, ...]]:
    """The rows of ``admissions``, one for each life of a request."""
    added, closed = request.added_at, request.closed_at
    for number, life in request.lives.items():
        yield (
            engine,
            journal,
            request.number,
            request.request_id,
            None if closed < 0 else began_us + closed,
            number,
            request.arrival,
            None if added < 0 else began_us + added,
            began_us + life.at,
            None if life.hit_tokens < 0 else life.hit_tokens,
            *(int(getattr(life, name)) for name in LIFE_COUNTS),
            request.prompt_tokens,
            request.priority,
            *(getattr(request, label.name) or None for label in LABELS if not is_number(label)),
        )


def operation_rows(
    engine: str, journal: str, began_us: int, first: int, changes: Sequence[Change]
) -> Iterator[tuple[Any, ...]]:
    """The rows of ``block_operations``. ``first``: the number of the first change in its journal."""
    for number, (kind, life, blocks, ids, at) in enumerate(changes, first):
        named = None if life < 0 else life
        yield engine, journal, began_us + at, number, OPERATIONS[kind], named, blocks, ids


_TURN_COLUMNS = [column.name for column in TURNS]


def turn_row(turn: Turn) -> tuple[Any, ...]:
    """The row of ``turns`` of one turn."""
    values = {
        **{name: getattr(turn, name) for name in _TURN_COLUMNS if hasattr(turn, name)},
        **{f"lost_{cause}": tokens for cause, tokens in turn.lost.items()},
        "given": int(turn.given),
        "before": turn.before or None,
        "retried": int(turn.retried),
        "closed_time": round(turn.ended_seconds * 1e6),
        "arrived_time": round(turn.arrived_seconds * 1e6),
        "idle_microseconds": None if turn.idle_seconds is None else round(turn.idle_seconds * 1e6),
    }
    return tuple(values.get(name, 0) for name in _TURN_COLUMNS)


_TURN_TIMES = ("closed_time", "arrived_time", "idle_microseconds")
TURN_QUERY = "SELECT {} FROM turns".format(
    ", ".join(f"epoch_us({name})" if name.endswith("_time") else name for name in _TURN_COLUMNS)
)
"""Asks for all rows of ``turns``, with times in microseconds since 1970."""


def turn_of(row: Sequence[Any]) -> Turn:
    """The turn of a row of :data:`TURN_QUERY`. A row has neither evictions nor messages."""
    values = dict(zip(_TURN_COLUMNS, row, strict=True))
    closed_us, arrived_us, idle_us = (values.pop(name) for name in _TURN_TIMES)
    lost = {name: values.pop(name) for name in _TURN_COLUMNS if name.startswith("lost_")}
    values |= {
        "given": bool(values["given"]),
        "retried": bool(values["retried"]),
        "before": values["before"] or "",
        "ended_seconds": closed_us / 1e6,
        "arrived_seconds": arrived_us / 1e6,
        "idle_seconds": None if idle_us is None else idle_us / 1e6,
        "lost": {name.removeprefix("lost_"): tokens for name, tokens in lost.items() if tokens},
    }
    return Turn(**values)


# --- rows read again ------------------------------------------------------------------------------------

USE_COLUMNS = [column.name for column in BLOCK_USE[1:]]
USE_QUERY = f"SELECT {', '.join(USE_COLUMNS).replace('time', 'epoch_us(time)', 1)} FROM block_use"


def summed(rows: Iterable[Sequence[Any]]) -> tuple[list[BlockUse], list[Series]]:
    """The use of the blocks of each journal, and their states over time.

    Rows have :data:`USE_COLUMNS`, with times in microseconds since 1970.
    """
    uses: dict[str, Bucket] = {}
    by_journal: dict[str, list[tuple[int, int, Bucket]]] = {}
    for row in sorted(rows, key=lambda row: row[1]):
        journal, us, width_us, bucket = row[0], row[1], row[2], _bucket(row[3:])
        by_journal.setdefault(journal, []).append((us, width_us, Bucket(bucket.levels, bucket.use.copy())))
        put(uses, journal, bucket)
    return [bucket.use for bucket in uses.values()], [_series(some) for some in by_journal.values()]


def _bucket(values: Sequence[Any]) -> Bucket:
    blocks, most = values[:2]
    levels, times = values[2:6], values[6:10]
    numbers = [Quantiles.of(dict(one or {})) for one in values[15:]]
    sums: dict[str, Any] = dict(zip((*COUNTS, *DISTRIBUTIONS), (*values[11:15], *numbers), strict=True))
    states = dict(zip(STATES, times, strict=True))
    use = BlockUse(blocks=blocks, most_running=most, microseconds=states, cached=values[10], **sums)
    return Bucket(dict(zip(STATES, levels, strict=True)), use)


def _series(buckets: Sequence[tuple[int, int, Bucket]]) -> Series:
    widest = max(width_us for _, width_us, _ in buckets)
    series = Series(width_ticks=max(1, widest * TICKS // 1_000_000))
    for us, _, bucket in buckets:
        series.level(us / 1e6, bucket.levels)
        series.count(us / 1e6, "evicted", bucket.use.evicted)
    return series
