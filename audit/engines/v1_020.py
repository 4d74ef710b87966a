"""vLLM v1, releases 0.20 to 0.26: where they differ from 0.27.

- A preempted request keeps its placeholders, and what is in flight for it is delivered; only after a
  reset of the cache under running requests is it thrown away, by a flag (0.20) or a number of outputs
  (0.22) that the asynchronous scheduler honours. What was thrown away is seen afterwards: the
  request's output has not grown.
- Before 0.26 the engine does not count tokens in flight, and reports the last admission's hits.
- The look-up's answer is the hit that is used, and look-up statistics count it at once: an attempt
  that leads to no admission too. ``LookupsCounted`` says -1 of them.
- A turn of a session that ends keeps the whole count, placeholders with it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..hooks import Hook
from .observer import Observer
from .v1 import V1Observer


class V1Observer020(V1Observer):
    """Watches one scheduler of these releases."""

    NAME: ClassVar[str] = "v1-0.20"
    FIGURES: ClassVar[str] = "last"
    COUNTED: ClassVar[tuple[str, ...]] = ("external",)
    HOOKS: ClassVar[tuple[Hook, ...]] = (
        Hook("", "schedule", ((), ("throttle_prefills",)), "schedule_begins", "scheduled"),
        Hook(
            "",
            "update_from_output",
            (("scheduler_output", "model_runner_output"),),
            "output_arrives",
            "output_taken",
            boundary=True,
        ),
        Hook("", "add_request", (("request",),), after="request_added"),
        Hook("", "_preempt_request", (("request", "timestamp"),), "preemption_begins", "preempted"),
        Hook("", "_free_request", (("request", "delay_free_blocks"),), before="finished"),
        Hook(
            "",
            "_handle_invalid_blocks",
            (("invalid_block_ids", "num_scheduled_tokens"),),
            "load_failure_begins",
            "load_failed",
        ),
        Hook("", "_update_waiting_for_remote_kv", (("request",),), "wait_ends", "remote_wait_ended"),
        Hook(
            "",
            "reset_prefix_cache",
            (("reset_running_requests", "reset_connector"),),
            "reset_begins",
            "cache_reset",
        ),
        Hook("", "_handle_stopped_request", (("request",),), "stop_begins", "turn_stopped", asleep=True),
        Hook("", "_update_request_as_session", (("session", "update"),), after="session_extended"),
        Hook("", "shutdown", ((),), before="shutting_down"),
        Hook("kv_cache_manager", "get_computed_blocks", (("request",),), after="looked_up"),
        Hook("connector", "get_num_new_matched_tokens", (), after="matched", optional=True),
        Hook("connector", "update_state_after_alloc", (), after="promised", optional=True),
        Hook("connector", "build_connector_meta", (), after="load_planned", optional=True),
    )

    counts = Observer.counts

    def counts_lookups(self, request: Any) -> bool:
        return True

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        attempt = self._attempt(request)
        if attempt.looked_up < 0:  # hybrids with Mamba layers ask the coordinator itself
            attempt.looked_up = attempt.local = num_computed_tokens
        super().matched(None, result, request, num_computed_tokens)

    def preempted(
        self, before: tuple[int, int, int] | None, _: None, request: Any, *__: Any, **___: Any
    ) -> None:
        if before is None:
            return
        if self.log.undelivered:
            self._draining.add(request.request_id)
        delivered = self._resetting_in != self._step
        self._tell_preempted(request, before, self.held_blocks(request), delivered)

    def _stale(self, scheduled: dict[str, int]) -> Any:
        """Requests whose output may be thrown away, each with its output tokens so far."""
        requests = self.scheduler.requests
        known = [requests[name] for name in self._draining if name in scheduled and name in requests]
        return [(request, request.num_output_tokens) for request in known]

    def _ignored(self, stale: Any) -> list[str]:
        ignored = []
        for request, output_tokens in stale:
            if request.num_output_tokens == output_tokens:
                ignored.append(request.request_id)
            else:  # outputs are thrown away in order: no further one will be
                self._draining.discard(request.request_id)
        return ignored

    def _frontier(self, request: Any, before: int) -> int:
        return before


class V1Observer026(V1Observer020):
    """Watches one scheduler of 0.26, whose prompt figures are already those of 0.27."""

    NAME: ClassVar[str] = "v1-0.26"
    FIGURES: ClassVar[str] = "first"
    HAS: ClassVar[tuple[str, ...]] = ("kv_cache_manager.estimate_cached_tokens",)
