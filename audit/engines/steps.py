"""One step of the engine: requests that arrive, ``schedule``, and ``update_from_output``.

Order of events in one step: preemptions and rollbacks as they happen, then admissions, planned loads and
saves, lookup statistics, then the step. For an output: load failures, the output, the figures that the engine
reports, then the requests that ended because of it.

Cost follows what changed. An unchanged step costs a comparison of two lists; only a changed step and the
census visit every running request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .. import events as ev
from ..text import cut_id, cut_priority
from .admissions import Admissions
from .encoder_watch import EncoderWatch
from .ends_of_lives import Lives
from .engine_counts import EngineCounts
from .loads import Loads
from .observer import Observer
from .prompt_reports import PromptReports

TRACEPARENT = re.compile(r"[0-9a-f]{2}(-[0-9a-f]{32})(-[0-9a-f]{16})(-[0-9a-f]{2})")

AT_REST_STEPS = 8
"""Every so many steps the observer checks whether a snapshot or a census is due."""


class Steps:
    """Handles the arrivals, the scheduled steps and the outputs of one engine."""

    def __init__(
        self,
        observer: Observer,
        counts: EngineCounts,
        reports: PromptReports,
        admissions: Admissions,
        loads: Loads,
        lives: Lives,
    ) -> None:
        self._observer = observer
        """Has the step number, and the pools, connector and worker if they are observed."""
        self._scheduler = observer.scheduler
        self._log = observer.log
        self._counts = counts
        self._reports = reports
        self._admissions = admissions
        self._loads = loads
        self._lives = lives
        self.encoder: EncoderWatch | None = None
        """Observes the encoder cache; None without one."""
        diffuses = getattr(self._scheduler.vllm_config, "diffusion_config", None) is not None
        self._one_at_most = getattr(self._scheduler, "num_spec_tokens", -1) == 0 and not diffuses
        """Without drafts and diffusion a request samples at most one token a step."""

    def request_added(self, _: None, __: None, request: Any) -> None:
        """``add_request`` returned. Emits ``RequestAdded``, but not for a session's next chunk or its end.

        The end of a session may leave its request, which has ended, to a connector that still keeps blocks.
        """
        log, request_id = self._log, request.request_id
        if request_id in log.ids or self._scheduler.requests.get(request_id) is not request:
            return
        self._reports.expect(request)
        self._admissions.queue.arrived = True
        adapter = getattr(request, "lora_request", None)
        if adapter is not None:
            self._observer.weights.adapter_used(adapter)
        resumable, headers = getattr(request, "resumable", False), getattr(request, "trace_headers", None)
        if resumable:
            self.expect_sessions()
        log.emit(
            ev.RequestAdded(
                log.now(),
                log.intern(request_id),
                cut_id(request_id),
                request.num_prompt_tokens,
                request.max_tokens,
                cut_priority(request.priority),
                request.pooling_params is not None,
                resumable,
                _traceparent(headers) if headers else None,
                self._counts.transferred(request),
                self._observer.isolation(request),
                self._observer.labels.of(request),
                *self._counts.handover(request),
                not getattr(request, "skip_reading_prefix_cache", False),
            )
        )

    def expect_sessions(self) -> None:
        """A request may be extended by further chunks: observe the end of turns from now on."""
        if self._observer.hooks is not None:
            self._observer.hooks.activate("_handle_stopped_request")

    # --- a step -------------------------------------------------------------------------------------

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        """``schedule`` returned. Emits the step's admissions, then ``Stepped`` if the step changed."""
        tokens, log, observer = output.num_scheduled_tokens, self._log, self._observer
        # The requests that ran before are listed here too, in the order of ``tokens``.
        request_ids = getattr(output.scheduled_cached_reqs, "req_ids", [])
        total = output.total_num_scheduled_tokens
        same = request_ids == log.request_ids
        unchanged = (
            same and log.steady and not log.unchanged_step and total == len(request_ids) == len(tokens)
        )
        pools = observer.pools
        if pools is not None:
            pools.scheduled(output, log.request_nos if same else None, unchanged=unchanged)
        admissions = self._admissions
        if admissions.attempts:
            admissions.admit(tokens)
        if admissions.planned:
            admissions.emit_planned()
        if admissions.queue.waiting:
            admissions.queue.step_ended(total)
        if tokens:
            log.undelivered += 1
            if unchanged:
                log.unchanged_step = observer.step
            else:
                drafts, requests = output.scheduled_spec_decode_tokens, self._scheduler.requests
                step = observer.step
                if drafts or not same or not log.scheduled_singly(step, tokens, total, requests):
                    log.scheduled(step, tokens, drafts, requests, request_ids)
        elif not (log.undelivered or self._counts.passes_over(self._scheduler)):
            observer.idle_calls += 1
        if pools is not None:
            pools.admitted(output)
        if self.encoder is not None:
            self.encoder.scheduled(output)
        observer.in_step = False

    # --- an output ------------------------------------------------------------------------------------

    def output_arrives(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """``update_from_output`` is called: note the sampled lengths, since the method trims the lists.

        Events are held until the method returns, so that the ends in it come after the output.
        """
        log, lives, sampled = self._log, self._lives, model_runner_output.sampled_token_ids
        if log.undelivered:  # else the hook of the step failed, and it was not counted
            log.undelivered -= bool(scheduler_output.num_scheduled_tokens)
        lives.output = None
        self._observer.in_step = True
        if self._one_at_most and sampled and type(sampled[0]) is list and all(sampled):
            lengths = log.one_each(len(sampled))
        else:
            lengths = list(map(len, sampled))
        stale = lives.stale(scheduler_output.num_scheduled_tokens) if lives.draining else None
        if self._loads.failed:
            self._loads.failed = set()
        log.held = []
        lives.output = log.now(), model_runner_output, lengths
        return stale

    def output_taken(self, stale: Any, result: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        """``update_from_output`` returned.

        Emits ``Delivered`` if the output changed, ``Reported``, what was held, and ``LoadFinished``.
        """
        log, lives, loads, reports = self._log, self._lives, self._loads, self._reports
        held, log.held = log.held, None
        output, lives.output = lives.output, None
        tokens = scheduler_output.num_scheduled_tokens
        if tokens and output is not None:
            at, _, lengths = output
            dropped = lives.dropped(stale) if stale else []
            if loads.failed:
                dropped += loads.failed.intersection(tokens)
            if reports.due:
                reported = reports.read(at, result, model_runner_output, lengths, len(loads.failed))
                held = reported + (held or [])
            if log.steady and log.unchanged_step and lengths is log.ones and not (dropped or held):
                log.unchanged_step = 0
                log.repeats += 1
            else:
                order, index = model_runner_output.req_ids, model_runner_output.req_id_to_index
                log.delivered(at, lengths, order, index, dropped, held or ())
        elif held:
            log.emit_all(held)
        if not self._one_at_most and scheduler_output.scheduled_spec_decode_tokens:
            self._emit_counted_drafts(result, scheduler_output)
        observer = self._observer
        observer.in_step = False
        if log.pool_calls and observer.pools is not None:
            observer.pools.emit_calls()
        if lives.ended:
            for request_id in lives.ended:
                lives.forget(request_id)
            lives.ended = []
        if observer.connector is not None:
            received = loads.received(model_runner_output)
            if received:
                loads.finished(received)
        if observer.resync or not observer.step % AT_REST_STEPS:
            observer.at_rest()

    def _emit_counted_drafts(self, result: Any, scheduler_output: Any) -> None:
        """Emit ``DraftsCounted`` if the step admitted a request, or its output ended one."""
        if not (self._lives.ended or scheduler_output.scheduled_new_reqs):
            return
        for outputs in result.values():
            counted = getattr(outputs.scheduler_stats, "spec_decoding_stats", None)
            if counted is not None:
                figures = counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens
                self._log.emit(ev.DraftsCounted(self._log.now(), *figures))


def _traceparent(headers: Mapping[str, str]) -> str | None:
    """The caller's trace context, the only header that is recorded, and only if it is well formed."""
    value = headers.get("traceparent")
    return value if isinstance(value, str) and TRACEPARENT.fullmatch(value) else None
