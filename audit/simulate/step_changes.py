"""Step times with one more feature: how many requests joined the step, or left it since the step before.

Steps whose requests changed take longer than unchanged ones with the same tokens, because the engine prepares
their batch anew. What a token costs is not changed by that, so the model of costs does without; a simulation
adds up all steps, and does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .. import events as ev
from ..analysis import step_model
from ..analysis.step_times import STEP_HANDLERS as OF_WORK
from ..analysis.step_times import StepSample, StepTimes, Work

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
