"""A book as plain data and back: what a checkpoint holds of one engine.

:func:`capture` at any event and :func:`restore` give a book that goes on exactly as the first would
have. Not pickle: the data lies where an engine's container may write, so nothing in it names code.
Rules of this file:

- Only the classes of :data:`OBJECTS` and :data:`STRUCTS` are written, each by its place there. An
  attribute that holds anything else fails :func:`capture`, so none is forgotten silently.
- All of an object's attributes are carried but those of :data:`REBUILT`, which its constructor makes.
- A struct that a book, an auditor or a ledger holds itself needs no place: its type is the one that
  the constructor put there.
- An object met twice is written once: accounts and lives are the same ones afterwards.
- Every class is written with the same attributes, so their names are part of the format: where they
  differ (:func:`layout`) nothing is restored, for an attribute that begins late would tell lies.

A value is a scalar as it is, or a list whose first item is one of the codes below.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from ..analysis.reconciliation import Difference, Figures, Reconciliation, Step
from ..checks.auditor import Auditor, KeptFinding
from ..checks.registry import Violation
from ..errors import LedgerError
from ..events import EngineStarted
from ..ledger.account import Account, InFlight, Life
from ..ledger.blocks.ledger import BlockLedger
from ..ledger.blocks.records import Pool
from ..ledger.frozen import Line, RemovedRange, Settlement
from ..ledger.ledger import Ledger
from ..ledger.positions import Losses, PositionRange, PositionRanges
from ..ledger.totals import Totals
from ..ledger.transfers import Promise, WorkerTransfers
from .engine_audit import EngineAudit

SCHEMA = 1
"""Version of the codes below, and of what the attributes mean."""

OBJECTS: tuple[type, ...] = (
    EngineAudit,
    Auditor,
    Ledger,
    BlockLedger,
    WorkerTransfers,
    Promise,
    Account,
    Life,
    InFlight,
    PositionRanges,
    PositionRange,
    Losses,
    KeptFinding,
    Reconciliation,
    Step,
)
"""Classes with attributes or slots, written attribute by attribute, with their identity."""

STRUCTS: tuple[type, ...] = (
    Totals,
    EngineStarted,
    Violation,
    Settlement,
    Line,
    RemovedRange,
    Figures,
    Difference,
    Pool,
)
"""msgspec structs and named tuples: written and checked by their types."""

REBUILT: dict[type, frozenset[str]] = {
    EngineAudit: frozenset(
        {
            "path",
            "accounts",
            "on_closed",
            "engine_counters",
            "read_seconds",
            "checkpoint_seconds",
            "_keep",
            "workers",
        }
    ),
    Auditor: frozenset({"_debug", "_subscribed", "_on_violation"}),
    Ledger: frozenset({"keep_closed", "watch", "entries"}),
    BlockLedger: frozenset({"findings", "accounts", "refilled"}),
    WorkerTransfers: frozenset(),
}
"""What a constructor makes anew, and what lasts for one event only."""

_OBJECT, _AGAIN, _STRUCT, _LIST, _TUPLE, _SET, _DEQUE, _DICT, _HELD = range(9)
_SCALARS = frozenset({type(None), bool, int, float, str})
_ITEMS: dict[type, int] = {list: _LIST, tuple: _TUPLE, set: _SET, deque: _DEQUE}
_MAKERS: dict[int, Callable[[Any], Any]] = {code: kind for kind, code in _ITEMS.items()}


class _Captured(msgspec.Struct, array_like=True):
    layout: str
    value: Any


def capture(book: EngineAudit) -> bytes:
    """All that ``book`` knows. It must keep no accounts (``keep``, ``watch``): a live one does not.

    Raises TypeError for an attribute of a class that this module does not know: our own bug.
    """
    assert not book.accounts, "a book that keeps accounts has no bound and no checkpoint"
    return msgspec.msgpack.encode(_Captured(layout(), _Writer().value(book)))


def restore(data: bytes, path: Path) -> EngineAudit:
    """The book that ``data`` was captured of, for the journal at ``path``.

    Raises :class:`LedgerError` for another schema and for what :func:`capture` never wrote.
    """
    try:
        captured = msgspec.msgpack.decode(data, type=_Captured)
        if captured.layout == layout():
            book = EngineAudit(path)
            _Reader().fill(book, captured.value)
            return book
    except (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise LedgerError("The state of a book is damaged.") from None
    raise OtherLayout("The state of a book was written by another version of kvledger.")


class OtherLayout(LedgerError):
    """Nothing is damaged, but what was captured is not what this version holds."""


@cache
def layout() -> str:
    """The schema, and a checksum over the names of all that is carried."""
    names = [(kind.__name__, attributes(kind)) for kind in OBJECTS], [kind.__name__ for kind in STRUCTS]
    return f"{SCHEMA}.{crc32(repr(names).encode()):08x}"


@cache
def attributes(kind: type) -> tuple[str, ...]:
    """What is carried of an instance of ``kind``, by name and in the order that it is written."""
    every = getattr(kind, "__slots__", None) or vars(_BLANK[kind]())
    return tuple(sorted(set(every) - REBUILT.get(kind, frozenset())))


_BLANK: dict[type, Callable[[], Any]] = {
    EngineAudit: lambda: EngineAudit(Path()),
    Auditor: Auditor,
    Ledger: Ledger,
    BlockLedger: BlockLedger,
    WorkerTransfers: WorkerTransfers,
    Reconciliation: Reconciliation,
    Step: Step,
}


class _Writer:
    """Objects to lists, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._ways: dict[type, Callable[[Any], Any]] = dict.fromkeys(_ITEMS, self._items)
        self._ways[dict] = self._dict
        self._getters: dict[type, tuple[int, Callable[[Any], Any]]] = {}
        for place, kind in enumerate(OBJECTS):
            names = attributes(kind)
            getter: Callable[[Any], Any] = attrgetter(*names)
            if len(names) == 1:
                getter = _alone(getter)
            self._getters[kind] = (place, getter)
            self._ways[kind] = self._object
        for kind in STRUCTS:
            self._ways[kind] = self._struct

    def value(self, value: Any) -> Any:
        """``value`` as scalars and lists. Raises TypeError for what has no place in them."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        way = self._ways.get(kind)
        if way is None:
            raise TypeError(f"a checkpoint can't hold a {kind.__module__}.{kind.__qualname__}")
        return way(value)

    def _object(self, value: Any) -> list[Any]:
        known = self._seen.get(id(value))
        if known is not None:
            return [_AGAIN, known]
        self._seen[id(value)] = len(self._seen)
        place, getter = self._getters[type(value)]
        scalars, ways = _SCALARS, self._ways
        made = type(value) in REBUILT
        row: list[Any] = [_OBJECT, place]
        for one in getter(value):
            kind = type(one)
            if kind in scalars:
                row.append(one)
            elif kind in ways:
                row.append(ways[kind](one))
            else:
                row.append([_HELD, one] if made and isinstance(one, msgspec.Struct) else self.value(one))
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
    """attrgetter of a single name gives no tuple."""
    return lambda value: (getter(value),)


class _Reader:
    """Lists back to objects."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def fill(self, into: Any, row: list[Any]) -> Any:
        """Give ``into`` the attributes of the object that ``row`` is of."""
        code, place, *values = row
        kind = OBJECTS[place]
        if code != _OBJECT or not isinstance(into, kind):
            raise ValueError("not the object that belongs here")
        self._seen.append(into)
        for name, value in zip(attributes(kind), values, strict=True):
            made = getattr(into, name) if kind in REBUILT else None
            setattr(into, name, self._part(made, value))
        return into

    def _part(self, made: Any, value: Any) -> Any:
        """An attribute, where its owner's constructor has ``made`` one of its own."""
        if type(made) in REBUILT:
            return self.fill(made, value)
        if type(value) is list and value[0] == _HELD:
            if not isinstance(made, msgspec.Struct):
                raise ValueError("a struct of no known type")
            return msgspec.convert(value[1], type(made))
        return self.value(value)

    def value(self, value: Any) -> Any:
        """What was written as ``value``."""
        if type(value) is str:
            return sys.intern(value)  # the accounts compare sources by identity
        if type(value) is not list:
            return value
        code = value[0]
        if code == _AGAIN:
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
        return self.fill(kind.__new__(kind), row)
