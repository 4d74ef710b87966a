"""Begins to observe a scheduler in its first step.

Until then a test may replace the connector and add requests in any state. Nothing is lost: the snapshot at
that point describes every request that waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

SCHEDULE, UPDATE = "schedule", "update_from_output"


class FirstStep:
    """Calls ``observe`` once with a scheduler: before it runs its first ``schedule()``.

    The two methods of a step are replaced on the object itself. So a method that overrides one of them runs
    once, and may call the one below it in any way.
    """

    def __init__(self, scheduler: Any, observe: Callable[[Any], None]) -> None:
        self._scheduler = scheduler
        self._observe: Callable[[Any], None] | None = observe
        """Begins to observe it; None once it was called."""
        self._below = {name: getattr(scheduler, name) for name in (SCHEDULE, UPDATE)}
        """What the replaced methods call: the scheduler's own method, and later the observing wrapper."""
        self._replaced = {name: self._replace(name) for name in self._below}
        """What the scheduler has in place of its methods until its first step."""

    @property
    def missed(self) -> bool:
        """Whether the scheduler took steps, none of them by a call of its own ``schedule()``.

        A test may call the class's method with the scheduler. Releases that count no steps answer False.
        """
        return self._observe is not None and getattr(self._scheduler, "current_step", 0) > 0

    def _replace(self, name: str) -> Callable[..., Any]:
        @functools.wraps(self._below[name])
        def replaced(*args: Any, **kwargs: Any) -> Any:
            observe = self._observe
            if observe is not None and name == SCHEDULE:
                self._observe = None
                self._begin(observe)
            return self._below[name](*args, **kwargs)

        setattr(self._scheduler, name, replaced)
        return replaced

    def _begin(self, observe: Callable[[Any], None]) -> None:
        """Restore the scheduler's methods and observe them.

        A test may have bound ``update_from_output`` before, as ``s.update_from_output(s.schedule(), output)``
        does: what it bound calls the observing wrapper. If it has wrapped ``schedule``, its wrapper stays on
        top, because it is running. If it has wrapped ``update_from_output``, the wrapper is observed with it.
        """
        scheduler, present = self._scheduler, dict(vars(self._scheduler))
        ours = [name for name, method in self._replaced.items() if present.get(name) is method]
        for name in {SCHEDULE, *ours} & present.keys():
            delattr(scheduler, name)
        observe(scheduler)
        for name in {SCHEDULE, *ours}:
            self._below[name] = getattr(scheduler, name)
        if SCHEDULE not in ours and SCHEDULE in present:
            scheduler.schedule = present[SCHEDULE]
