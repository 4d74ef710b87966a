"""The findings of one engine: how many each invariant has, and the first ones of each.

Every finding is counted, also one that is not kept: memory is bounded by :data:`FINDINGS_KEPT`, and not by
the number of violations, and no total is cut.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal

import msgspec
from msgspec.structs import replace

from ..events import EngineStarted, Event
from ..figures.sums import Sums, add_tokens, merge_tokens
from ..ledger.account import Account
from ..ledger.entries import Entry
from ..ledger.ledger import Ledger
from ..ledger.ledger_state import Counted, Watch
from ..text import session_of, tenant_of
from .registry import Check, Invariant, Severity, Usual, Violation, Witness, catalogue, is_once

FINDINGS_KEPT = 1_000
"""Most findings kept of one invariant; those in later requests are only counted."""

Key = tuple[str, int | None]
"""An invariant and the number of a request; None: one finding stands for all requests."""


class KeptFinding(msgspec.Struct):
    """A violation as it was first found, and how often it was found again in the same request, or engine.

    ``last_step``: the step in which it was found last. ``in_window``: whether it was found in the auditor's
    window. ``counted_before``: the sums of an earlier part count it.
    """

    violation: Violation
    last_step: int
    repeats: int = 0
    in_window: bool = True
    counted_before: bool = False

    @property
    def counted(self) -> Violation:
        """The violation with its repeats."""
        return replace(self.violation, repeats=self.repeats, last_step=self.last_step)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings one invariant has, and how many of them are kept to be listed.

    ``findings`` counts requests, or times where no request is concerned; ``at_least``: there may be more, as
    in a window. ``tokens``: how many tokens they were about when each was first found, and of a drift, which
    is found once an engine, in all; None: not known, or none.
    """

    id: str
    severity: Severity
    findings: int
    listed: int
    tokens: int | None = None
    at_least: bool = False

    @property
    def shown(self) -> str:
        """``1,000 of 3,690 shown``; "" where all are."""
        return f"{self.listed:,} of {self.number} shown" if self.is_cut else ""

    @property
    def number(self) -> str:
        """``3,690``, or ``at least 1,000``."""
        return f"{'at least ' if self.at_least else ''}{self.findings:,}"

    @property
    def is_cut(self) -> bool:
        """Whether the list of findings is not whole."""
        return self.at_least or self.listed < self.findings


class Findings(Sums):
    """What the checks found. Two of them are added if they are of one journal, the earlier part first; of
    two engines with :meth:`by_invariant`."""

    kept: dict[Key, KeptFinding] = {}
    """In the order in which they were first found."""
    found: dict[str, int] = {}
    """How many findings each invariant has, kept or not."""
    tokens: dict[str, int] = {}
    """By invariant: the tokens that its findings are about."""
    check_failures: dict[str, int] = {}
    """Defects of kvledger: how often each check raised an exception."""

    def merge(self, more: Findings) -> None:
        """Add later findings. One that was made before is a repeat."""
        kept = Counter(id for id, _ in self.kept)
        for table in ("found", "tokens", "check_failures"):
            merge_tokens(getattr(self, table), getattr(more, table))
        for key, later in more.kept.items():
            earlier = self.kept.get(key)
            if earlier is not None:
                earlier.repeats += later.repeats + 1
                earlier.last_step = later.last_step
                if not later.counted_before:
                    self.found[key[0]] -= 1
                    if later.violation.tokens is not None and not is_once(key[0]):
                        self.tokens[key[0]] -= later.violation.tokens
            elif kept[key[0]] < FINDINGS_KEPT:
                kept[key[0]] += 1
                self.kept[key] = replace(later)

    def copy(self) -> Findings:
        """An independent copy."""
        kept = {key: replace(finding) for key, finding in self.kept.items()}
        return Findings(kept, {**self.found}, {**self.tokens}, {**self.check_failures})

    def is_full(self, id: str) -> bool:
        """Whether no further finding of an invariant is kept."""
        return self.found.get(id, 0) >= FINDINGS_KEPT

    def keep(self, key: Key, finding: KeptFinding) -> None:
        """Keep and count a new finding, or one that replaces an earlier one of its key."""
        if self.kept.pop(key, None) is None and not finding.counted_before:
            add_tokens(self.found, key[0], 1)
        self.kept[key] = finding

    def by_invariant(self, later_us: int = 0) -> Findings:
        """One finding of each invariant, which has the others as its repeats; all of them are counted.

        ``later_us``: how much later its times are, counted from the start of another engine.
        """
        whole = Findings({}, {**self.found}, {**self.tokens}, {**self.check_failures})
        for finding in self.kept.values():
            violation = replace(finding.violation, at=finding.violation.at + later_us)
            one = replace(finding, violation=violation, counted_before=True)
            whole.merge(Findings({(violation.id, None): one}))
        return whole

    def placed(self) -> Iterator[tuple[Violation, bool]]:
        """All kept findings, and whether each was found in the window."""
        for finding in self.kept.values():
            yield finding.counted, finding.in_window

    def totals(self) -> list[Found]:
        """Each invariant with findings, in the order in which they were first found."""
        listed = Counter(id for id, _ in self.kept)
        return [
            Found(
                id=id,
                severity=catalogue()[id].severity,
                findings=findings,
                listed=listed[id],
                tokens=self.tokens.get(id),
            )
            for id, findings in self.found.items()
        ]


def together(totals: Iterable[Found]) -> list[Found]:
    """The totals of several engines, one row for each invariant."""
    sums: dict[str, Found] = {}
    for row in totals:
        before = sums.get(row.id)
        sums[row.id] = (
            row
            if before is None
            else replace(
                before,
                findings=before.findings + row.findings,
                listed=before.listed + row.listed,
                tokens=_sum(before.tokens, row.tokens),
                at_least=before.at_least or row.at_least,
            )
        )
    return list(sums.values())


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


# --- auditor -------------------------------------------------------------------------------------------
#
# The auditor: post events to a ledger, run the checks on its entries, collect the violations.
#
# Live and replayed events are handled alike. What was found is in :mod:`.findings`, what was added up in the
# ledger's sums; both can be taken, and sums of other events put in their place.


Verdict = Literal["clean", "violated", "unknown"]

OnViolation = Callable[[str, int, Account | None], None]
"""Called with the invariant's id, the event's ``at`` and the account, if one is concerned."""

InWindow = Callable[[int], bool]
"""Whether a time, in microseconds since the engine started, is in the window."""

NameOf = Callable[[EngineStarted], str]
"""The name of an engine in findings."""


class Listed:
    """Lists findings by severity, in the order of their first occurrence, engine by engine."""

    def _findings(self) -> list[Violation]:
        """All findings so far, drifts included."""
        raise NotImplementedError

    @property
    def violations(self) -> list[Violation]:
        """What the engine did wrong so far, without drifts."""
        return [finding for finding in self._findings() if finding.severity == "violation"]

    @property
    def drifts(self) -> list[Violation]:
        """Figures that the engine counts by a deliberate but misleading rule; the verdict stays clean."""
        return [finding for finding in self._findings() if finding.severity == "drift"]


class Auditor:
    """Posts events to its ledger and runs the checks on the entries.

    ``engine`` is the engine's name in violations; without it, ``name_of`` the first EngineStarted is. With
    ``debug``, an exception in a check is raised; otherwise it is counted. The default is the environment
    variable KVLEDGER_DEBUG. ``on_violation`` is called for every violation found, repeated ones included.
    ``invariants``: those that are checked; None: all. ``in_window`` tells which violations are in the window;
    None: all of them. ``keep_closed``, ``watch`` and ``counted`` are the ledger's.
    """

    def __init__(
        self,
        *,
        engine: str = "",
        keep_closed: bool = False,
        watch: Watch | None = None,
        counted: Counted | None = None,
        debug: bool | None = None,
        on_violation: OnViolation | None = None,
        invariants: Iterable[Invariant] | None = None,
        in_window: InWindow | None = None,
        name_of: NameOf = attrgetter("name"),
    ) -> None:
        self.ledger = Ledger(keep_closed=keep_closed)
        """The ledger that events are posted to."""
        self.ledger.watch, self.ledger.counted = watch, counted
        self.findings = Findings()
        """What was found. The caller may take it, and put other findings in its place."""
        self.found_in: dict[int, set[str]] = {}
        """What was found in each request, by number. The caller that takes an account removes its number."""
        self._debug = bool(os.environ.get("KVLEDGER_DEBUG")) if debug is None else debug
        """Whether an exception in a check is raised."""
        self.given_name = engine
        """The engine's name if the caller gave it; "" otherwise."""
        self._name_of = name_of
        """The engine's name, when it has started."""
        self._on_violation = on_violation
        """Called for every violation found."""
        self._is_in_window = in_window
        """Whether a time is in the window; None: every time is."""
        self._subscribed: dict[type, list[tuple[Usual | None, list[tuple[Invariant, Check]]]]] = {}
        """The checks to run for each type of subject, and the entries that those in a row leave out."""
        for row in catalogue().values() if invariants is None else invariants:
            for subject in row.on:
                groups = self._subscribed.setdefault(subject, [])
                usual = row.unless.get(subject)
                if not groups or groups[-1][0] is not usual:
                    groups.append((usual, []))
                groups[-1][1].append((row, row.check))
        self.ledger.wanted = frozenset(self._subscribed)

    @property
    def engine(self) -> str:
        """The engine's name in violations; "" if it is not known."""
        started = self.ledger.engine
        return self.given_name or ("" if started is None else self._name_of(started))

    def feed(self, event: Event, number: int | None = None) -> list[Violation]:
        """Audit one event; returns the new findings. A finding made before is only counted."""
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
            account = entry.account
            if account is not None and account.unknown is not None:
                continue
            for usual, rows in subscribed.get(type(entry.subject), ()):
                if usual is not None and usual(entry):
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
                        add_tokens(self.findings.check_failures, row.id, 1)
        return findings

    def enter(self, entry: Entry) -> None:
        """Run the checks on something that no single event shows, such as a transfer between two engines."""
        for _, rows in self._subscribed.get(type(entry.subject), ()):
            for row, check in rows:
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
        add_tokens(self.findings.check_failures, name, 1)
        self.ledger.abandon(f"{name} failed")

    def feed_all(self, events: Iterable[Event]) -> list[Violation]:
        """Audit events in order; returns the new findings."""
        return [violation for event in events for violation in self.feed(event)]

    def _record(self, row: Invariant, entry: Entry, witness: Witness) -> Violation | None:
        """Keep or count one violation; returns it if it is a new finding."""
        account = entry.account
        before = False
        if account is not None:
            ids = self.found_in.setdefault(account.request, set())
            before = row.id in ids
            ids.add(row.id)
        if self._on_violation is not None:
            self._on_violation(row.id, entry.at, account)
        number = getattr(entry.subject, "number", None) if account is None else account.request
        watched = account is not None and account.lines is not None
        key = (row.id, None if row.once and not watched else number)
        inside = self._is_in_window is None or self._is_in_window(entry.at)
        findings = self.findings
        tokens = row.tokens_of(witness.figures)
        earlier = findings.kept.get(key)
        again = before if account is not None else earlier is not None
        if tokens is not None and (row.once or not again):
            add_tokens(findings.tokens, row.id, tokens)
        of_engine = row.once or account is None
        if earlier is not None and (earlier.in_window or not inside or not of_engine):
            earlier.repeats += 1
            earlier.last_step = entry.step
            return None
        before = before and not row.once
        if earlier is None and findings.is_full(row.id):
            add_tokens(findings.found, row.id, int(not before))
            return None
        request, life = None, None
        tenant = session = ""
        if account is not None:
            request = account.request_id
            session = request if account.resumable else session_of(account.labels)
            tenant = tenant_of(account.labels)
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
            tenant=tenant,
            session=session,
            tokens=tokens,
        )
        findings.keep(key, KeptFinding(violation, entry.step, in_window=inside, counted_before=before))
        return violation

    @property
    def violations(self) -> list[Violation]:
        """All kept findings, drifts included, in the order they were first found."""
        return [finding.counted for finding in self.findings.kept.values()]

    @property
    def totals(self) -> list[Found]:
        """How many findings each invariant has, kept or not."""
        return self.findings.totals()

    def is_violated_by(self, request: int) -> bool:
        """Whether the request with this number, which nobody has taken, has a violation (not a drift)."""
        found = self.found_in.get(request)
        return bool(found) and any(catalogue()[id].severity == "violation" for id in found or ())

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
        ledger, sums, failed = self.ledger, self.ledger.sums, self.findings.check_failures
        losses = sums.gaps if losses is None else losses
        failures = sums.hook_failures if failures is None else failures
        errors = list(sums.engine_errors) if errors is None else errors
        counts = (
            (0 if ledger.engine else 1, "no engine was seen to start"),
            (unknown, f"{unknown} accounts are unknown"),
            (losses, f"events were lost {'once' if losses == 1 else f'{losses} times'}"),
            (failures, f"observers failed {failures} times"),
            (len(errors), f"the engine raised {', '.join(errors)}"),
            (len(failed), f"checks failed: {', '.join(failed)}"),
        )
        return [phrase for count, phrase in counts if count]

    @property
    def verdict(self) -> Verdict:
        """``violated`` if there is a violation (not a drift), else ``unknown`` if there are doubts."""
        if any(f.violation.severity == "violation" for f in self.findings.kept.values()):
            return "violated"
        return "unknown" if self.doubts else "clean"
