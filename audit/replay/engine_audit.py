"""One engine's journal, audited: the ledger, the findings, and the sums of ended requests.

An :class:`EngineAudit` serves a whole journal and a live one alike: its figures of ended requests only
ever rise. Memory is bounded by open requests: an account is added to the sums when it closes, and dropped
unless the caller asked for it. Reading whole journals and finding them are in ``journals.py`` and
``find.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..analysis.costs import CostCounters, Costs, priced
from ..analysis.reconciliation import EngineCounters
from ..analysis.step_model import StepModel, fit
from ..analysis.step_times import STEP_HANDLERS, Sample, StepTimes
from ..causes import BEGAN_BEFORE, ENGINE_ENDED, UNKNOWN
from ..checks.auditor import Auditor, Verdict
from ..checks.registry import Violation, is_once
from ..events import EngineRaised, EngineStarted, Event, Finished, HookFailed
from ..figures.sums import add_tokens
from ..figures.totals import Totals
from ..journal.format import gone_by
from ..journal.hosts import engine_name, journal_name
from ..journal.reader import Batch, Reader
from ..ledger.account import Account
from ..ledger.observation import error_name
from ..ledger.state import Watch
from ..ledger.subjects import Entry
from ..text import utc
from .metrics_state import METRICS_HANDLERS, MetricsState
from .recorded_events import RecordedEvents
from .sums import EngineSums, WindowSums
from .windows import EVERYTHING, LossesInWindow, Window
from .worker_journals import AFTER_PLANNING, WorkerJournals

if TYPE_CHECKING:
    from ..release_semantics import Meaning


LIVE_SAMPLE = 1024
"""Observations kept of an engine that is followed, since a checkpoint holds them."""


class EngineAudit:
    """One engine's journal, audited.

    ``keep`` keeps every account in ``accounts``; ``watch(request_id)`` keeps the accounts of the requests
    for which it is true, with every posting. With a ``window``, requests that ended outside it are left
    out of the sums. Without ``with_metrics`` the state that only metrics need stays empty. ``times_steps``
    observes how long steps took, and ``with_costs`` adds up lost work and, unless ``times_steps`` is false,
    observes steps too; metrics do both in any case.
    ``accounts_only`` checks no invariant and reconciles nothing, for a caller that asks for accounts, totals
    and costs, and for no verdict.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: bool = False,
        watch: Watch | None = None,
        window: Window = EVERYTHING,
        with_metrics: bool = True,
        with_costs: bool = False,
        times_steps: bool | None = None,
        accounts_only: bool = False,
    ) -> None:
        self.path = path
        """The journal's folder, or a single segment file."""
        self.series = ""
        """The label of this engine's metrics, if a follower chose it; engines after each other share one."""
        self.window = window
        """The time window that requests must have ended in to be counted."""
        self.metrics = MetricsState()
        """What metrics need beyond the totals, of all requests whatever the window."""
        self.auditor = Auditor(
            keep_closed=True,
            watch=watch,
            on_violation=self._count_violation,
            checks=not accounts_only,
            in_window=self._is_in_window,
            name_of=partial(engine_name, path=path),
        )
        """The ledger and the checks that every event goes through."""
        self.sums = EngineSums()
        """What the ended requests of the window add up to."""
        self.accounts: list[Account] = []
        """Accounts that ``keep`` or ``watch`` asked for, in the order they closed."""
        self.notes: list[str] = []
        """What a reader should know about how the journal ended and what was damaged in it."""
        self.on_closed: list[Callable[[Account, Verdict], None]] = []
        """Functions called with each account that closes and its verdict, before it is dropped."""
        self.on_violation: list[Callable[[str, int, Account | None], None]] = []
        """Functions called with each violation, repeated ones included: its id, time and account."""
        self.engine_counters: EngineCounters | None = None
        """The engine's own counters beside the ledger's figures, if the engine is scraped."""
        self.workers = WorkerJournals(path)
        """The journals of this engine's workers."""
        self.live_events = RecordedEvents(path)
        """The recorded KV events of this engine, for a follower that enables them."""
        self.lost_tails = 0
        """How many journals ended without ``EngineStopped`` although their engines are gone: 0 or 1, or more
        after :meth:`absorb`."""
        self.read_seconds = 0.0
        """Unix time at which the journal was last read to its end; 0.0 before the first time."""
        self.checkpoint_seconds = 0.0
        """Unix time at which this audit was last saved in a checkpoint; 0.0 before the first time."""
        self.step_times = StepTimes(
            Sample(most=LIVE_SAMPLE) if with_metrics else Sample(),
            since_seconds=window.since,
            until_seconds=window.until,
        )
        """How long the steps took."""
        self.cost_counters = CostCounters()
        """Seconds of lost work and loads, for metrics."""
        self._keep = keep
        """Whether every account goes to ``accounts``."""
        self._reconciles = not accounts_only
        """Whether ``reconciliation`` is filled."""
        self._with_metrics = with_metrics
        """Whether ``metrics`` and ``cost_counters`` are filled."""
        self._with_costs = with_costs
        """Whether ``cost_tally`` is filled."""
        self._times_steps = with_metrics or (with_costs if times_steps is None else times_steps)
        """Whether ``step_times`` is filled."""
        self._in_window: dict[str, bool] = {}
        """For each request with a finding, whether it is in a bounded window."""
        self._bounded = window.bounded
        """Whether the window has a bound."""
        self._losses = LossesInWindow()
        """How many times events were lost at a time that a bounded window may include."""
        self._failures = LossesInWindow()
        """How many times a hook failed then."""
        self._unobserved_from = math.inf
        """Unix time from which the engine ran on without being observed, because a hook kept failing."""
        self._errors: set[str] = set()
        """Exceptions of the engine in a bounded window."""
        self._whole_until = 0.0
        """Unix time of the last event before a lost tail."""
        self._gone_by = math.inf
        """Unix time by which the engine of a lost tail was gone."""

    def feed(self, number: int, event: Event) -> list[Violation]:
        """Audit one event; returns the findings that are new."""
        auditor = self.auditor
        from_workers: list[Violation] = []
        if 0 <= self.workers.next_step <= auditor.ledger.step and type(event) in AFTER_PLANNING:
            from_workers = self._feed_worker_steps()
        findings = self._feed_in_window(event, number) if self._bounded else auditor.feed(event, number)
        if from_workers:
            findings = from_workers + findings
        if self.live_events.enabled:
            self.live_events.feed(event)
        try:
            handler = METRICS_HANDLERS.get(type(event)) if self._with_metrics else None
            if handler is not None:
                handler(self.metrics, event, auditor.ledger.living)
            if self._times_steps and (observe := STEP_HANDLERS.get(type(event))) is not None:
                observe(self.step_times, event)
            if findings and self._bounded:
                self._in_window.update(dict.fromkeys((v.request for v in findings if v.request), False))
            if auditor.ledger.closed:
                self._add_closed(event)
        except Exception:
            auditor.note_failure(event)
            auditor.ledger.closed.clear()
        return findings

    def _feed_in_window(self, event: Event, number: int) -> list[Violation]:
        """Audit one event, and find out whether a loss or failure that it tells of is in the window."""
        ledger = self.auditor.ledger
        before, gaps, failures = ledger.at, ledger.gaps, ledger.hook_failures
        findings = self.auditor.feed(event, number)
        began = self.began_seconds or 0.0
        between = began + before / 1e6, began + event.at / 1e6
        self._losses.place(self.window, ledger.gaps > gaps, *between)
        self._failures.place(self.window, ledger.hook_failures > failures, *between)
        if type(event) is HookFailed and event.removed:
            self._unobserved_from = between[0]
        if type(event) is EngineRaised and self.window.holds(between[1]):
            self._errors |= {error_name(event)} & ledger.engine_errors.keys()
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
        feed = self._feed_in_window if self._bounded else self.auditor.feed
        for event in raised:
            feed(replace(event, at=ledger.at, lost=False), ledger.number)

    def read(self, reader: Reader, lock: AbstractContextManager[object] | None = None) -> None:
        """Audit everything in the journal by now, holding ``lock`` for one batch at a time."""
        for _ in self.batches(reader, lock):
            pass

    def batches(
        self, reader: Reader, lock: AbstractContextManager[object] | None = None
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """Like :meth:`read`, and yields each batch after it was audited, with the findings that are new."""
        feed, hold = self.feed, lock or nullcontext()
        begun = time.time()
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
                self.sums.events += len(batch.events)
                if self.live_events.enabled:
                    findings += self._compare_events()
            yield batch, findings
        if reader.ended:
            with hold:
                self._feed_worker_steps()
                self.workers.close()
                if not reader.stopped and not reader.continues:
                    self.lose_tail()
        if self.live_events.enabled:
            with hold:
                self._compare_events(at_end=True, ended=reader.ended)
        self.read_seconds = begun  # events written since then may have been missed

    def _compare_events(self, *, at_end: bool = False, ended: bool = False) -> list[Violation]:
        """Compare the recorded KV events with the cache up to now; returns the findings that are new."""
        engine, ledger = self.engine, self.auditor.ledger
        if engine is None:
            return []
        read_to = ledger.read_to
        self.live_events.advance(
            engine,
            read_to,
            time.time(),
            self.metrics.kv_events,
            at_end=at_end,
            ended=read_to if ended else None,
        )
        found = self.live_events.comparison.differences()
        return self.auditor.check(
            Entry(ledger.number, step, at, subject, None) for subject, step, at in found
        )

    def _add_closed(self, event: Event | None = None) -> None:
        """Add the accounts that closed with ``event`` to the sums, and drop them from the ledger."""
        closed = self.auditor.ledger.closed
        bounded = self.window.bounded
        for account in closed.values():
            verdict = self._verdict(account)
            kind = (verdict, account.outcome or UNKNOWN)
            if self._with_metrics:
                self.metrics.close(account, verdict, event)
                self.cost_counters.close(account, self.step_times.sample)
            self.auditor.violating.discard(account.request)
            if bounded and not self._add_to_window(account):
                continue
            if account.unknown != BEGAN_BEFORE:
                self.sums.requests[kind] = self.sums.requests.get(kind, 0) + 1
            self._add_account(account)
            for callback in self.on_closed:
                callback(account, verdict)
        closed.clear()

    def _count_violation(self, id: str, at: int, account: Account | None) -> None:
        self.metrics.count_violation(id, at, account)
        for callback in self.on_violation:
            callback(id, at, account)

    def _is_in_window(self, at: int) -> bool:
        return not self._bounded or self.window.holds((self.began_seconds or 0.0) + at / 1e6)

    def _add_to_window(self, account: Account) -> bool:
        """Whether an ended request is in the window; if so, it is added to the window's totals."""
        inside = self.window.has(account, self.began_seconds)
        if inside:
            self.sums.totals.add(account)
        if account.request_id in self._in_window:
            self._in_window[account.request_id] = inside
        return inside

    def _add_account(self, account: Account) -> None:
        """Add one account to the reconciliation, and keep it if the caller asked for it."""
        if self._reconciles:
            self.sums.reconciliation.add(account)
        if self._with_costs:
            self.sums.costs.add(account)
        if account.unknown is not None:
            add_tokens(self.sums.unknown, account.unknown, 1)
        if self._keep or account.lines is not None:
            self.accounts.append(account)

    def _verdict(self, account: Account) -> Verdict:
        if account.request in self.auditor.violating:
            return "violated"
        return "unknown" if account.unknown is not None else "clean"

    def take_accounts(self) -> list[Account]:
        """The accounts kept since the last call, which are then no longer kept here."""
        accounts, self.accounts = self.accounts, []
        return accounts

    def resume(self, window: Window) -> None:
        """Keep the accounts that close from now on, and count those of the ``window`` only.

        For an audit that was restored to read a journal on. The figures of requests that ended before stay.
        """
        self.window, self._bounded, self._keep = window, window.bounded, True
        times = self.step_times
        times.since_seconds, times.until_seconds = window.since, window.until
        if self.engine is not None:
            times.started(self.engine)

    def begin_with(self, sums: WindowSums) -> None:
        """Take the figures of the window's requests that ended earlier, after :meth:`resume`."""
        self.sums = sums.sums
        self._losses, self._failures, self._errors = sums.losses, sums.failures, sums.errors
        self._unobserved_from = sums.unobserved_from
        self._in_window = sums.in_window

    def describe(self, engine: EngineStarted) -> None:
        """Take the engine's description from elsewhere, where no event is read."""
        self.auditor.ledger.engine = engine
        self.auditor.engine = engine_name(engine, self.path)

    @property
    def of_all_times(self) -> bool:
        """Whether it needs events before its window: for metrics, or for requests that are watched."""
        return self._with_metrics or self.auditor.ledger.watch is not None

    def workers_beside(self) -> bool:
        """Whether journals of workers lie beside the engine's journal."""
        return self.workers.beside()

    def lose_tail(self) -> None:
        """Note that the engine is gone and its last events may be missing. Idempotent.

        Requests that are open at the journal's end become unknown; ended ones keep their verdict.
        """
        if not self.lost_tails:
            self.lost_tails = 1
            self._whole_until, self._gone_by = self.auditor.ledger.read_to, gone_by(self.path)
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
            self._add_closed()
        for request in list(ledger.open):
            self.feed(ledger.number, Finished(ledger.at, request, ENGINE_ENDED, -1, -1, -1, -1, -1))
        ledger.forget_steps()

    def absorb(self, other: EngineAudit) -> None:
        """Add the sums of another engine, which has ended, so that its audit can be dropped."""
        self.auditor.absorb(other.auditor)
        self.sums.merge(other.sums)
        self.metrics.merge(other.metrics)
        self.cost_counters.merge(other.cost_counters)
        self.step_times.busy_us += other.step_times.busy_us
        self.lost_tails += other.lost_tails
        self._whole_until = max(self._whole_until, other._whole_until)

    def note_damage(self, reader: Reader, first: int = 0) -> None:
        """Note what ``reader`` found damaged, from the damage number ``first`` on."""
        rotated = self.auditor.ledger.removed_events
        if rotated:
            removed = f"rotation has removed the first {counted(rotated, 'event')}"
            self.notes.append(f"{removed}: the trace begins at {utc(self.created)}")
        self.notes += [str(damage) for damage in reader.damage[first + bool(rotated) :]]

    def note_end(self, reader: Reader, first: int = 0) -> None:
        """The same, and whether the engine still writes."""
        self.note_damage(reader, first)
        if not reader.ended:
            self.notes.append("the engine is still running, this is up to now")
        elif reader.continues:
            self.notes.append("this segment is not the journal's last")

    def forget_sums(self) -> None:
        """Begin all sums anew; what is open stays. Not for an audit with metrics or a bounded window."""
        self.auditor.forget_findings()
        self.auditor.ledger.forget_sums()
        self.sums = EngineSums()
        self.step_times.forget_sums()

    def precede(self, earlier: EngineAudit) -> None:
        """Add the sums of the same journal up to where this audit forgot its own."""
        self.auditor.precede(earlier.auditor)
        self.sums = earlier.sums + self.sums
        self.step_times.precede(earlier.step_times)
        self.notes = [*earlier.notes, *self.notes]
        self.accounts = [*earlier.accounts, *self.accounts]

    def finish(self) -> None:
        """Add the requests that are still open to the reconciliation, as they stand; no event follows."""
        for account in self.open():
            self._add_account(account)

    def open(self) -> list[Account]:
        """The accounts that are still open, as they stand; none if the window has an end.

        None either if the engine was gone before the window began.
        """
        ledger, window = self.auditor.ledger, self.window
        inside = window.until is None and window.touches(ledger.read_to, self.open_until)
        accounts = list(ledger.open.values()) if inside else []
        for account in accounts:
            if account.request_id in self._in_window:
                self._in_window[account.request_id] = True
        return accounts

    @property
    def open_until(self) -> float:
        """Unix time up to which a request that is open at the end of the trace may have run."""
        if self.lost_tails:
            return self._gone_by
        ledger = self.auditor.ledger
        return math.inf if ledger.stopped is None else ledger.read_to

    def totals(self) -> Totals:
        """Sums over all requests, open ones included."""
        if not self.window.bounded:
            return self.auditor.ledger.totals()
        totals = self.sums.totals.copy()
        for account in self.open():
            totals.add(account)
        return totals

    def step_model(self) -> StepModel:
        """The model of step time, fitted to the steps so far."""
        return fit(self.step_times.sample)

    def costs(self, model: StepModel) -> Costs:
        """Lost work and loads, in seconds by ``model``."""
        return priced(self.sums.costs, model, self.step_times.busy_us, self.connector)

    @property
    def connector(self) -> str:
        """The engine's connector; "none" if it has none."""
        return str((self.engine and self.engine.configuration.get("connector")) or "none")

    @property
    def last_at(self) -> int:
        """Time of the last event, in microseconds since the engine started."""
        return self.auditor.ledger.at

    @property
    def violations(self) -> list[Violation]:
        """Findings, drifts included, in the requests of the window.

        A finding that concerns no single request, or stands for all, belongs to each window in which it was
        seen.
        """
        if not self.window.bounded:
            return self.auditor.violations
        self.open()
        return [
            violation
            for violation, inside in self.auditor.placed_violations()
            if (inside if of_engine(violation) else self._in_window.get(violation.request or "", False))
        ]

    @property
    def verdict(self) -> Verdict:
        """``violated`` for a violation in the window, else ``unknown`` if there are doubts."""
        if not self.window.bounded:
            violated = self.auditor.verdict == "violated"
        else:
            violated = any(verdict == "violated" for verdict, _ in self.sums.requests)
            violated |= any(violation.severity == "violation" for violation in self.violations)
        return "violated" if violated else "unknown" if self.doubts else "clean"

    @property
    def doubts(self) -> list[str]:
        """Why the verdict can't be clean. What went wrong counts for each window that may include it."""
        unknown = self.totals().doubtful_requests
        if self.window.bounded:
            unobserved = self._unobserved_from < math.inf
            unobserved &= self.window.touches(self._unobserved_from, math.inf)
            failures = self._failures.count(self.window) or int(unobserved)
            doubts = self.auditor.doubts_with(
                unknown, self._losses.count(self.window), failures, sorted(self._errors)
            )
        else:
            doubts = self.auditor.doubts_with(unknown)
        return [*doubts, *self._tail_doubts()]

    def _tail_doubts(self) -> list[str]:
        """Up to when the trace is whole, if what may be missing after that can be in the window."""
        if not self.lost_tails or not self.window.touches(self._whole_until, self._gone_by):
            return []
        if self.lost_tails > 1:
            return [f"{self.lost_tails} engines did not end in good order: their last events may be missing"]
        return [
            "the engine did not end in good order, or the journal's last segments were removed: "
            f"the trace is whole up to {utc(self._whole_until)}"
        ]

    @property
    def closed(self) -> Totals:
        """Totals of the requests that have ended."""
        return self.sums.totals if self.window.bounded else self.auditor.ledger.ended

    @property
    def began_seconds(self) -> float | None:
        """Unix time from which the journal's times count; None if no engine was seen to start."""
        return None if self.engine is None else self.engine.began_seconds

    @property
    def all_notes(self) -> list[str]:
        """How the journal was read, why the verdict can't be clean, and why requests are unknown."""
        unknown = dict(self.sums.unknown)
        before = unknown.pop(BEGAN_BEFORE, 0)
        began = f"{counted(before, 'request')} began before the first kept segment, no figure includes them"
        left_out = [began] if before else []
        most_first = sorted(unknown.items(), key=lambda row: (-row[1], row[0]))
        reasons = [f"in {requests} of them: {reason}" for reason, requests in most_first]
        return [*self.notes, *left_out, *self.doubts, *reasons]

    @property
    def engine(self) -> EngineStarted | None:
        """How the engine described itself when it started."""
        return self.auditor.ledger.engine

    @property
    def random_suffixes(self) -> bool:
        """Whether the engine's release appends random digits to ids; of an unknown engine, yes."""
        from ..client_ids import has_random_suffix
        from ..release_semantics import release

        return self.engine is None or has_random_suffix(release(self.engine.version))

    @property
    def created(self) -> float:
        """Unix time since which the sums count: the engine's start, or that of the oldest segment left."""
        return self.engine.wall_seconds if self.engine else 0.0

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
        return meanings(self.engine.version, v0=self.engine.adapter.startswith("v0"))

    @property
    def name(self) -> str:
        """The engine's name in findings and labels."""
        return self.auditor.engine or journal_name(self.path)


def of_engine(violation: Violation) -> bool:
    """Whether a finding concerns no single request, or its first request stands for all."""
    return violation.request is None or is_once(violation.id)


def counted(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _started(batch: Batch) -> EngineStarted | None:
    return next((event for event in batch.events if isinstance(event, EngineStarted)), None)
