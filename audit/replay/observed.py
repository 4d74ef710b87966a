"""An audit's observers and all its sums, which can be taken, added and replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ..checks.auditor import Verdict
from ..checks.findings import Findings
from ..events import Event
from ..ledger.account import Account
from ..ledger.ledger_state import LedgerSums
from .observer import Observer
from .sums import EngineSums, JournalSums
from .verdict import Judged

Kind = TypeVar("Kind", bound=Observer)
ObserverKind = Callable[[Any], Observer]
"""Makes an observer of an audit: its class."""


class Observed(Judged):
    """An audit with what its caller wants counted beside the ledger and the checks."""

    def __init__(self, observers: Sequence[ObserverKind]) -> None:
        self.journal = JournalSums()
        """What was read of the journal, beside the sums of the ledger."""
        self.on_event: list[Callable[[Event], object]] = []
        """Functions called with each event after it was audited."""
        self.on_closed: list[Callable[[Account, Verdict], None]] = []
        """Functions called with each account of the window that closes, and its verdict."""
        self.on_violation: list[Callable[[str, int, Account | None], None]] = []
        """Functions called with each violation, repeated ones included: its id, time and account."""
        self.observers: list[Observer] = []
        """What counts beside the ledger and the checks."""
        self._by_class: dict[type[Observer], Observer | None] = {}
        """What was found of each class that was asked for."""
        self._handlers: dict[type[Event], list[Callable[[Any], object]]] = {}
        """What observers call with each type of event."""
        for kind in observers:
            observer = kind(self)
            self.observers.append(observer)
            self.on_closed.append(observer.close)
            self.on_violation.append(observer.violated)
        self._connect()

    def observer(self, kind: type[Kind]) -> Kind | None:
        """The observer of this class; None if the caller wanted none."""
        if kind not in self._by_class:
            self._by_class[kind] = next((one for one in self.observers if isinstance(one, kind)), None)
        return cast("Kind | None", self._by_class[kind])

    def of(self, kind: type[Kind]) -> Kind:
        """The observer of this class, which the caller must have wanted."""
        found = self.observer(kind)
        assert found is not None, f"{kind.__name__} does not observe this audit"
        return found

    def _connect(self) -> None:
        """Call the observers with the events that they handle."""
        handlers = defaultdict(list)
        for observer in self.observers:
            for kind, handle in observer.handlers().items():
                handlers[kind].append(handle)
        self._handlers = dict(handlers)

    @property
    def sums(self) -> EngineSums:
        """What everything that has ended adds up to. They still rise, unless other sums replace them."""
        observed = {type(one).__name__: one.sums for one in self.observers}
        return EngineSums(self.auditor.ledger.sums, self.auditor.findings, self.journal, observed)

    @sums.setter
    def sums(self, sums: EngineSums) -> None:
        self.auditor.ledger.sums, self.auditor.findings = sums.ledger, sums.findings
        self.journal = sums.journal
        for one in self.observers:
            one.sums = sums.observed[type(one).__name__]
        self._connect()

    def take_sums(self) -> EngineSums:
        """The sums so far; new ones begin."""
        taken = self.sums
        observed = {type(one).__name__: one.new_sums() for one in self.observers}
        self.sums = EngineSums(LedgerSums(), Findings(), JournalSums(), observed)
        return taken
