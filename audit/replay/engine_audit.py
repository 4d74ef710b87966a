"""One engine's journal, audited: each event goes to the ledger, the checks, and the caller's observers.

An :class:`EngineAudit` serves a whole journal and a live one alike. It is a session, the open accounts,
blocks and clocks that the next event meets, and sums of what has ended; ``serialize.py`` saves it. Memory is
bounded by open requests.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from ..causes import BEGAN_BEFORE, ENGINE_ENDED, UNKNOWN
from ..checks.auditor import Auditor, Findings, Found, Verdict
from ..checks.coverage import Coverage, ledger_coverage
from ..checks.registry import Invariant, Violation, is_once
from ..events import EngineRaised, EngineStarted, Event, Finished, HookFailed, Stepped, WeightsChanged
from ..figures.sums import Sums, add_tokens
from ..figures.totals import Totals
from ..journal.format import gone_by
from ..journal.host_folders import engine_name, journal_name
from ..journal.reader import Batch, Position, Reader
from ..ledger.account import Account
from ..ledger.blocks.contents import Contents
from ..ledger.engine_postings import error_name
from ..ledger.entries import Entry
from ..ledger.ledger_state import LedgerSums, Watch
from ..text import counted, utc
from .windows import EVERYTHING, LossesInWindow, Window, last_start
from .worker_journals import AFTER_PLANNING, WorkerJournals

if TYPE_CHECKING:
    from ..release_semantics import Meaning


# --- sums ----------------------------------------------------------------------------------------------
#
# What everything that has ended in an engine adds up to: ``earlier + later``, by one rule.
#
# The engines of one name, a window and a restarted reader all are the state of the last part with the sum of
# all parts. Nothing in these sums decides how the next event is audited.


class Trouble(NamedTuple):
    """What went wrong with an event at Unix time ``at``, after one at ``before``; most often nothing.

    ``lost``: events were lost. ``failed``: a hook failed, and with ``unobserved`` the engine runs on without.
    ``error``: the exception that the engine raised.
    """

    before: float
    at: float
    lost: bool
    failed: bool
    unobserved: bool
    error: str


class WindowDoubts(Sums):
    """What went wrong at a time that a bounded window may include."""

    losses: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    """How many times events were lost."""
    failures: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    """How many times a hook failed."""
    unobserved_from: float = math.inf
    """Unix time from which the engine ran on without being observed, because a hook kept failing."""
    errors: set[str] = set()
    """Exceptions of the engine."""
    requests: dict[str, bool] = {}
    """For each request with a finding, whether it is in the window."""

    def merge(self, more: WindowDoubts) -> None:
        """Add what went wrong later."""
        self.losses.merge(more.losses)
        self.failures.merge(more.failures)
        self.unobserved_from = min(self.unobserved_from, more.unobserved_from)
        self.errors = self.errors | more.errors
        self.requests = {**self.requests, **more.requests}

    def place(self, window: Window, trouble: Trouble) -> None:
        """Take an event, and what went wrong with it."""
        self.losses.place(window, trouble.lost, trouble.before, trouble.at)
        self.failures.place(window, trouble.failed, trouble.before, trouble.at)
        if trouble.unobserved:
            self.unobserved_from = trouble.before
        if trouble.error and window.holds(trouble.at):
            self.errors |= {trouble.error}


class JournalSums(Sums):
    """What was read of a journal, beside the sums of its ledger."""

    events: int = 0
    """How many events were read."""
    requests: dict[tuple[str, str], int] = {}
    """The number of ended requests, by verdict and outcome."""
    unknown: dict[str, int] = {}
    """The number of requests whose account is unknown, by the reason."""
    notes: list[str] = []
    """What a reader should know about how the journal ended and what was damaged in it."""
    missed: list[str] = []
    """What was kept of the journal, is not in it any more, and can't be used."""
    lost_tails: int = 0
    """How many journals ended without ``EngineStopped`` although their engines are gone."""
    whole_until: float = 0.0
    """Unix time of the last event before a lost tail."""
    gone_by: float = math.inf
    """Unix time by which the engine of a lost tail was gone."""
    window: WindowDoubts = msgspec.field(default_factory=WindowDoubts)
    """What went wrong in a bounded window."""

    def merge(self, more: JournalSums) -> None:
        """Add what was read later."""
        whole_until, gone_by = max(self.whole_until, more.whole_until), min(self.gone_by, more.gone_by)
        super().merge(more)
        self.whole_until, self.gone_by = whole_until, gone_by


class EngineSums(Sums):
    """All sums of one engine, or of several that ran one after the other."""

    ledger: LedgerSums = msgspec.field(default_factory=LedgerSums)
    findings: Findings = msgspec.field(default_factory=Findings)
    journal: JournalSums = msgspec.field(default_factory=JournalSums)
    observed: dict[str, Any] = {}
    """The sums of each observer, by the name of its class."""


# --- description ---------------------------------------------------------------------------------------
#
# What an engine said of itself when it started, read for reports and labels.


class Described:
    """Has an engine's description. Until the engine was seen to start, nothing is known."""

    path: Path

    @property
    def engine(self) -> EngineStarted | None:
        """How the engine described itself when it started."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The engine's name in findings and labels."""
        return journal_name(self.path)

    @property
    def began_seconds(self) -> float | None:
        """Unix time from which the journal's times count; None if no engine was seen to start."""
        return None if self.engine is None else self.engine.began_seconds

    @property
    def created(self) -> float:
        """Unix time since which the sums count: the engine's start, or that of the oldest segment left."""
        return self.engine.wall_seconds if self.engine else 0.0

    @property
    def connector(self) -> str:
        """The engine's connector; "none" if it has none."""
        return str((self.engine and self.engine.configuration.get("connector")) or "none")

    @property
    def rank(self) -> int:
        """The engine's data-parallel rank, which vLLM's own metrics have as ``engine``."""
        settings = self.engine.configuration if self.engine else {}
        index = settings.get("engine_index", settings.get("data_parallel_rank", 0))
        return index if isinstance(index, int) else 0

    @property
    def model(self) -> str:
        """The model that the engine serves; "" if the engine did not report it."""
        return str(self.engine.configuration.get("model", "")) if self.engine else ""

    @property
    def kv_role(self) -> str:
        """vLLM's ``kv_role`` of the engine; "" without a connector, or if the engine did not report it."""
        return str(self.engine.configuration.get("kv_role") or "") if self.engine else ""

    @property
    def random_suffixes(self) -> bool:
        """Whether the engine's release appends random digits to ids; of an unknown engine, yes."""
        from ..release_semantics import has_random_suffix

        return self.engine is None or has_random_suffix(self.engine.engine, self.engine.version)

    @property
    def meanings(self) -> dict[str, str]:
        """For each figure that the engine reports, a sentence on what this release means by it."""
        return {figure: row.says for figure, row in self._meanings().items()}

    @property
    def meaning_words(self) -> dict[str, str]:
        """Like :attr:`meanings`, with one word a figure, for programs."""
        return {figure: row.word for figure, row in self._meanings().items()}

    def _meanings(self) -> dict[str, Meaning]:
        from ..release_semantics import meanings

        if self.engine is None:
            return {}
        return meanings(self.engine.version, self.engine.adapter, self.engine.engine)


# --- verdict -------------------------------------------------------------------------------------------
#
# What an audit concludes: verdict, doubts, notes and findings, of the requests in its window.


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


# --- observer ------------------------------------------------------------------------------------------
#
# What a caller wants counted beside the ledger and the checks: an observer each, with its own sums.


Handlers = Mapping[type[Event], Callable[[Any], object]]
"""What is called with each event of a type, after the ledger has posted it."""


class Observer:
    """Observes one audit. ``sums`` can be taken and replaced, see :class:`~.sums.EngineSums`."""

    kind: Callable[[], Any]
    """Makes sums of nothing."""

    def __init__(self, audit: Judged) -> None:
        self.audit = audit
        """The audit that is observed."""
        self.sums: Any = self.new_sums()
        """What was counted: sums, or a list."""

    def new_sums(self) -> Any:
        """Sums of nothing."""
        return self.kind()

    def handlers(self) -> Handlers:
        """What is called with events; made anew when ``sums`` was replaced."""
        return {}

    def add(self, account: Account) -> None:
        """A request of the window has ended, or is still open at the end of the journal."""

    def close(self, account: Account, verdict: Verdict) -> None:
        """A request of the window has ended."""
        self.add(account)

    def violated(self, id: str, at: int, account: Account | None) -> None:
        """An invariant is violated, again or for the first time."""

    def end(self) -> None:
        """The engine has ended: drop all but the sums."""

    @property
    def saved(self) -> Any:
        """What a checkpoint holds of this observer: a struct that has its sums."""
        return self.sums

    @saved.setter
    def saved(self, value: Any) -> None:
        self.sums = value


# --- observed ------------------------------------------------------------------------------------------
#
# An audit's observers and all its sums, which can be taken, added and replaced.


Kind = TypeVar("Kind", bound=Observer)
ObserverKind = Callable[[Any], Observer]
"""Makes an observer of an audit: its class."""


class Observed(Judged):
    """An audit with what its caller wants counted beside the ledger and the checks."""

    def __init__(self, observers: Sequence[ObserverKind]) -> None:
        self.journal = JournalSums()
        """What was read of the journal, beside the sums of the ledger."""
        self.on_event: list[Callable[[Event], object]] = []
        """Functions called with each event after it was audited."""
        self.on_closed: list[Callable[[Account, Verdict], None]] = []
        """Functions called with each account of the window that closes, and its verdict."""
        self.on_violation: list[Callable[[str, int, Account | None], None]] = []
        """Functions called with each violation, repeated ones included: its id, time and account."""
        self.on_trouble: list[Callable[[Trouble], None]] = []
        """Functions called with what went wrong with an event, and with the event after it."""
        self.observers: list[Observer] = []
        """What counts beside the ledger and the checks."""
        self._by_class: dict[type[Observer], Observer | None] = {}
        """What was found of each class that was asked for."""
        self._handlers: dict[type[Event], list[Callable[[Any], object]]] = {}
        """What observers call with each type of event."""
        for kind in observers:
            observer = kind(self)
            self.observers.append(observer)
            self.on_closed.append(observer.close)
            self.on_violation.append(observer.violated)
        self._connect()

    def observer(self, kind: type[Kind]) -> Kind | None:
        """The observer of this class; None if the caller wanted none."""
        if kind not in self._by_class:
            self._by_class[kind] = next((one for one in self.observers if isinstance(one, kind)), None)
        return cast("Kind | None", self._by_class[kind])

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


# --- event audit ---------------------------------------------------------------------------------------
#
# One engine's events, audited: each goes to the ledger, the checks, and the caller's observers.
#
# It is a session: the open accounts, blocks and clocks that the next event meets, saved and taken up again
# by ``serialize.py``. What has ended adds up to ``sums``. Memory is bounded by open requests.


UNREAD = -1.0
"""No time of an engine's start."""


class EventAudit(Observed):
    """Audits the events of one engine, and those of its workers.

    ``observers`` count what the caller wants beside the ledger and the checks. ``window``: requests that
    ended outside it are left out of all sums. ``watch`` selects the requests whose postings are kept, and
    ``invariants`` what is checked (None: everything). ``name`` replaces the engine's name in findings.
    ``beside``: another audit of the journal, with another window, that reads the events for both.
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
        beside: EventAudit | None = None,
    ) -> None:
        self.path = path
        """The journal's folder, or a single segment file."""
        self.window = window
        """The time window that requests must have ended in to be counted."""
        self.read_clock: float | None = UNREAD
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
        self.contents = Contents()
        """What the blocks contain, once an observer reads its changes."""
        self.event: Event | None = None
        """The event with which accounts close now; None if an engine is gone and they close without one."""
        self._others: list[EventAudit] = []
        """Audits of the same events with other windows: they have findings and sums of their own."""
        self._troubled = True
        """Whether something went wrong with the last event, or in what was read before this audit began."""
        self._ended: Totals | None = None
        """Totals of the ended requests in the window of such an audit; None: the ledger has them."""
        if beside is not None:
            self._ended = Totals()
            self.auditor.ledger, self.contents = beside.auditor.ledger, beside.contents
            self.auditor.findings.check_failures = beside.auditor.findings.check_failures
            beside._others.append(self)
        super().__init__(observers)

    def feed(self, number: int, event: Event) -> list[Violation]:
        """Audit one event; returns the findings that are new."""
        auditor, workers, kind = self.auditor, self.workers, type(event)
        ledger = auditor.ledger
        from_workers: list[Violation] = []
        if 0 <= workers.next_step <= ledger.step and kind in AFTER_PLANNING:
            from_workers = self._feed_worker_steps()
        if workers.calls and kind in (Stepped, WeightsChanged):
            self._feed_worker_calls(ledger.clock + event.at / 1e6)
        findings = self._post(event, number)
        if from_workers:
            findings = from_workers + findings
        for audit in (self, *self._others):
            for observe in audit.on_event:
                observe(event)
        handlers = self._handlers.get(kind, ())
        if handlers or self._others or ledger.closed:
            self._tell(event, handlers)
        return findings

    def _feed_plain(self, batch: Batch) -> list[Violation]:
        """The same for all events of a batch that concern nobody else, in two thirds of the time."""
        found: list[Violation] = []
        feed, handlers, closed = self.auditor.feed, self._handlers, self.auditor.ledger.closed
        for number, event in enumerate(batch.events, batch.first_event):
            if findings := feed(event, number):
                found += findings
            if closed or type(event) in handlers:
                self._tell(event, handlers.get(type(event), ()))
        return found

    @property
    def _is_plain(self) -> bool:
        """Whether an event concerns nobody but the ledger, the checks, and the observers of its type."""
        workers = self.workers.next_step >= 0 or self.workers.calls
        beside = self._others or self.on_trouble or self.on_event
        return self.window is EVERYTHING and not (workers or beside)

    def _tell(self, event: Event, handlers: Iterable[Callable[[Any], object]]) -> None:
        """Give an event to the observers of its type, and add the accounts that it closed."""
        try:
            for handle in handlers:
                handle(event)
            for other in self._others:
                for handle in other._handlers.get(type(event), ()):
                    handle(event)
            if self.auditor.ledger.closed:
                self.event = event
                self._add_closed()
        except Exception:
            self.auditor.note_failure(event)
            self.auditor.ledger.closed.clear()

    def _post(self, event: Event, number: int) -> list[Violation]:
        """Post and check one event, and place what went wrong with it in bounded windows."""
        if not self.window.bounded and not self._others and not self.on_trouble:
            return self.auditor.feed(event, number)
        ledger = self.auditor.ledger
        before, gaps, failures = ledger.at, ledger.sums.gaps, ledger.sums.hook_failures
        findings = self._check(event, number)
        lost, failed = ledger.sums.gaps > gaps, ledger.sums.hook_failures > failures
        raised = event if type(event) is EngineRaised else None
        removed = type(event) is HookFailed and event.removed
        after, self._troubled = self._troubled, lost or failed or removed or raised is not None
        if not (after or self._troubled):  # a loss lies between two events, so the one after it counts too
            return findings
        began = self.began_seconds or 0.0
        error = "" if raised is None else error_name(raised)
        trouble = Trouble(
            before=began + before / 1e6,
            at=began + event.at / 1e6,
            lost=lost,
            failed=failed,
            unobserved=removed,
            error=error if error in ledger.sums.engine_errors else "",
        )
        for audit in (self, *self._others):
            if audit.window.bounded:
                audit.journal.window.place(audit.window, trouble)
        for place in self.on_trouble:
            place(trouble)
        return findings

    def _check(self, event: Event, number: int) -> list[Violation]:
        """Post one event, and check its entries here and in the other audits; returns new findings."""
        findings = self.auditor.feed(event, number)
        self._note_requests(findings)
        for other in self._others:
            other._note_requests(other.auditor.check(self.auditor.ledger.entries))
        return findings

    def _note_requests(self, findings: Sequence[Violation]) -> None:
        """Note requests with findings; where they end, it is known whether they are in the window."""
        if findings and self.window.bounded:
            self.journal.window.requests.update((one.request, False) for one in findings if one.request)

    def enter(self, entry: Entry) -> None:
        """Check something that no single event shows, here and in the other audits."""
        for audit in (self, *self._others):
            audit.auditor.enter(entry)

    def _feed_worker_steps(self) -> list[Violation]:
        """Audit what workers did up to the current step; returns the findings that are new."""
        ledger = self.auditor.ledger
        return [
            violation
            for event in self.workers.upto(ledger.step)
            for violation in self._check(replace(event, at=ledger.at), ledger.number)
        ]

    def _feed_worker_calls(self, until: float) -> None:
        """Audit workers' calls that change weights, and exceptions, up to a Unix time."""
        ledger = self.auditor.ledger
        for when, event in self.workers.calls_until(until):
            at = max(ledger.at, round((when - ledger.clock) * 1e6))
            if isinstance(event, EngineRaised):  # the engine's own journal has lost nothing
                self._post(replace(event, at=at, lost=False), ledger.number)
            else:
                self._post(replace(event, at=at), ledger.number)

    # --- accounts ---------------------------------------------------------------------------------------

    def _add_closed(self) -> None:
        """Add the accounts that closed to the sums, and drop them from the ledger."""
        closed = self.auditor.ledger.closed
        for audit in (self, *self._others):
            for account in closed.values():
                audit._add(account)
        closed.clear()

    def _add(self, account: Account) -> None:
        """Add an account that closed to the sums, if its request is in the window."""
        verdict, journal = self._verdict_of(account), self.journal
        self.auditor.found_in.pop(account.request, None)
        if self.window.bounded:
            inside = self._counts(account)
            if account.request_id in journal.window.requests:
                journal.window.requests[account.request_id] = inside
            if not inside:
                return
        if self._ended is not None:
            self._ended.add(account)
        if account.unknown is not None:
            add_tokens(journal.unknown, account.unknown, 1)
        if account.unknown != BEGAN_BEFORE:
            kind = (verdict, account.outcome or UNKNOWN)
            journal.requests[kind] = journal.requests.get(kind, 0) + 1
        for callback in self.on_closed:
            callback(account, verdict)

    @property
    def closed(self) -> Totals:
        """Totals of the requests of the window that have ended."""
        return super().closed if self._ended is None else self._ended

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
        if self.read_clock == UNREAD:
            newest = last_start(self.path)
            self.read_clock = newest.began_seconds if newest else None
        return self.read_clock

    def _counts(self, account: Account) -> bool:
        return self.window.has(account, self.began_seconds)

    def holds(self, at: int) -> bool:
        """Whether the window has this time of the journal, in microseconds."""
        return self.window.holds((self.began_seconds or 0.0) + at / 1e6)

    def _violated(self, id: str, at: int, account: Account | None) -> None:
        for callback in self.on_violation:
            callback(id, at, account)


# --- engine audit --------------------------------------------------------------------------------------
#
# One engine's journal, audited from a reader, to its present end.
#
# An :class:`EngineAudit` serves a whole journal and a live one alike: its figures of ended requests only
# ever rise. Whole journals are read in ``journals.py``, followed in ``followed_audit.py``.


class EngineAudit(EventAudit):
    """One engine's journal, audited. The arguments are those of :class:`~.event_audit.EventAudit`."""

    def read(self, reader: Reader, lock: AbstractContextManager[object] | None = None) -> None:
        """Audit everything in the journal by now, holding ``lock`` for one batch at a time."""
        for _ in self.batches(reader, lock):
            pass

    def replay(
        self, start: Position | None = None, until: int = -1
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """Audit the journal from ``start``, if the audit is there, to its end, or up to the batch that holds
        the event ``until``; see :meth:`batches`."""
        with Reader(self.path, start) as reader:
            for batch, findings in self.batches(reader):
                yield batch, findings
                if 0 <= until < batch.first_event + len(batch.events):
                    return
            self.note_end(reader)
        self.finish()

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
                if self._is_plain:
                    findings += self._feed_plain(batch)
                else:
                    for number, event in enumerate(batch.events, batch.first_event):
                        findings += feed(number, event)
                self._feed_worker_calls(self.auditor.ledger.read_to)
                self.journal.events += len(batch.events)
                findings += self.compared()
            yield batch, findings
        if reader.ended:
            with hold:
                self._feed_worker_calls(inf)
                self._feed_worker_steps()
                self.workers.close()
                if not reader.stopped and not reader.continues:
                    self.lose_tail()

    def compared(self) -> list[Violation]:
        """The new findings of comparing the batch with what was recorded elsewhere; nothing is, here."""
        return []

    # --- the end ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Add what is still open to the observers that count it, as it stands; no event follows."""
        for audit in (self, *self._others):
            for account in audit.open():
                if account.unknown is not None:
                    add_tokens(audit.journal.unknown, account.unknown, 1)
                for observer in audit.observers:
                    observer.add(account)

    def lose_tail(self) -> None:
        """Note that the engine is gone and its last events may be missing. Idempotent.

        Requests that are open at the journal's end become unknown; ended ones keep their verdict.
        """
        for audit in (self, *self._others):
            journal = audit.journal
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
        self.contents.forget()
        for observer in self.observers:
            observer.end()

    def note_damage(self, reader: Reader, first: int = 0) -> None:
        """Note what ``reader`` found damaged, from the damage number ``first`` on."""
        rotated, notes = self.auditor.ledger.sums.removed_events, []
        if rotated:
            removed = f"rotation has removed the first {counted(rotated, 'event')}"
            notes.append(f"{removed}: the trace begins at {utc(self.created)}")
        self._note(notes + [str(damage) for damage in reader.damage[first + bool(rotated) :]])

    def note_end(self, reader: Reader, first: int = 0) -> None:
        """The same, and whether the engine still writes."""
        self.note_damage(reader, first)
        if not reader.ended:
            self._note(["the engine is still running, this is up to now"])
        elif reader.continues:
            self._note(["this segment is not the journal's last"])

    def _note(self, notes: Sequence[str]) -> None:
        for audit in (self, *self._others):
            audit.notes.extend(notes)


def _started(batch: Batch) -> EngineStarted | None:
    return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
