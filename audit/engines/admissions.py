"""Look-ups of waiting requests, and what became of them: the admissions of a step.

A look-up is only told when its step is over: as an admission, or, counted while they stay equal, as
attempts that led to none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import sub
from typing import Any, ClassVar

import msgspec

from .. import events as ev
from .connectors.metadata_reader import Saved
from .observer import Observer

UNCOUNTED = (-1, -1, -1)
NOTHING = (0, 0, 0)


class _Attempt(msgspec.Struct, gc=False):
    """One waiting request's look-up in the current step. ``prompt``: its length when it was looked up."""

    request: Any
    prompt: int
    looked_up: int
    local: int
    external: int = 0
    matched: int | None = 0
    asynchronous: bool = False
    queried: int = -1


class AdmissionObserver(Observer):
    """Watches the prefix cache look-up, the connector's match and what is allocated for them."""

    COUNTED: ClassVar[tuple[str, ...]] = ("local", "external")
    """The look-up statistics that this release keeps by admission."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attempts: dict[str, _Attempt] = {}
        self._planned: list[ev.LoadPlanned | ev.SavePlanned | ev.BlocksPromised] = []
        self._promises: dict[str, tuple[int, list[int]]] = {}
        self._counted: tuple[int, ...] | None = None
        self._since_033: bool = hasattr(self.scheduler, "deferred_loads")
        """Loads may be put off, and a count is lowered by drafts accepted beyond a stop."""
        self._replays = bool(getattr(self.scheduler, "prefix_replay_tokens", 0))

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` untouched."""
        super().start(boundary)
        # Else ``schedule`` uses the look-up's own answer, and every admission's count is held against it.
        if self.hooks is not None and (self.connector is not None or self._replays):
            self.hooks.wake("kv_cache_manager.record_prefix_cache_stats")

    def schedule_begins(self, *_: Any, **__: Any) -> None:
        """Nothing has been looked up in this step yet."""
        self._step += 1
        if self._attempts:
            self._attempts = {}
        if self._promises:
            self._promises = {}
        scheduler = self.scheduler
        nobody_waits = len(scheduler.requests) == len(scheduler.running)
        self._counted = None if nobody_waits else self._counters()
        if self.pools is not None:
            self.pools.untold.step_begins(nobody_waits)

    def looked_up(self, _: None, result: Any, request: Any, *__: Any, **___: Any) -> None:
        tokens, request_id = result[1], request.request_id
        if self.pools is not None and self.pools.books is not None:
            self.pools.books.looked_up(request_id)
        attempt = self._attempts.get(request_id)
        if attempt is None:
            self._attempts[request_id] = _Attempt(request, request.num_prompt_tokens, tokens, tokens)
        else:  # asked again within the step, after the connector's answer
            attempt.looked_up = attempt.local = tokens

    def _attempt(self, request: Any) -> _Attempt:
        """This step's look-up of a request; one without an answer where it used an older one."""
        attempt = self._attempts.get(request.request_id)
        if attempt is None:
            attempt = _Attempt(request, request.num_prompt_tokens, -1, 0)
            self._attempts[request.request_id] = attempt
        return attempt

    def local_hit_used(self, _: None, __: None, request: Any, num_hits: int) -> None:
        self._attempt(request).local = num_hits

    def matched(self, _: None, result: Any, request: Any, num_computed_tokens: int) -> None:
        attempt = self._attempt(request)
        if request.num_prompt_tokens != attempt.prompt:
            self._prompt_cut(request)
            attempt.prompt = request.num_prompt_tokens
        attempt.queried = num_computed_tokens
        attempt.matched, attempt.asynchronous = result

    def _prompt_cut(self, request: Any) -> None:
        """NIXL's connector takes the last token off the prompt of a Mamba prefill, as it is asked."""
        number, prompt = self.log.ids[request.request_id], request.num_prompt_tokens
        if request.request_id in self._unreported:
            self._unreported[request.request_id] = prompt
        self.log.emit(ev.Extended(self.log.now(), number, prompt, self.computed(request)))

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

    def load_planned(self, _: None, plan: Any, scheduler_output: Any) -> None:
        if self.worker is not None:
            self.worker.planned(plan, self._step)
        if self._promises:
            self._tell_promised()
        reader = self.connector.reader if self.connector is not None else None
        if reader is None:
            return
        if "saves" in reader.READS:
            self._saves(reader.saves(plan))
        if not self._promises:
            return
        size = self.scheduler.block_size
        filled = reader.filled(plan, size)
        for request_id, __, tokens, promise in self._promised_blocks():
            if self._attempts[request_id].asynchronous:
                continue
            missing = [block for block in promise if block not in filled]
            covered = promise.index(missing[0]) * size if missing else tokens
            self._planned.append(
                ev.LoadPlanned(
                    self.log.now(), self.log.ids[request_id], self._step, min(covered, tokens), missing
                )
            )

    def _tell_promised(self) -> None:
        """Which blocks the promises of this step are to fill."""
        size = self.scheduler.block_size
        for request_id, start, tokens, promise in self._promised_blocks():
            if promise:
                number, now = self.log.ids[request_id], self.log.now()
                self._planned.append(ev.BlocksPromised(now, number, self._step, start, tokens, size, promise))

    def _promised_blocks(self) -> Iterator[tuple[str, int, int, list[int]]]:
        """Of each promise of this step whose blocks are known: request, first position, tokens, blocks."""
        size = self.scheduler.block_size
        for request_id, (tokens, blocks) in self._promises.items():
            start = self._attempts[request_id].local
            if blocks:
                yield request_id, start, tokens, blocks[start // size : -(-(start + tokens) // size)]

    def _saves(self, saves: Iterable[Saved]) -> None:
        for request_id, start, end in saves:
            number = self.log.ids.get(request_id)
            if number is not None:
                self._planned.append(ev.SavePlanned(self.log.now(), number, self._step, start, end))

    def _admit(self, scheduled: dict[str, int]) -> None:
        """Say what became of this step's look-ups, and what its plan orders."""
        told: list[ev.Event] = []
        now = self.log.now()
        admitted = False
        for request_id, attempt in self._attempts.items():
            if request_id in scheduled or self.waits_for_load(attempt.request):
                admitted = True
                self._admitted(told, now, request_id, attempt, scheduled.get(request_id, 0))
            else:
                self._not_admitted(told, now, request_id, attempt)
        if self._planned:
            told += self._planned
            self._planned = []
        counted = self._lookups_counted(now, admitted)
        if counted is not None:
            told.append(counted)
        if told:
            self.log.emit_all(told)

    def tell_planned(self) -> None:
        """Say what this step's plan orders, though nobody was looked up in it."""
        self.log.emit_all(self._planned)
        self._planned = []

    def _admitted(
        self, told: list[ev.Event], now: int, request_id: str, attempt: _Attempt, scheduled: int
    ) -> None:
        log, request, step = self.log, attempt.request, self._step
        number = log.ids[request_id]
        if self._failed_attempts:
            failed = self._failed_attempts.pop(request_id, None)
            if failed is not None:
                told.append(failed)
        if self._since_033:  # the connector is told only when the load may start
            deferred = self.scheduler.deferred_loads.get(request_id)
            if deferred is not None:
                attempt.external = deferred[1]
        local, external, queried = attempt.local, attempt.external, attempt.queried
        if attempt.looked_up >= 0:
            told.append(ev.LookedUp(now, number, step, attempt.looked_up))
        if queried >= 0:
            told.append(ev.Matched(now, number, step, queried, attempt.matched, attempt.asynchronous))
        resumed, counted = self.preemptions(request) > 0, self.counts_lookups(request)
        begins = computed = self.computed(request) - scheduled
        if scheduled and self._replays and request.replay_start:
            begins += max(0, local + external - request.replay_start)
        told.append(ev.Admitted(now, number, step, resumed, local, external, not scheduled, begins, counted))
        if begins != computed:
            told.append(ev.RolledBack(now, number, "replay", begins, computed))
        self._lived.add(request_id)
        log.admitted(request_id, runs=scheduled > 0)

    def _not_admitted(self, told: list[ev.Event], now: int, request_id: str, attempt: _Attempt) -> None:
        """Equal failed attempts in a row are one event, told when they end."""
        if attempt.looked_up < 0:
            return
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
                told.append(last)
        self._failed_attempts[request_id] = ev.AdmissionFailed(
            now,
            self.log.ids[request_id],
            self._step,
            reason,
            attempt.looked_up,
            external,
            attempts,
        )

    def counts_lookups(self, request: Any) -> bool:
        """Whether the engine's statistics count this request's look-ups."""
        return bool(self.scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request))

    def _counters(self) -> tuple[int, ...]:
        """Look-ups, tokens asked for and hit, as the engine's statistics have them; a connector's besides."""
        scheduler = self.scheduler
        local = _cache_counters(scheduler.kv_cache_manager.prefix_cache_stats)
        if self.connector is None:
            return local
        return local + _cache_counters(getattr(scheduler, "connector_prefix_cache_stats", None))

    def _lookups_counted(self, now: int, admitted: bool) -> ev.LookupsCounted | None:
        before, after = self._counted, self._counters()
        if before is None or (not admitted and before == after):
            return None
        scheduler, counted = self.scheduler, self.COUNTED
        local = external = UNCOUNTED
        if "local" in counted and scheduler.kv_cache_manager.prefix_cache_stats is not None:
            local = tuple(map(sub, after[:3], before))
        if (
            self.connector is not None
            and "external" in counted
            and getattr(scheduler, "connector_prefix_cache_stats", None) is not None
            and not getattr(scheduler, "defer_async_loads", False)
        ):
            external = tuple(map(sub, after[3:], before[3:]))
        return ev.LookupsCounted(now, self._step, *local, *external)


def _cache_counters(stats: Any) -> tuple[int, int, int]:
    if stats is None:
        return NOTHING
    return (
        stats.requests + stats.preempted_requests,
        stats.queries + stats.preempted_queries,
        stats.hits + stats.preempted_hits,
    )
