"""Observes one scheduler of SGLang, 0.5.3 to 0.5.23, at level ``tokens``.

Facts about SGLang stand beside the code that relies on them. Names are those of
``sglang/srt/managers/scheduler.py`` and ``schedule_batch.py``.

**A step** is a call of ``run_batch`` with requests. An extend batch computes ``extend_lens`` tokens of each
request after ``prefix_lens``; a mixed batch is one, too, whose decoding requests have one token. A decode
batch computes one token of each request. ``process_batch_result`` takes the outputs, oldest step first. With
the overlap loop, which is the default, step n+1 runs before the output of step n is taken: a request that
ended in step n, or was retracted meanwhile, has a row in step n+1 whose output the engine throws away.

**A lookup** is repeated each time a waiting request is looked at. Only the one before the request runs counts
here, and in SGLang's own figures: it is ``prefix_lens`` of the first extend batch of a life. Tokens that were
on the host are loaded into that prefix before the batch runs, so a load has always finished.

**A retraction** ends a life: for lack of room, for a request of higher priority, or in a pause. In all three
the request is added to the waiting queue again.

**An abort** has no call that every release makes through the scheduler's attribute: the dispatcher keeps
bound methods from its construction on, and the engine itself aborts a request that finds no room. So when a
step is chosen, the requests that are in no batch and no queue any more have ended. One that is aborted while
it runs ends with its next output instead, as any other. A request that ran and is gone although nobody asked
to abort it was lost by the engine: its outcome is unknown, and its client waits.

Not observed, and refused: speculative decoding, prefill and decode on different engines, pipeline stages,
diffusion models.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from ... import causes
from ... import events as ev
from ...hooks import EngineMismatch, Hook
from ...text import cut_id
from ..observer import CENSUS_STEPS, Observer
from ..step_log import StepLog
from ..weights_watch import WeightsWatch
from .slots import Slots, slots

LIVES_A_STEP = 32
"""Slots are counted after one step for so many open requests."""

KEPT_MICROSECONDS = 5_000_000
"""How often protected tokens of an engine at rest are told."""

NO_COUNT = -1
"""For a count that the engine does not keep."""

ENDS = {"stop": "stopped", "abort": "aborted"}
"""Types of SGLang's finish reasons whose names here are others."""

SOURCES = ("disk", "distributed", "tensor", "ipc")
"""From where weights are updated."""

UPDATES = tuple(
    Hook("tp_worker", f"update_weights_from_{source}", (), after=f"weights.from_{source}", optional=True)
    for source in SOURCES
)
"""The worker's methods that change the weights, until 0.5.20. The scheduler flushes its cache after them.

In 0.5.23 an object that can't be given a wrapper has them. There the message tells, and not the outcome.
"""

ABORT = "AbortReq"
"""The name of the message that asks to abort requests."""

UPDATE = "UpdateWeight"
"""How the names of messages begin that ask for new weights."""

NO_OWNERS = "slots have no reference counts, and no call of its pool names a request"
"""Why levels above ``tokens`` are out of reach."""

UNSUPPORTED = (
    ("speculative_algorithm", None, "speculative decoding"),
    ("disaggregation_mode", "null", "prefill and decode on different engines"),
    ("pp_size", 1, "pipeline stages"),
    ("dllm_algorithm", None, "a diffusion model"),
)
"""Server arguments, the value that is observed, and what another value stands for."""


class Life(NamedTuple):
    """What an open request has in its present life."""

    request: Any
    runs: bool
    """Whether the life has been admitted; else the request waits."""


class Computed(NamedTuple):
    """How many tokens of a request a step leaves computed, by the name that the step log reads."""

    num_computed_tokens: int


class StepRows:
    """The rows of one batch, read where the step log asks for one: it asks only for those that changed."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._places = {request.rid: place for place, request in enumerate(batch.reqs)}
        self._extends = bool(batch.forward_mode.is_extend())

    def tokens(self) -> dict[str, int]:
        """The tokens that the batch computes, by request id, in the batch's order."""
        if self._extends:
            return dict(zip(self._places, self._batch.extend_lens, strict=True))
        return dict.fromkeys(self._places, 1)

    def before(self, request_id: str) -> int:
        """The computed tokens of a request before the batch."""
        place = self._places[request_id]
        if self._extends:
            return int(self._batch.prefix_lens[place])
        return int(self._batch.seq_lens_cpu[place]) - 1

    def __getitem__(self, request_id: str) -> Computed:
        tokens = self._batch.extend_lens[self._places[request_id]] if self._extends else 1
        return Computed(self.before(request_id) + int(tokens))


class Delivery(NamedTuple):
    """A step whose output has not been taken."""

    request_ids: list[str]
    requests: list[Any]


class UpdatedWeights(WeightsWatch):
    """Notes updates of the weights. Nothing else is looked at."""

    def __init__(self, scheduler: Any, *args: Any) -> None:
        super().__init__(scheduler, *args)
        noted = [functools.partial(self._updated, f"update_weights_from_{source}") for source in SOURCES]
        self.from_disk, self.from_distributed, self.from_tensor, self.from_ipc = noted
        """Called after the methods of :data:`UPDATES`."""
        worker = getattr(scheduler, "tp_worker", None)
        self._by_message = not any(hasattr(worker, hook.method) for hook in UPDATES)
        """Whether only the message tells of an update."""

    def asked(self, messages: Iterable[Any]) -> None:
        """Messages are about to be handled. Where only they tell, an update may be one that fails."""
        for name in (type(message).__name__ for message in messages):
            if self._by_message and name.startswith(UPDATE):
                self.changed(name.removesuffix("ReqInput"), ev.POSSIBLE)

    def _updated(self, by: str, _: None, result: Any, *__: Any, **___: Any) -> None:
        """A method returned whether it succeeded. If not, some weights may have changed."""
        succeeded = bool(result[0] if isinstance(result, tuple) else result)
        self.changed(by, ev.DECLARED if succeeded else ev.POSSIBLE)

    def start(self, *, digests: bool) -> None:
        """The observer's hooks see every update."""

    def remove(self) -> None:
        """Nothing was wrapped."""

    def watch_model(self, worker: Any) -> None:
        """The model runs elsewhere."""


class SGLangObserver(Observer):
    """Observes one scheduler. ``start`` wraps its methods, ``stop`` restores them."""

    NAME: ClassVar[str] = "sglang-0.5"
    ENGINE: ClassVar[str] = "sglang"
    LOGGER: ClassVar[logging.Logger] = logging.getLogger("kvledger")  # the engine logs to the root
    CENSUS_AT_END: ClassVar[tuple[str, ...]] = ("detached",)
    HAS: ClassVar[tuple[str, ...]] = (
        "waiting_queue",
        "tree_cache",
        "token_to_kv_pool_allocator",
        "page_size",
    )
    HOOKS: ClassVar[tuple[Hook, ...]] = (
        Hook("", "_add_request_to_queue", (("req", "is_retracted"),), after="queued"),
        Hook("", "process_input_requests", (("recv_reqs",),), "messages_arrive"),
        Hook("", "get_next_batch_to_run", (), "step_begins", "step_chosen", boundary=True),
        Hook("", "run_batch", (), before="scheduled"),
        Hook("", "process_batch_result", (), "output_arrives", "output_taken"),
        Hook("", "flush_cache", (), after="flushed"),
        # Since 0.5.13 the handler of the message keeps the method itself.
        Hook("flush_wrapper", "_flush_cache", (), after="flushed", optional=True),
        *UPDATES,
    )

    log: StepLog
    weights: UpdatedWeights

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lives: dict[str, Life] = {}
        """The open requests, by id."""
        self._retracted: set[str] = set()
        """Open requests whose life was ended by a retraction."""
        self._host_tokens: dict[str, int] = {}
        """By open request: the tokens of its first life's prefix that came from the host or from storage."""
        self._asked: set[str] = set()
        """Open requests that a message asked to abort."""
        self._in_flight: deque[Delivery] = deque()
        """The steps whose outputs have not been taken, oldest first."""
        self._choosing = False
        """``get_next_batch_to_run`` runs: what it retracts without a flag had a lower priority."""
        self._slots_step = self._slots_before = 0
        """The steps after which slots were counted last, and before that."""
        self._slots_at = 0
        """When they were."""
        self._missing = -1, False
        """How many slots were in no count, and whether two accounts in a row have said so."""

    def _watch_weights(self) -> UpdatedWeights:
        return UpdatedWeights(self.scheduler, self.log, self._step_now, self._hook_failed)

    # --- beginning and end ------------------------------------------------------------------------------

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        refuse_unsupported(self.scheduler, self.level)
        for batch, *_ in getattr(self.scheduler, "result_queue", None) or ():
            self._in_flight.append(Delivery([each.rid for each in batch.reqs], list(batch.reqs)))
        self.log.undelivered = len(self._in_flight)
        super().start(boundary)

    def snapshot_rows(self) -> list[ev.SnapshotRow]:
        running = {id(request) for request in self._running(None)}
        for request in self._present(None):
            if request.rid not in self._lives and not request.finished():
                self._lives[request.rid] = Life(request, id(request) in running)
        return [self._snapshot_row(life) for life in self._lives.values()]

    def _snapshot_row(self, life: Life) -> ev.SnapshotRow:
        request = life.request
        prompt, outputs = len(request.origin_input_ids), len(request.output_ids)
        return ev.SnapshotRow(
            request=self.log.intern(request.rid),
            request_id=cut_id(request.rid),
            prompt_tokens=prompt,
            fresh=not (life.runs or outputs or request.rid in self._retracted),
            computed_tokens=committed(request) if life.runs else 0,
            in_flight_tokens=NO_COUNT,
            placeholder_tokens=NO_COUNT,
            sequence_tokens=prompt + outputs,
            preemptions=int(getattr(request, "retraction_count", 0)),
            labels=labels_of(request),
        )

    def configuration(self) -> dict[str, ev.Setting]:
        """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
        return configuration_of(self.scheduler) | {"figures": self.FIGURES, "census_steps": CENSUS_STEPS}

    def census_wanted(self) -> bool:
        """Count the slots, and ask for a census where the account is another than the one before.

        That costs time for each running request, so with many of them not after each step; at rest once a
        second. Tokens that stay protected at rest are told every few seconds.
        """
        now = self.log.now()
        rests = not (self._lives or self._in_flight)
        steps = self.step - self._slots_step
        if steps < 1 + len(self._lives) // LIVES_A_STEP and not (
            rests and (steps or now - self._slots_at >= 1_000_000)
        ):
            return False
        self._slots_before, self._slots_step, self._slots_at = self._slots_step, self.step, now
        parts = self._slots()
        if parts is None:
            return False
        before, said_twice = self._missing
        missing = parts.slots - sum(parts[:-1])
        self._missing = missing, missing in (0, before)
        kept = rests and parts.protected_slots and now - self._last_census[1] >= KEPT_MICROSECONDS
        return missing != before or not said_twice or bool(kept)

    def _slots(self) -> Slots | None:
        in_flight = (request for step in self._in_flight for request in step.requests)
        return slots(self.scheduler, self._running(None), in_flight)

    def census(self, now: int) -> None:
        rows: list[int] = []
        for life in self._lives.values():
            if life.runs:
                request = life.request
                length = len(request.origin_input_ids) + len(request.output_ids)
                rows += (self.log.ids[request.rid], committed(request), NO_COUNT, NO_COUNT, length)
        scheduler = self.scheduler
        allocator, page = scheduler.token_to_kv_pool_allocator, int(scheduler.page_size)
        free = int(allocator.available_size()) + _evictable(scheduler.tree_cache)
        blocks = free // page, int(allocator.size) // page
        waiting = len(scheduler.waiting_queue)
        parts = self._slots()
        sessions = getattr(getattr(scheduler, "session_controller", scheduler), "sessions", ())
        self.log.emit(
            ev.Census(
                now,
                self.step,
                rows,
                waiting,
                *blocks,
                *self.hook_time(),
                paused_sessions=len(sessions),
                slots_before=self._slots_before,
                **({} if parts is None else parts._asdict()),
            )
        )

    def computed_tokens(self, request: Any) -> int:
        return committed(request)

    def emit_failed_attempts(self) -> None:
        """A lookup that leads to no admission is not counted by SGLang either."""

    # --- arrivals, aborts, weights ------------------------------------------------------------------------

    def messages_arrive(self, recv_reqs: Any) -> None:
        """``process_input_requests`` is called, in an idle engine too."""
        if recv_reqs:
            self.weights.asked(recv_reqs)
        for message in recv_reqs or ():
            if type(message).__name__ == ABORT:  # it names all requests whose ids begin so
                every, begins = getattr(message, "abort_all", False), message.rid or ""
                self._asked.update(each for each in self._lives if every or each.startswith(begins))

    def queued(self, _: None, __: Any, req: Any, is_retracted: bool = False) -> None:
        """``_add_request_to_queue`` returned: a request is new, or one that ran waits again.

        A new one may have been refused, for a full queue or for its priority. Then it is not in the queue.
        """
        request_id = req.rid
        life = self._lives.get(request_id)
        if life is not None and life.request is req:
            if life.runs:
                self._preempted(req, is_retracted)
            return
        if not any(each is req for each in reversed(self.scheduler.waiting_queue)):
            return
        number = self.log.intern(request_id)
        self._lives[request_id] = Life(req, False)
        # A prompt that is refused for its length has room for no output; 0.5.10 counts below zero.
        outputs = req.sampling_params.max_new_tokens
        self.log.emit(
            ev.RequestAdded(
                self.log.now(),
                number,
                cut_id(request_id),
                len(req.origin_input_ids),
                outputs if outputs is not None and outputs > 0 else None,
                int(req.priority or 0),
                labels=labels_of(req),
            )
        )

    def _preempted(self, request: Any, is_retracted: bool) -> None:
        """A life ended. What the engine counted of it is gone by now. An output in flight will be dropped."""
        cause = causes.BLOCKS if is_retracted else causes.PRIORITY if self._choosing else causes.PAUSE
        request_id = request.rid
        self._lives[request_id] = Life(request, False)
        self._retracted.add(request_id)
        number, after = self.log.ids[request_id], committed(request)
        if after == NO_COUNT:
            after = len(request.prefix_indices)
        counts = NO_COUNT, NO_COUNT, NO_COUNT, after, 0
        self.log.emit(ev.Preempted(self.log.now(), number, self.step, cause, *counts, False))
        self.log.preempted(request_id)

    def flushed(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``flush_cache`` returned; newer releases return an object."""
        self.log.emit(ev.CacheReset(self.log.now(), bool(getattr(result, "success", result)), False))

    # --- a step -----------------------------------------------------------------------------------------

    def step_begins(self, *_: Any, **__: Any) -> None:
        """``get_next_batch_to_run`` is called. The counts of requests are those after the last step."""
        self.at_rest()
        self._choosing = True

    def step_chosen(self, _: None, chosen: Any, *__: Any, **___: Any) -> None:
        """It returned a batch, or since 0.5.23 a plan with batches. Ends the requests that have left."""
        self._choosing = False
        batch = getattr(chosen, "batch_to_run", chosen)
        running = getattr(chosen, "running_batch", self.scheduler.running_batch)
        batches = {id(each): each for each in (batch, running) if each is not None}.values()
        present = sum(not request.finished() for each in batches for request in each.reqs or ())
        if len(self._lives) > present + len(self.scheduler.waiting_queue):
            self._end_absent(chosen)

    def scheduled(self, batch: Any, *_: Any, **__: Any) -> None:
        """``run_batch`` is called. Emits what the batch's requests were admitted with, and ``Stepped``."""
        requests = batch.reqs
        if not requests:  # a rank of data parallel attention that waits for others
            return
        self.step += 1
        rows = StepRows(batch)
        for request in requests:
            life = self._lives.get(request.rid)
            if life is not None and not life.runs and life.request is request:
                self._admitted(request, rows.before(request.rid))
        tokens = rows.tokens()
        ended = [request_id for request_id in tokens if request_id not in self.log.ids]
        for request_id in ended:
            del tokens[request_id]
        self.log.scheduled(self.step, tokens, {}, rows)
        self.log.undelivered += 1
        self._in_flight.append(Delivery(list(tokens), [r for r in requests if r.rid in tokens]))

    def _admitted(self, request: Any, prefix: int) -> None:
        """A life begins with ``prefix`` tokens, a part of them loaded from the host or from storage."""
        request_id, log = request.rid, self.log
        number, now, step = log.ids[request_id], log.now(), self.step
        self._lives[request_id] = Life(request, True)
        host, storage = loaded(request, prefix)
        self._host_tokens.setdefault(request_id, host)
        local = prefix - host
        log.emit(ev.LookedUp(now, number, step, local))
        resumed = request_id in self._retracted
        log.emit(ev.Admitted(now, number, step, resumed, local, host, False, prefix))
        tiers = {causes.TIER_HOST: host - storage, causes.TIER_DISK: storage}
        tiers = {name: tokens for name, tokens in tiers.items() if tokens}
        if tiers:
            log.emit(ev.TiersReported(now, number, step, host, list(tiers), list(tiers.values())))
        log.admitted(request_id, True)

    # --- its output -----------------------------------------------------------------------------------------

    def output_arrives(self, batch: Any, *_: Any, **__: Any) -> bool:
        """``process_batch_result`` is called. Emits ``Delivered`` for the oldest step.

        Until 0.5.3 the overlap loop passes a batch without requests first.
        """
        if not batch.reqs or not self._in_flight:
            return False
        self.log.undelivered -= 1
        step = self._in_flight.popleft()
        order: list[str] = []
        lengths: list[int] = []
        ignored: list[str] = []
        for request_id, request in zip(step.request_ids, step.requests, strict=True):
            life = self._lives.get(request_id)
            if life is None or life.request is not request:  # it has ended since
                continue
            order.append(request_id)
            lengths.append(0 if in_middle_of_prompt(request) else 1)
            if request.is_retracted or request.finished():
                ignored.append(request_id)
        if len(lengths) == sum(lengths):
            lengths = self.log.one_each(len(lengths))
        self.log.delivered(self.log.now(), lengths, order, dict.fromkeys(order), ignored)
        return True

    def output_taken(self, taken: bool | None, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """``process_batch_result`` returned. Emits ``Reported`` and ``Finished`` of requests that ended."""
        for request in batch.reqs if taken else ():
            life = self._lives.get(request.rid)
            if life is not None and life.request is request and request.finished():
                kind = request.finished_reason.to_json()["type"]
                self._reported(request)
                self._ended(request, ENDS.get(kind, kind))

    def _reported(self, request: Any) -> None:
        """What the engine tells the client of the prompt. Aborts without an output have no figures."""
        cached, prompt = int(request.cached_tokens), len(request.origin_input_ids)
        external = reported_from_host(request)
        if external is None:  # the release does not say; what was loaded is known from the admission
            external = min(cached, self._host_tokens.get(request.rid, 0))
        number = self.log.ids[request.rid]
        figures = prompt, cached - external, external, prompt - cached, cached
        self.log.emit(ev.Reported(self.log.now(), number, *figures))

    def _ended(self, request: Any, reason: str) -> None:
        request_id, log = request.rid, self.log
        outputs = len(request.output_ids)
        sequence = len(request.origin_input_ids) + outputs
        counts = NO_COUNT, NO_COUNT, NO_COUNT, sequence, outputs
        log.emit(ev.Finished(log.now(), log.ids[request_id], reason, *counts))
        del self._lives[request_id]
        self._asked.discard(request_id)
        self._retracted.discard(request_id)
        self._host_tokens.pop(request_id, None)
        log.forget(request_id)

    def _end_absent(self, chosen: Any) -> None:
        """End the requests that left without an output.

        They were aborted while they waited, in the middle of their prompt, or because they found no room
        although every other request had been retracted; or the engine lost them.
        """
        batches = (
            *self._running(chosen),
            *(request for step in self._in_flight for request in step.requests),
        )
        present = {id(each) for each in batches if not (each.finished() or each.is_retracted)}
        present.update(map(id, self.scheduler.waiting_queue))
        for life in list(self._lives.values()):
            request = life.request
            if id(request) not in present:
                reason = request.finished_reason or getattr(request, "to_finish", None)
                aborted = not life.runs or request.rid in self._asked or reason is not None
                self._ended(request, "aborted" if aborted else causes.UNKNOWN)

    def _present(self, chosen: Any) -> Iterator[Any]:
        """All requests that the scheduler has: waiting, in a batch, or in the middle of a prompt."""
        yield from self.scheduler.waiting_queue
        yield from self._running(chosen)

    def _running(self, chosen: Any) -> Iterator[Any]:
        scheduler = self.scheduler
        batches = [getattr(scheduler, name, None) for name in ("running_batch", "last_batch", "cur_batch")]
        batches += [chosen, *(getattr(chosen, name, None) for name in ("batch_to_run", "running_batch"))]
        for batch in batches:
            yield from getattr(batch, "reqs", None) or ()
        chunked = getattr(scheduler, "chunked_req", None)
        if chunked is not None:
            yield chunked


def refuse_unsupported(scheduler: Any, level: str) -> None:
    """Raise :class:`~kvledger.audit.hooks.EngineMismatch` for what is not observed."""
    if level != "tokens":
        raise EngineMismatch(f"SGLang is observed at level tokens, not {level}: its {NO_OWNERS}")
    arguments = scheduler.server_args
    for name, observed, what in UNSUPPORTED:
        if getattr(arguments, name, observed) not in (observed, None):
            raise EngineMismatch(f"kvledger does not observe {what} in SGLang yet")


def call_when_made(observe: Callable[[Any], object]) -> None:
    """Have SGLang's plugins call ``observe`` with each scheduler that is made in this process.

    Of tensor parallel ranks, whose schedulers all do the same, one is observed.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def made(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if is_entry_rank(scheduler):
            observe(scheduler)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", made, HookType.AFTER)


def is_entry_rank(scheduler: Any) -> bool:
    """Whether this process speaks for its engine: the schedulers of all tensor parallel ranks do the same."""
    if hasattr(scheduler, "attn_tp_rank"):
        return not (scheduler.attn_tp_rank or scheduler.pp_rank)
    parallel = _parallel()
    return not (getattr(parallel, "attn_tp_rank", 0) or getattr(parallel, "pp_rank", 0))


def _parallel() -> Any:
    """Where 0.5.23 keeps the ranks of the process; None: not there."""
    context = sys.modules.get("sglang.srt.runtime_context")
    return None if context is None else context.get_parallel()


def committed(request: Any) -> int:
    """The engine's count of a request's tokens whose KV is written or will be; -1 in 0.5.3: it has none."""
    return int(getattr(getattr(request, "kv", request), "kv_committed_len", NO_COUNT))


def in_middle_of_prompt(request: Any) -> bool:
    """Whether the last step computed a part of the request's prompt, not the end: it samples nothing."""
    chunks = getattr(request, "inflight_middle_chunks", None)  # since 0.5.13
    return int(getattr(request, "is_chunked", 0) if chunks is None else chunks) > 0


def loaded(request: Any, prefix: int) -> tuple[int, int]:
    """How many tokens of a request's prefix were loaded: from host and storage, and from storage alone.

    Until 0.5.20 it is what was promised: no request says what was loaded.
    """
    materialized = getattr(request, "materialized_host_hit_len", None)
    host = materialized() if materialized is not None else getattr(request, "host_hit_length", 0)
    host = min(prefix, int(host or 0))
    return host, min(host, int(getattr(request, "storage_hit_length", 0) or 0))


def reported_from_host(request: Any) -> int | None:
    """The cached tokens that the engine reports from the host and from storage; None before 0.5.10."""
    if not hasattr(request, "cached_tokens_host"):
        return None
    return int(request.cached_tokens_host or 0) + int(getattr(request, "cached_tokens_storage", 0) or 0)


def labels_of(request: Any) -> ev.RequestLabels | None:
    """The adapter, priority and session of a request; None if it has none. Never raises."""
    try:
        adapter = str(getattr(request, "lora_id", None) or "")[:64]
        priority = int(request.priority or 0)
        session = getattr(getattr(request, "session", None), "session_id", None) or ""
        if not (adapter or priority or session):
            return None
        return ev.RequestLabels(adapter, 0, "", priority, cut_id(str(session)))
    except Exception:  # an observer must never stop the engine; the request's labels are unknown
        return None


def configuration_of(scheduler: Any) -> dict[str, ev.Setting]:
    """Plain settings; no paths, no prompts, no addresses."""
    arguments, parallel = scheduler.server_args, _parallel()
    rank = getattr(scheduler, "dp_rank", None)
    rank = getattr(parallel, "dp_rank", None) if rank is None else rank
    model = str(getattr(arguments, "served_model_name", None) or arguments.model_path)
    allocator, page = scheduler.token_to_kv_pool_allocator, int(scheduler.page_size)
    return {
        "model": model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", ".")) else model,
        "scheduler": type(scheduler).__name__,
        "cache": type(scheduler.tree_cache).__name__,
        "asynchronous": bool(getattr(scheduler, "enable_overlap", False)),
        "policy": str(getattr(arguments, "schedule_policy", "")),
        "block_size": page,
        "blocks": int(allocator.size) // page,
        "groups": 1,
        "max_running": int(getattr(scheduler, "max_running_requests", 0)),
        "max_batched_tokens": int(getattr(arguments, "chunked_prefill_size", 0) or 0),
        "prefix_caching": not getattr(arguments, "disable_radix_cache", False),
        "drafts": 0,
        "connector": None,
        "host_cache": bool(getattr(arguments, "enable_hierarchical_cache", False)),
        "data_parallel_rank": int(rank or 0),
        "engine_index": int(rank or 0),
        "workers": int(getattr(arguments, "tp_size", 1) or 1),
    }


def _evictable(cache: Any) -> int:
    """Cached tokens that no request uses. Hybrid caches count by kind; full attention stands for them."""
    sizes = cache.evictable_size()
    return int(sizes[0] if isinstance(sizes, tuple) else sizes)
