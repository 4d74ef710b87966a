"""What a run led to, recorded or simulated: its totals, and the figures of each request.

Both sides are counted by the ledger at level ``tokens``, so that a figure means the same on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from .. import causes
from .. import events as ev
from ..analysis import step_model
from ..analysis.step_times import STEP_HANDLERS as OF_WORK
from ..analysis.step_times import StepSample, StepTimes, Work
from ..figures.declared import FIGURES
from ..figures.figure import MICROSECONDS
from ..figures.totals import Totals
from ..ledger.account import Account
from ..ledger.blocks.ledger import BlockLedger
from ..ledger.ledger import Ledger

# --- Step times with one more feature: how many requests joined the step, or left it since the step
# before.
#
# Steps whose requests changed take longer than unchanged ones with the same tokens, because the engine
# prepares their batch anew. What a token costs is not changed by that, so the model of costs does without;
# a simulation adds up all steps, and does not.

FEATURES = (*step_model.FEATURES, "changed_requests")
"""The features of a step."""


class StepChanges(StepTimes):
    """Observes the steps of one engine, and how many requests of each were not in the step before."""

    changes: StepSample = msgspec.field(default_factory=StepSample)
    """Observations: steps, the features, microseconds."""
    changed: list[int] = []
    """Changed requests of each pending step."""
    carried: int = 0
    """Changed requests of the delivered steps that the next observation includes."""
    anew: bool = False
    """The next step lists every request."""

    def snapshot(self, event: ev.Snapshot) -> None:
        """See the base."""
        super().snapshot(event)
        self.changed = [0] * len(self.pending)
        self.carried, self.anew = 0, True

    def stepped(self, event: ev.Stepped) -> None:
        """See the base."""
        joined = sum(request not in self.requests for request in ev.numbers(event.changed)[::4])
        super().stepped(event)
        if not self.lost:
            self.changed.append(0 if self.anew else joined + len(ev.numbers(event.dropped)))
            self.anew = False

    def repeat(self, event: ev.Repeated) -> None:
        """See the base."""
        depth = len(self.pending)
        super().repeat(event)
        self.carried += sum(self.changed[: event.times])
        self.changed = [*self.changed[event.times :], *[0] * min(event.times, depth)][: len(self.pending)]

    def _deliver(self, at: int) -> None:
        if not (self.lost or self.skip) and self.pending and self.changed:
            self.carried += self.changed.pop(0)
        super()._deliver(at)
        self.carried = 0

    def _observe(self, begin: int, end: int, work: Work) -> None:
        if end > begin:
            whole = self.repeated + work if self.repeated_at >= 0 else work
            self.changes.add(end, *whole, self.carried, end - begin)
        super()._observe(begin, end, work)


STEP_HANDLERS: dict[type[ev.Event], Callable[[StepChanges, Any], None]] = {
    **OF_WORK,
    ev.Snapshot: StepChanges.snapshot,
    ev.Stepped: StepChanges.stepped,
    ev.Repeated: StepChanges.repeat,
}
"""The method for each type of event."""


NOT_SIMULATED = (
    *("sampled_misses", "suspect_outputs", "older_hits", "older_loads", "older_prompt"),
    *("promised_by_tier", "loaded_by_tier", "voided_by_tier", "loaded_again_by_tier"),
    *("encoder_computed", "encoder_cached"),
)
"""Figures that a simulation has no part in: samples by a secret of the process, weights, tiers, encoders."""

COMPARED = tuple(
    figure
    for figure in FIGURES
    if figure.unit != MICROSECONDS
    and figure.name not in NOT_SIMULATED
    and not figure.name.startswith("reported_")
    and figure.name not in ("requests", "reports", "first_tokens")
)
"""The figures by which a recorded and a simulated request are compared, in tokens and preemptions."""

QUEUED = list(causes.FIRST_TOKEN).index(causes.QUEUED)


class RequestRow(msgspec.Struct, array_like=True):
    """One request. Times are microseconds; -1: there is none. ``values`` are those of :data:`COMPARED`."""

    number: int
    added_at: int
    outcome: str
    first_token_us: int
    queued_us: int
    output_us: int
    later_tokens: int
    values: list[Any]


class Run(msgspec.Struct):
    """A whole run. ``steps``: how many scheduled tokens; ``busy_us``: how long they took. ``sample``: timed
    steps. ``idle_at``: when the last event was."""

    totals: Totals
    steps: int
    busy_us: int
    sample: StepSample
    rows: list[RequestRow]
    began_at: int = 0
    idle_at: int = 0
    waiting: list[int] = []
    """How many requests waited when one twentieth, two twentieths, ... of all had come."""
    error: str = ""
    """The exception that ended it."""


class Counting:
    """Counts the events of one engine. ``number_of``: the recorded number of an account's request.

    ``since`` and ``until``: only requests that came then are counted, in microseconds.
    """

    def __init__(self, *, by_name: bool = False, since: int = 0, until: int = 1 << 62) -> None:
        self.ledger = Ledger(keep_closed=True)
        """Posts the events."""
        self.times = StepChanges()
        """Times the steps."""
        self.rows: list[RequestRow] = []
        """The requests that have ended."""
        self.totals = Totals()
        """Sums over them."""
        self._by_name = by_name
        """Whether the recorded number is the request's name."""
        self._window = since, until
        """When counted requests came."""
        self._began_at = -1
        """When the first counted request came."""

    def feed(self, events: Iterable[ev.Event]) -> None:
        """Count more events."""
        apply, times, steps = self.ledger.apply, self.times, STEP_HANDLERS
        closed = self.ledger.closed
        for event in events:
            kind = type(event)
            if kind in BlockLedger.EVENTS or kind is ev.PoolCalls:
                continue
            if kind is ev.EngineStarted:
                event = msgspec.structs.replace(event, level="tokens")
            apply(event)
            handle = steps.get(kind)
            if handle is not None:
                handle(times, event)
            if closed:
                for account in closed.values():
                    self._add(account)
                closed.clear()

    def _add(self, account: Account) -> None:
        if not self._window[0] <= account.added_at < self._window[1]:
            return
        if self._began_at < 0:
            self._began_at = account.added_at
        self.totals.add(account)
        first, later = account.first_token, account.output_time
        self.rows.append(
            RequestRow(
                int(account.request_id) if self._by_name else account.request,
                account.added_at,
                account.outcome,
                -1 if first is None else sum(first),
                -1 if first is None else first[QUEUED],
                -1 if later is None else sum(later),
                account.later_tokens,
                [figure.read(account) for figure in COMPARED],
            )
        )

    def run(self) -> Run:
        """What was counted, with open requests as they stand."""
        for account in self.ledger.open.values():
            self._add(account)
        return Run(
            self.totals,
            self.ledger.scheduled_steps,
            self.times.sums.busy_us,
            self.times.changes,
            sorted(self.rows, key=lambda row: row.number),
            max(0, self._began_at),
            self.ledger.at,
        )


class Difference(msgspec.Struct, frozen=True):
    """A figure of one request that differs."""

    request: int
    figure: str
    recorded: Any
    simulated: Any


def differences(recorded: Run, simulated: Run) -> list[Difference]:
    """Every figure that differs, request by request."""
    others = {row.number: row for row in simulated.rows}
    found = []
    for row in recorded.rows:
        other = others.pop(row.number, None)
        if other is None:
            found.append(Difference(row.number, "request", row.outcome, None))
            continue
        if row.outcome != other.outcome:
            found.append(Difference(row.number, "outcome", row.outcome, other.outcome))
        for figure, one, another in zip(COMPARED, row.values, other.values, strict=True):
            if one != another:
                found.append(Difference(row.number, figure.name, one, another))
    found += [Difference(number, "request", None, row.outcome) for number, row in sorted(others.items())]
    return found
