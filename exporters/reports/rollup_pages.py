"""The part of a rollup for the HTML report: how it is built from a journal, and what it gives to an audit.

Sums are by the minute (``rollup_minutes.py``). Findings are no sums: a rollup keeps those that the audit
keeps, which are the first 1,000 of each invariant, and the minutes to which each belongs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from ...audit import events as ev
from ...audit.analysis.reconciliation import Reconciliation
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.checks.registry import Violation, is_once
from ...audit.ledger.account import Account
from ...audit.ledger.observation import error_name
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit, of_engine
from ...audit.replay.window_sums import WindowSums
from ...audit.replay.windows import Window
from ..trace.request_counts import RequestCounts
from .rollup_minutes import Losses, Minute, Reconciled, decoded, encoded, within

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


def ended_seconds(account: Account, began: float) -> float:
    """Unix time of a request's end; 0.0 if it has not ended."""
    return began + account.closed_at / 1e6 if account.closed_at >= 0 else 0.0


class PageBuilder:
    """Adds up the page of a journal, batch by batch, or continues ``old``."""

    def __init__(self, audit: EngineAudit, old: Page | None) -> None:
        self._audit = audit
        self._page = Page() if old is None else old
        self._counts = self._page.counts()
        self._minutes: dict[int, Minute] = {}
        self._reconciliations: dict[int, Reconciliation] = {}
        self._errors = dict(audit.auditor.ledger.engine_errors)
        self._last = audit.last_at
        audit.on_closed.append(self._closed)
        audit.on_violation.append(self._found)

    def add(self, events: Sequence[ev.Event], accounts: Sequence[Account]) -> None:
        """Add a batch that was audited, and the accounts that closed in it."""
        began = self._audit.began_seconds or 0.0
        self._add_errors(events, began)
        for event in events:
            at = began + event.at / 1e6
            if self._counts.feed(event):
                minute = self._minute(at)
                minute.levels = self._counts.running, self._counts.waiting
                minute.preemptions += type(event) is ev.Preempted
            self._place(event, began + self._last / 1e6, at)
            self._last = event.at
        self.add_accounts(accounts)

    def add_accounts(self, accounts: Sequence[Account]) -> None:
        """Add accounts that closed, or that are open at the end of the journal."""
        began = self._audit.began_seconds or 0.0
        for account in accounts:
            at = ended_seconds(account, began)
            self._minute(at).add(account, began, self._audit.last_at)
            self._reconciliations.setdefault(int(at // 60), Reconciliation()).add(account)

    def page(self, damage: Sequence[object]) -> Page:
        """The page up to here; ``damage`` was found since it was begun."""
        page, by_hour = self._page, dict[int, dict[int, Minute]]()
        for minute in self._take():
            by_hour.setdefault(minute[0] // 60, {})[minute[0]] = minute[1]
        for hour, minutes in by_hour.items():
            before = decoded(page.hours[hour]) if hour in page.hours else {}
            for place, found in minutes.items():
                before.setdefault(place, Minute()).merge(found)
            page.hours[hour] = encoded(before)
        page.in_engine, page.running = self._counts.state
        page.damage = [*page.damage, *map(str, damage)][:MOST_DAMAGE]
        page.findings = replace(self._findings(), rows=[])  # the audit's state has them
        self._page = replace(
            page,
            losses=page.losses.copy(),
            failures=page.failures.copy(),
            findings=page.findings.copy(),
        )
        page.end = self._end(Minute(), ended=False)
        return page

    def end(self) -> End:
        """What came after :meth:`page`, up to the end of a journal that has ended."""
        rest = Minute()
        for _, minute in self._take():
            rest.merge(minute)
        return self._end(rest, ended=True)

    def _take(self) -> list[tuple[int, Minute]]:
        minutes, self._minutes = self._minutes, {}
        for place, found in self._reconciliations.items():
            minutes[place].reconciled = Reconciled.of(found)
        self._reconciliations = {}
        return sorted(minutes.items())

    def _end(self, rest: Minute, *, ended: bool) -> End:
        audit = self._audit
        auditor, ledger = audit.auditor, audit.auditor.ledger
        return End(
            ended=ended,
            events=audit.events,
            last_at=audit.last_at,
            stopped=ledger.stopped,
            tail=audit.ending,
            losses=self._page.losses.copy(),
            failures=self._page.failures.copy(),
            unobserved_from=self._page.unobserved_from,
            gaps=ledger.gaps,
            hook_failures=ledger.hook_failures,
            errors=dict(ledger.engine_errors),
            check_failures=dict(auditor.check_failures),
            findings=self._findings(),
            rest=rest,
        )

    def _findings(self) -> Findings:
        """The findings so far; requests without a kept finding are forgotten."""
        rows, known = self._audit.auditor.violations, self._page.findings
        named = {row.request for row in rows}
        ends = {name: minute for name, minute in known.ends.items() if name in named}
        found = {id: sorted(set(minutes)) for id, minutes in known.found.items()}
        return Findings(rows, ends, found, dict(self._audit.auditor.not_kept))

    def _minute(self, at: float) -> Minute:
        return self._minutes.setdefault(int(at // 60), Minute())

    def _closed(self, account: Account, verdict: str) -> None:
        began = self._audit.began_seconds or 0.0
        at = ended_seconds(account, began)
        if account.unknown != BEGAN_BEFORE:
            table, kind = self._minute(at).requests, f"{verdict} {account.outcome or UNKNOWN}"
            table[kind] = table.get(kind, 0) + 1
        if account.request_id in self._page.findings.ends:
            self._page.findings.ends[account.request_id] = int(at // 60)

    def _found(self, id: str, at: int, account: Account | None) -> None:
        findings = self._page.findings
        if account is not None:
            findings.ends.setdefault(account.request_id, OPEN)
        if account is None or is_once(id):
            minute = int(((self._audit.began_seconds or 0.0) + at / 1e6) // 60)
            minutes = findings.found.setdefault(id, [])
            if not minutes or minutes[-1] != minute:
                minutes.append(minute)

    def _place(self, event: ev.Event, before: float, at: float) -> None:
        """Place a loss of events, or a hook that failed."""
        kind = type(event)
        self._page.losses.place(
            isinstance(event, ev.Gap)
            and not (self._audit.auditor.ledger.gaps == 0 and event.reason == ev.REMOVED),
            before,
            at,
        )
        self._page.failures.place(kind is ev.HookFailed, before, at)
        if isinstance(event, ev.HookFailed) and event.removed:
            self._page.unobserved_from = before

    def _add_errors(self, events: Sequence[ev.Event], began: float) -> None:
        """Add exceptions of the engine, and those of its workers, which were read before this batch."""
        known = self._audit.auditor.ledger.engine_errors
        raised = Counter[str]()
        for event in events:
            if isinstance(event, ev.EngineRaised) and error_name(event) in known:
                raised[error_name(event)] += 1
                self._note_error(error_name(event), began + event.at / 1e6)
        for error, times in known.items():
            if times - self._errors.get(error, 0) > raised[error]:
                self._note_error(error, began + self._last / 1e6)
        self._errors = dict(known)

    def _note_error(self, error: str, at: float) -> None:
        errors = self._minute(at).errors
        if error not in errors:
            errors.append(error)
