"""vLLM v1, releases 0.27 to 0.33: what each hook sees of a step, and the events it makes of it.

``HOOKS`` and the observers named there are all that is known of these releases; an older family is a
subclass with its own table and the observers that differ. Line-level facts
of upstream stand beside the code that relies on them, by the names of
``vllm/v1/core/sched/scheduler.py``.

Order of events in one step: preemptions and rollbacks as they happen, then admissions, the load
plan, look-up statistics, then the step. For an output: load failures, the output, the figures
reported, then what ended because of it.

Cost follows what changed. A step equal to the one before is a comparison of two lists; nothing
walks the running requests but a step that differs, and the census.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from .. import events as ev
from ..hooks import Hook
from .lives import LifeObserver

TRACEPARENT = re.compile(r"[0-9a-f]{2}(-[0-9a-f]{32})(-[0-9a-f]{16})(-[0-9a-f]{2})")

AT_REST_STEPS = 8
"""So often it is asked whether a snapshot or a census is due."""


class V1Observer(LifeObserver):
    """Watches one v1 scheduler."""

    NAME: ClassVar[str] = "v1-0.27"
    OUTPUT: ClassVar[tuple[str, ...]] = ("prefill_stats",)
    HOOKS: ClassVar[tuple[Hook, ...]] = (
        Hook("", "schedule", (("throttle_prefills",),), "schedule_begins", "scheduled"),
        Hook(
            "",
            "update_from_output",
            (("scheduler_output", "model_runner_output"),),
            "output_arrives",
            "output_taken",
            boundary=True,
        ),
        Hook("", "add_request", (("request",),), after="request_added"),
        Hook(
            "",
            "_preempt_request",
            (("request", "timestamp", "drop_stale_output"),),
            "preemption_begins",
            "preempted",
        ),
        Hook("", "_free_request", (("request", "delay_free_blocks"),), before="finished"),
        Hook(
            "",
            "_handle_invalid_blocks",
            (("invalid_block_ids", "num_scheduled_tokens"),),
            "load_failure_begins",
            "load_failed",
        ),
        Hook(
            "",
            "_handle_failed_recving",
            (("failed_req_ids",),),
            "load_failure_begins",
            "load_failed",
            optional=True,  # since 0.30
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
        Hook(
            "",
            "_update_request_as_session",
            (("session", "update"),),
            after="session_extended",
        ),
        Hook("", "shutdown", ((),), before="shutting_down"),
        Hook(
            "kv_cache_manager",
            "get_computed_blocks",
            (("request",), ("request", "max_cache_hit_length")),
            after="looked_up",
        ),
        Hook(
            "kv_cache_manager",
            "get_computed_blocks_for_connector",
            (("request",), ("request", "max_cache_hit_length")),
            after="looked_up",
        ),
        Hook(
            "kv_cache_manager",
            "record_prefix_cache_stats",
            (("request", "num_hits"),),
            after="local_hit_used",
            asleep=True,  # see ``AdmissionObserver.start``
        ),
        Hook("connector", "get_num_new_matched_tokens", (), after="matched", optional=True),
        Hook("connector", "update_state_after_alloc", (), after="promised", optional=True),
        Hook("connector", "build_connector_meta", (), after="load_planned", optional=True),
    )

    def __init__(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, *args, **kwargs)
        # Without drafts (a diffusion model's canvas is one too) a request samples one token or none.
        diffuses = getattr(scheduler.vllm_config, "diffusion_config", None) is not None
        self._one_at_most = getattr(scheduler, "num_spec_tokens", -1) == 0 and not diffuses

    def counts(self, request: Any) -> tuple[int, int, int]:
        return request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders

    # --- arrivals and look-ups ------------------------------------------------------------------------

    def request_added(self, _: None, __: None, request: Any) -> None:
        log, request_id = self.log, request.request_id
        if request_id in log.ids or request_id not in self.scheduler.requests:
            return  # a session's next chunk, or its end
        prompt_tokens = request.num_prompt_tokens
        if self.unreported(request):
            self._unreported[request_id] = prompt_tokens
        resumable, headers = getattr(request, "resumable", False), getattr(request, "trace_headers", None)
        if resumable:
            self.sessions_come()
        log.emit(
            ev.RequestAdded(
                log.now(),
                log.intern(request_id),
                request_id,
                prompt_tokens,
                request.max_tokens,
                request.priority,
                request.pooling_params is not None,
                resumable,
                _traceparent(headers) if headers else None,
                self.transferred(request),
            )
        )

    # --- a step -------------------------------------------------------------------------------------

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        tokens, log = output.num_scheduled_tokens, self.log
        # Who ran before has this list too, in the order of ``tokens``.
        names = getattr(output.scheduled_cached_reqs, "req_ids", [])
        total = output.total_num_scheduled_tokens
        same = names == log.names
        again = same and log.quiet and not log.same_step and total == len(names) == len(tokens)
        if self.pools is not None:
            self.pools.scheduled(output, log.numbers if same else None, again=again)
        if self._attempts:
            self._admit(tokens)
        if self._planned:
            self.tell_planned()
        if tokens:
            log.undelivered += 1
            if again:
                log.same_step = self._step
            else:
                drafts, requests = output.scheduled_spec_decode_tokens, self.scheduler.requests
                if drafts or not same or not log.scheduled_singly(self._step, tokens, total, requests):
                    log.scheduled(self._step, tokens, drafts, requests, names)
        if self.pools is not None:
            self.pools.admitted(output)

    # --- an output ------------------------------------------------------------------------------------

    def output_arrives(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Before the engine takes it: stop handling trims the token lists in place."""
        log, sampled, self._output = self.log, model_runner_output.sampled_token_ids, None
        if self._one_at_most and sampled and type(sampled[0]) is list and all(sampled):
            lengths = log.one_each(len(sampled))
        else:
            lengths = list(map(len, sampled))
        stale = self._stale(scheduler_output.num_scheduled_tokens) if self._draining else None
        if self._load_failures:
            self._load_failures = set()
        log.held = []
        self._output = log.now(), model_runner_output, lengths
        return stale

    def output_taken(self, stale: Any, result: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        log = self.log
        held, log.held = log.held, None
        output, self._output = self._output, None
        tokens = scheduler_output.num_scheduled_tokens
        log.undelivered -= bool(tokens)
        if tokens and output is not None:
            at, _, lengths = output
            ignored = self._ignored(stale) if stale else []
            if self._load_failures:
                ignored += self._load_failures.intersection(tokens)
            if self._unreported:
                held = self._reports(at, result, model_runner_output, lengths) + (held or [])
            if log.quiet and log.same_step and lengths is log.ones and not (ignored or held):
                log.same_step = 0
                log.repeats += 1
            else:
                order, index = model_runner_output.req_ids, model_runner_output.req_id_to_index
                log.delivered(at, lengths, order, index, ignored, held or ())
        elif held:
            log.emit_all(held)
        if log.calls and self.pools is not None:
            self.pools.tell_calls()
        if self._gone:
            for request_id in self._gone:
                self._forget(request_id)
            self._gone = []
        if self.connector is not None:
            received = self.received(model_runner_output)
            if received:
                self._loads_finished(received)
        if self._resync or not self._step % AT_REST_STEPS:
            self._at_rest()

    def _reports(self, at: int, result: Any, output: Any, lengths: list[int]) -> list[ev.Event]:
        """The figures the engine hands its front end, once a request.

        They come with its first output; the youngest stand last.
        """
        due = self._due(output.req_id_to_index, lengths)
        reports: list[ev.Event] = []
        for outputs in result.values() if due else ():
            for told in reversed(outputs.outputs):
                if told.request_id not in self._unreported:
                    continue
                figures = self._figures(told)
                if figures is None:
                    continue
                del self._unreported[told.request_id]
                reports.append(ev.Reported(at, self.log.ids[told.request_id], *figures))
                due -= 1
                if due <= 0:
                    break
        reports.reverse()
        return reports

    def _due(self, index: dict[str, int], lengths: list[int]) -> int:
        """At most so many requests have their figures with this output."""
        due = 0
        for request_id in self._unreported:
            if request_id in index and (not lengths or lengths[index[request_id]]):
                due += 1
        return due

    def _figures(self, told: Any) -> tuple[int, int, int, int, int] | None:
        """Prompt, local, external, computed and cached tokens, where ``told`` carries them."""
        figures = told.prefill_stats
        if figures is None:
            return None
        return (
            figures.num_prompt_tokens,
            figures.num_local_cached_tokens,
            figures.num_external_cached_tokens,
            figures.num_computed_tokens,
            figures.num_cached_tokens,
        )


def _traceparent(headers: Mapping[str, str]) -> str | None:
    """The caller's trace context, of all its headers this one alone, and only if it is well formed."""
    said = headers.get("traceparent")
    return said if isinstance(said, str) and TRACEPARENT.fullmatch(said) else None
