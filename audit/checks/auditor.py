"""The auditor: post events to a ledger, run the checks on its entries, collect the violations.

Live and replayed events are handled alike. An auditor keeps the first findings of each invariant and counts
the rest, so its memory is bounded by open requests and not by the number of violations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal

from msgspec.structs import replace

from ..events import EngineStarted, Event
from ..figures.sums import added
from ..ledger.account import Account
from ..ledger.ledger import Ledger
from ..ledger.state import Watch
from ..ledger.subjects import Entry
from .registry import Check, Invariant, Violation, Witness, catalogue

Verdict = Literal["clean", "violated", "unknown"]

OnViolation = Callable[[str, int, Account | None], None]
"""Called with the invariant's id, the event's ``at`` and the account, if one is concerned."""

InWindow = Callable[[int], bool]
"""Whether a time, in microseconds since the engine started, is in the window."""

NameOf = Callable[[EngineStarted], str]
"""The name of an engine in findings."""

FINDINGS_KEPT = 1_000
"""Most findings kept of one invariant; violations in later requests are only counted."""


class KeptFinding:
    """A violation as it was first found, and how often it was found again."""

    __slots__ = ("in_window", "last_step", "repeats", "violation")

    def __init__(self, violation: Violation, *, in_window: bool = True) -> None:
        self.violation = violation
        """The violation as first found."""
        self.repeats = 0
        """How often it was found again in the same request, or engine."""
        self.last_step = violation.step
        """The step in which it was found last."""
        self.in_window = in_window
        """Whether it was found in the auditor's window. One of the engine is found anew there."""


class Auditor:
    """Posts events to its ledger and runs the checks on the entries.

    ``engine`` is the engine's name in violations; without it, the first EngineStarted gives the name. With
    ``debug``, an exception in a check is raised; otherwise it is counted. The default is the environment
    variable KVLEDGER_DEBUG. ``on_violation`` is called for every violation found, repeated ones included.
    ``only`` names the one invariant to check; None: all of them. Without ``checks`` none is checked.
    ``in_window`` tells which violations are in the window; None: all of them. ``name_of`` names the engine.
    """

    def __init__(
        self,
        *,
        engine: str = "",
        keep_closed: bool = False,
        watch: Watch | None = None,
        debug: bool | None = None,
        on_violation: OnViolation | None = None,
        only: str | None = None,
        checks: bool = True,
        in_window: InWindow | None = None,
        name_of: NameOf = attrgetter("name"),
    ) -> None:
        self.ledger = Ledger(keep_closed=keep_closed, watch=watch)
        """The ledger that events are posted to."""
        self.engine = engine
        """The engine's name in violations."""
        self.check_failures: dict[str, int] = {}
        """Defects of kvledger: how often each check raised an exception."""
        self.violating: set[int] = set()
        """Numbers of the requests with a violation; the caller that takes an account removes its number."""
        self.not_kept: dict[str, int] = {}
        """How many violations were counted and not kept, by invariant."""
        self._debug = bool(os.environ.get("KVLEDGER_DEBUG")) if debug is None else debug
        """Whether an exception in a check is raised."""
        self._name_of = name_of
        """The engine's name, when it has started."""
        self._on_violation = on_violation
        """Called for every violation found."""
        self._is_in_window = in_window
        """Whether a time is in the window; None: every time is."""
        self._findings: dict[tuple[str, int | None], KeptFinding] = {}
        """The kept findings, by invariant and request number."""
        self._kept: dict[str, int] = {}
        """How many findings of each invariant are kept."""
        self._subscribed: dict[type, tuple[tuple[Invariant, Check], ...]] = {}
        """The checks to run for each type of subject."""
        for row in catalogue().values() if checks else ():
            for subject in row.on if only in (None, row.id) else ():
                self._subscribed[subject] = (
                    *self._subscribed.get(subject, ()),
                    (row, row.check),
                )

    def feed(self, event: Event, number: int | None = None) -> list[Violation]:
        """Audit one event; returns the new findings. A finding made before is only counted."""
        if type(event) is EngineStarted and not self.engine:
            self.engine = self._name_of(event)
        try:
            entries = self.ledger.apply(event, number)
        except Exception:
            self.note_failure(event)
            return []
        return self.check(entries) if entries else []

    def check(self, entries: Iterable[Entry]) -> list[Violation]:
        """Run the checks on entries; returns the new findings."""
        findings: list[Violation] = []
        subscribed = self._subscribed
        for entry in entries:
            rows = subscribed.get(type(entry.subject))
            if rows is None:
                continue
            account = entry.account
            if account is not None and account.unknown is not None:
                continue
            for row, check in rows:
                try:
                    for witness in check(entry):
                        violation = self._record(row, entry, witness)
                        if violation is not None:
                            findings.append(violation)
                except Exception:
                    # A defect of kvledger: the other checks still run, and the verdict is not clean.
                    if self._debug:
                        raise
                    self.check_failures[row.id] = self.check_failures.get(row.id, 0) + 1
        return findings

    def enter(self, entry: Entry) -> None:
        """Run the checks on something that no single event shows, such as a transfer between two engines."""
        for row, check in self._subscribed.get(type(entry.subject), ()):
            for witness in check(entry):
                self._record(row, entry, witness)

    def note_failure(self, event: Event) -> None:
        """Posting an event raises: a defect of kvledger, or an event that no engine emits.

        The ledger may have posted a part of it, so open accounts become unknown and the verdict is not clean.
        Call this where the exception is handled; with ``debug`` it is raised again.
        """
        if self._debug:
            raise
        name = f"posting {type(event).__name__}"
        self.check_failures[name] = self.check_failures.get(name, 0) + 1
        self.ledger.abandon(f"{name} failed")

    def feed_all(self, events: Iterable[Event]) -> list[Violation]:
        """Audit events in order; returns the new findings."""
        return [violation for event in events for violation in self.feed(event)]

    def _record(self, row: Invariant, entry: Entry, witness: Witness) -> Violation | None:
        """Keep or count one violation; returns it if it is a new finding."""
        account = entry.account
        if account is not None and row.severity == "violation":
            self.violating.add(account.request)
        if self._on_violation is not None:
            self._on_violation(row.id, entry.at, account)
        number = getattr(entry.subject, "number", None) if account is None else account.request
        key = (row.id, None if row.once else number)
        inside = self._is_in_window is None or self._is_in_window(entry.at)
        earlier = self._findings.get(key)
        of_engine = row.once or account is None
        if earlier is not None and (earlier.in_window or not inside or not of_engine):
            earlier.repeats += 1
            earlier.last_step = entry.step
            return None
        if earlier is None and self._kept.get(row.id, 0) >= FINDINGS_KEPT:
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
        self._findings.pop(key, None)
        self._findings[key] = KeptFinding(violation, in_window=inside)
        self._kept[row.id] = self._kept.get(row.id, 0) + (earlier is None)
        return violation

    def place_findings(self, placed: Iterable[tuple[Violation, bool]]) -> None:
        """Take from elsewhere which findings an audit of a window begins with, as :meth:`placed_violations`
        gives them, and whether each is in the window."""
        keys = list(self._findings)
        self._findings = {}
        for place, (violation, inside) in enumerate(placed):
            finding = KeptFinding(violation, in_window=inside)
            finding.repeats, finding.last_step = violation.repeats, violation.last_step
            self._findings[keys[place] if place < len(keys) else (violation.id, -place - 1)] = finding

    def forget_findings(self) -> None:
        """Forget all findings. The requests in which violations were found stay known."""
        self._findings, self._kept, self.not_kept, self.check_failures = {}, {}, {}, {}

    def precede(self, earlier: Auditor) -> None:
        """Add the findings of the same journal up to where this auditor forgot its own."""
        self.ledger.precede(earlier.ledger)
        findings, kept = earlier._findings, earlier._kept
        not_kept = added(earlier.not_kept, self.not_kept)
        for key, finding in self._findings.items():
            id = finding.violation.id
            if key in findings:
                findings[key].repeats += finding.repeats + 1
                findings[key].last_step = finding.last_step
            elif kept.get(id, 0) >= FINDINGS_KEPT:
                not_kept[id] = not_kept.get(id, 0) + finding.repeats + 1
            else:
                findings[key] = finding
                kept[id] = kept.get(id, 0) + 1
        self._findings, self._kept, self.not_kept = findings, kept, not_kept
        self.check_failures = added(earlier.check_failures, self.check_failures)

    def absorb(self, other: Auditor) -> None:
        """Add the findings of another engine, which has ended; one finding of each invariant is kept.

        Times count from the start of the engine that began first.
        """
        self.engine = self.engine or other.engine
        before = self.ledger.engine
        self.ledger.absorb(other.ledger)
        for kept in self._findings.values():
            kept.violation = _moved(kept.violation, before, self.ledger.engine)
        for finding in other._findings.values():
            key = (finding.violation.id, None)
            if key in self._findings:
                self._findings[key].repeats += finding.repeats + 1
            else:
                violation = _moved(finding.violation, other.ledger.engine, self.ledger.engine)
                self._findings[key] = KeptFinding(violation)
                self._findings[key].repeats = finding.repeats
            self._findings[key].last_step = finding.last_step
        for table, more in ((self.not_kept, other.not_kept), (self.check_failures, other.check_failures)):
            for id, times in more.items():
                table[id] = table.get(id, 0) + times

    @property
    def violations(self) -> list[Violation]:
        """All kept findings, drifts included, in the order they were first found."""
        return [violation for violation, _ in self.placed_violations()]

    def placed_violations(self) -> Iterator[tuple[Violation, bool]]:
        """All kept findings, and whether each was found in the window."""
        for finding in self._findings.values():
            violation = replace(finding.violation, repeats=finding.repeats, last_step=finding.last_step)
            yield violation, finding.in_window

    @property
    def doubts(self) -> list[str]:
        """Why the verdict can't be clean, one phrase each."""
        return self.doubts_with(self.ledger.totals().doubtful_requests)

    def doubts_with(
        self,
        unknown: int,
        losses: int | None = None,
        failures: int | None = None,
        errors: Sequence[str] | None = None,
    ) -> list[str]:
        """The same, if ``unknown`` accounts and these losses of events, failures of hooks and errors of the
        engine matter; None: all of them."""
        ledger = self.ledger
        losses = ledger.gaps if losses is None else losses
        failures = ledger.hook_failures if failures is None else failures
        errors = list(ledger.engine_errors) if errors is None else errors
        counts = (
            (0 if ledger.engine else 1, "no engine was seen to start"),
            (unknown, f"{unknown} accounts are unknown"),
            (losses, f"events were lost {'once' if losses == 1 else f'{losses} times'}"),
            (failures, f"observers failed {failures} times"),
            (len(errors), f"the engine raised {', '.join(errors)}"),
            (len(self.check_failures), f"checks failed: {', '.join(self.check_failures)}"),
        )
        return [phrase for count, phrase in counts if count]

    @property
    def verdict(self) -> Verdict:
        """``violated`` if there is a violation (not a drift), else ``unknown`` if there are doubts."""
        if any(f.violation.severity == "violation" for f in self._findings.values()):
            return "violated"
        return "unknown" if self.doubts else "clean"


def _moved(violation: Violation, clock: EngineStarted | None, other: EngineStarted | None) -> Violation:
    """A violation with its time counted from the start of another engine."""
    if clock is None or other is None or clock.began_seconds == other.began_seconds:
        return violation
    shift = round((clock.began_seconds - other.began_seconds) * 1e6)
    return replace(violation, at=violation.at + shift)
