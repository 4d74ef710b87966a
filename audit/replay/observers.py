"""The observers that callers add to an audit: kept accounts, reconciliation, costs, step times, metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..analysis.costs import CostCounters, CostTally
from ..analysis.source_differences import Reconciliation
from ..analysis.step_model import StepModel, fit
from ..analysis.step_times import (
    FAR,
    LOAD_HANDLERS,
    STEP_HANDLERS,
    StepLimits,
    StepLimitState,
    StepSample,
    StepSums,
    StepTimes,
)
from ..analysis.store_return import STORE_EVENTS, LoadsByTier, StoreContents
from ..analysis.trace_reader import TRACE_EVENTS
from ..analysis.turns import LiveTurnState, TurnCounts
from ..checks.auditor import Verdict
from ..events import Admitted, Event, Gap, Repeated, Stepped
from ..ledger.account import Account
from ..ledger.blocks.contents import CONTENT_EVENTS
from .engine_audit import EngineAudit, Handlers, Judged, Observer
from .metrics_state import METRICS_HANDLERS, MetricsState

LIVE_SAMPLE = 1024
"""Observations kept of an engine that is followed, since a checkpoint holds them."""


class KeptAccounts(Observer):
    """Keeps every account, or those of the requests that the audit watches, in the order they closed.

    Memory grows until the caller takes them.
    """

    kind = list
    sums: list[Account]

    def add(self, account: Account) -> None:
        """Keep it, as it stands."""
        if account.lines is not None or self.audit.auditor.ledger.watch is None:
            self.sums.append(account)

    def take(self) -> list[Account]:
        """The accounts kept since the last call, which are then no longer kept here."""
        accounts, self.sums = self.sums, []
        return accounts

    @property
    def saved(self) -> None:
        """Nothing: accounts are taken before an audit is saved."""
        assert not self.sums, "an audit that keeps accounts is unbounded and has no checkpoint"

    @saved.setter
    def saved(self, value: None) -> None:
        pass


class Reconciled(Observer):
    """Reconciles settled, planned and engine-reported tokens."""

    kind = Reconciliation
    sums: Reconciliation

    def add(self, account: Account) -> None:
        """Reconcile one request."""
        self.sums.add(account)


class Lost(Observer):
    """Adds up lost work and loads, in tokens."""

    kind = CostTally
    sums: CostTally

    def add(self, account: Account) -> None:
        """Add one request."""
        self.sums.add(account)


class Stored(Observer):
    """Adds up loads by tier, and follows what the connector stored and loaded, which :attr:`store` has."""

    kind = LoadsByTier
    sums: LoadsByTier

    def __init__(self, audit: EngineAudit) -> None:
        self.store = StoreContents()
        """The contents of the store."""
        self._contents = audit.contents
        super().__init__(audit)

    def handlers(self) -> Handlers:
        """What is stored, loaded and cached."""
        return dict.fromkeys((*STORE_EVENTS, *CONTENT_EVENTS), self._read)

    def _read(self, event: Event) -> None:
        self.store.feed(event, self._contents.read(event))

    def add(self, account: Account) -> None:
        """Add one request."""
        self.sums.add(account)


class Steps(Observer):
    """Observes how long steps took; engine time counts in the window, the model takes all steps."""

    def __init__(self, audit: Judged, most: int | None = None) -> None:
        self._most = most
        """The most observations that are kept; None: the usual number."""
        since, until = audit.window.since, audit.window.until
        self.times = StepTimes(
            since_us=0 if since is None else round(since * 1e6),
            until_us=FAR if until is None else round(until * 1e6),
        )
        """The steps in flight, and what was observed."""
        super().__init__(audit)

    @property
    def sums(self) -> StepSums:
        """What was observed."""
        return self.times.sums

    @sums.setter
    def sums(self, sums: StepSums) -> None:
        self.times.sums = sums

    def new_sums(self) -> StepSums:
        """Of no step."""
        return StepSums() if self._most is None else StepSums(StepSample(most=self._most))

    def handlers(self) -> Handlers:
        """The events of steps."""
        return {kind: partial(handle, self.times) for kind, handle in STEP_HANDLERS.items()}

    @property
    def saved(self) -> StepTimes:
        """The steps in flight too. The window and what is wanted by the minute are the next reader's."""
        return self.times

    @saved.setter
    def saved(self, saved: StepTimes) -> None:
        saved.since_us, saved.until_us = self.times.since_us, self.times.until_us
        saved.by_minute = self.times.by_minute
        self.times = saved

    @property
    def model(self) -> StepModel:
        """The model of step time, fitted to the steps so far."""
        return fit(self.sums.sample)


class LiveSteps(Steps):
    """The same, with a sample that fits into a checkpoint."""

    def __init__(self, audit: Judged) -> None:
        super().__init__(audit, LIVE_SAMPLE)


class LiveCosts(Observer):
    """Seconds of lost work and loads while requests end, by the model of the audit's steps."""

    kind = CostCounters
    sums: CostCounters

    def __init__(self, audit: EngineAudit) -> None:
        super().__init__(audit)
        self._steps = audit.of(LiveSteps)
        """Times the steps of the engine."""

    def close(self, account: Account, verdict: Verdict) -> None:
        """Add a request that has ended."""
        self.sums.close(account, self._steps.sums.sample)


class LiveTurns(Observer):
    """Counts the turns of sessions, of engines whose blocks are recorded."""

    kind = TurnCounts

    def __init__(self, audit: EngineAudit) -> None:
        self._state = LiveTurnState()
        """What was read, and the counts."""
        self._audit = audit
        super().__init__(audit)

    @property
    def sums(self) -> TurnCounts:
        """The counts."""
        return self._state.sums

    @sums.setter
    def sums(self, sums: TurnCounts) -> None:
        self._state.sums = sums

    def handlers(self) -> Handlers:
        """The events of blocks and requests."""
        return dict.fromkeys(TRACE_EVENTS, self._read)

    def _read(self, event: Event) -> None:
        self._state.feed(event, self._audit.contents.read(event))

    def end(self) -> None:
        """Forget the blocks of the engine."""
        self._state.end()

    @property
    def saved(self) -> LiveTurnState:
        """What was read, too."""
        return self._state

    @saved.setter
    def saved(self, saved: LiveTurnState) -> None:
        self._state = saved


class LiveLimits(Observer):
    """Counts the steps of the last hour by what kept them from admitting more."""

    kind = StepLimits

    def __init__(self, audit: EngineAudit) -> None:
        self._state = StepLimitState()
        """The counts, and the requests that wait for a load."""
        super().__init__(audit)

    @property
    def sums(self) -> StepLimits:
        """The counts."""
        return self._state.sums

    @sums.setter
    def sums(self, sums: StepLimits) -> None:
        self._state.sums = sums

    def handlers(self) -> Handlers:
        """The events of steps and loads."""
        handlers: dict[type[Event], Callable[[Any], object]] = {
            kind: partial(handle, self._state) for kind, handle in LOAD_HANDLERS.items()
        }
        return {**handlers, Stepped: lambda event: self._step(event, 1), Repeated: self._repeat}

    def _repeat(self, event: Repeated) -> None:
        self._step(event, event.times)

    def _step(self, event: Event, steps: int) -> None:
        ledger = self.audit.auditor.ledger
        if ledger.clock is not None:
            self._state.step(ledger.clock + event.at / 1e6, ledger.queue, steps)

    @property
    def saved(self) -> StepLimitState:
        """The requests that wait, too."""
        return self._state

    @saved.setter
    def saved(self, saved: StepLimitState) -> None:
        self._state = saved


class Metrics(Observer):
    """Counts what metrics need beyond the totals."""

    kind = MetricsState
    sums: MetricsState

    def __init__(self, audit: EngineAudit) -> None:
        super().__init__(audit)
        self._audit = audit
        """The audit, for the event with which an account closes."""

    def handlers(self) -> Handlers:
        """The rare events that metrics count."""
        handlers: dict[type[Event], Callable[[Any], object]] = dict.fromkeys(CONTENT_EVENTS, self._use_blocks)
        handlers |= {kind: partial(handle, self.sums) for kind, handle in METRICS_HANDLERS.items()}
        return {**handlers, Admitted: self._admit, Gap: self._lose}

    def _use_blocks(self, event: Event) -> None:
        self.sums.use_blocks(event, self._audit.contents.read(event))

    def _lose(self, event: Gap) -> None:
        self.sums.gap(event)
        self._use_blocks(event)

    def _admit(self, event: Admitted) -> None:
        account = self._audit.auditor.ledger.living.get(event.request)
        if account is not None:
            self.sums.admit(event, account)

    def close(self, account: Account, verdict: Verdict) -> None:
        """Add a request that has ended."""
        self.sums.close(account, verdict, self._audit.event)

    def violated(self, id: str, at: int, account: Account | None) -> None:
        """Count a violation."""
        self.sums.count_violation(id, at, account)


def taken(audit: EngineAudit) -> list[Account]:
    """The accounts that an audit has kept since the last call; none if :class:`KeptAccounts` keeps none."""
    kept = audit.observer(KeptAccounts)
    return [] if kept is None else kept.take()
