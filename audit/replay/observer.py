"""What a caller wants counted beside the ledger and the checks: an observer each, with its own sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checks.auditor import Verdict
from ..events import Event
from ..ledger.account import Account
from .verdict import Judged

Handlers = Mapping[type[Event], Callable[[Any], object]]
"""What is called with each event of a type, after the ledger has posted it."""


class Observer:
    """Observes one audit. ``sums`` can be taken and replaced, see :class:`~.sums.EngineSums`."""

    kind: Callable[[], Any]
    """Makes sums of nothing."""

    def __init__(self, audit: Judged) -> None:
        self.audit = audit
        """The audit that is observed."""
        self.sums: Any = self.new_sums()
        """What was counted: sums, or a list."""

    def new_sums(self) -> Any:
        """Sums of nothing."""
        return self.kind()

    def handlers(self) -> Handlers:
        """What is called with events; made anew when ``sums`` was replaced."""
        return {}

    def add(self, account: Account) -> None:
        """A request of the window has ended, or is still open at the end of the journal."""

    def close(self, account: Account, verdict: Verdict) -> None:
        """A request of the window has ended."""
        self.add(account)

    def violated(self, id: str, at: int, account: Account | None) -> None:
        """An invariant is violated, again or for the first time."""

    def end(self) -> None:
        """The engine has ended: drop all but the sums."""

    @property
    def saved(self) -> Any:
        """What a checkpoint holds of this observer: a struct that has its sums."""
        return self.sums

    @saved.setter
    def saved(self, value: Any) -> None:
        self.sums = value
