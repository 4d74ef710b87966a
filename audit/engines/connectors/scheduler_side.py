"""The live connector, scheduler side, beyond what each admission shows of it.

Here: what it counts itself, what it keeps of requests that have ended, and what the children of a
``MultiConnector`` answer. What it matches, promises and plans is observed with the admissions
(``admissions``); how a plan is read, by the readers (``plans``).

Nothing here runs in a step of decodes: a connector's own count is asked for when a life ends and at a
census.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import events as ev
from ...hooks import Hook, Hooks
from ..event_log import StepLog
from ..readers import reader_of
from .metadata_reader import MetadataReader

TABLE: tuple[Hook, ...] = (
    Hook("", "request_finished", (), after="request_finished", optional=True),
    Hook("", "request_finished_all_groups", (), after="request_finished", optional=True),
)
CHILD_TABLE: tuple[Hook, ...] = (Hook("", "get_num_new_matched_tokens", (), after="matched", optional=True),)

Failed = Callable[[str, Exception, bool], None]


class ConnectorWatch:
    """Watches one scheduler's connector, and its children where it has any."""

    def __init__(self, scheduler: Any, log: StepLog, step: Callable[[], int], failed: Failed) -> None:
        self.reader: MetadataReader | None = reader_of(scheduler.connector)
        self._scheduler = scheduler
        self._log = log
        self._step = step
        self._tracks = self.reader is not None and "tracker" in self.reader.READS
        self._recent = _steps_ahead(scheduler) * (1 + max(0, int(getattr(scheduler, "num_spec_tokens", 0))))
        self._ended: dict[str, int] = {}
        self._delayed: dict[str, int] = {}
        self._hooks = [Hooks(TABLE, scheduler.connector, self, failed)]
        children = getattr(scheduler.connector, "_connectors", ())
        for place, child in enumerate(children if isinstance(children, list | tuple) else ()):
            watch = _Child(f"{place} {type(child).__name__}", log, step)
            self._hooks.append(Hooks(CHILD_TABLE, child, watch, failed))

    def remove(self) -> None:
        """Give the connector back."""
        for hooks in self._hooks:
            hooks.remove()

    def ends(self, request_id: str) -> None:
        """A request ends: the connector may be about to keep its blocks."""
        number = self._log.ids.get(request_id)
        if number is not None:
            self._ended = {request_id: number}

    def track(self, request: Any, computed_tokens: int, waits: bool) -> None:
        """State what the connector counts of ``request``. While a load holds it back, that is nothing."""
        if not self._tracks or waits or computed_tokens <= 0:
            return
        assert self.reader is not None
        tokens = min(computed_tokens, request.num_tokens)
        tracking = self.reader.tracking(request, tokens - self._recent)
        number = self._log.ids.get(request.request_id)
        if tracking is None or number is None:
            return
        self._log.emit(
            ev.Tracked(
                at=self._log.now(),
                request=number,
                step=self._step(),
                tracked_tokens=tracking.tracked,
                saved_tokens=tracking.saved,
                due_tokens=tracking.due,
                computed_tokens=tokens,
                recent_tokens=self._recent,
            )
        )

    def request_finished(self, _: None, result: Any, request: Any, block_ids: Any) -> None:
        request_id = request.request_id
        number = self._ended.pop(request_id, None)
        if number is None or not result[0]:
            return
        self._delayed[request_id] = number
        groups = [block_ids] if block_ids and isinstance(block_ids[0], int) else block_ids
        blocks = sum(map(len, groups))
        self._log.emit(ev.FreeDelayed(self._log.now(), number, self._step(), request_id, blocks))

    def at_rest(self) -> None:
        """Say which of the requests whose blocks were kept are gone from the scheduler."""
        for request_id in [name for name in self._delayed if name not in self._scheduler.requests]:
            number = self._delayed.pop(request_id)
            self._log.emit(ev.FreeCompleted(self._log.now(), number, self._step()))


def _steps_ahead(scheduler: Any) -> int:
    """So many steps may have been planned before the output of the first of them was known."""
    config = scheduler.vllm_config
    asynchronous = bool(getattr(config.scheduler_config, "async_scheduling", False))
    return int(getattr(config.parallel_config, "pipeline_parallel_size", 1)) + asynchronous


class _Child:
    """What one child answered last, by request."""

    def __init__(self, name: str, log: StepLog, step: Callable[[], int]) -> None:
        self._name = name
        self._log = log
        self._step = step
        self._last: dict[str, tuple[Any, ...]] = {}

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        number = self._log.ids.get(request.request_id)
        said = (num_computed_tokens, *result)
        if number is None or self._last.get(request.request_id) == said:
            return
        if len(self._last) > len(self._log.ids):
            self._last = {name: last for name, last in self._last.items() if name in self._log.ids}
        self._last[request.request_id] = said
        step, now = self._step(), self._log.now()
        self._log.emit(ev.ChildMatched(now, number, step, self._name, num_computed_tokens, *result))
