"""What the requests of an engine add up to, and what an audit of a window begins with."""

from __future__ import annotations

import math

import msgspec

from ..analysis.costs import CostTally
from ..analysis.reconciliation import Reconciliation
from ..figures.sums import Sums
from ..figures.totals import Totals
from .windows import LossesInWindow


class EngineSums(Sums):
    """Sums of requests that ended, of one engine or of several that ran one after the other."""

    totals: Totals = msgspec.field(default_factory=Totals)
    """Figures of the requests that ended in a bounded window; the ledger has those of all requests."""
    requests: dict[tuple[str, str], int] = {}
    """The number of requests, by verdict and outcome."""
    unknown: dict[str, int] = {}
    """The number of requests whose account is unknown, by the reason."""
    reconciliation: Reconciliation = msgspec.field(default_factory=Reconciliation)
    """Settled, planned and engine-reported tokens, and why they differ."""
    costs: CostTally = msgspec.field(default_factory=CostTally)
    """Lost work and loads, if the audit counts them."""
    events: int = 0
    """How many events were read."""


class WindowSums(msgspec.Struct):
    """What an :class:`~.engine_audit.EngineAudit` of a window begins with, that goes on from a saved one.

    ``errors``: exceptions of the engine; ``unobserved_from``: Unix time from which it ran without being
    observed; ``in_window``: for each request with a finding, whether it ended in the window.
    """

    sums: EngineSums = msgspec.field(default_factory=EngineSums)
    losses: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    failures: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    errors: set[str] = set()
    unobserved_from: float = math.inf
    in_window: dict[str, bool] = {}
