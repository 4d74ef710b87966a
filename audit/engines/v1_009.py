"""vLLM v1, releases 0.9.2 to 0.11: where they differ from 0.12.

``schedule()`` preempts by itself: the one seam is the freeing of the blocks of a request that is still
running. What it did then is looked at when the step is over, and told before the step's admissions.
Before 0.11 the engine does not count preemptions: they are counted here. Nor can a load fail.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ..hooks import Hook
from .v1_012 import V1Observer012


class _Victim(NamedTuple):
    """A request that was running when its blocks were freed; the engine's counts before."""

    request: Any
    before: tuple[int, int, int]
    held_blocks: int


class V1Observer009(V1Observer012):
    """Watches one scheduler of these releases."""

    NAME: ClassVar[str] = "v1-0.9"
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
        Hook("", "_free_request", (("request",),), before="finished"),
        Hook(
            "",
            "_handle_invalid_blocks",
            (("invalid_block_ids",),),
            "load_failure_begins",
            "load_failed",
            optional=True,  # since 0.11
        ),
        Hook("", "_update_waiting_for_remote_kv", (("request",),), "wait_ends", "remote_wait_ended"),
        Hook("", "reset_prefix_cache", ((),), "reset_begins", "cache_reset"),
        Hook("", "shutdown", ((),), before="shutting_down"),
        Hook("kv_cache_manager", "get_computed_blocks", (("request",),), after="looked_up"),
        Hook("kv_cache_manager", "free", (("request",),), "free_begins", "freed"),
        Hook("connector", "get_num_new_matched_tokens", (), after="matched", optional=True),
        Hook("connector", "update_state_after_alloc", (), after="promised", optional=True),
        Hook("connector", "build_connector_meta", (), after="load_planned", optional=True),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._victims: list[_Victim] = []
        self._preemptions: dict[str, int] = {}

    def preemptions(self, request: Any) -> int:
        own = self._preemptions.get(request.request_id, 0)
        return int(getattr(request, "num_preemptions", own))

    def free_begins(self, request: Any) -> tuple[int, int, int] | None:
        return self.preemption_begins(request) if request.status.name == "RUNNING" else None

    def freed(self, before: tuple[int, int, int] | None, _: None, request: Any) -> None:
        if before is None:
            return
        request_id = request.request_id
        self._preemptions[request_id] = self._preemptions.get(request_id, 0) + 1
        if self.log.undelivered:
            self._draining.add(request_id)
        self._victims.append(_Victim(request, before, self.held_blocks(request)))

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        self._tell_victims()
        super().scheduled(None, output)

    def finished(self, request: Any, *_: Any, **__: Any) -> None:
        self._tell_victims()
        super().finished(request)

    def _tell_victims(self) -> None:
        for victim in self._victims:
            self._tell_preempted(victim.request, victim.before, victim.held_blocks, delivered=True)
        self._victims = []

    def received(self, model_runner_output: Any) -> Any:
        """Nothing is done with it: the scheduler polls."""
        return None

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._preemptions.pop(request_id, None)
