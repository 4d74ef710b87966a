"""Adds up what a rollup keeps for the HTML report, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ...audit import events as ev
from ...audit.analysis.reconciliation import Reconciliation
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.checks.registry import is_once
from ...audit.ledger.account import Account
from ...audit.ledger.observation import error_name
from ...audit.replay.engine_audit import EngineAudit
from .rollup_minutes import Minute, Reconciled, decoded, encoded
from .rollup_pages import MOST_DAMAGE, OPEN, End, Findings, Page


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
