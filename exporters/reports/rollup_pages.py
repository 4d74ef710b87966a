"""The part of a rollup for the HTML report, and what it gives to an audit.

Sums are by the minute (``rollup_minutes.py``). Findings are no sums: a rollup keeps those that the audit
keeps, which are the first 1,000 of each invariant, and the minutes to which each belongs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from ...audit.checks.registry import Violation
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit, of_engine
from ...audit.replay.window_sums import WindowSums
from ...audit.replay.windows import Window
from ..trace.request_counts import RequestCounts
from .rollup_minutes import Losses, Minute, within

MOST_DAMAGE = 100
"""The most damaged places of a journal that a rollup names."""

OPEN = -1
"""The minute of a request that has not ended."""


class Findings(msgspec.Struct):
    """The kept findings, in the order in which they were first found.

    ``rows`` is empty where the audit's state has them. ``ends``: for each request with a finding, the minute
    of its end. ``found``: for findings that are no request's, by invariant, the minutes in which they were
    found. ``not_kept``: violations by invariant.
    """

    rows: list[Violation] = []
    ends: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    not_kept: dict[str, int] = {}

    def copy(self) -> Findings:
        """An independent copy."""
        found = {id: list(minutes) for id, minutes in self.found.items()}
        return Findings(list(self.rows), dict(self.ends), found, dict(self.not_kept))


class End(msgspec.Struct):
    """The audit at the end of the journal if ``ended``, else where the rollup ends.

    It is used when the journal is gone. ``rest``: what the last batch and open requests add.
    """

    ended: bool = False
    events: int = 0
    last_at: int = 0
    stopped: str | None = None
    tail: tuple[int, float, float] = (0, 0.0, math.inf)
    losses: Losses = msgspec.field(default_factory=Losses)
    failures: Losses = msgspec.field(default_factory=Losses)
    unobserved_from: float = -1.0
    gaps: int = 0
    hook_failures: int = 0
    errors: dict[str, int] = {}
    check_failures: dict[str, int] = {}
    findings: Findings = msgspec.field(default_factory=Findings)
    rest: Minute = msgspec.field(default_factory=Minute)


class Page(msgspec.Struct):
    """What a rollup keeps for the report. ``hours`` has the minutes of each hour, encoded.

    ``in_engine`` and ``running``: the requests in the engine where the journal goes on.
    """

    hours: dict[int, msgspec.Raw] = {}
    in_engine: int = 0
    running: list[int] = []
    losses: Losses = msgspec.field(default_factory=Losses)
    failures: Losses = msgspec.field(default_factory=Losses)
    unobserved_from: float = -1.0
    """Unix time from which the engine ran without being observed; -1: it never did."""
    findings: Findings = msgspec.field(default_factory=Findings)
    damage: list[str] = []
    end: End = msgspec.field(default_factory=End)

    def minutes(self, window: Window, *, gone: bool, until_seconds: float) -> Iterator[tuple[int, Minute]]:
        """The minutes in the window; the rest of a journal that is ``gone`` is at ``until_seconds``."""
        yield from within(self.hours, window)
        if gone and window.holds(until_seconds):
            yield int(until_seconds // 60), self.end.rest

    def counts(self) -> RequestCounts:
        """The requests in the engine where the journal goes on."""
        return RequestCounts(self.in_engine, self.running)

    def begin(
        self, audit: EngineAudit, window: Window, minutes: Sequence[Minute], totals: Totals, *, gone: bool
    ) -> None:
        """Give an audit everything that the window's requests add up to, and the findings.

        The audit was restored where the rollup ends, and has all of that for a window without bounds; if the
        journal is ``gone``, the audit knows the engine only.
        """
        if window.bounded or gone:
            audit.begin_with(self._sums(audit, window, minutes, totals, gone=gone))
        audit.notes += self.damage
        findings = self.end.findings if gone else self.findings
        if gone:
            self._end(audit)
        for id in findings.not_kept if window.bounded else ():
            audit.notes.append(f"more requests violate {id} than findings are kept: some may be missing here")

    def _sums(
        self, audit: EngineAudit, window: Window, minutes: Sequence[Minute], totals: Totals, *, gone: bool
    ) -> WindowSums:
        findings, facts = (self.end.findings, self.end) if gone else (self.findings, self)
        rows = findings.rows if gone else [violation for violation, _ in audit.auditor.placed_violations()]
        audit.auditor.place_findings(_placed(rows, findings, window, audit.began_seconds or 0.0))
        sums = WindowSums(
            totals=totals,
            losses=facts.losses.within(window),
            failures=facts.failures.within(window),
            unobserved_from=math.inf if facts.unobserved_from < 0 else facts.unobserved_from,
            in_window={
                name: minute != OPEN and window.holds(60.0 * minute) for name, minute in findings.ends.items()
            },
        )
        for minute in minutes:
            for kind, requests in minute.requests.items():
                verdict, _, outcome = kind.partition(" ")
                sums.requests[verdict, outcome] = sums.requests.get((verdict, outcome), 0) + requests
            for reason, requests in minute.unknown.items():
                sums.unknown[reason] = sums.unknown.get(reason, 0) + requests
            minute.reconciled.give(sums.reconciliation)
            sums.errors.update(minute.errors)
        return sums

    def _end(self, audit: EngineAudit) -> None:
        end, ledger = self.end, audit.auditor.ledger
        audit.events, ledger.at, ledger.stopped = end.events, end.last_at, end.stopped
        ledger.gaps, ledger.hook_failures = end.gaps, end.hook_failures
        ledger.engine_errors, audit.auditor.check_failures = end.errors, end.check_failures
        audit.end_with(*end.tail)
        lacks = "" if end.ended else ", which does not have its last events"
        audit.notes.append(f"the journal is gone: this is its rollup{lacks}")


def _placed(
    rows: Sequence[Violation], findings: Findings, window: Window, began: float
) -> Iterator[tuple[Violation, bool]]:
    """The findings, and whether each is in the window.

    One of the engine that was found again in the window is as it was first found.
    """
    several = Counter(row.id for row in rows if of_engine(row))
    for row in rows:
        minutes = findings.found.get(row.id, []) if several[row.id] == 1 else []
        first = (began + row.at / 1e6) // 60
        yield row, any(window.holds(60.0 * minute) for minute in (first, *minutes))
