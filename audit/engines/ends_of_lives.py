"""The end of a life or a turn: preemption, a reset of the prefix cache, a session's next chunk, the end.

A life runs from an admission to the next preemption or the end of the request. An output may still be in
flight when a life ends; ``draining`` holds the requests for which that may be so.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import events as ev
from .admissions import Admissions
from .engine_counts import EngineCounts
from .loads import Loads
from .observer import Observer
from .prompt_reports import PromptReports

NO_STEP = -1


class Lives:
    """Handles the ends of lives. Here: 0.27 and later."""

    def __init__(
        self,
        observer: Observer,
        counts: EngineCounts,
        reports: PromptReports,
        admissions: Admissions,
        loads: Loads,
    ) -> None:
        self._observer = observer
        """Has the step number, and the pools, connector and worker if they are observed."""
        self._scheduler = observer.scheduler
        self._log = observer.log
        self._counts = counts
        self._reports = reports
        self._admissions = admissions
        self._loads = loads
        self.draining: set[str] = set()
        """Ids of the requests whose ended life may still get an output."""
        self.ended: list[str] = []
        """Ids of the requests that ended while the scheduler processed the current output."""
        self.output: tuple[int, Any, list[int]] | None = None
        """The output being processed: its time, the model's output, and the tokens sampled a request."""
        self._stopping: int | None = None
        """The computed count of the session for which ``_handle_stopped_request`` runs."""
        self._resetting_in = NO_STEP
        """The step in which ``reset_prefix_cache`` is running."""
        self._trims_drafts: bool = hasattr(self._scheduler, "deferred_loads")
        """Whether the engine subtracts drafts accepted past a stop from the computed count (since 0.33)."""

    # --- preemption -----------------------------------------------------------------------------------

    def preemption_begins(self, request: Any, *_: Any, **__: Any) -> tuple[int, int, int]:
        """``_preempt_request`` is called: note the counts, which it resets."""
        if self._observer.pools is not None:
            self._observer.pools.leaves(request.request_id)
        return (request.num_computed_tokens, *self._counts.of(request)[1:])

    def preempted(
        self, before: tuple[int, int, int] | None, _: None, request: Any, *__: Any, **___: Any
    ) -> None:
        """The request waits again. Emits ``Preempted``."""
        if before is None:
            return
        if before[1]:
            self.draining.add(request.request_id)
        self.emit_preempted(request, before, self.held_blocks(request), not request.drop_stale_output)

    def held_blocks(self, request: Any) -> int:
        """Blocks in the request's tables."""
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(len(manager.req_to_blocks.get(request.request_id, ())) for manager in managers)

    def emit_preempted(
        self, request: Any, before: tuple[int, int, int], held_blocks: int, delivered: bool
    ) -> None:
        """Emit ``Preempted``. ``delivered``: the output in flight still counts."""
        self._track(request, before[0])
        log, step = self._log, self._observer.step
        self._admissions.queue.preempted_in = step
        log.emit(
            ev.Preempted(
                at=log.now(),
                request=log.ids[request.request_id],
                step=step,
                cause="reset" if self._resetting_in == step else "blocks",
                before_tokens=before[0],
                in_flight_tokens=before[1],
                placeholder_tokens=before[2],
                computed_tokens=request.num_computed_tokens,
                held_blocks=held_blocks,
                delivered=delivered,
            )
        )
        log.preempted(request.request_id)

    def stale(self, scheduled: dict[str, int]) -> Any:
        """Requests in the output for ``scheduled`` whose life has ended and whose output will be dropped."""
        dropped: list[str] = []
        for request_id in list(self.draining):
            request = self._scheduler.requests.get(request_id)
            if request is None or request.num_stale_output_tokens <= 0:
                self.draining.discard(request_id)
            elif request_id in scheduled and request.drop_stale_output:
                dropped.append(request_id)
        return dropped

    def dropped(self, stale: Any) -> list[str]:
        """Ids of the requests whose output the engine dropped, once it has processed the output."""
        return list(stale)

    def reset_begins(self, *_: Any, **__: Any) -> None:
        """``reset_prefix_cache`` is called: preemptions from here on are due to the reset."""
        self._resetting_in = self._observer.step

    def cache_reset(
        self, _: None, result: bool, reset_running_requests: bool = False, *__: Any, **___: Any
    ) -> None:
        """``reset_prefix_cache`` returned. Emits ``CacheReset``."""
        self.reset_ended()
        if result and self._admissions.sample is not None:
            self._admissions.sample.reset()
        self._log.emit(ev.CacheReset(self._log.now(), bool(result), bool(reset_running_requests)))

    def reset_ended(self) -> None:
        """``reset_prefix_cache`` has returned or raised."""
        self._resetting_in = NO_STEP

    # --- sessions ---------------------------------------------------------------------------------------

    def stop_begins(self, request: Any) -> None:
        """``_handle_stopped_request`` is called: note the computed count, which it may lower."""
        self._stopping = int(request.num_computed_tokens) if request.resumable else None

    def turn_stopped(self, _: None, __: bool, request: Any) -> None:
        """The session has ended, or waits for its next chunk. Emits ``RolledBack``."""
        self._turn_ends(request)

    def session_extends(self, session: Any, *_: Any) -> int:
        """``_update_request_as_session`` is called: a queued chunk ends the turn at once. Note its length."""
        self._turn_ends(session)
        if self._observer.pools is not None:
            self._observer.pools.tokens_change(session)
        return int(session.num_tokens)

    def _turn_ends(self, request: Any) -> None:
        """Emit ``RolledBack``: from the count at the stop to the one that the engine keeps."""
        before, self._stopping = self._stopping, None
        if before is None:
            return
        before = self._past_stop(request, before)
        if self._counts.of(request)[1] and self._log.undelivered:
            self.draining.add(request.request_id)
        self._loads.emit_rolled_back(request, "session", before, request.num_computed_tokens)

    def session_extended(self, tokens: int | None, _: None, session: Any, *__: Any) -> None:
        """``_update_request_as_session`` appended a chunk to the prompt. Emits ``Extended``."""
        number = self._log.ids[session.request_id]
        if self._observer.pools is not None:
            self._observer.pools.emit_all_calls()  # the chunk may replace tokens for which blocks were cached
        self._reports.extended(session)
        prompt, computed = session.num_prompt_tokens, session.num_computed_tokens
        isolation = self._observer.isolation(session)
        before = -1 if tokens is None else tokens
        self._log.emit(ev.Extended(self._log.now(), number, prompt, computed, isolation, before))

    # --- the end ----------------------------------------------------------------------------------------

    def finished(self, request: Any, *_: Any, **__: Any) -> None:
        """``_free_request`` is called: the request has ended. Emits ``Finished``.

        A request that ends within an output is forgotten after the output's events.
        """
        log, request_id, observer = self._log, request.request_id, self._observer
        number = log.ids.get(request_id)
        if number is None or request_id in self.ended:
            return
        if observer.pools is not None:
            observer.pools.ends(request)
        if self._admissions.sample is not None:
            self._admissions.sample.ended(request)
        failed = self._admissions.failed
        if request_id in failed:
            log.emit(failed.pop(request_id))
        if self._trims_drafts and not getattr(request, "resumable", False):
            self._past_stop(request, request.num_computed_tokens)
        counts = self._counts
        if observer.connector is not None:
            self._track(request, counts.computed(request))
            observer.connector.ends(request_id)
        output = None if log.held is None else self.output
        tokens, outputs = request.num_tokens, request.num_output_tokens
        now, reason = log.now() if output is None else output[0], _reason(request.status._name_)
        computed, in_flight, placeholders = counts.of(request)
        log.emit(ev.Finished(now, number, reason, computed, in_flight, placeholders, tokens, outputs))
        if self.draining:
            self.draining.discard(request_id)
        if output is None:
            self.forget(request_id)
        else:
            self.ended.append(request_id)

    def forget(self, request_id: str) -> None:
        """The engine has dropped the request, so every part forgets it."""
        self._log.forget(request_id)
        self._reports.due.pop(request_id, None)
        self._admissions.admitted_before.discard(request_id)
        self._counts.forget(request_id)

    def _past_stop(self, request: Any, computed: int) -> int:
        """Emit ``RolledBack`` for drafts accepted past a stop, which 0.33 subtracts; return the new count."""
        if self.output is None or not self._trims_drafts or request.request_id in self.draining:
            return computed
        at, output, lengths = self.output
        index = output.req_id_to_index.get(request.request_id)
        if index is None or not lengths:
            return computed
        trimmed = lengths[index] - len(output.sampled_token_ids[index])
        if trimmed > 0:
            number = self._log.ids[request.request_id]
            self._log.emit(ev.RolledBack(at, number, "past_stop", computed + trimmed, computed))
        return computed

    def _track(self, request: Any, computed_tokens: int) -> None:
        """Emit ``Tracked`` if the connector keeps a count of its own for the request."""
        connector = self._observer.connector
        if connector is not None:
            connector.track(request, computed_tokens, self._counts.waits_for_load(request))


@functools.cache
def _reason(status: str) -> str:
    """``stopped`` for ``FINISHED_STOPPED``. Takes the name, since hashing an enum member runs Python code."""
    return status.removeprefix("FINISHED_").lower()
