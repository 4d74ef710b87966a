"""When events were lost, hooks failed, the engine raised, or a finding of the engine was made.

A session keeps these times by the minute, so that an audit of a window whose bounds are whole minutes knows
its doubts without reading the journal. Each list grows with minutes in which something went wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ...audit import events as ev
from ...audit.checks.registry import Violation, is_once
from ...audit.ledger.account import Account
from ...audit.ledger.engine_postings import error_name
from ...audit.replay.engine_audit import EngineAudit, of_engine
from ...audit.replay.windows import LossesInWindow, Window


class Losses(msgspec.Struct, array_like=True):
    """Times at which events were lost, or a hook failed, by the minutes between which each loss lies.

    ``rows``: first minute, last minute, losses. ``since``: as in
    :class:`~kvledger.audit.replay.windows.LossesInWindow`.
    """

    rows: list[tuple[int, int, int]] = []
    since: float = -1.0

    def place(self, lost: bool, before: float, at: float) -> None:
        """Take an event at Unix time ``at``, after one at ``before``; ``lost``: it reports a loss."""
        if lost:
            self.since = before if self.since < 0 else self.since
        elif self.since >= 0:
            first, last = int(self.since // 60), int(at // 60)
            if self.rows and self.rows[-1][:2] == (first, last):
                self.rows[-1] = (first, last, self.rows[-1][2] + 1)
            else:
                self.rows.append((first, last, 1))
            self.since = -1.0

    def within(self, window: Window) -> LossesInWindow:
        """The losses that may lie in a window whose bounds are whole minutes."""
        times = sum(row[2] for row in self.rows if window.touches(60.0 * row[0], 60.0 * row[1]))
        return LossesInWindow(times, self.since)


class Doubts(msgspec.Struct):
    """What went wrong in a journal, and when.

    ``errors``: the minutes in which each exception left the engine. ``found``: for findings that are no
    single request's, by invariant, the minutes in which they were made.
    """

    losses: Losses = msgspec.field(default_factory=Losses)
    failures: Losses = msgspec.field(default_factory=Losses)
    unobserved_from: float = math.inf
    """Unix time from which the engine ran without being observed."""
    errors: dict[str, list[int]] = {}
    found: dict[str, list[int]] = {}

    def errors_within(self, window: Window) -> set[str]:
        """The exceptions in the window."""
        return {error for error, minutes in self.errors.items() if any(_held(window, minutes))}

    def placed(
        self, findings: Sequence[Violation], window: Window, began_seconds: float
    ) -> Iterator[tuple[Violation, bool]]:
        """The findings, and whether each was made in the window.

        A finding of the engine that was made again in the window is as it was first made.
        """
        several = Counter(row.id for row in findings if of_engine(row))
        for row in findings:
            minutes = self.found.get(row.id, []) if several[row.id] == 1 else []
            first = int((began_seconds + row.at / 1e6) // 60)
            yield row, any(_held(window, [first, *minutes]))


def _held(window: Window, minutes: Sequence[int]) -> Iterator[bool]:
    return (window.holds(60.0 * minute) for minute in minutes)


class DoubtsFollower:
    """Follows one audit, batch by batch, and adds to ``doubts``."""

    def __init__(self, audit: EngineAudit, doubts: Doubts) -> None:
        self.doubts = doubts
        self._audit = audit
        self._errors = dict(audit.auditor.ledger.sums.engine_errors)
        """The exceptions before this batch, by name."""
        self._last = audit.last_at
        """Time of the event before."""
        audit.on_violation.append(self._found)

    def add(self, events: Sequence[ev.Event]) -> None:
        """Add a batch that was audited."""
        began = self._audit.began_seconds or 0.0
        self._add_errors(events, began)
        for event in events:
            before, at = began + self._last / 1e6, began + event.at / 1e6
            removed = isinstance(event, ev.Gap) and event.reason == ev.REMOVED
            no_loss = removed and self._audit.auditor.ledger.sums.gaps == 0
            self.doubts.losses.place(isinstance(event, ev.Gap) and not no_loss, before, at)
            self.doubts.failures.place(isinstance(event, ev.HookFailed), before, at)
            if isinstance(event, ev.HookFailed) and event.removed:
                self.doubts.unobserved_from = before
            self._last = event.at

    def _found(self, id: str, at: int, account: Account | None) -> None:
        if account is None or is_once(id):
            _note(self.doubts.found, id, (self._audit.began_seconds or 0.0) + at / 1e6)

    def _add_errors(self, events: Sequence[ev.Event], began: float) -> None:
        """Add exceptions of the engine, and those of its workers, which were read before this batch."""
        known = self._audit.auditor.ledger.sums.engine_errors
        raised = Counter[str]()
        for event in events:
            if isinstance(event, ev.EngineRaised) and error_name(event) in known:
                raised[error_name(event)] += 1
                _note(self.doubts.errors, error_name(event), began + event.at / 1e6)
        for error, times in known.items():
            if times - self._errors.get(error, 0) > raised[error]:
                _note(self.doubts.errors, error, began + self._last / 1e6)
        self._errors = dict(known)


def _note(table: dict[str, list[int]], name: str, seconds: float) -> None:
    minutes, minute = table.setdefault(name, []), int(seconds // 60)
    if not minutes or minutes[-1] != minute:
        minutes.append(minute)
