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

import time
from typing import Any, ClassVar

from kvledger.audit import events as ev
from kvledger.audit.engines.plans import READERS
from kvledger.audit.engines.steps import Sink, StepLog
from kvledger.audit.hooks import Hook, Hooks

CENSUS_STEPS = 512
CENSUS_SECONDS = 10.0


class _Attempt:
    """One waiting request's look-up in the current step."""

    __slots__ = ("asynchronous", "external", "local", "looked_up", "matched", "queried", "request")

    def __init__(self, request: Any, looked_up: int) -> None:
        self.request = request
        self.looked_up = looked_up
        self.local = looked_up
        self.external = 0
        self.matched: int | None = 0
        self.asynchronous = False
        self.queried = -1


class V1Observer:
    """Watches one scheduler. ``start`` wraps it, ``stop`` gives it back."""

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

    def __init__(self, scheduler: Any, sink: Sink, *, version: str, level: str = "tokens") -> None:
        self.scheduler = scheduler
        self.version = version
        self.level = level
        self.hooks: Hooks | None = None
        self.log = StepLog(sink)
        # Since 0.33 the count is lowered by drafts accepted beyond a stop.
        self._trims = hasattr(scheduler, "_drain_deferred_loads")
        self._step = 0
        self._stopped = False
        # What is under way.
        self._attempts: dict[str, _Attempt] = {}
        self._failed_attempts: dict[str, ev.AdmissionFailed] = {}
        self._planned: list[ev.LoadPlanned] = []
        self._promises: dict[str, tuple[int, list[int]]] = {}
        self._counted = (0, 0, 0, 0, 0, 0)
        self._lived: set[str] = set()
        self._unreported: set[str] = set()
        self._draining: set[str] = set()
        self._load_failures: set[str] = set()
        self._gone: list[str] = []
        self._output: tuple[Any, list[int]] | None = None
        self._output_at = 0
        self._resetting = False
        self._resync = False
        self._census_step = 0
        self._census_at = self.log.now()

    # --- beginning and end ------------------------------------------------------------------------

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` untouched."""
        self.hooks = Hooks(self.HOOKS, self.scheduler, self, self._hook_failed, boundary)
        self._restart()

    def stop(self, reason: str) -> None:
        """Say what is still to be said and give the scheduler back. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self.hooks is not None:
            self.hooks.remove()
        for failed in self._failed_attempts.values():
            self.log.emit(failed)
        self.log.emit(ev.EngineStopped(self.log.now(), reason))

    def shutting_down(self) -> None:
        self.stop("shutdown")
        close = getattr(self.log.sink, "close", None)
        if close is not None:
            close()

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self.log.held = None
        self._resync = True
        self.log.emit(ev.HookFailed(self.log.now(), hook, f"{type(error).__name__}: {error}", removed))
        if removed:  # without it every later figure would be wrong
            self.stop(f"the observer of {hook} kept failing")

    def _restart(self) -> None:
        """Tell the reader everything that lives, so that it may begin here."""
        self._resync = False
        now = self.log.now()
        rows = [
            self._snapshot_row(request)
            for request in self.scheduler.requests.values()
            if not request.is_finished()
        ]
        started = ev.EngineStarted(
            at=now,
            wall_seconds=time.time(),
            engine="vllm",
            version=self.version,
            adapter=self.NAME,
            level=self.level,
            process_id=_process_id(),
            configuration=_configuration(self.scheduler),
        )
        self.log.restart(started, ev.Snapshot(now, self._step, rows, self.log.undelivered))
        self._census_step, self._census_at = self._step, now

    def _snapshot_row(self, request: Any) -> ev.SnapshotRow:
        request_id = request.request_id
        number = self.log.intern(request_id)
        if request.prefill_stats is not None:
            self._unreported.add(request_id)
        return ev.SnapshotRow(
            request=number,
            request_id=request_id,
            prompt_tokens=request.num_prompt_tokens,
            fresh=(
                request_id not in self._lived
                and request.num_computed_tokens == 0
                and request.num_preemptions == 0
                and request.num_output_tokens == 0
            ),
            computed_tokens=request.num_computed_tokens,
            in_flight_tokens=request.num_in_flight_tokens,
            placeholder_tokens=request.num_output_placeholders,
            sequence_tokens=request.num_tokens,
            preemptions=request.num_preemptions,
        )

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

    def looked_up(self, _: None, result: Any, request: Any, *__: Any, **___: Any) -> None:
        attempt = self._attempts.get(request.request_id)
        if attempt is None:
            self._attempts[request.request_id] = _Attempt(request, result[1])
        else:  # asked again within the step, after the connector's answer
            attempt.looked_up = attempt.local = result[1]

    def local_hit_used(self, _: None, __: None, request: Any, num_hits: int) -> None:
        attempt = self._attempts.get(request.request_id)
        if attempt is not None:
            attempt.local = num_hits

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        attempt = self._attempts.get(request.request_id)
        if attempt is not None:
            attempt.queried = num_computed_tokens
            attempt.matched, attempt.asynchronous = result

    def promised(self, _: None, __: None, request: Any, blocks: Any, num_external_tokens: int) -> None:
        attempt = self._attempts.get(request.request_id)
        if attempt is None:
            return  # its promise was made in an earlier step
        attempt.external = num_external_tokens
        if num_external_tokens > 0:
            groups = blocks.get_block_ids()
            self._promises[request.request_id] = (
                num_external_tokens,
                list(groups[0]) if len(groups) == 1 else [],
            )

    # --- a step -------------------------------------------------------------------------------------

    def schedule_begins(self, *_: Any, **__: Any) -> None:
        self._step += 1
        self._resetting = False
        if self._attempts:
            self._attempts = {}
        if self._promises:
            self._promises = {}
        self._counted = self._counters()

    def load_planned(self, _: None, plan: Any, scheduler_output: Any) -> None:
        if not self._promises:
            return
        reader = READERS.get(type(self.scheduler.connector).__name__)
        if reader is None:
            return
        size = self.scheduler.block_size
        filled = reader(plan, size)
        for request_id, (tokens, blocks) in self._promises.items():
            attempt = self._attempts[request_id]
            if attempt.asynchronous or not blocks:
                continue
            local = attempt.local
            promise = blocks[local // size : -(-(local + tokens) // size)]
            missing = [block for block in promise if block not in filled]
            covered = promise.index(missing[0]) * size if missing else tokens
            self._planned.append(
                ev.LoadPlanned(
                    self.log.now(), self.log.ids[request_id], self._step, min(covered, tokens), missing
                )
            )

    def scheduled(self, _: None, output: Any, *__: Any, **___: Any) -> None:
        tokens = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        self.log.undelivered += bool(tokens)
        if self._attempts:
            self._admit(tokens)
        if not tokens:
            return
        self.log.scheduled(self._step, tokens, drafts, self.scheduler.requests)

    def _admit(self, scheduled: dict[str, int]) -> None:
        """Say what became of this step's look-ups."""
        admitted = False
        for request_id, attempt in self._attempts.items():
            if request_id in scheduled or attempt.request.status.name == "WAITING_FOR_REMOTE_KVS":
                admitted = True
                self._admitted(request_id, attempt, scheduled.get(request_id, 0))
            else:
                self._not_admitted(request_id, attempt)
        for planned in self._planned:
            self.log.emit(planned)
        self._planned = []
        self._count_lookups(admitted)

    def _admitted(self, request_id: str, attempt: _Attempt, scheduled: int) -> None:
        number, request, now = self.log.ids[request_id], attempt.request, self.log.now()
        failed = self._failed_attempts.pop(request_id, None)
        if failed is not None:
            self.log.emit(failed)
        deferred = getattr(self.scheduler, "deferred_loads", {}).get(request_id)
        if deferred is not None:  # 0.33: the connector is told only when the load may start
            attempt.external = deferred[1]
        self.log.emit(ev.LookedUp(now, number, self._step, attempt.looked_up))
        if attempt.queried >= 0:
            self.log.emit(
                ev.Matched(
                    now,
                    number,
                    self._step,
                    attempt.queried,
                    attempt.matched,
                    attempt.asynchronous,
                )
            )
        computed = request.num_computed_tokens - scheduled
        replayed = 0
        if scheduled and self.scheduler.prefix_replay_tokens:
            replayed = max(0, attempt.local + attempt.external - request.replay_start)
            replayed = replayed if request.replay_start else 0
        self.log.emit(
            ev.Admitted(
                at=now,
                request=number,
                step=self._step,
                resumed=request.num_preemptions > 0,
                local_tokens=attempt.local,
                external_tokens=attempt.external,
                asynchronous=not scheduled,
                computed_tokens=computed + replayed,
                counted=self.scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request),
            )
        )
        if replayed:
            self.log.emit(ev.RolledBack(now, number, "replay", computed + replayed, computed))
        self._lived.add(request_id)
        self.log.admitted(request_id, runs=scheduled > 0)

    def _not_admitted(self, request_id: str, attempt: _Attempt) -> None:
        """Equal failed attempts in a row are one event, told when they end."""
        reason = "deferred" if attempt.matched is None else "not_allocated"
        external = attempt.matched or 0
        last = self._failed_attempts.get(request_id)
        attempts = 1
        if last is not None:
            if (
                last.reason == reason
                and last.local_tokens == attempt.looked_up
                and last.external_tokens == external
            ):
                attempts = last.attempts + 1
            else:
                self.log.emit(last)
        self._failed_attempts[request_id] = ev.AdmissionFailed(
            self.log.now(),
            self.log.ids[request_id],
            self._step,
            reason,
            attempt.looked_up,
            external,
            attempts,
        )

    def _counters(self) -> tuple[int, int, int, int, int, int]:
        manager = self.scheduler.kv_cache_manager
        return (
            *_cache_counters(manager.prefix_cache_stats),
            *_cache_counters(self.scheduler.connector_prefix_cache_stats),
        )

    def _count_lookups(self, admitted: bool) -> None:
        before, after = self._counted, self._counters()
        if not admitted and before == after:
            return
        rise = [new - old for old, new in zip(before, after, strict=True)]
        manager = self.scheduler.kv_cache_manager
        if manager.prefix_cache_stats is None:
            rise[:3] = (-1, -1, -1)
        if self.scheduler.connector_prefix_cache_stats is None or getattr(
            self.scheduler, "defer_async_loads", False
        ):
            rise[3:] = (-1, -1, -1)
        self.log.emit(ev.LookupsCounted(self.log.now(), self._step, *rise))

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

    def _at_rest(self) -> None:
        """Between two steps: a snapshot if one is wanted, a census if one is due."""
        now = self.log.now()
        if self.log.sink.wants_snapshot or self._resync:
            self._restart()
        elif self._step - self._census_step >= CENSUS_STEPS or (
            now - self._census_at >= CENSUS_SECONDS * 1e6
        ):
            self._census(now)
        else:
            self.log.flush(now)

    def _census(self, now: int) -> None:
        self._census_step, self._census_at = self._step, now
        scheduler, ids = self.scheduler, self.log.ids
        rows: list[int] = []
        for request in scheduler.running:
            rows += (
                ids[request.request_id],
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_output_placeholders,
                request.num_tokens,
            )
        pool = scheduler.kv_cache_manager.block_pool
        waiting = scheduler.get_request_counts()[1]
        free = pool.get_num_free_blocks()
        self.log.emit(ev.Census(now, self._step, rows, waiting, free, pool.num_gpu_blocks))

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


def _cache_counters(stats: Any) -> tuple[int, int, int]:
    if stats is None:
        return 0, 0, 0
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )


def _process_id() -> int:
    import os

    return os.getpid()


def _configuration(scheduler: Any) -> dict[str, ev.Setting]:
    """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
    config = scheduler.vllm_config
    transfer = config.kv_transfer_config
    connector = scheduler.connector
    return {
        "model": str(getattr(config.model_config, "served_model_name", "") or ""),
        "scheduler": type(scheduler).__name__,
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "policy": str(config.scheduler_config.policy),
        "block_size": int(scheduler.block_size),
        "blocks": int(config.cache_config.num_gpu_blocks or 0),
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "max_running": int(scheduler.max_num_running_reqs),
        "max_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "max_model_len": int(scheduler.max_model_len),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "drafts": int(scheduler.num_spec_tokens),
        "connector": type(connector).__name__ if connector is not None else None,
        "plan": "read" if type(connector).__name__ in READERS else "opaque",
        "load_failure_policy": str(transfer.kv_load_failure_policy) if transfer else None,
        "log_stats": bool(scheduler.log_stats),
        "figures": "first",
        "data_parallel_rank": int(config.parallel_config.data_parallel_index),
        "census_steps": CENSUS_STEPS,
    }
