"""What a rollup keeps by the minute for the HTML report, beside the cells: additive, and exact.

A minute has the figures of the requests that ended in it, and what happened in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from ...audit.analysis.reconciliation import Figures, Reconciliation, ReconciliationStep
from ...audit.ledger.account import Account
from ...audit.replay.windows import LossesInWindow, Window

WAITS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds between the bars of the distribution of waits."""

SOURCES = ("local", "external", "computed", "unattained")

Tokens = tuple[int, int, int, int]
"""Prompt tokens by source, as :data:`SOURCES` names them."""


class Reconciled(msgspec.Struct, array_like=True):
    """A :class:`~kvledger.audit.analysis.reconciliation.Reconciliation` as data, without settled tokens.

    ``to_plan`` and ``to_reported``: requests and tokens by cause.
    """

    plan: Tokens = (0, 0, 0, 0)
    reported: Tokens = (0, 0, 0, 0)
    reports: int = 0
    to_plan: dict[str, tuple[int, Tokens]] = {}
    to_reported: dict[str, tuple[int, Tokens]] = {}

    @classmethod
    def of(cls, found: Reconciliation) -> Reconciled:
        """The data of a reconciliation."""
        steps = [
            {cause: (row.requests, _tokens(row.figures)) for cause, row in step.differences.items()}
            for step in (found.to_plan, found.to_reported)
        ]
        return cls(_tokens(found.plan), _tokens(found.reported), found.reports, *steps)

    def give(self, into: Reconciliation) -> None:
        """Add everything to a reconciliation."""
        into.plan.add(Figures(*self.plan))
        into.reported.add(Figures(*self.reported))
        into.reports += self.reports
        for step, rows in ((into.to_plan, self.to_plan), (into.to_reported, self.to_reported)):
            _give_step(step, rows)


def _give_step(step: ReconciliationStep, rows: dict[str, tuple[int, Tokens]]) -> None:
    for cause, (requests, tokens) in rows.items():
        step.add(cause, Figures(*tokens), requests)


def _tokens(figures: Figures) -> Tokens:
    return figures.local, figures.external, figures.computed, figures.unattained


class Minute(msgspec.Struct, array_like=True):
    """One minute, or the sum of several. New fields are appended, each with a default."""

    requests: dict[str, int] = {}
    """Ended requests by verdict and outcome, with a space between."""
    unknown: dict[str, int] = {}
    """Unknown requests by the reason."""
    reconciled: Reconciled = msgspec.field(default_factory=Reconciled)
    waits: dict[int, int] = {}
    """Ended requests by their place in :data:`WAITS`."""
    settled: dict[int, Tokens] = {}
    """Prompt tokens of the ended requests, by the minute in which they were settled."""
    levels: tuple[int, int] | None = None
    """Running and waiting requests after the last change in this minute."""
    preemptions: int = 0
    """Preemptions in this minute."""
    errors: list[str] = []
    """Exceptions of the engine in this minute."""

    def add(self, account: Account, began: float, until: int) -> None:
        """Add an ended request, or an open one that waits ``until`` now. Its reconciliation is not added."""
        if account.unknown is not None:
            self.unknown[account.unknown] = self.unknown.get(account.unknown, 0) + 1
            return
        place = wait_place(account, until)
        self.waits[place] = self.waits.get(place, 0) + 1
        for settlement in account.settlements:
            minute = int((began + settlement.at / 1e6) // 60)
            more = settlement.local, settlement.external, settlement.computed, settlement.unattained
            self.settled[minute] = _plus(self.settled.get(minute, (0, 0, 0, 0)), more)

    def merge(self, more: Minute) -> None:
        """Add what happened later in this minute, or in another one."""
        for into, table in (
            (self.requests, more.requests),
            (self.unknown, more.unknown),
        ):
            for name, requests in table.items():
                into[name] = into.get(name, 0) + requests
        for place, requests in more.waits.items():
            self.waits[place] = self.waits.get(place, 0) + requests
        for minute, tokens in more.settled.items():
            self.settled[minute] = _plus(self.settled.get(minute, (0, 0, 0, 0)), tokens)
        both = Reconciliation()
        self.reconciled.give(both)
        more.reconciled.give(both)
        self.reconciled = Reconciled.of(both)
        self.levels = more.levels or self.levels
        self.preemptions += more.preemptions
        self.errors = list(dict.fromkeys([*self.errors, *more.errors]))


def wait_place(account: Account, until: int) -> int:
    """The place of an account in :data:`WAITS`; an open one waits ``until`` now."""
    return bisect_right(WAITS, account.waited(until) / 1e6)


def _plus(one: Tokens, other: Tokens) -> Tokens:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


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

    def copy(self) -> Losses:
        """An independent copy."""
        return Losses(list(self.rows), self.since)

    def within(self, window: Window) -> LossesInWindow:
        """The losses that may lie in a window whose bounds are whole minutes."""
        times = sum(row[2] for row in self.rows if window.touches(60.0 * row[0], 60.0 * row[1]))
        return LossesInWindow(times, self.since)


_decoder = msgspec.msgpack.Decoder(dict[int, Minute])


def encoded(minutes: dict[int, Minute]) -> msgspec.Raw:
    """The minutes of an hour as a rollup keeps them."""
    return msgspec.Raw(msgspec.msgpack.encode(minutes))


def decoded(raw: msgspec.Raw) -> dict[int, Minute]:
    """The minutes of an hour."""
    return _decoder.decode(raw)


def within(hours: dict[int, msgspec.Raw], window: Window) -> Iterable[tuple[int, Minute]]:
    """The minutes in a window whose bounds are whole minutes, the earliest first."""
    for hour in sorted(hours):
        if window.touches(3600.0 * hour, 3600.0 * hour + 3540):
            for minute, found in sorted(decoded(hours[hour]).items()):
                if window.holds(60.0 * minute):
                    yield minute, found
