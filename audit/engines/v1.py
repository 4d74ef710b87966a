"""vLLM v1, releases 0.32 and 0.33: what each hook sees, and the events it makes of it.

``HOOKS`` and the observers named there are all that is known of these releases. Line-level facts
of upstream stand beside the code that relies on them, by the names of
``vllm/v1/core/sched/scheduler.py``.

Order of events in one step: preemptions and rollbacks as they happen, then admissions, the load
plan, look-up statistics, then the step. For an output: load failures, the output, the figures
reported, then what ended because of it.

Cost follows what changed. A step equal to the one before is one dict comparison here; nothing
walks the running requests but a step that differs, and the census.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvledger.audit import events as ev
from kvledger.audit.engines.admissions import AdmissionObserver
from kvledger.audit.hooks import Hook


class V1Observer(AdmissionObserver):
    """Watches one v1 scheduler."""

    NAME: ClassVar[str] = "v1-0.32"
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
        ),
        Hook("", "_update_waiting_for_remote_kv", (("request",),), "wait_ends", "remote_wait_ended"),
        Hook(
            "",
            "reset_prefix_cache",
            (("reset_running_requests", "reset_connector"),),
            "reset_begins",
            "cache_reset",
        ),
        Hook("", "_handle_stopped_request", (("request",),), "stop_begins", "turn_stopped"),
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
        ),
        Hook("connector", "get_num_new_matched_tokens", (), after="matched", optional=True),
        Hook("connector", "update_state_after_alloc", (), after="promised", optional=True),
        Hook("connector", "build_connector_meta", (), after="load_planned", optional=True),
    )

    def __init__(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, *args, **kwargs)
        # Since 0.33 the count is lowered by drafts accepted beyond a stop.
        self._trims = hasattr(scheduler, "_drain_deferred_loads")
        self._draining: set[str] = set()
        self._load_failures: set[str] = set()
        self._gone: list[str] = []
        self._output: tuple[Any, list[int]] | None = None
        self._output_at = 0
        self._resetting = False

    # --- arrivals and look-ups ------------------------------------------------------------------------

    def request_added(self, _: None, __: None, request: Any) -> None:
        request_id = request.request_id
        if request_id in self.log.ids or request_id not in self.scheduler.requests:
            return  # a session's next chunk, or its end
        self._unreported.add(request_id)
        self.log.emit(
            ev.RequestAdded(
                at=self.log.now(),
                request=self.log.intern(request_id),
                request_id=request_id,
                prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                priority=request.priority,
                pooling=request.pooling_params is not None,
                resumable=request.resumable,
            )
        )

    # --- a step -------------------------------------------------------------------------------------

    def schedule_begins(self, *_: Any, **__: Any) -> None:
        self._step += 1
        self._resetting = False
        self.step_begins()

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        tokens = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        self.log.undelivered += bool(tokens)
        if self._attempts:
            self._admit(tokens)
        if not tokens:
            return
        self.log.scheduled(self._step, tokens, drafts, self.scheduler.requests)

    # --- an output ------------------------------------------------------------------------------------

    def output_arrives(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Before the engine takes it: stop handling trims the token lists in place."""
        lengths = list(map(len, model_runner_output.sampled_token_ids))
        ignored: list[str] = []
        if self._draining:
            scheduled = scheduler_output.num_scheduled_tokens
            for request_id in list(self._draining):
                request = self.scheduler.requests.get(request_id)
                if request is None or request.num_stale_output_tokens <= 0:
                    self._draining.discard(request_id)
                elif request_id in scheduled and request.drop_stale_output:
                    ignored.append(request_id)
        self._load_failures = set()
        self.log.held = []
        self._output = model_runner_output, lengths
        self._output_at = self.log.now()
        return lengths, ignored

    def output_taken(self, before: Any, result: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        held, self.log.held, self._output = self.log.held, None, None
        tokens = scheduler_output.num_scheduled_tokens
        self.log.undelivered -= bool(tokens)
        if tokens and before is not None:
            lengths, ignored = before
            skipped = [*ignored, *self._load_failures.intersection(tokens)]
            self.log.delivered(self._output_at, lengths, model_runner_output, skipped)
            if self._unreported:
                self._report(result, model_runner_output, lengths)
        for event in held or ():
            self.log.emit(event)
        for request_id in self._gone:
            self._forget(request_id)
        self._gone = []
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and transfers.finished_recving:
            self._loads_finished(transfers.finished_recving)
        self._at_rest()

    def _report(self, result: Any, output: Any, lengths: list[int]) -> None:
        """The figures the engine hands its front end, once a request.

        They come with its first output; the youngest stand last.
        """
        index = output.req_id_to_index
        due = len([r for r in self._unreported if r in index and (not lengths or lengths[index[r]])])
        reports: list[ev.Reported] = []
        for outputs in result.values() if due else ():
            for told in reversed(outputs.outputs):
                figures = told.prefill_stats
                if figures is None or told.request_id not in self.log.ids:
                    continue
                self._unreported.discard(told.request_id)
                reports.append(
                    ev.Reported(
                        self._output_at,
                        self.log.ids[told.request_id],
                        figures.num_prompt_tokens,
                        figures.num_local_cached_tokens,
                        figures.num_external_cached_tokens,
                        figures.num_computed_tokens,
                        figures.num_cached_tokens,
                    )
                )
                due -= 1
                if due <= 0:
                    break
        for report in reversed(reports):
            self.log.emit(report)

    # --- external loads -------------------------------------------------------------------------------

    def load_failure_begins(self, *_: Any, **__: Any) -> dict[str, int]:
        return {
            request_id: request.num_computed_tokens for request_id, request in self.scheduler.requests.items()
        }

    def load_failed(self, before: dict[str, int] | None, result: set[str], failed: set[Any], *_: Any) -> None:
        self._load_failures |= result
        for request_id, tokens in (before or {}).items():
            request = self.scheduler.requests[request_id]
            computed = request.num_computed_tokens
            if computed != tokens and request_id in self.log.ids:
                waiting = request.status.name == "WAITING_FOR_REMOTE_KVS"
                self.log.emit(
                    ev.LoadFailed(self.log.now(), self.log.ids[request_id], tokens, computed, waiting)
                )

    def _loads_finished(self, request_ids: Any) -> None:
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None and request_id in self.log.ids:
                self.log.emit(
                    ev.LoadFinished(self.log.now(), self.log.ids[request_id], request.num_computed_tokens)
                )

    def wait_ends(self, request: Any) -> tuple[int, bool]:
        failed = request.request_id in self.scheduler.failed_recving_kv_req_ids
        return request.num_computed_tokens, failed

    def remote_wait_ended(self, before: tuple[int, bool] | None, _: None, request: Any) -> None:
        if before is None:
            return
        tokens, failed = before
        computed = request.num_computed_tokens
        if failed and tokens == 0:
            cause = "released"
        elif computed != tokens:
            cause = "replay" if self.scheduler.prefix_replay_tokens else "full_hit"
        else:
            return
        number = self.log.ids[request.request_id]
        self.log.emit(ev.RolledBack(self.log.now(), number, cause, tokens, computed))

    # --- preemption, sessions, the end -------------------------------------------------------------------

    def preemption_begins(self, request: Any, *_: Any, **__: Any) -> tuple[int, int, int]:
        return (
            request.num_computed_tokens,
            request.num_in_flight_tokens,
            request.num_output_placeholders,
        )

    def preempted(
        self, before: tuple[int, int, int] | None, _: None, request: Any, *__: Any, **___: Any
    ) -> None:
        if before is None:
            return
        request_id = request.request_id
        if before[1]:
            self._draining.add(request_id)
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.log.emit(
            ev.Preempted(
                at=self.log.now(),
                request=self.log.ids[request_id],
                step=self._step,
                cause="reset" if self._resetting else "blocks",
                before_tokens=before[0],
                in_flight_tokens=before[1],
                placeholder_tokens=before[2],
                computed_tokens=request.num_computed_tokens,
                held_blocks=sum(len(m.req_to_blocks.get(request_id, ())) for m in managers),
                delivered=not request.drop_stale_output,
            )
        )

    def reset_begins(self, *_: Any, **__: Any) -> None:
        self._resetting = True

    def cache_reset(
        self,
        _: None,
        result: bool,
        reset_running_requests: bool = False,
        *__: Any,
        **___: Any,
    ) -> None:
        self._resetting = False
        self.log.emit(ev.CacheReset(self.log.now(), bool(result), bool(reset_running_requests)))

    def stop_begins(self, request: Any) -> int:
        # A queued chunk is taken up inside; the rollback has to be told before it.
        if request.resumable and request.streaming_queue:
            self._turn_ends(request, request.num_computed_tokens)
        return int(request.num_computed_tokens)

    def turn_stopped(self, before: int | None, finished: bool, request: Any) -> None:
        if before is None or finished or request.status.name != "WAITING_FOR_STREAMING_REQ":
            return
        self._turn_ends(request, before)

    def _turn_ends(self, request: Any, before: int) -> None:
        before = self._past_stop(request, before)
        if request.num_in_flight_tokens:
            self._draining.add(request.request_id)
        frontier = before - request.num_output_placeholders
        if request.status.name == "WAITING_FOR_STREAMING_REQ":
            frontier = request.num_computed_tokens
        number = self.log.ids[request.request_id]
        self.log.emit(ev.RolledBack(self.log.now(), number, "session", before, frontier))

    def session_extended(self, _: None, __: None, session: Any, *___: Any) -> None:
        self.log.emit(
            ev.Extended(
                self.log.now(),
                self.log.ids[session.request_id],
                session.num_prompt_tokens,
                session.num_computed_tokens,
            )
        )

    def finished(self, request: Any, *_: Any, **__: Any) -> None:
        request_id = request.request_id
        number = self.log.ids.get(request_id)
        if number is None or request_id in self._gone:
            return
        failed = self._failed_attempts.pop(request_id, None)
        if failed is not None:
            self.log.emit(failed)
        if not request.resumable:
            self._past_stop(request, request.num_computed_tokens)
        self.log.emit(
            ev.Finished(
                at=self.log.now(),
                request=number,
                reason=_reason(request.status),
                computed_tokens=request.num_computed_tokens,
                in_flight_tokens=request.num_in_flight_tokens,
                placeholder_tokens=request.num_output_placeholders,
                sequence_tokens=request.num_tokens,
                output_tokens=request.num_output_tokens,
            )
        )
        if self.log.held is None:
            self._forget(request_id)
        else:  # its last output has not been told yet
            self._gone.append(request_id)

    def _past_stop(self, request: Any, computed: int) -> int:
        """The count before 0.33 took off the drafts accepted beyond a stop; told as a rollback."""
        if self._output is None or not self._trims or request.request_id in self._draining:
            return computed
        output, lengths = self._output
        index = output.req_id_to_index.get(request.request_id)
        if index is None or not lengths:
            return computed
        trimmed = lengths[index] - len(output.sampled_token_ids[index])
        if trimmed > 0:
            number, at = self.log.ids[request.request_id], self._output_at
            self.log.emit(ev.RolledBack(at, number, "past_stop", computed + trimmed, computed))
        return computed

    def _forget(self, request_id: str) -> None:
        self.log.forget(request_id)
        for known in (self._unreported, self._lived, self._draining):
            known.discard(request_id)


def _reason(status: Any) -> str:
    """``stopped`` for ``RequestStatus.FINISHED_STOPPED``."""
    return str(status.name).removeprefix("FINISHED_").lower()
