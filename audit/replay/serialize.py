"""Turn the session of an :class:`EngineAudit`, and its sums, into plain data and back, for a checkpoint.

After :func:`capture` at any event, :func:`restore` gives an audit that continues exactly as the first would
have. Pickle is not used: an engine's container may be able to write the file, so nothing in it may name
code. Rules of this file:

- Only the classes in :data:`OBJECTS` and :data:`STRUCTS` are written, each by its index there. An
  attribute with any other value makes :func:`capture` fail, so no class is left out silently.
- All attributes of an object are written, except those in :data:`REBUILT`, which its constructor makes.
- A struct in an attribute of an object that :data:`REBUILT` lists needs no index: the constructor has put a
  struct of the same type there.
- An object that is referenced twice is written once, so accounts and lives keep their identity.
- The names of all classes and attributes are part of the layout (:func:`layout`). Data of another layout is
  not restored, because a new attribute would have no right value; the journals are read again instead.

A value is a scalar as it is, or a list whose first item is one of the codes below.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from ..analysis.routed_cache import OpenRequest, RecentCounts, RoutedCache
from ..checks.auditor import Auditor
from ..errors import LedgerError
from ..events import EngineStarted, KVEventsReceived, RequestLabels
from ..journal.reader import Position
from ..ledger.account import (
    Account,
    CachedRange,
    EncoderInput,
    GroupBlock,
    InFlight,
    Life,
    Line,
    Losses,
    PositionRange,
    PositionRanges,
    Settlement,
)
from ..ledger.blocks.ledger import BlockLedger
from ..ledger.blocks.pool import Absent, LifeLacks, Pool
from ..ledger.kv_events import Change, KVComparison, KVEvent, NotAnnounced, NotInCache, StreamGap
from ..ledger.ledger import Ledger
from ..ledger.transfers import Promise, WorkerTransfers
from ..ledger.weights import Weights
from .engine_audit import EngineAudit
from .followed_audit import FollowedAudit
from .recorded_events import RecordedEvents
from .worker_journals import Progress, WorkerJournals

SCHEMA = 4
"""Version of the codes below, of the meaning of the attributes, and of the checkpoint around them."""

OBJECTS: tuple[type, ...] = (
    EngineAudit,
    FollowedAudit,
    Auditor,
    Ledger,
    BlockLedger,
    WorkerTransfers,
    Weights,
    WorkerJournals,
    Promise,
    Account,
    Life,
    InFlight,
    PositionRanges,
    PositionRange,
    Losses,
    RecordedEvents,
    KVComparison,
    RoutedCache,
    RecentCounts,
)
"""Classes written attribute by attribute, with their identity."""

STRUCTS: tuple[type, ...] = (
    EngineStarted,
    Settlement,
    Line,
    CachedRange,
    GroupBlock,
    Pool,
    LifeLacks,
    Absent,
    RequestLabels,
    Position,
    Change,
    KVEvent,
    KVEventsReceived,
    StreamGap,
    NotAnnounced,
    NotInCache,
    OpenRequest,
    Progress,
    EncoderInput,
)
"""msgspec structs and named tuples, written and checked by their types."""

_BY_CALLER = frozenset(
    {
        "path",
        "window",
        "observers",
        "event",
        "on_event",
        "on_closed",
        "on_violation",
        "on_trouble",
        "_handlers",
        "_by_class",
        "_others",
        "_ended",
    }
)
"""What the caller decides of an audit, before it is restored."""

REBUILT: dict[type, frozenset[str]] = {
    EngineAudit: _BY_CALLER,
    FollowedAudit: _BY_CALLER | {"engine_counters", "read_seconds", "checkpoint_seconds"},
    Auditor: frozenset({"_debug", "_subscribed", "_name_of", "_on_violation", "_is_in_window"}),
    Ledger: frozenset({"keep_closed", "watch", "counted", "wanted", "entries"}),
    BlockLedger: frozenset({"findings", "requests", "removed_kept", "refilled", "invalid_hits"}),
    WorkerTransfers: frozenset(),
    RecordedEvents: frozenset(
        {"enabled", "on_batch", "_contents", "_neighbours", "_path", "_readers", "_searched"}
    ),
    KVComparison: frozenset({"cache"}),
    RoutedCache: frozenset(),
    RecentCounts: frozenset({"_changes", "_dropped", "_order"}),
    WorkerJournals: frozenset({"next_step", "raised", "calls", "_folder", "_readers", "_steps"}),
}
"""Attributes that are not written: constructors make them, or they last for one event only."""

_OBJECT, _REFERENCE, _STRUCT, _LIST, _TUPLE, _SET, _DEQUE, _DICT, _TYPED_BY_OWNER = range(9)
_SCALARS = frozenset({type(None), bool, int, float, str})
_ITEMS: dict[type, int] = {list: _LIST, tuple: _TUPLE, set: _SET, deque: _DEQUE}
_MAKERS: dict[int, Callable[[Any], Any]] = {code: kind for kind, code in _ITEMS.items()}


Audit = TypeVar("Audit", bound=EngineAudit)


class _Captured(msgspec.Struct, array_like=True):
    layout: str
    value: Any
    observers: dict[str, msgspec.Raw]


def capture(audit: EngineAudit) -> bytes:
    """The open state of ``audit`` and its sums. Accounts that it keeps must have been taken.

    Raises TypeError for a value of an unknown class, which is a defect of kvledger.
    """
    encode = msgspec.msgpack.encode
    observers = {type(one).__name__: msgspec.Raw(encode(one.saved)) for one in audit.observers}
    return encode(_Captured(layout(), _Writer().value(audit), observers))


def restore(data: bytes, audit: Audit) -> Audit:
    """Give a new ``audit`` the state that :func:`capture` turned into ``data``.

    The caller has made it with the same observers, for the journal where it is now, and with the window that
    counts from here on. Raises :class:`OtherLayout` for data of another version, and :class:`LedgerError` for
    damaged data.
    """
    try:
        captured = msgspec.msgpack.decode(data, type=_Captured)
        if captured.layout == layout():
            _Reader().fill(audit, captured.value)
            for one in audit.observers:
                saved = captured.observers[type(one).__name__]
                one.saved = msgspec.msgpack.decode(saved, type=type(one.saved))
            audit.sums = audit.sums  # the observers count on in what was read
            return audit
    except (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise LedgerError("The saved audit of an engine is damaged.") from None
    raise OtherLayout("The saved audit of an engine was written by another version of kvledger.")


class OtherLayout(LedgerError):
    """The data is not damaged, but another version of kvledger with another layout wrote it."""


@cache
def layout() -> str:
    """The schema, and a checksum over the names of all classes and attributes that are written."""
    names = [(kind.__name__, attributes(kind)) for kind in (*OBJECTS, *STRUCTS, *_typed_by_owner())]
    return f"{SCHEMA}.{crc32(repr(names).encode()):08x}"


@cache
def attributes(kind: type) -> tuple[str, ...]:
    """The names of the attributes of ``kind`` that are written, in their order."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if issubclass(kind, tuple):
        return tuple(kind.__annotations__)
    every = getattr(kind, "__slots__", None) or vars(_BLANK[kind]())
    return tuple(sorted(set(every) - REBUILT.get(kind, frozenset())))


def _typed_by_owner() -> list[type]:
    """The structs that constructors put into attributes."""
    found = (getattr(make(), name) for kind, make in _BLANK.items() for name in attributes(kind))
    return [type(one) for one in found if isinstance(one, msgspec.Struct)]


_BLANK: dict[type, Callable[[], Any]] = {
    EngineAudit: lambda: EngineAudit(Path()),
    FollowedAudit: lambda: FollowedAudit(Path()),
    Auditor: Auditor,
    Ledger: Ledger,
    BlockLedger: BlockLedger,
    WorkerTransfers: WorkerTransfers,
    Weights: Weights,
    WorkerJournals: lambda: WorkerJournals(Path()),
    RecordedEvents: lambda: RecordedEvents(Path()),
    KVComparison: KVComparison,
    RoutedCache: RoutedCache,
    RecentCounts: RecentCounts,
}


_UNFILLED: dict[type, Callable[[], Any]] = {
    Account: lambda: Account(0, "", 0, 0),
    Life: lambda: Life(0, 0, 0, False),
    InFlight: lambda: InFlight(0, 0, 0, Life(0, 0, 0, False)),
    PositionRanges: PositionRanges,
    PositionRange: lambda: PositionRange(0, 0, "", 0),
    Losses: Losses,
}
"""By struct with an identity: one that is filled with what was written."""


class _Writer:
    """Turns objects into lists, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        """The place of each object among those that were written, by the identity of the object."""
        self._writers: dict[type, Callable[[Any], Any]] = dict.fromkeys(_ITEMS, self._items)
        """By class: what turns a value into a list."""
        self._writers[dict] = self._dict
        self._getters: dict[type, tuple[int, Callable[[Any], Any]]] = {}
        """By class: its index in ``OBJECTS``, and what reads all its attributes."""
        for place, kind in enumerate(OBJECTS):
            names = attributes(kind)
            getter: Callable[[Any], Any] = attrgetter(*names)
            if len(names) == 1:
                getter = _alone(getter)
            self._getters[kind] = (place, getter)
            self._writers[kind] = self._object
        for kind in STRUCTS:
            self._writers[kind] = self._struct

    def value(self, value: Any) -> Any:
        """``value`` as scalars and lists. Raises TypeError for a value of another class."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        write = self._writers.get(kind)
        if write is None:
            raise TypeError(f"a checkpoint can't hold a {kind.__module__}.{kind.__qualname__}")
        return write(value)

    def _object(self, value: Any) -> list[Any]:
        index = self._seen.get(id(value))
        if index is not None:
            return [_REFERENCE, index]
        self._seen[id(value)] = len(self._seen)
        place, getter = self._getters[type(value)]
        scalars, writers = _SCALARS, self._writers
        rebuilt = type(value) in REBUILT
        row: list[Any] = [_OBJECT, place]
        for one in getter(value):
            kind = type(one)
            if kind in scalars:
                row.append(one)
            elif kind in writers:
                row.append(writers[kind](one))
            else:
                typed = rebuilt and isinstance(one, msgspec.Struct)
                row.append([_TYPED_BY_OWNER, msgspec.msgpack.encode(one)] if typed else self.value(one))
        return row

    def _struct(self, value: Any) -> list[Any]:
        return [_STRUCT, STRUCTS.index(type(value)), value]

    def _items(self, value: Any) -> list[Any]:
        return [_ITEMS[type(value)], *map(self.value, value)]

    def _dict(self, value: dict[Any, Any]) -> list[Any]:
        row: list[Any] = [_DICT]
        for key, one in value.items():
            row += (self.value(key), self.value(one))
        return row


def _alone(getter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap an attrgetter of a single name, which returns no tuple."""
    return lambda value: (getter(value),)


class _Reader:
    """Turns lists back into objects."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        """The objects that were read, in the order in which they were written."""

    def fill(self, into: Any, row: list[Any]) -> Any:
        """Set the attributes of ``into`` to those in ``row``."""
        code, place, *values = row
        kind = OBJECTS[place]
        if code != _OBJECT or not isinstance(into, kind):
            raise ValueError("not the object that belongs here")
        self._seen.append(into)
        for name, value in zip(attributes(kind), values, strict=True):
            rebuilt = getattr(into, name) if kind in REBUILT else None
            setattr(into, name, self._part(rebuilt, value))
        return into

    def _part(self, rebuilt: Any, value: Any) -> Any:
        """The value of an attribute in which the constructor has put the object or struct ``rebuilt``."""
        if type(rebuilt) in REBUILT:
            return self.fill(rebuilt, value)
        if type(value) is list and value[0] == _TYPED_BY_OWNER:
            if not isinstance(rebuilt, msgspec.Struct):
                raise ValueError("a struct of no known type")
            return msgspec.msgpack.decode(value[1], type=type(rebuilt))
        return self.value(value)

    def value(self, value: Any) -> Any:
        """The object that was written as ``value``."""
        if type(value) is str:
            return sys.intern(value)  # accounts compare sources by identity
        if type(value) is not list:
            return value
        code = value[0]
        if code == _REFERENCE:
            return self._seen[value[1]]
        if code == _OBJECT:
            return self._object(value)
        if code == _STRUCT:
            return msgspec.convert(value[2], STRUCTS[value[1]])
        if code == _DICT:
            rest = map(self.value, value[1:])
            return dict(zip(rest, rest, strict=True))
        return _MAKERS[code](map(self.value, value[1:]))

    def _object(self, row: list[Any]) -> Any:
        kind = OBJECTS[row[1]]
        if kind in REBUILT:
            raise ValueError("an object that its owner makes")
        blank = _UNFILLED.get(kind)
        return self.fill(kind.__new__(kind) if blank is None else blank(), row)
