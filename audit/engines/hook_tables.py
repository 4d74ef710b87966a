"""The methods of a v1 engine that an observer wraps: one table, and how a release amends it.

The table is that of 0.27 and later. A hook's ``before`` and ``after`` name a method of one of the observer's
parts.
"""

from __future__ import annotations

from ..hooks import Hook

V1: tuple[Hook, ...] = (
    Hook("", "schedule", (("throttle_prefills",),), "admissions.schedule_begins", "steps.scheduled"),
    Hook(
        "",
        "update_from_output",
        (("scheduler_output", "model_runner_output"),),
        "steps.output_arrives",
        "steps.output_taken",
        boundary=True,
    ),
    Hook("", "add_request", (("request",),), after="steps.request_added"),
    Hook(
        "",
        "_preempt_request",
        (("request", "timestamp", "drop_stale_output"),),
        "lives.preemption_begins",
        "lives.preempted",
    ),
    Hook("", "_free_request", (("request", "delay_free_blocks"),), before="lives.finished"),
    Hook(
        "",
        "_handle_invalid_blocks",
        (("invalid_block_ids", "num_scheduled_tokens"),),
        "loads.failure_begins",
        "loads.load_failed",
    ),
    Hook(
        "",
        "_handle_failed_recving",
        (("failed_req_ids",),),
        "loads.failure_begins",
        "loads.load_failed",
        optional=True,  # since 0.30
    ),
    Hook("", "_update_waiting_for_remote_kv", (("request",),), "loads.wait_ends", "loads.remote_wait_ended"),
    Hook(
        "",
        "reset_prefix_cache",
        (("reset_running_requests", "reset_connector"),),
        "lives.reset_begins",
        "lives.cache_reset",
    ),
    Hook(
        "",
        "_handle_stopped_request",
        (("request",),),
        "lives.stop_begins",
        "lives.turn_stopped",
        deferred=True,  # see ``Steps.expect_sessions``
    ),
    Hook(
        "",
        "_update_request_as_session",
        (("session", "update"),),
        "lives.session_extends",
        "lives.session_extended",
    ),
    Hook("", "set_pause_state", (("pause_state",),), after="admissions.pause_changed"),
    Hook("", "shutdown", ((),), before="shutting_down"),
    Hook(
        "kv_cache_manager",
        "get_computed_blocks",
        (("request",), ("request", "max_cache_hit_length")),
        after="admissions.looked_up",
    ),
    Hook(
        "kv_cache_manager",
        "get_computed_blocks_for_connector",
        (("request",), ("request", "max_cache_hit_length")),
        after="admissions.looked_up",
    ),
    Hook(
        "kv_cache_manager",
        "record_prefix_cache_stats",
        (("request", "num_hits"),),
        after="admissions.local_hit_used",
        deferred=True,  # see ``Admissions.started``
    ),
    Hook(
        "connector",
        "get_num_new_matched_tokens",
        (),
        "admissions.match_begins",
        "admissions.matched",
        optional=True,
    ),
    Hook("connector", "update_state_after_alloc", (), after="admissions.promised", optional=True),
    Hook(
        "connector",
        "get_external_cache_hit_sources",
        (),
        after="admissions.tiers_reported",
        optional=True,  # since 0.32
    ),
    Hook("connector", "build_connector_meta", (), after="admissions.load_planned", optional=True),
)


def amended(table: tuple[Hook, ...], *hooks: Hook, without: tuple[str, ...] = ()) -> tuple[Hook, ...]:
    """``table`` with ``hooks`` added or in place of those on the same methods, ``without`` these methods."""
    replaced = {(hook.owner, hook.method): hook for hook in hooks}
    kept = [hook for hook in table if hook.method not in without]
    rows = [replaced.pop((hook.owner, hook.method), hook) for hook in kept]
    return (*rows, *replaced.values())


def signature(table: tuple[Hook, ...], method: str, *parameters: tuple[str, ...]) -> Hook:
    """The hook on ``method`` in ``table``, for a release in which the method takes these ``parameters``."""
    (hook,) = (hook for hook in table if hook.method == method)
    return hook._replace(parameters=parameters)
