"""vLLM v1, releases 0.16 to 0.19: where they differ from 0.20.

The figures of a prompt travel with every output: ``num_cached_tokens``, of the first admission that
ran, and ``num_external_computed_tokens``, of the last time the connector was asked, less what failed
to load. The front end makes local, external and computed tokens of them at the first output, by
``PromptTokenStats.update_from_output``: the host's own class is asked here too, so that what is
reported is what the engine counts.

Up to 0.17 asynchronous loads are polled for: :class:`V1Observer017`; from 0.18 not:
:class:`V1Observer018`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..hooks import Hook
from .polling import Polling
from .v1_020 import V1Observer020


class V1Observer018(V1Observer020):
    """Watches one scheduler of 0.18 or 0.19."""

    NAME: ClassVar[str] = "v1-0.18"
    FIGURES: ClassVar[str] = "mixed"
    HAS: ClassVar[tuple[str, ...]] = ("_try_promote_blocked_waiting_request",)
    OUTPUT: ClassVar[tuple[str, ...]] = ("num_cached_tokens", "num_external_computed_tokens")
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
        Hook("", "_free_request", (("request", "delay_free_blocks"),), before="finished"),
        Hook(
            "",
            "_handle_invalid_blocks",
            (("invalid_block_ids",), ("invalid_block_ids", "num_scheduled_tokens")),
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

    def unreported(self, request: Any) -> bool:
        return bool(request.num_output_tokens == 0)

    def _due(self, index: dict[str, int], lengths: list[int]) -> int:
        # A request that ends because its load failed is reported too.
        return super()._due(index, lengths) + len(self._load_failures)

    def _figures(self, told: Any) -> tuple[int, int, int, int, int] | None:
        prompt = self._unreported[told.request_id]
        counted = prompt_token_stats()
        counted.update_from_output(told.num_cached_tokens, told.num_external_computed_tokens, prompt)
        return (
            prompt,
            counted.local_cache_hit,
            counted.external_kv_transfer,
            counted.computed,
            counted.cached_tokens,
        )


class V1Observer017(Polling, V1Observer018):
    """Watches one scheduler of 0.16 or 0.17."""

    NAME: ClassVar[str] = "v1-0.17"
    HAS: ClassVar[tuple[str, ...]] = ()


def prompt_token_stats() -> Any:
    """The host's own sum of prompts by source, empty."""
    from vllm.v1.metrics.stats import PromptTokenStats

    return PromptTokenStats()
