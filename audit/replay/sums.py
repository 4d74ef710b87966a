"""What everything that has ended in an engine adds up to: ``earlier + later``, by one rule.

The engines of one name, a window and a restarted reader all are the state of the last
part with the sum of all parts. Nothing in these sums decides how the next event is audited.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..checks.findings import Findings
from ..figures.sums import Sums
from ..ledger.ledger_state import LedgerSums
from .windows import LossesInWindow


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
    """The sums of each observer (``observer.py``), by the name of its class."""
