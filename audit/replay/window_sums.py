"""Figures of the requests that ended before a replay began, for an audit that goes on from there."""

from __future__ import annotations

import math

import msgspec

from ..analysis.reconciliation import Reconciliation
from ..figures.totals import Totals
from .windows import LossesInWindow


class WindowSums(msgspec.Struct):
    """What an :class:`~.engine_audit.EngineAudit` adds up for a window.

    ``errors``: exceptions of the engine; ``unobserved_from``: Unix time from which it ran without being
    observed; ``in_window``: for each request with a finding, whether it ended in the window.
    """

    totals: Totals = msgspec.field(default_factory=Totals)
    requests: dict[tuple[str, str], int] = {}
    unknown: dict[str, int] = {}
    reconciliation: Reconciliation = msgspec.field(default_factory=Reconciliation)
    losses: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    failures: LossesInWindow = msgspec.field(default_factory=LossesInWindow)
    errors: set[str] = set()
    unobserved_from: float = math.inf
    in_window: dict[str, bool] = {}
