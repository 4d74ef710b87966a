"""The audit of a journal that is followed: with what metrics need, and the engine's recorded KV events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ..analysis.costs import CostCounters
from ..analysis.source_differences import EngineCounters
from ..analysis.step_times import StepLimits, StepSums
from ..analysis.turns import TurnCounts
from ..checks.registry import Violation
from ..journal.reader import Batch, Reader
from ..ledger.entries import Entry
from .engine_audit import EngineAudit
from .metrics_state import MetricsState
from .observers import LiveCosts, LiveLimits, LiveSteps, LiveTurns, Metrics, Reconciled
from .recorded_events import RecordedEvents


class FollowedAudit(EngineAudit):
    """The audit of one engine that metrics are made of."""

    removed_kept = 0  # as many as the pool needs: a sidecar follows many engines for long

    def __init__(self, path: Path, *, name: str = "") -> None:
        super().__init__(path, (Metrics, LiveSteps, LiveCosts, LiveTurns, LiveLimits, Reconciled), name=name)
        self.series = ""
        """The label of this engine's metrics, if a follower chose it; engines after each other share one."""
        self.engine_counters: EngineCounters | None = None
        """The engine's own counters beside the ledger's figures, if the engine is scraped."""
        self.live_events = RecordedEvents.beside(path)
        """The recorded KV events of this engine, read after :meth:`compare_events`."""
        self.read_seconds = 0.0
        """Unix time at which the journal was last read to its end; 0.0 before the first time."""
        self.checkpoint_seconds = 0.0
        """Unix time at which this audit was last saved in a checkpoint; 0.0 before the first time."""

    @property
    def clock(self) -> float | None:
        """Unix time from which the journal's times count, as far as the journal was read."""
        return self.auditor.ledger.clock

    @property
    def metrics(self) -> MetricsState:
        """What metrics need beyond the totals."""
        return self.of(Metrics).sums

    @property
    def step_times(self) -> StepSums:
        """How long the steps took."""
        return self.of(LiveSteps).sums

    @property
    def cost_counters(self) -> CostCounters:
        """Seconds of lost work and loads."""
        return self.of(LiveCosts).sums

    @property
    def turns(self) -> TurnCounts:
        """The turns of sessions."""
        return self.of(LiveTurns).sums

    @property
    def step_limits(self) -> StepLimits:
        """What kept the steps of the last hour from admitting more."""
        return self.of(LiveLimits).sums

    def compare_events(self) -> None:
        """Compare the engine's recorded KV events with its cache, from the next event on."""
        self.live_events.enabled = True
        self.on_event.append(lambda event: self.live_events.feed(event, self.contents.read(event)))

    def batches(
        self, reader: Reader, lock: AbstractContextManager[object] | None = None
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """Audit everything in the journal by now, and compare recorded KV events with the cache."""
        begun = time.time()
        yield from super().batches(reader, lock)
        with lock or nullcontext():
            self.compared(at_end=True, ended=reader.ended)
        self.read_seconds = begun  # events written since then may have been missed

    def compared(self, *, at_end: bool = False, ended: bool = False) -> list[Violation]:
        """Compare the recorded KV events with the cache up to now; returns the findings that are new."""
        engine, ledger = self.engine, self.auditor.ledger
        if engine is None or not self.live_events.enabled:
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


def settled(audit: FollowedAudit) -> FollowedAudit:
    """The audit of an ended engine with all its sums and findings, without what decides how it would go on.

    The blocks of a pool take more memory than everything else.
    """
    whole = FollowedAudit(audit.path, name=audit.name)
    ledger, before = whole.auditor.ledger, audit.auditor.ledger
    ledger.engine, ledger.clock = before.engine, before.clock
    ledger.at, ledger.stopped = before.at, before.stopped
    whole.sums = audit.sums
    whole.metrics.blocks.pools = {}
    whole.series, whole.engine_counters = audit.series, audit.engine_counters
    whole.read_seconds, whole.checkpoint_seconds = audit.read_seconds, audit.checkpoint_seconds
    return whole


def folded(name: str, audit: FollowedAudit, before: FollowedAudit | None) -> FollowedAudit:
    """One audit for an engine that has ended and those of its name that ended ``before``.

    It has the sums of all, with one finding of each invariant, and no open state. Times count from the start
    of the engine that began first.
    """
    both = [one for one in (before, audit) if one is not None]
    whole = FollowedAudit(Path(name), name=audit.name)
    whole.series = name
    ledger = whole.auditor.ledger
    ledgers = [one.auditor.ledger for one in both if one.engine is not None]
    if ledgers:
        first = min(ledgers, key=lambda one: one.clock)
        ledger.engine, ledger.clock = first.engine, first.clock
        ledger.at = round((max(one.read_to for one in ledgers) - first.clock) * 1e6)
    ledger.stopped = audit.auditor.ledger.stopped
    sums = whole.sums
    for one in both:
        later = 0.0 if one.began_seconds is None else one.began_seconds - (whole.began_seconds or 0.0)
        added = one.sums
        added.findings = added.findings.by_invariant(round(later * 1e6))
        sums += added
    whole.sums = sums
    return whole
