"""vLLM v1, releases 0.12 to 0.15: where they differ from 0.16.

The front end has no prompt tokens by source: nothing is reported. Statistics of the connector count a
request when it begins to run, and its whole sequence as asked for: no look-up is counted by
admission.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .. import events as ev
from ..hooks import Hook
from .v1_017 import V1Observer017


class V1Observer012(V1Observer017):
    """Watches one scheduler of these releases."""

    NAME: ClassVar[str] = "v1-0.12"
    FIGURES: ClassVar[str] = "none"
    COUNTED: ClassVar[tuple[str, ...]] = ()
    OUTPUT: ClassVar[tuple[str, ...]] = ()
    HOOKS: ClassVar[tuple[Hook, ...]] = (
        Hook("", "schedule", ((),), "schedule_begins", "scheduled"),
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
        Hook("", "_free_request", (("request",), ("request", "delay_free_blocks")), before="finished"),
        Hook(
            "",
            "_handle_invalid_blocks",
            (("invalid_block_ids",),),
            "load_failure_begins",
            "load_failed",
        ),
        Hook("", "_update_waiting_for_remote_kv", (("request",),), "wait_ends", "remote_wait_ended"),
        Hook(
            "",
            "reset_prefix_cache",
            (("reset_running_requests",), ("reset_running_requests", "reset_connector")),
            "reset_begins",
            "cache_reset",
        ),
        # Sessions came with 0.15.
        Hook(
            "",
            "_handle_stopped_request",
            (("request",),),
            "stop_begins",
            "turn_stopped",
            optional=True,
            asleep=True,
        ),
        Hook(
            "",
            "_update_request_as_session",
            (("session", "update"),),
            after="session_extended",
            optional=True,
        ),
        Hook("", "shutdown", ((),), before="shutting_down"),
        Hook("kv_cache_manager", "get_computed_blocks", (("request",),), after="looked_up"),
        Hook("connector", "get_num_new_matched_tokens", (), after="matched", optional=True),
        Hook("connector", "update_state_after_alloc", (), after="promised", optional=True),
        Hook("connector", "build_connector_meta", (), after="load_planned", optional=True),
    )

    def unreported(self, request: Any) -> bool:
        return False

    def _counters(self) -> tuple[int, ...]:
        return 0, 0, 0, 0, 0, 0

    def _lookups_counted(self, now: int, admitted: bool) -> ev.LookupsCounted | None:
        return super()._lookups_counted(now, admitted) if admitted else None
