"""What an audit concludes: verdict, doubts, notes and findings, of the requests in its window."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from ..causes import BEGAN_BEFORE
from ..checks.auditor import Auditor, Verdict
from ..checks.coverage import Coverage, ledger_coverage
from ..checks.findings import Found
from ..checks.registry import Violation, is_once
from ..events import EngineStarted
from ..figures.totals import Totals
from ..journal.host_folders import journal_name
from ..ledger.account import Account
from ..text import utc
from .description import Described
from .sums import JournalSums
from .windows import Window


class Judged(Described):
    """An audit whose verdict can be asked for at any time."""

    window: Window
    auditor: Auditor
    journal: JournalSums

    @property
    def engine(self) -> EngineStarted | None:
        """How the engine described itself when it started."""
        return self.auditor.ledger.engine

    @property
    def name(self) -> str:
        """The engine's name in findings and labels."""
        return self.auditor.engine or journal_name(self.path)

    @property
    def last_at(self) -> int:
        """Time of the last event, in microseconds since the engine started."""
        return self.auditor.ledger.at

    @property
    def closed(self) -> Totals:
        """Totals of the requests of the window that have ended."""
        return self.auditor.ledger.sums.ended

    def totals(self) -> Totals:
        """Sums over all requests of the window, open ones included."""
        totals = self.closed.copy()
        for account in self.open():
            totals.add(account)
        return totals

    def open(self) -> Sequence[Account]:
        """The accounts that are still open, as they stand; none if the window has an end.

        None either if the engine was gone before the window began.
        """
        ledger, window = self.auditor.ledger, self.window
        inside = window.until is None and window.touches(ledger.read_to, self.open_until)
        accounts = list(ledger.open.values()) if inside else []
        placed = self.journal.window.requests
        placed.update((one.request_id, True) for one in accounts if one.request_id in placed)
        return accounts

    @property
    def open_until(self) -> float:
        """Unix time up to which a request that is open at the end of the trace may have run."""
        if self.journal.lost_tails:
            return self.journal.gone_by
        ledger = self.auditor.ledger
        return math.inf if ledger.stopped is None else ledger.read_to

    @property
    def violations(self) -> list[Violation]:
        """Findings, drifts included, in the requests of the window.

        A finding that concerns no single request, or stands for all, belongs to each window in which it was
        seen.
        """
        if not self.window.bounded:
            return self.auditor.violations
        self.open()
        placed = self.journal.window.requests
        return [
            violation
            for violation, inside in self.auditor.findings.placed()
            if (inside if of_engine(violation) else placed.get(violation.request or "", False))
        ]

    @property
    def found(self) -> list[Found]:
        """How many findings each invariant has in the window, kept or not.

        Which of the findings that are not kept are in a bounded window is not known, nor are its tokens.
        """
        totals = self.auditor.totals
        if not self.window.bounded:
            return totals
        inside = Counter(violation.id for violation in self.violations)
        return [
            replace(
                row,
                findings=inside[row.id],
                listed=inside[row.id],
                tokens=None,
                at_least=row.is_cut,
            )
            for row in totals
            if inside[row.id] or row.is_cut
        ]

    @property
    def coverage(self) -> Coverage:
        """What this audit examined, and what it did not."""
        return ledger_coverage(self.auditor.ledger, self.engine)

    @property
    def verdict(self) -> Verdict:
        """``violated`` for a violation in the window, else ``unknown`` if there are doubts."""
        violated = any(violation.severity == "violation" for violation in self.violations)
        if self.window.bounded:
            violated |= any(verdict == "violated" for verdict, _ in self.journal.requests)
        return "violated" if violated else "unknown" if self.doubts else "clean"

    @property
    def doubts(self) -> list[str]:
        """Why the verdict can't be clean. What went wrong counts for each window that may include it."""
        unknown = self.totals().doubtful_requests
        if not self.window.bounded:
            return [*self.journal.missed, *self.auditor.doubts_with(unknown), *self._tail_doubts()]
        wrong = self.journal.window
        unobserved = wrong.unobserved_from < math.inf
        unobserved &= self.window.touches(wrong.unobserved_from, math.inf)
        losses = wrong.losses.count(self.window)
        failures = wrong.failures.count(self.window) or int(unobserved)
        doubts = self.auditor.doubts_with(unknown, losses, failures, sorted(wrong.errors))
        return [*self.journal.missed, *doubts, *self._tail_doubts()]

    def _tail_doubts(self) -> list[str]:
        """Up to when the trace is whole, if what may be missing after that can be in the window."""
        tails, whole_until = self.journal.lost_tails, self.journal.whole_until
        if not tails or not self.window.touches(whole_until, self.journal.gone_by):
            return []
        if tails > 1:
            return [f"{tails} engines did not end in good order: their last events may be missing"]
        return [
            "the engine did not end in good order, or the journal's last segments were removed: "
            f"the trace is whole up to {utc(whole_until)}"
        ]

    @property
    def notes(self) -> list[str]:
        """How the journal ended and what was damaged in it; more may be appended."""
        return self.journal.notes

    @property
    def all_notes(self) -> list[str]:
        """How the journal was read, why the verdict can't be clean, and why requests are unknown."""
        unknown = dict(self.journal.unknown)
        before = unknown.pop(BEGAN_BEFORE, 0)
        began = f"{counted(before, 'request')} began before the first kept segment, no figure includes them"
        left_out = [began] if before else []
        most_first = sorted(unknown.items(), key=lambda row: (-row[1], row[0]))
        reasons = [f"in {requests} of them: {reason}" for reason, requests in most_first]
        return [*self.notes, *left_out, *self.doubts, *reasons, *self.cut]

    @property
    def cut(self) -> list[str]:
        """Of which invariants not all findings are listed, and how many are."""
        return [f"{row.shown} of the findings of {row.id}" for row in self.found if row.is_cut]


def of_engine(violation: Violation) -> bool:
    """Whether a finding concerns no single request, or its first request stands for all."""
    return violation.request is None or is_once(violation.id)


def counted(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
