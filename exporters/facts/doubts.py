"""When events were lost, hooks failed, the engine raised, or a finding of the engine was made.

A session keeps these times by the minute, so that an audit of a window whose bounds are whole minutes knows
its doubts without reading the journal. Each list grows with minutes in which something went wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ...audit.checks.registry import Violation, is_once
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit, Trouble, of_engine
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

    def place(self, trouble: Trouble) -> None:
        """Take an event, and what went wrong with it."""
        self.losses.place(trouble.lost, trouble.before, trouble.at)
        self.failures.place(trouble.failed, trouble.before, trouble.at)
        if trouble.unobserved:
            self.unobserved_from = trouble.before
        if trouble.error:
            _note(self.errors, trouble.error, trouble.at)

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


def keep_doubts(audit: EngineAudit, doubts: Doubts) -> None:
    """Add what goes wrong from now on in the journal of an audit."""

    def found(id: str, at: int, account: Account | None) -> None:
        if account is None or is_once(id):
            _note(doubts.found, id, (audit.began_seconds or 0.0) + at / 1e6)

    audit.on_violation.append(found)
    audit.on_trouble.append(doubts.place)


def _note(table: dict[str, list[int]], name: str, seconds: float) -> None:
    minutes, minute = table.setdefault(name, []), int(seconds // 60)
    if not minutes or minutes[-1] != minute:
        minutes.append(minute)
