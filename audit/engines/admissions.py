"""Admissions: the prefix-cache lookups and connector matches of waiting requests, and which were admitted.

The events of a step's lookups are emitted when the step is over, because only then it is known which requests
were admitted. Equal failed attempts in consecutive steps are counted and emitted as one event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import add, sub
from typing import Any

import msgspec

from .. import causes
from .. import events as ev
from ..hooks import EngineMismatch, Wrapping
from ..text import cut_id
from .connector_metadata.metadata_reader import Saved
from .engine_counts import EngineCounts
from .observer import Observer
from .pool.pool_census import WHOLE_MANAGER
from .prompt_reports import PromptReports, PromptSample, prompt_sample

# --- What ended the admissions of a step that left requests waiting.
#
# The scheduler admits waiting requests until a condition of its loop ends it. The conditions only come true
# while the loop runs, so what holds after ``schedule`` is what ended it. A refused allocation leaves no
# trace, so the manager's ``allocate_slots`` is wrapped from the step's first lookup to the step's end: all
# running requests have their blocks by then, and only calls for waiting requests are seen. An object whose
# method was once covered by an attribute is slower for good, so this begins only after a lookup that led to
# no admission.


class QueueWatch:
    """Emits ``LeftWaiting``."""

    def __init__(self, observer: Observer, counts: EngineCounts) -> None:
        scheduler = observer.scheduler
        self._observer = observer
        self._scheduler = scheduler
        self._counts = counts
        """Says whether the engine is paused."""
        self._budget: int = scheduler.max_num_scheduled_tokens
        """Tokens that a step may schedule."""
        self._limit: int = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        """As many requests may run."""
        self.waiting = False
        """Whether requests waited when the step began."""
        self.arrived = False
        """Whether a request has come since the last step."""
        self.preempted_in = -1
        """The last step that preempted a request."""
        self.watches = False
        """Whether allocations are watched: a lookup has led to no admission."""
        self._refused = False
        """Whether the step's last allocation for a waiting request was refused."""
        self._wrapping: Wrapping | None = None
        """``allocate_slots`` while it is wrapped."""
        self._emitted = ""
        """The cause of the last event; empty if readers may not know it."""

    def step_begins(self, nobody_waits: bool) -> None:
        """``schedule`` is called."""
        self.waiting = not nobody_waits
        if self._wrapping is not None:  # an exception left the last step
            self.unwrap()
            self._refused = False

    def looked_up(self) -> None:
        """The engine looks a waiting request up: watch the allocation that follows."""
        if self.watches and self._wrapping is None:
            self._refused = False
            with contextlib.suppress(EngineMismatch):  # then no refusal is seen
                self._wrapping = Wrapping(
                    self._scheduler.kv_cache_manager, "allocate_slots", self._watch_refusal
                )

    def _watch_refusal(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            self._refused = blocks is None
            return blocks

        return watched

    def unwrap(self) -> None:
        """Restore ``allocate_slots``."""
        wrapping, self._wrapping = self._wrapping, None
        if wrapping is not None:
            wrapping.undo()

    def step_ended(self, tokens: int) -> None:
        """``schedule`` returned; requests waited when it was called. ``tokens``: all that it scheduled."""
        if self._wrapping is not None:
            self.unwrap()
        if len(self._scheduler.requests) != len(self._scheduler.running):
            cause = self._cause(tokens)
            if self.arrived or cause != self._emitted:
                self._emit(cause)
        self.arrived = self._refused = False

    def _cause(self, tokens: int) -> str:
        if self._counts.paused(self._scheduler):
            return causes.QUEUED_PAUSED
        if self.preempted_in == self._observer.step:
            return causes.QUEUED_PREEMPTION
        if tokens >= self._budget:
            return causes.QUEUED_BUDGET
        if len(self._scheduler.running) >= self._limit:
            return causes.QUEUED_RUNNING_LIMIT
        return causes.QUEUED_BLOCKS if self._refused else causes.QUEUED_UNKNOWN

    def pause_changed(self) -> None:
        """The engine was paused, or goes on."""
        paused = self._counts.paused(self._scheduler)
        self._emit(causes.QUEUED_PAUSED if paused else causes.QUEUED_NEXT_STEP)

    def begin_segment(self) -> None:
        """A new reader knows no cause yet."""
        self._emitted = ""
        if self._counts.paused(self._scheduler):
            self.pause_changed()

    def _emit(self, cause: str) -> None:
        self._emitted = cause
        log = self._observer.log
        log.emit(ev.LeftWaiting(log.now(), cause))


# --- The tiers that a connector's external tokens come from, as the connector reports them to the engine.
#
# vLLM asks since 0.32, with ``get_external_cache_hit_sources``. An older connector has no such method, and
# then nothing is recorded.


def tiers_reported(
    at: int, request: int, step: int, external_tokens: int, answer: Mapping[Any, int]
) -> ev.TiersReported:
    """The event of an answer about ``external_tokens`` tokens of a request."""
    names = [cut_id(str(getattr(tier, "value", tier))) for tier in answer]
    return ev.TiersReported(
        at, request, step, external_tokens, names, [int(each) for each in answer.values()]
    )


UNCOUNTED = (-1, -1, -1)
NOTHING = (0, 0, 0)


class Attempt(msgspec.Struct, gc=False):
    """An attempt to admit one waiting request in the current step."""

    request: Any
    prompt: int
    """The length of the prompt at the lookup."""
    looked_up: int
    """Tokens that the prefix-cache lookup returned; -1 if the engine used an older answer."""
    local: int
    """Tokens of the local hit that the engine uses."""
    external: int = 0
    """Tokens for which blocks were allocated and the connector has promised the KV."""
    matched: int | None = 0
    """The connector's answer; None: ask again later."""
    asynchronous: bool = False
    """Whether the connector loads asynchronously."""
    queried: int = -1
    """The local tokens that the connector was asked to extend; -1: not asked."""
    cut: int = 0
    """Tokens that the connector cut off the prompt when it was asked."""
    blocks: Any = None
    """The blocks of the lookup, by group; None without one."""
    tiers: ev.TiersReported | None = None
    """The tiers of the external tokens; None: the connector was not asked."""


class Admissions:
    """Handles the prefix-cache lookups, the connector's matches and the planned loads of each step."""

    def __init__(self, observer: Observer, counts: EngineCounts, reports: PromptReports) -> None:
        self._observer = observer
        """Has the step number, and the pools, connector and worker if they are observed."""
        self._scheduler = observer.scheduler
        self._log = observer.log
        self._counts = counts
        self._reports = reports
        self.queue = QueueWatch(observer, counts)
        """Finds out why requests are left waiting."""
        self.attempts: dict[str, Attempt] = {}
        """This step's attempts, by request id."""
        self.failed: dict[str, ev.AdmissionFailed] = {}
        """The failed attempts of each waiting request that are being counted, by request id."""
        self.admitted_before: set[str] = set()
        """Ids of the living requests that have been admitted."""
        self.planned: list[ev.LoadPlanned | ev.SavePlanned | ev.BlocksSaved | ev.BlocksPromised] = []
        """The loads and saves of this step's connector metadata, not yet emitted."""
        self._promises: dict[str, tuple[int, list[int]]] = {}
        """External tokens promised in this step and the request's blocks, by request id."""
        self.not_admitted = NOTHING
        """Lookups, queried and hit tokens without an admission, in releases that count every attempt."""
        self._followed_group = followed_group(self._scheduler)
        """The KV cache group whose blocks a promise names, and its tokens per block."""
        self._statistics: tuple[int, ...] | None = None
        """The engine's lookup statistics when the step began; None if no request waited."""
        self._counted: tuple[Any, tuple[int, ...]] = None, NOTHING
        """The engine's statistics of its own cache, and what they counted when they were last read."""
        self.defers_loads: bool = hasattr(self._scheduler, "deferred_loads")
        """Since 0.33 a load may start in a later step than its admission."""
        self._replays = bool(getattr(self._scheduler, "prefix_replay_tokens", 0))
        """Whether the engine recomputes the end of each hit."""
        self.sample: PromptSample | None = None
        """Samples what prompts miss; None if no prefixes are cached."""

    def started(self) -> None:
        """The observer has wrapped the scheduler.

        Without a connector or replay the hit used is the lookup's answer, and the hook that reads the hit
        used stays off.
        """
        self.sample = prompt_sample(self._scheduler)
        if self._observer.hooks is not None and (self._observer.connector is not None or self._replays):
            self._observer.hooks.activate("kv_cache_manager.record_prefix_cache_stats")

    # --- hooks ----------------------------------------------------------------------------------------

    def schedule_begins(self, *_: Any, **__: Any) -> None:
        """``schedule`` is called: a new step begins, without attempts so far."""
        observer, scheduler = self._observer, self._scheduler
        if observer.census_wanted():
            observer.at_rest()
        self.counted_between_steps(known=not observer.in_step)
        observer.step += 1
        observer.in_step = True
        if self.attempts:
            self.attempts = {}
        if self._promises:
            self._promises = {}
        nobody_waits = len(scheduler.requests) == len(scheduler.running)
        self._statistics = None if nobody_waits else self._read_statistics()
        self.queue.step_begins(nobody_waits)
        if observer.pools is not None:
            observer.pools.begin_step(nobody_waits)

    def pause_changed(self, *_: Any, **__: Any) -> None:
        """``set_pause_state`` returned. Emits ``LeftWaiting``."""
        self.queue.pause_changed()

    def looked_up(self, _: None, result: Any, request: Any, *__: Any, **___: Any) -> None:
        """``get_computed_blocks`` returned the local hit. Emits ``LookedUp`` with the admission."""
        tokens, request_id, pools = result[1], request.request_id, self._observer.pools
        if pools is not None:
            pools.looked_up(request_id)
        attempt = self.attempts.get(request_id)
        if attempt is None:
            adapter = getattr(request, "lora_request", None)
            if adapter is not None:
                self._observer.weights.adapter_runs(adapter)
            attempt = Attempt(request, request.num_prompt_tokens, tokens, tokens)
            self.attempts[request_id] = attempt
            self.queue.looked_up()
        else:  # a second lookup in the step, after the connector's answer
            attempt.looked_up = attempt.local = tokens
        attempt.blocks = result[0]

    def attempt(self, request: Any) -> Attempt:
        """This step's attempt; a new one without a lookup where the engine used an older answer."""
        attempt = self.attempts.get(request.request_id)
        if attempt is None:
            attempt = Attempt(request, request.num_prompt_tokens, -1, 0)
            self.attempts[request.request_id] = attempt
            self.queue.looked_up()
        return attempt

    def local_hit_used(self, _: None, __: None, request: Any, num_hits: int) -> None:
        """``record_prefix_cache_stats`` counts the hit that the engine uses."""
        self.attempt(request).local = num_hits

    def match_begins(self, request: Any, *_: Any) -> None:
        """``get_num_new_matched_tokens`` is called: the attempt has the prompt that the connector may cut."""
        self.attempt(request)

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        """``get_num_new_matched_tokens`` answered. Emits ``Matched`` with the admission."""
        attempt = self.attempt(request)
        if request.num_prompt_tokens != attempt.prompt:
            self._prompt_cut(request)
            attempt.cut += attempt.prompt - request.num_prompt_tokens
            attempt.prompt = request.num_prompt_tokens
        attempt.queried = num_computed_tokens
        attempt.matched, attempt.asynchronous = result

    def _prompt_cut(self, request: Any) -> None:
        """Emit ``Extended``: NIXL's connector cuts the last token off the prompt of a Mamba prefill."""
        number, prompt = self._log.ids[request.request_id], request.num_prompt_tokens
        self._reports.prompt_cut(request)
        computed, isolation = self._counts.computed(request), self._observer.isolation(request)
        self._log.emit(ev.Extended(self._log.now(), number, prompt, computed, isolation))

    def promised(self, _: None, __: None, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """``update_state_after_alloc``: blocks are allocated for the external tokens of the match."""
        attempt = self.attempts.get(request.request_id)
        if attempt is None:
            return  # the tokens were promised in an earlier step
        attempt.external = num_external_tokens
        if num_external_tokens > 0:
            group, groups = self._followed_group[0], blocks.get_block_ids()
            table = list(groups[group]) if 0 <= group < len(groups) else []
            self._promises[request.request_id] = num_external_tokens, table

    def tiers_reported(self, _: None, result: Any, request: Any, num_external_tokens: int) -> None:
        """``get_external_cache_hit_sources`` answered. Emits ``TiersReported``, after an admission."""
        number = self._log.ids.get(request.request_id)
        if number is None:
            return
        event = tiers_reported(self._log.now(), number, self._observer.step, num_external_tokens, result)
        attempt = self.attempts.get(request.request_id)
        if attempt is None:  # the load starts in a later step than its admission
            self._log.emit(event)
        else:
            attempt.tiers = event

    def load_planned(self, _: None, metadata: Any, scheduler_output: Any) -> None:
        """``build_connector_meta`` returned this step's metadata.

        Emits ``BlocksPromised``, ``SavePlanned`` and ``LoadPlanned`` after the admissions.
        """
        observer = self._observer
        if observer.worker is not None:
            observer.worker.planned(metadata, observer.step)
        if self._promises:
            self._plan_promised_blocks()
        reader = observer.connector.reader if observer.connector is not None else None
        if reader is None:
            return
        if "saves" in reader.READS:
            self._plan_saves(reader.saves(metadata))
        if observer.pools is not None and "blocks" in reader.READS:
            stored = reader.stored(metadata, self._scheduler.block_size)
            if stored:
                self.planned.append(ev.BlocksSaved(self._log.now(), observer.step, stored))
        if not self._promises:
            return
        filled, size = reader.filled(metadata, self._scheduler.block_size), self._followed_group[1]
        for request_id, __, tokens, promised in self._promised_blocks():
            if self.attempts[request_id].asynchronous:
                continue
            missing = [block for block in promised if block not in filled]
            covered = promised.index(missing[0]) * size if missing else tokens
            number, now = self._log.ids[request_id], self._log.now()
            self.planned.append(ev.LoadPlanned(now, number, observer.step, min(covered, tokens), missing))

    def _plan_promised_blocks(self) -> None:
        """The blocks that the loads promised in this step will fill."""
        size, log, step = self._followed_group[1], self._log, self._observer.step
        for request_id, start, tokens, promised in self._promised_blocks():
            if promised:
                number = log.ids[request_id]
                event = ev.BlocksPromised(log.now(), number, step, start, tokens, size, promised)
                self.planned.append(event)

    def _promised_blocks(self) -> Iterator[tuple[str, int, int, list[int]]]:
        """Request id, first position, tokens and blocks of each promise whose blocks are known."""
        size = self._followed_group[1]
        for request_id, (tokens, blocks) in self._promises.items():
            start = self.attempts[request_id].local
            if blocks:
                yield request_id, start, tokens, blocks[start // size : -(-(start + tokens) // size)]

    def _plan_saves(self, saves: Iterable[Saved]) -> None:
        step = self._observer.step
        for request_id, start, end in saves:
            number = self._log.ids.get(request_id)
            if number is not None:
                self.planned.append(ev.SavePlanned(self._log.now(), number, step, start, end))

    # --- the end of a step --------------------------------------------------------------------------

    def admit(self, scheduled: dict[str, int]) -> None:
        """Emit this step's admissions and failed attempts, planned loads and saves, and statistics."""
        events: list[ev.Event] = []
        now = self._log.now()
        admitted = False
        waits_for_load = self._counts.waits_for_load
        for request_id, attempt in self.attempts.items():
            if request_id in scheduled or waits_for_load(attempt.request):
                admitted = True
                self._admitted(events, now, request_id, attempt, scheduled.get(request_id, 0))
            else:
                self._not_admitted(events, now, request_id, attempt)
        if self.planned:
            events += self.planned
            self.planned = []
        counted = self.lookups_counted(now, admitted)
        if counted is not None:
            events.append(counted)
        if events:
            self._log.emit_all(events)

    def emit_planned(self) -> None:
        """Emit the loads and saves of a step without attempts."""
        self._log.emit_all(self.planned)
        self.planned = []

    def _admitted(
        self, events: list[ev.Event], now: int, request_id: str, attempt: Attempt, scheduled: int
    ) -> None:
        log, request, step = self._log, attempt.request, self._observer.step
        number = log.ids[request_id]
        if self.failed:
            failed = self.failed.pop(request_id, None)
            if failed is not None:
                events.append(failed)
        if self.defers_loads:  # the connector is informed only when the load may start
            deferred = self._scheduler.deferred_loads.get(request_id)
            if deferred is not None:
                attempt.external = deferred[1]
        local, external, queried = attempt.local, attempt.external, attempt.queried
        if attempt.looked_up >= 0:
            events.append(ev.LookedUp(now, number, step, attempt.looked_up))
        if queried >= 0:
            events.append(ev.Matched(now, number, step, queried, attempt.matched, attempt.asynchronous))
        counts = self._counts
        resumed, counted = counts.preemptions(request) > 0, self.counts_lookups(request)
        begins = computed = counts.computed(request) - scheduled
        if scheduled and self._replays and request.replay_start:
            begins += max(0, local + external - request.replay_start)
        missed = None
        if self.sample is not None and request_id not in self.admitted_before:
            missed = self.sample.admitted(request, local + external)
        split = resumed, local, external, not scheduled, begins, counted, self.cut(attempt)
        events.append(ev.Admitted(now, number, step, *split, missed))
        if local > 0 and self._observer.pools is not None:
            compared = self._observer.pools.hit(request, attempt.blocks, local)
            if compared is not None:
                events.append(compared)
        if attempt.tiers is not None:
            events.append(attempt.tiers)
        if begins != computed:
            events.append(ev.RolledBack(now, number, "replay", begins, computed))
        self.admitted_before.add(request_id)
        log.admitted(request_id, runs=scheduled > 0)

    def _not_admitted(self, events: list[ev.Event], now: int, request_id: str, attempt: Attempt) -> None:
        """Count an equal failed attempt of an earlier step, or begin to count this one."""
        if attempt.looked_up < 0:
            return
        reason = "deferred" if attempt.matched is None else "not_allocated"
        self.queue.watches |= attempt.matched is not None
        external = attempt.matched or 0
        last = self.failed.get(request_id)
        attempts = 1
        if last is not None:
            if (
                last.reason == reason
                and last.local_tokens == attempt.looked_up
                and last.external_tokens == external
            ):
                attempts = last.attempts + 1
            else:
                events.append(last)
        number, step = self._log.ids[request_id], self._observer.step
        self.failed[request_id] = ev.AdmissionFailed(
            now, number, step, reason, attempt.looked_up, external, attempts
        )

    # --- lookup statistics ---------------------------------------------------------------------------

    def cut(self, attempt: Attempt) -> int:
        """Tokens that the local lookup counted and the connector then cut off; none if it counts later."""
        return 0

    def counts_lookups(self, request: Any) -> bool:
        """Whether the engine's statistics count this request's lookups."""
        return bool(self._scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request))

    def _read_statistics(self) -> tuple[int, ...]:
        """Requests, queried and hit tokens in the engine's statistics: the cache's, then the connector's."""
        scheduler = self._scheduler
        local = _cache_statistics(scheduler.kv_cache_manager.prefix_cache_stats)
        if self._observer.connector is None:
            return local
        return local + _cache_statistics(getattr(scheduler, "connector_prefix_cache_stats", None))

    def lookups_counted(self, now: int, admitted: bool) -> ev.LookupsCounted | None:
        """What the engine's statistics counted in this step; None if nothing."""
        before, after = self._statistics, self._read_statistics()
        self._counted = self._scheduler.kv_cache_manager.prefix_cache_stats, after[:3]
        if before is None or (not admitted and before == after):
            return None
        scheduler = self._scheduler
        local = external = UNCOUNTED
        if scheduler.kv_cache_manager.prefix_cache_stats is not None:
            local = tuple(map(sub, after[:3], before))
        if self._counts_external():
            external = tuple(map(sub, after[3:], before[3:]))
        return ev.LookupsCounted(now, self._observer.step, *local, *external, *self.not_admitted)

    def _counts_external(self) -> bool:
        """Whether the engine counts the lookups of the connector in the step that makes them."""
        scheduler = self._scheduler
        return (
            self._observer.connector is not None
            and getattr(scheduler, "connector_prefix_cache_stats", None) is not None
            and not getattr(scheduler, "defer_async_loads", False)
        )

    def counted_between_steps(self, *, known: bool = True) -> None:
        """Emit ``LookupsCounted`` if the engine counted lookups of its own cache since the last step.

        It has no lookup to count then. The engine hands its statistics over with an output, and begins new
        ones. ``known`` is false if an exception has ended the last step, whose lookups were not read.
        """
        stats = self._scheduler.kv_cache_manager.prefix_cache_stats
        last, counts = self._counted
        if last is not None and last.requests + last.preempted_requests == counts[0]:
            if stats is last:
                return
            if stats is not None and not stats.requests and not stats.preempted_requests:
                self._counted = stats, NOTHING
                return
        now = _cache_statistics(stats)
        self._counted = stats, now
        if last is None or not known:
            return
        more = tuple(map(sub, _cache_statistics(last), counts))
        if stats is not last:
            more = tuple(map(add, more, now))
        if any(more):
            external: tuple[int, ...] = NOTHING if self._counts_external() else UNCOUNTED
            log, step = self._log, self._observer.step
            log.emit(ev.LookupsCounted(log.now(), step, *more, *external))


def _cache_statistics(stats: Any) -> tuple[int, int, int]:
    if stats is None:
        return NOTHING
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )


def followed_group(scheduler: Any) -> tuple[int, int]:
    """The KV cache group whose blocks a promise names, and its tokens per block; -1: there is none.

    It is the only group, or the first of full attention, in which a load fills every block.
    """
    coordinator = getattr(scheduler.kv_cache_manager, "coordinator", None)
    managers = getattr(coordinator, "single_type_managers", ())
    if len(managers) < 2:
        return 0, scheduler.block_size
    whole = [manager for manager in managers if type(manager).__name__ == WHOLE_MANAGER]
    return (whole[0].kv_cache_group_id, whole[0].block_size) if whole else (-1, scheduler.block_size)
