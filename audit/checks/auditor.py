"""Events in, violations out: the ledger and the checks that subscribe to its entries.

Live or replayed is the same here. An auditor keeps the first findings of each invariant and counts
the rest, so that its memory is bounded by what is open, not by how often an engine errs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec.structs import replace

from ..events import EngineStarted, Event
from ..ledger.account import Account
from ..ledger.ledger import Ledger
from ..ledger.state import Watch
from ..ledger.subjects import Entry
from .registry import Check, Invariant, Violation, Witness, catalogue

Verdict = Literal["clean", "violated", "unknown"]

OnViolation = Callable[[str, int, Account | None], None]
"""Told the invariant's id, the event's ``at`` and the account concerned."""

FINDINGS_KEPT = 1_000
"""Findings kept of one invariant; later requests that break it are only counted."""


class KeptFinding:
    """A violation as first seen, and how often since."""

    __slots__ = ("last_step", "repeats", "violation")

    def __init__(self, violation: Violation) -> None:
        self.violation = violation
        self.repeats = 0
        self.last_step = violation.step


class Auditor:
    """Feeds events to its ledger, and what they meant to the checks.

    ``engine`` names the engine in violations (else its first event does). ``debug`` raises when a
    check itself fails, which is counted otherwise; by default it is KVLEDGER_DEBUG. ``on_violation`` is
    told of every sight of a broken invariant, repeats too.
    """

    def __init__(
        self,
        *,
        engine: str = "",
        keep_closed: bool = False,
        watch: Watch | None = None,
        debug: bool | None = None,
        on_violation: OnViolation | None = None,
    ) -> None:
        self.ledger = Ledger(keep_closed=keep_closed, watch=watch)
        self.engine = engine
        self.check_failures: dict[str, int] = {}
        """Our own bugs: how often each check raised."""
        self.violating: set[int] = set()
        """Requests that a violation was found in; whoever takes their accounts takes them out."""
        self.not_kept: dict[str, int] = {}
        """Sights beyond the first :data:`FINDINGS_KEPT` findings, by invariant."""
        self._debug = bool(os.environ.get("KVLEDGER_DEBUG")) if debug is None else debug
        self._on_violation = on_violation
        self._findings: dict[tuple[str, int | None], KeptFinding] = {}
        self._kept: dict[str, int] = {}
        self._subscribed: dict[type, tuple[tuple[Invariant, Check], ...]] = {}
        for row in catalogue().values():
            for subject in row.on:
                self._subscribed[subject] = (
                    *self._subscribed.get(subject, ()),
                    (row, row.check),
                )

    def feed(self, event: Event, number: int | None = None) -> list[Violation]:
        """Audit one event; the findings that are new, a repeat of a known one is counted."""
        if type(event) is EngineStarted and not self.engine:
            self.engine = f"{event.engine} {event.version} pid {event.process_id}"
        found: list[Violation] = []
        subscribed = self._subscribed
        for entry in self.ledger.apply(event, number):
            rows = subscribed.get(type(entry.subject))
            if rows is None:
                continue
            account = entry.account
            if account is not None and account.unknown is not None:
                continue
            for row, check in rows:
                try:
                    for witness in check(entry):
                        violation = self._find(row, entry, witness)
                        if violation is not None:
                            found.append(violation)
                except Exception:
                    # Our own bug: it must not cost the other findings, nor be taken for clean.
                    if self._debug:
                        raise
                    self.check_failures[row.id] = self.check_failures.get(row.id, 0) + 1
        return found

    def feed_all(self, events: Iterable[Event]) -> list[Violation]:
        """Audit events in order; the findings that are new."""
        return [violation for event in events for violation in self.feed(event)]

    def _find(self, row: Invariant, entry: Entry, witness: Witness) -> Violation | None:
        account = entry.account
        if account is not None and row.severity == "violation":
            self.violating.add(account.request)
        if self._on_violation is not None:
            self._on_violation(row.id, entry.at, account)
        key = (row.id, None if account is None else account.request)
        known = self._findings.get(key)
        if known is not None:
            known.repeats += 1
            known.last_step = entry.step
            return None
        if self._kept.get(row.id, 0) >= FINDINGS_KEPT:
            self.not_kept[row.id] = self.not_kept.get(row.id, 0) + 1
            return None
        request, life = None, None
        if account is not None:
            request = account.request_id
            life = account.life.number if account.life else len(account.lives)
        violation = Violation(
            id=row.id,
            severity=row.severity,
            engine=self.engine,
            request=request,
            life=life,
            step=entry.step,
            at=entry.at,
            message=row.render(witness, request),
            figures=witness.figures,
            references=list(row.references),
            repeats=0,
            last_step=entry.step,
            story=list(witness.story),
        )
        self._findings[key] = KeptFinding(violation)
        self._kept[row.id] = self._kept.get(row.id, 0) + 1
        return violation

    def absorb(self, other: Auditor) -> None:
        """Add what another auditor found, of an engine that is gone: of each invariant one finding stays."""
        self.engine = self.engine or other.engine
        self.ledger.absorb(other.ledger)
        for finding in other._findings.values():
            known = self._findings.setdefault((finding.violation.id, None), KeptFinding(finding.violation))
            known.repeats += finding.repeats + (known.violation is not finding.violation)
            known.last_step = finding.last_step
        for table, more in ((self.not_kept, other.not_kept), (self.check_failures, other.check_failures)):
            for id, times in more.items():
                table[id] = table.get(id, 0) + times

    @property
    def violations(self) -> list[Violation]:
        """All findings kept, drifts too, by first sight, with their repeats up to now."""
        return [
            replace(finding.violation, repeats=finding.repeats, last_step=finding.last_step)
            for finding in self._findings.values()
        ]

    @property
    def doubts(self) -> list[str]:
        """Why the verdict can't be clean, a phrase each."""
        return self.doubts_with(self.ledger.totals().unknown_requests)

    def doubts_with(self, unknown: int) -> list[str]:
        """The same where ``unknown`` accounts are asked for."""
        ledger = self.ledger
        counts = (
            (0 if ledger.engine else 1, "no engine was seen to start"),
            (unknown, f"{unknown} accounts are unknown"),
            (ledger.gaps, f"events were lost {'once' if ledger.gaps == 1 else f'{ledger.gaps} times'}"),
            (ledger.hook_failures, f"observers failed {ledger.hook_failures} times"),
            (len(self.check_failures), f"checks failed: {', '.join(self.check_failures)}"),
        )
        return [phrase for count, phrase in counts if count]

    @property
    def verdict(self) -> Verdict:
        """``violated`` for a violation (not a drift), else ``unknown`` where there are doubts."""
        if any(f.violation.severity == "violation" for f in self._findings.values()):
            return "violated"
        return "unknown" if self.doubts else "clean"
