"""vLLM v1, releases 0.27 to 0.33: the observer of these releases, and the parts that it is made of.

An older release is a subclass that replaces a few hooks and parts (``v1_until_0_26``, ``v1_until_0_19``).
Facts about vLLM stand beside the code that relies on them. Names are those of
``vllm/v1/core/sched/scheduler.py``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, ClassVar, NamedTuple

import msgspec

from .. import events as ev
from ..hooks import EngineMismatch, Hook
from ..text import cut_id
from . import hook_tables
from .admissions import Admissions
from .configuration import configuration_of
from .connectors.worker_side import WorkerWatch, worker_in_this_process
from .content.attached import watch_content
from .encoder_watch import watch_encoder_cache
from .ends_of_lives import Lives
from .engine_counts import EngineCounts
from .loads import Loads
from .observer import CENSUS_STEPS, Observer
from .prompt_reports import PromptReports
from .step_log import Sink
from .steps import Steps


class Parts(NamedTuple):
    """The classes that a release's observer is made of, by the name of its attribute."""

    counts: type[EngineCounts] = EngineCounts
    reports: type[PromptReports] = PromptReports
    admissions: type[Admissions] = Admissions
    loads: type[Loads] = Loads
    lives: type[Lives] = Lives
    steps: type[Steps] = Steps


class V1Observer(Observer):
    """Observes one v1 scheduler."""

    NAME: ClassVar[str] = "v1-0.27"
    OUTPUT: ClassVar[tuple[str, ...]] = ("prefill_stats",)
    HOOKS: ClassVar[tuple[Hook, ...]] = hook_tables.V1
    PARTS: ClassVar[Parts] = Parts()

    def __init__(self, scheduler: Any, sink: Sink, **options: Any) -> None:
        super().__init__(scheduler, sink, **options)
        parts = self.PARTS
        self.counts = parts.counts()
        """Reads the engine's own counts of a request."""
        self.reports = parts.reports(self.log)
        """Reads the prompt figures that the engine reports."""
        self.admissions = parts.admissions(self, self.counts, self.reports)
        """Handles lookups, connector matches and admissions."""
        self.loads = parts.loads(self, self.counts, self.admissions)
        """Handles the ends of asynchronous loads, and load failures."""
        self.lives = parts.lives(self, self.counts, self.reports, self.admissions, self.loads)
        """Handles preemptions, sessions and the ends of requests."""
        self.steps = parts.steps(self, self.counts, self.reports, self.admissions, self.loads, self.lives)
        """Handles arrivals, scheduled steps and outputs."""
        self.waiting = self.counts.waiting(scheduler)
        """The scheduler's queues of waiting requests."""

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        self.steps.encoder = watch_encoder_cache(self)
        try:
            super().start(boundary)
        except Exception:
            self._stop_encoder_watch()
            raise
        self.admissions.started()

    def stop(self, reason: str) -> None:
        self.admissions.queue.unwrap()
        super().stop(reason)
        self._stop_encoder_watch()

    def _stop_encoder_watch(self) -> None:
        if self.steps.encoder is not None:
            self.steps.encoder.remove()

    def begin_segment(self) -> None:
        super().begin_segment()
        self.admissions.queue.begin_segment()
        if self.steps.encoder is not None:
            self.steps.encoder.begin_segment()

    def watch_worker(self, connector: Any = None) -> None:
        """Observe the connector's worker side too, where it runs in this process and has no journal."""
        connector = connector or worker_in_this_process(self.scheduler.vllm_config)
        if self.connector is None or connector is None:
            return
        with contextlib.suppress(EngineMismatch):  # then only the scheduler side is observed
            self.worker = WorkerWatch(
                connector,
                self.log,
                self._hook_failed,
                block_size=int(self.scheduler.block_size),
                in_scheduler_process=True,
                raised=self.engine_raised,
            )

    def watch_content(self, worker: Any) -> None:
        """Observe the contents of blocks too. ``worker``: vLLM's worker, if it runs in this process."""
        connector = worker_in_this_process(self.scheduler.vllm_config)
        self.content = watch_content(self, worker, connector)
        if self.content is not None:
            self.content.begin_segment()

    def engine_raised(self, method: str, error: Exception) -> None:
        if method == "reset_prefix_cache":
            self.lives.reset_ended()
        super().engine_raised(method, error)

    def emit_failed_attempts(self) -> None:
        for failed in self.admissions.failed.values():
            self.log.emit(failed)

    def configuration(self) -> dict[str, ev.Setting]:
        metadata_read = self.connector is not None and self.connector.reader is not None
        encoder = self.steps.encoder
        return configuration_of(
            self.scheduler, figures=self.FIGURES, metadata_read=metadata_read, census_steps=CENSUS_STEPS
        ) | {"encoder_cache": None if encoder is None else encoder.size}

    def snapshot_rows(self) -> list[ev.SnapshotRow]:
        requests = self.scheduler.requests.values()
        return [self._snapshot_row(request) for request in requests if not request.is_finished()]

    def _snapshot_row(self, request: Any) -> ev.SnapshotRow:
        request_id, counts = request.request_id, self.counts
        number = self.log.intern(request_id)
        if getattr(request, "resumable", False):
            self.steps.expect_sessions()
        self.reports.expect(request)
        computed, in_flight, placeholders = counts.of(request)
        preemptions = counts.preemptions(request)
        remote_decode, remote_request = counts.handover(request)
        never_admitted = request_id not in self.admissions.admitted_before
        return ev.SnapshotRow(
            request=number,
            request_id=cut_id(request_id),
            prompt_tokens=request.num_prompt_tokens,
            fresh=never_admitted and computed == preemptions == request.num_output_tokens == 0,
            computed_tokens=computed,
            in_flight_tokens=in_flight,
            placeholder_tokens=placeholders,
            sequence_tokens=request.num_tokens,
            preemptions=preemptions,
            transferred=counts.transferred(request),
            isolation=self.isolation(request),
            labels=self.labels.of(request),
            remote_decode=remote_decode,
            remote_request=remote_request,
        )

    def census(self, now: int) -> None:
        scheduler, ids, counts = self.scheduler, self.log.ids, self.counts
        rows: list[int] = []
        for request in scheduler.running:
            number = ids.get(request.request_id)
            if number is not None:  # else it has ended
                rows += (number, request.num_computed_tokens, *counts.of(request)[1:], request.num_tokens)
        waiting_rows = self._waiting_rows(set(rows[::5]))
        if self.connector is not None:
            for request in scheduler.running:
                waits = counts.waits_for_load(request)
                self.connector.track(request, request.num_computed_tokens, waits)
            self.connector.at_rest()
        pool = scheduler.kv_cache_manager.block_pool
        waiting = scheduler.get_request_counts()[1]
        free = pool.get_num_free_blocks()
        blocks, timed = pool.num_gpu_blocks, self.hook_time()
        if self.steps.encoder is not None:
            self.steps.encoder.census()
        idle, self.idle_calls = self.idle_calls, 0
        queued = self._misqueued()
        census = ev.Census(
            now, self.step, rows, waiting, free, blocks, *timed, waiting_rows, misqueued=queued
        )
        self.admissions.counted_between_steps()
        if self.pools is not None:
            self.pools.report_compared()
        self.log.emit(self._idle_census(census, idle) if idle else census)

    def _idle_census(self, census: ev.Census, idle: int) -> ev.Census:
        """The census of an engine whose last calls of ``schedule`` scheduled nothing."""
        counts, ids = self.counts, self.log.ids
        requests = self.scheduler.requests.values()
        ready = [ids.get(request.request_id, -1) for request in requests if counts.ready(request)]
        return msgspec.structs.replace(
            census,
            idle_calls=idle,
            ready_requests=len(ready),
            first_ready=min((number for number in ready if number >= 0), default=-1),
            paused_sessions=sum(map(counts.awaits_chunk, requests)),
        )

    def _misqueued(self) -> dict[str, int]:
        """The places of each request that is not queued as it should be."""
        ids, queues = self.log.ids, (self.scheduler.running, *self.waiting)
        self.misqueued = self._spare_places()
        queued = (request for queue in queues for request in queue)
        places = Counter(each.request_id for each in queued if each.request_id in ids or each.is_finished())
        return {cut_id(name): places[name] for name in ids.keys() | places if places[name] != (name in ids)}

    def census_wanted(self) -> bool:
        """Whether the queues have come to differ from the open requests, or differ otherwise than before."""
        return self._spare_places() != self.misqueued and not self.in_step

    def _spare_places(self) -> int:
        """How many places more the queues have than there are open requests; negative if fewer."""
        return len(self.scheduler.running) + sum(map(len, self.waiting)) - len(self.log.ids)

    def computed_tokens(self, request: Any) -> int:
        return self.counts.computed(request)

    def _waiting_rows(self, running: set[int]) -> list[int]:
        """The engine's counts of the admitted requests that are not among ``running``."""
        ids, admitted = self.log.ids, self.admissions.admitted_before
        rows: list[int] = []
        for request_id, request in self.scheduler.requests.items():
            if request.num_computed_tokens or request_id in admitted:
                number = ids.get(request_id)
                if number is not None and number not in running and not request.is_finished():
                    rows += (number, *self.counts.of(request), request.num_tokens)
        return rows
