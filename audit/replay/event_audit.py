"""One engine's events, audited: each goes to the ledger, the checks, and the caller's observers.

It is a session: the open accounts, blocks and clocks that the next event meets, saved and taken up again by
``serialize.py``. What has ended adds up to ``sums``. Memory is bounded by open requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace

from ..causes import BEGAN_BEFORE, UNKNOWN
from ..checks.auditor import Auditor, Verdict
from ..checks.registry import Invariant, Violation
from ..events import EngineRaised, EngineStarted, Event, HookFailed, Stepped, WeightsChanged
from ..figures.sums import add_tokens
from ..journal.host_folders import engine_name
from ..ledger.account import Account
from ..ledger.engine_postings import error_name
from ..ledger.ledger_state import Watch
from .observed import Observed, ObserverKind
from .windows import EVERYTHING, Window, last_start
from .worker_journals import AFTER_PLANNING, WorkerJournals

UNREAD = -1.0
"""No time of an engine's start."""


class EventAudit(Observed):
    """Audits the events of one engine, and those of its workers.

    ``observers`` count what the caller wants beside the ledger and the checks. ``window``: requests that
    ended outside it are left out of all sums. ``watch`` selects the requests whose postings are kept, and
    ``invariants`` what is checked (None: everything). ``name`` replaces the engine's name in findings.
    """

    removed_kept: ClassVar[int] = 1 << 18
    """How many evicted hashes are remembered, to tell evicted tokens from those never seen before."""

    def __init__(
        self,
        path: Path,
        observers: Sequence[ObserverKind] = (),
        *,
        window: Window = EVERYTHING,
        watch: Watch | None = None,
        invariants: Iterable[Invariant] | None = None,
        name: str = "",
    ) -> None:
        self.path = path
        """The journal's folder, or a single segment file."""
        self.window = window
        """The time window that requests must have ended in to be counted."""
        self._clock: float | None = UNREAD
        """What :attr:`clock` has read."""
        self.auditor = Auditor(
            engine=name,
            keep_closed=True,
            watch=watch,
            counted=self._counts if window.bounded else None,
            on_violation=self._violated,
            invariants=invariants,
            in_window=self.holds if window.bounded else None,
            name_of=partial(engine_name, path=path),
        )
        """The ledger and the checks that every event goes through."""
        self.auditor.ledger.blocks.removed_kept = self.removed_kept
        self.workers = WorkerJournals(path)
        """The journals of this engine's workers."""
        self.event: Event | None = None
        """The event with which accounts close now; None if an engine is gone and they close without one."""
        super().__init__(observers)

    def feed(self, number: int, event: Event) -> list[Violation]:
        """Audit one event; returns the findings that are new."""
        auditor, workers = self.auditor, self.workers
        ledger = auditor.ledger
        from_workers: list[Violation] = []
        if 0 <= workers.next_step <= ledger.step and type(event) in AFTER_PLANNING:
            from_workers = self._feed_worker_steps()
        if workers.calls and isinstance(event, Stepped | WeightsChanged):
            self._feed_worker_calls(ledger.clock + event.at / 1e6)
        if self.window.bounded:
            findings = from_workers + self._post(event, number)
            placed = ((one.request, False) for one in findings if one.request)
            self.journal.window.requests.update(placed)
        else:
            findings = auditor.feed(event, number)
            if from_workers:
                findings = from_workers + findings
        for observe in self.on_event:
            observe(event)
        handlers = self._handlers.get(type(event))
        if handlers or ledger.closed:
            try:
                for handle in handlers or ():
                    handle(event)
                if ledger.closed:
                    self.event = event
                    self._add_closed()
            except Exception:
                auditor.note_failure(event)
                ledger.closed.clear()
        return findings

    def _post(self, event: Event, number: int) -> list[Violation]:
        """Post and check one event, and place what went wrong with it in a bounded window."""
        if not self.window.bounded:
            return self.auditor.feed(event, number)
        ledger, placed = self.auditor.ledger, self.journal.window
        before, gaps, failures = ledger.at, ledger.sums.gaps, ledger.sums.hook_failures
        findings = self.auditor.feed(event, number)
        began = self.began_seconds or 0.0
        between = began + before / 1e6, began + event.at / 1e6
        placed.losses.place(self.window, ledger.sums.gaps > gaps, *between)
        placed.failures.place(self.window, ledger.sums.hook_failures > failures, *between)
        if type(event) is HookFailed and event.removed:
            placed.unobserved_from = between[0]
        if type(event) is EngineRaised and self.window.holds(between[1]):
            placed.errors |= {error_name(event)} & ledger.sums.engine_errors.keys()
        return findings

    def _feed_worker_steps(self) -> list[Violation]:
        """Audit what workers did up to the current step; returns the findings that are new."""
        ledger = self.auditor.ledger
        return [
            violation
            for event in self.workers.upto(ledger.step)
            for violation in self.auditor.feed(replace(event, at=ledger.at), ledger.number)
        ]

    def _feed_worker_errors(self) -> None:
        """Audit the exceptions that left the workers' connectors."""
        ledger, raised = self.auditor.ledger, self.workers.raised
        self.workers.raised = []
        for event in raised:
            self._post(replace(event, at=ledger.at, lost=False), ledger.number)

    def _feed_worker_calls(self, until: float) -> None:
        """Audit the calls of workers that change weights, up to a Unix time."""
        ledger = self.auditor.ledger
        for event in self.workers.calls_until(until):
            self._post(replace(event, at=ledger.at), ledger.number)

    # --- accounts ---------------------------------------------------------------------------------------

    def _add_closed(self) -> None:
        """Add the accounts that closed to the sums, and drop them from the ledger."""
        closed, journal = self.auditor.ledger.closed, self.journal
        for account in closed.values():
            verdict = self._verdict_of(account)
            self.auditor.found_in.pop(account.request, None)
            if self.window.bounded:
                inside = self._counts(account)
                if account.request_id in journal.window.requests:
                    journal.window.requests[account.request_id] = inside
                if not inside:
                    continue
            if account.unknown is not None:
                add_tokens(journal.unknown, account.unknown, 1)
            if account.unknown != BEGAN_BEFORE:
                kind = (verdict, account.outcome or UNKNOWN)
                journal.requests[kind] = journal.requests.get(kind, 0) + 1
            for callback in self.on_closed:
                callback(account, verdict)
        closed.clear()

    def _verdict_of(self, account: Account) -> Verdict:
        if self.auditor.is_violated_by(account.request):
            return "violated"
        return "unknown" if account.unknown is not None else "clean"

    @property
    def began_seconds(self) -> float | None:
        """Unix time from which the journal's times count; None if no engine was seen to start."""
        first = super().began_seconds
        return first if first is None or self.clock is None else self.clock

    @property
    def clock(self) -> float | None:
        """The same by the newest segment when it was first asked for; None: not known."""
        if self._clock == UNREAD:
            newest = last_start(self.path)
            self._clock = newest.began_seconds if newest else None
        return self._clock

    def take_clock(self, newest: EngineStarted) -> None:
        """Count the journal's times by a newer description of the engine."""
        self._clock = newest.began_seconds

    def _counts(self, account: Account) -> bool:
        return self.window.has(account, self.began_seconds)

    def holds(self, at: int) -> bool:
        """Whether the window has this time of the journal, in microseconds."""
        return self.window.holds((self.began_seconds or 0.0) + at / 1e6)

    def _violated(self, id: str, at: int, account: Account | None) -> None:
        for callback in self.on_violation:
            callback(id, at, account)
