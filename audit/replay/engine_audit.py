"""One engine's journal, audited: every event goes to the ledger, the checks, and the caller's observers.

An :class:`EngineAudit` is a session: the open accounts, blocks and clocks that the next event meets. It can
be saved and taken up again (``serialize.py``). What has ended adds up to ``sums``, which can be taken, added
and replaced. Memory is bounded by open requests. It serves a whole journal and a live one alike: its figures
of ended requests only ever rise. Whole journals are read in ``journals.py``, followed in ``live_audit.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ..causes import BEGAN_BEFORE, ENGINE_ENDED, UNKNOWN
from ..checks.auditor import Auditor, Verdict
from ..checks.findings import Findings
from ..checks.registry import Invariant, Violation
from ..events import EngineRaised, EngineStarted, Event, Finished, HookFailed
from ..figures.sums import add_tokens
from ..journal.format import gone_by
from ..journal.hosts import engine_name
from ..journal.reader import Batch, Reader
from ..ledger.account import Account
from ..ledger.observation import error_name
from ..ledger.state import Watch
from ..ledger.sums import LedgerSums
from ..text import utc
from .observer import Observer
from .sums import EngineSums, JournalSums
from .verdict import Judged, counted
from .windows import EVERYTHING, Window
from .worker_journals import AFTER_PLANNING, WorkerJournals

Kind = TypeVar("Kind", bound=Observer)
ObserverKind = Callable[["EngineAudit"], Observer]
"""Makes an observer of an audit: its class."""


class EngineAudit(Judged):
    """One engine's journal, audited.

    ``observers`` count what the caller wants beside the ledger and the checks. ``window``: requests that
    ended outside it are left out of all sums. ``watch`` selects the requests whose postings are kept, and
    ``invariants`` what is checked (None: everything). ``name`` replaces the engine's name in findings.
    """

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
        self.window = window
        self.auditor = Auditor(
            engine=name,
            keep_closed=True,
            watch=watch,
            counted=self._counts if window.bounded else None,
            on_violation=self._violated,
            invariants=invariants,
            in_window=self._holds if window.bounded else None,
            name_of=partial(engine_name, path=path),
        )
        self.journal = JournalSums()
        self.on_closed: list[Callable[[Account, Verdict], None]] = []
        """Functions called with each account of the window that closes, and its verdict."""
        self.on_violation: list[Callable[[str, int, Account | None], None]] = []
        """Functions called with each violation, repeated ones included: its id, time and account."""
        self.workers = WorkerJournals(path)
        """The journals of this engine's workers."""
        self.event: Event | None = None
        """The event with which accounts close now; None if an engine is gone and they close without one."""
        self.observers: list[Observer] = []
        """What counts beside the ledger and the checks."""
        self._handlers: dict[type[Event], list[Callable[[Any], object]]] = {}
        """What observers call with each type of event."""
        for kind in observers:
            observer = kind(self)
            self.observers.append(observer)
            self.on_closed.append(observer.close)
            self.on_violation.append(observer.violated)
        self._connect()

    # --- observers and sums -----------------------------------------------------------------------------

    def observer(self, kind: type[Kind]) -> Kind | None:
        """The observer of this class; None if the caller wanted none."""
        return next((one for one in self.observers if isinstance(one, kind)), None)

    def of(self, kind: type[Kind]) -> Kind:
        """The observer of this class, which the caller must have wanted."""
        found = self.observer(kind)
        assert found is not None, f"{kind.__name__} does not observe this audit"
        return found

    def _connect(self) -> None:
        """Call the observers with the events that they handle."""
        handlers = defaultdict(list)
        for observer in self.observers:
            for kind, handle in observer.handlers().items():
                handlers[kind].append(handle)
        self._handlers = dict(handlers)

    @property
    def sums(self) -> EngineSums:
        """What everything that has ended adds up to. They still rise, unless other sums replace them."""
        observed = {type(one).__name__: one.sums for one in self.observers}
        return EngineSums(self.auditor.ledger.sums, self.auditor.findings, self.journal, observed)

    @sums.setter
    def sums(self, sums: EngineSums) -> None:
        self.auditor.ledger.sums, self.auditor.findings = sums.ledger, sums.findings
        self.journal = sums.journal
        for one in self.observers:
            one.sums = sums.observed[type(one).__name__]
        self._connect()

    def take_sums(self) -> EngineSums:
        """The sums so far; new ones begin."""
        taken = self.sums
        observed = {type(one).__name__: one.new_sums() for one in self.observers}
        self.sums = EngineSums(LedgerSums(), Findings(), JournalSums(), observed)
        return taken

    # --- events -----------------------------------------------------------------------------------------

    def feed(self, number: int, event: Event) -> list[Violation]:
        """Audit one event; returns the findings that are new."""
        auditor = self.auditor
        from_workers: list[Violation] = []
        if 0 <= self.workers.next_step <= auditor.ledger.step and type(event) in AFTER_PLANNING:
            from_workers = self._feed_worker_steps()
        findings = self._post(event, number)
        if from_workers:
            findings = from_workers + findings
        if findings and self.window.bounded:
            placed = ((one.request, False) for one in findings if one.request)
            self.journal.window.requests.update(placed)
        try:
            for handle in self._handlers.get(type(event), ()):
                handle(event)
            if auditor.ledger.closed:
                self.event = event
                self._add_closed()
        except Exception:
            auditor.note_failure(event)
            auditor.ledger.closed.clear()
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

    def read(self, reader: Reader, lock: AbstractContextManager[object] | None = None) -> None:
        """Audit everything in the journal by now, holding ``lock`` for one batch at a time."""
        for _ in self.batches(reader, lock):
            pass

    def batches(
        self, reader: Reader, lock: AbstractContextManager[object] | None = None
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """Like :meth:`read`, and yields each batch after it was audited, with the findings that are new."""
        feed, hold = self.feed, lock or nullcontext()
        workers_read = False
        for batch in reader.poll():
            findings: list[Violation] = []
            if not workers_read and (started := self.engine or _started(batch)) is not None:
                settings = started.configuration
                self.workers.poll(settings.get("transfer"), settings.get("engine_key"))
                workers_read = True
            with hold:
                self._feed_worker_errors()
                number = batch.first_event
                for event in batch.events:
                    new = feed(number, event)
                    if new:
                        findings += new
                    number += 1
                self.journal.events += len(batch.events)
                findings += self.compared()
            yield batch, findings
        if reader.ended:
            with hold:
                self._feed_worker_steps()
                self.workers.close()
                if not reader.stopped and not reader.continues:
                    self.lose_tail()

    def compared(self) -> list[Violation]:
        """The new findings of comparing the batch with what was recorded elsewhere; nothing is, here."""
        return []

    # --- accounts ---------------------------------------------------------------------------------------

    def _add_closed(self) -> None:
        """Add the accounts that closed to the sums, and drop them from the ledger."""
        closed, journal = self.auditor.ledger.closed, self.journal
        for account in closed.values():
            verdict = self._verdict_of(account)
            self.auditor.violating.discard(account.request)
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
        if account.request in self.auditor.violating:
            return "violated"
        return "unknown" if account.unknown is not None else "clean"

    def _counts(self, account: Account) -> bool:
        return self.window.has(account, self.began_seconds)

    def _holds(self, at: int) -> bool:
        return self.window.holds((self.began_seconds or 0.0) + at / 1e6)

    def _violated(self, id: str, at: int, account: Account | None) -> None:
        for callback in self.on_violation:
            callback(id, at, account)

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Add what is still open to the observers that count it, as it stands; no event follows."""
        for account in self.open():
            if account.unknown is not None:
                add_tokens(self.journal.unknown, account.unknown, 1)
            for observer in self.observers:
                observer.leave_open(account)

    def lose_tail(self) -> None:
        """Note that the engine is gone and its last events may be missing. Idempotent.

        Requests that are open at the journal's end become unknown; ended ones keep their verdict.
        """
        journal = self.journal
        if not journal.lost_tails:
            journal.lost_tails = 1
            journal.whole_until, journal.gone_by = self.auditor.ledger.read_to, gone_by(self.path)
        self.auditor.ledger.doubt_open()

    def end(self, *, stopped: bool) -> None:
        """Close the open requests of an engine that has gone, at the end of a journal that was followed.

        ``stopped``: observation ended in good order, so the requests ended there. Otherwise, or if the
        engine ran on without being observed, nobody saw how they ended and they become unknown.
        """
        ledger = self.auditor.ledger
        if not stopped:
            self.lose_tail()
        if not stopped or ledger.stopped == "detached":
            ledger.lose_open()
            self.event = None
            self._add_closed()
        for request in list(ledger.open):
            self.feed(ledger.number, Finished(ledger.at, request, ENGINE_ENDED, -1, -1, -1, -1, -1))
        ledger.forget_steps()

    def note_damage(self, reader: Reader, first: int = 0) -> None:
        """Note what ``reader`` found damaged, from the damage number ``first`` on."""
        rotated = self.auditor.ledger.sums.removed_events
        if rotated:
            removed = f"rotation has removed the first {counted(rotated, 'event')}"
            self.notes.append(f"{removed}: the trace begins at {utc(self.created)}")
        self.journal.notes += [str(damage) for damage in reader.damage[first + bool(rotated) :]]

    def note_end(self, reader: Reader, first: int = 0) -> None:
        """The same, and whether the engine still writes."""
        self.note_damage(reader, first)
        if not reader.ended:
            self.notes.append("the engine is still running, this is up to now")
        elif reader.continues:
            self.notes.append("this segment is not the journal's last")


def _started(batch: Batch) -> EngineStarted | None:
    return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
