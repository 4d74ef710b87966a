"""vLLM v0, releases 0.9.1 and 0.9.2 without ``VLLM_USE_V1``: what each hook sees, and its events.

``HOOKS`` and the observers named there are all that is known of these releases. Facts of upstream
stand beside the code that relies on them, by the names of ``vllm/core/scheduler.py``.

A v0 scheduler is never handed an output: the engine writes into its sequences. An output is taken
to have come when a scheduled sequence's count has moved, and is told at the next rest: when ended
requests are freed, after an abort, or before the next ``schedule()``. With the asynchronous output
processor a request's end is found while its next step runs, which is then in flight.

**The count.** ``num_computed_tokens`` moves when a step's output is taken, by the whole chunk that
was handed out: the hit and what was executed in one sum. Here a chunk counts from its scheduling,
as everywhere in kvledger: until the engine has added it, it is added for the engine. At rest, at
a preemption and at an end that was not in flight the engine's own count stands alone; where it did
not move by the chunk, a census says so at once.

**Swapping** keeps the KV and the count: the life goes on, its request only misses steps.

Not accounted: a group of several sequences or with an encoder (told as an account that is not
known), multi-step scheduling and lookahead slots (refused). Where ``append_slots`` finds its
blocks is not seen: no count moves there.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any, ClassVar, NamedTuple

from kvledger.audit import events as ev
from kvledger.audit.engines.steps import Sink, StepLog
from kvledger.audit.hooks import EngineMismatch, Hook, Hooks

CENSUS_STEPS = 512
CENSUS_SECONDS = 10.0


class _Followed:
    """A sequence group of one sequence, and what is known of its look-up and its step."""

    __slots__ = (
        "cached",
        "chunk",
        "data",
        "group",
        "looked_up",
        "looked_up_step",
        "outputs",
        "preempted",
        "request_id",
        "running",
        "seq_id",
        "then",
    )

    def __init__(self, group: Any, running: bool) -> None:
        self.group = group
        self.request_id: str = group.request_id
        self.seq_id: int = group.first_seq.seq_id
        self.data = group.first_seq.data
        self.running = running
        self.preempted = False
        # The answer that the engine has for its waiting request, and the step that asked (-1: none).
        self.looked_up = 0
        self.looked_up_step = -1
        self.cached = -1
        # The chunk that is out, and count and output tokens when it was handed out.
        self.chunk = 0
        self.then = 0
        self.outputs = 0

    @property
    def moved(self) -> bool:
        """Whether the engine has taken the output of the chunk that is out."""
        return bool(self.data.get_num_computed_tokens() != self.then)

    @property
    def num_computed_tokens(self) -> int:
        """The engine's count, with the chunk that is out."""
        count = int(self.data.get_num_computed_tokens())
        return count + self.chunk if count == self.then else count


class _Answer(NamedTuple):
    """The requests of an output, in the order of its step."""

    req_ids: list[str]


class V0Observer:
    """Watches one scheduler. ``start`` wraps it, ``stop`` gives it back."""

    NAME: ClassVar[str] = "v0-0.9"
    HOOKS: ClassVar[tuple[Hook, ...]] = (
        Hook("", "schedule", ((),), "schedule_begins", "scheduled", boundary=True),
        Hook("", "add_seq_group", (("seq_group",),), after="request_added"),
        Hook("", "abort_seq_group", (("request_id", "seq_id_to_seq_group"),), after="rests"),
        Hook("", "free_seq", (("seq",),), "end_begins", "ended"),
        Hook("", "free_finished_seq_groups", ((),), after="rests"),
        Hook(
            "",
            "_preempt",
            (("seq_group", "blocks_to_swap_out"),),
            "preemption_begins",
            "preempted",
        ),
        Hook("", "reset_prefix_cache", (("device",),), after="cache_reset"),
        Hook(
            "block_manager",
            "get_num_cached_tokens",
            (("seq",),),
            "look_up_begins",
            "looked_up",
        ),
        Hook("block_manager", "allocate", (("seq_group",),), before="allocated"),
    )

    def __init__(self, scheduler: Any, sink: Sink, *, version: str, level: str = "tokens") -> None:
        self.scheduler = scheduler
        self.sink = sink
        self.version = version
        self.level = level
        self.hooks: Hooks | None = None
        self._log = StepLog(sink)
        self._step = 0
        self._stopped = False
        self._followed: dict[str, _Followed] = {}
        self._by_sequence: dict[int, _Followed] = {}
        # The step that is out, and what this one has asked and given.
        self._tokens: dict[str, int] = {}
        self._out: dict[str, _Followed] = {}
        self._attempts: dict[str, _Followed] = {}
        self._admissions: dict[str, _Followed] = {}
        self._failed_attempts: dict[str, ev.AdmissionFailed] = {}
        self._ends: list[tuple[_Followed, list[ev.Event]]] = []
        self._resync = self._census_due = False
        self._census_step = self._census_at = 0

    # --- beginning and end ------------------------------------------------------------------------

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` untouched."""
        _refuse_what_is_not_accounted(self.scheduler)
        self.hooks = Hooks(self.HOOKS, self.scheduler, self, self._hook_failed, boundary)
        self._restart()

    def stop(self, reason: str) -> None:
        """Say what is still to be said and give the scheduler back. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if self.hooks is not None:
            self.hooks.remove()
        self._settle()
        for failed in self._failed_attempts.values():
            self._log.emit(failed)
        self._log.emit(ev.EngineStopped(self._log.now(), reason))

    def _hook_failed(self, hook: str, error: Exception, removed: bool) -> None:
        self._resync = True
        text = f"{type(error).__name__}: {error}"
        self._log.emit(ev.HookFailed(self._log.now(), hook, text, removed))
        if removed:  # without it every later figure would be wrong
            self.stop(f"the observer of {hook} kept failing")

    def _restart(self) -> None:
        """Tell the reader everything that lives, so that it may begin here."""
        self._resync = self._census_due = False
        self._tokens, self._out, self._ends = {}, {}, []
        self._followed, self._by_sequence = {}, {}
        scheduler, rows = self.scheduler, []
        for group in (*scheduler.waiting, *scheduler.running, *scheduler.swapped):
            if not group.is_finished() and _is_accounted(group):
                rows.append(self._snapshot_row(group))
        for request_id in self._log.ids.keys() - self._followed.keys():
            self._log.forget(request_id)
        now = self._log.now()
        started = ev.EngineStarted(
            at=now,
            wall_seconds=time.time(),
            engine="vllm",
            version=self.version,
            adapter=self.NAME,
            level=self.level,
            process_id=os.getpid(),
            configuration=_configuration(scheduler),
        )
        self._log.restart(started, ev.Snapshot(now, self._step, rows, 0))
        self._census_step, self._census_at = self._step, now

    def _snapshot_row(self, group: Any) -> ev.SnapshotRow:
        known = self._follow(group)
        data = known.data
        remembered = self._remembered(known.seq_id)
        if not known.running and remembered is not None:
            known.looked_up, known.looked_up_step = remembered, self._step
        return ev.SnapshotRow(
            request=self._log.intern(group.request_id),
            request_id=group.request_id,
            prompt_tokens=data.get_prompt_len(),
            fresh=not (known.running or data.get_num_computed_tokens() or data.get_output_len()),
            computed_tokens=data.get_num_computed_tokens(),
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            preemptions=0,
        )

    def _follow(self, group: Any) -> _Followed:
        running = group.first_seq.status.name != "WAITING"
        known = _Followed(group, running)
        self._followed[known.request_id] = self._by_sequence[known.seq_id] = known
        return known

    # --- arrivals and look-ups ----------------------------------------------------------------------

    def request_added(self, _: None, __: None, seq_group: Any) -> None:
        request_id = seq_group.request_id
        if request_id in self._followed:
            return
        number, now = self._log.intern(request_id), self._log.now()
        if not _is_accounted(seq_group):  # an end without a beginning: an account that is not known
            self._log.emit(ev.Finished(now, number, "not_followed", 0, -1, -1, -1, -1))
            self._log.forget(request_id)
            return
        self._follow(seq_group)
        self._log.emit(
            ev.RequestAdded(
                at=now,
                request=number,
                request_id=request_id,
                prompt_tokens=seq_group.first_seq.get_prompt_len(),
                max_tokens=getattr(seq_group.sampling_params, "max_tokens", None),
                priority=seq_group.priority,
                pooling=seq_group.pooling_params is not None,
            )
        )

    def look_up_begins(self, seq: Any) -> int | None:
        return self._remembered(seq.seq_id)

    def looked_up(self, remembered: int | None, found: int, seq: Any) -> None:
        """The tracker answers a prefill from memory if it can: then nothing was looked up."""
        known = self._by_sequence.get(seq.seq_id)
        if known is None or known.running:
            return  # a later chunk: its hit was settled with the first
        if remembered is None or known.looked_up_step < 0:
            known.looked_up, known.looked_up_step = found, self._step
        self._attempts[known.request_id] = known

    def allocated(self, seq_group: Any) -> None:
        """Just before: what the cache holds now decides which blocks the table will share."""
        known = self._followed.get(seq_group.request_id)
        if known is not None:
            known.cached = self._held_now(known.seq_id)
            self._admissions[known.request_id] = known

    def _remembered(self, seq_id: int) -> int | None:
        tracker = _tracker(self.scheduler)
        return None if tracker is None else tracker._seq_id_to_num_tokens_computed.get(seq_id)

    def _held_now(self, seq_id: int) -> int:
        """Tokens of a sequence that the cache holds, asked without leaving a trace; -1: no cache."""
        tracker = _tracker(self.scheduler)
        hashes = None if tracker is None else tracker._seq_id_to_blocks_hashes.get(seq_id)
        if tracker is None or hashes is None:
            return -1
        return len(tracker._allocator.find_cached_blocks_prefix(hashes)) * int(tracker._block_size)

    # --- a step ---------------------------------------------------------------------------------------

    def schedule_begins(self) -> None:
        if self._out:
            self._deliver()
        self._say_ends()
        self._at_rest()
        self._step += 1
        self._attempts, self._admissions = {}, {}

    def scheduled(self, _: None, result: Any) -> None:
        metadata, outputs = result[0], result[1]
        tokens: dict[str, int] = {}
        hits: dict[str, int] = {}
        out: dict[str, _Followed] = {}
        for row in metadata:
            request_id = row.request_id
            known = self._followed.get(request_id)
            if known is None:
                continue
            data = known.data
            known.chunk, known.then = row.token_chunk_size, data.get_num_computed_tokens()
            known.outputs = data.get_output_len()
            out[request_id] = known
            if row.is_prompt:
                hits[request_id], tokens[request_id] = self._executed(row, known)
            else:
                tokens[request_id] = known.chunk
        if self._attempts or self._admissions:
            self._admit(tokens, hits)
        if tokens:
            self._tokens, self._out = tokens, out
            self._log.scheduled(self._step, tokens, {}, self._followed)
        for group in outputs.ignored_seq_groups:
            known = self._followed.get(group.request_id)
            if known is not None and group.is_finished():
                self._end(known, [self._finished(known)])

    def _executed(self, row: Any, known: _Followed) -> tuple[int, int]:
        """The hit that a prompt's chunk uses, and the tokens that are executed.

        As ``ModelRunner._compute_for_prefix_cache_hit``: the hit is as many blocks as the step's
        metadata calls computed; of a full hit the last token is executed.
        """
        hit = len(row.computed_block_nums or ()) * self.scheduler.cache_config.block_size
        if self.scheduler.cache_config.sliding_window is not None:
            hit = 0
        end = min(known.data.get_len(), known.then + known.chunk)
        hit = min(hit, end)
        return hit, end - max(known.then, min(hit, end - 1))

    def _admit(self, tokens: dict[str, int], hits: dict[str, int]) -> None:
        """Say what became of this step's look-ups."""
        for request_id, known in self._attempts.items():
            if request_id not in self._admissions:
                self._not_admitted(known)
        for request_id, known in self._admissions.items():
            if request_id in tokens:
                self._admitted(known, hits.get(request_id, 0), tokens[request_id])

    def _admitted(self, known: _Followed, hit: int, executed: int) -> None:
        emit, now, number = self._log.emit, self._log.now(), self._log.ids[known.request_id]
        failed = self._failed_attempts.pop(known.request_id, None)
        if failed is not None:
            emit(failed)
        asked = known.looked_up_step
        if asked >= 0:
            emit(ev.LookedUp(now, number, asked, known.looked_up))
            if asked != self._step or known.cached not in (-1, known.looked_up):
                emit(
                    ev.LookupKept(now, number, self._step, asked, known.looked_up, known.cached, False)
                )
        computed = known.then + known.chunk - executed
        given_back = int(hit == known.then + known.chunk)
        resumed = known.preempted
        before = computed + given_back
        emit(ev.Admitted(now, number, self._step, resumed, hit, 0, False, before))
        if given_back:
            emit(ev.RolledBack(now, number, "full_hit", before, computed))
        known.running, known.looked_up_step = True, -1
        self._log.admitted(known.request_id, runs=True)

    def _not_admitted(self, known: _Followed) -> None:
        """Equal failed attempts in a row are one event, told when they end."""
        request_id, found = known.request_id, known.looked_up
        last = self._failed_attempts.get(request_id)
        attempts = 1
        if last is not None:
            if last.local_tokens == found:
                attempts = last.attempts + 1
            else:
                self._log.emit(last)
        self._failed_attempts[request_id] = ev.AdmissionFailed(
            self._log.now(), self._log.ids[request_id], self._step, "not_allocated", found, 0, attempts
        )

    # --- its output -------------------------------------------------------------------------------------

    def rests(self, *_: Any, **__: Any) -> None:
        """Requests were freed or aborted; the engine is between two steps, or in one."""
        self._settle()

    def _settle(self) -> None:
        if self._out and any(known.moved for known in self._out.values()):
            self._deliver()
        self._say_ends()

    def _deliver(self) -> None:
        tokens, out = self._tokens, self._out
        self._tokens, self._out = {}, {}
        lengths = []
        for known in out.values():
            data = known.data
            lengths.append(data.get_output_len() - known.outputs)
            if data.get_num_computed_tokens() != known.then + known.chunk:
                self._census_due |= not known.group.is_finished()
            known.chunk, known.then = 0, -1
        self._log.delivered(self._log.now(), lengths, _Answer(list(tokens)), [])

    def _at_rest(self) -> None:
        """Between two steps: a snapshot if one is wanted, a census if one is due."""
        now = self._log.now()
        if self.sink.wants_snapshot or self._resync:
            self._restart()
        elif (
            self._census_due
            or self._step - self._census_step >= CENSUS_STEPS
            or now - self._census_at >= CENSUS_SECONDS * 1e6
        ):
            self._census(now)
        else:
            self._log.flush(now)

    def _census(self, now: int) -> None:
        self._census_due = False
        self._census_step, self._census_at = self._step, now
        rows: list[int] = []
        for known in self._followed.values():
            if known.running:
                data = known.data
                number = self._log.ids[known.request_id]
                rows += (number, data.get_num_computed_tokens(), -1, -1, data.get_len())
        manager = self.scheduler.block_manager
        free = manager.get_num_free_gpu_blocks()
        blocks = getattr(manager, "num_total_gpu_blocks", 0)
        waiting = len(self.scheduler.waiting)
        self._log.emit(ev.Census(now, self._step, rows, waiting, free, blocks))

    # --- preemption and the end ---------------------------------------------------------------------------

    def preemption_begins(self, seq_group: Any, *_: Any) -> int:
        known = self._followed.get(seq_group.request_id)
        return known.num_computed_tokens if known is not None else -1

    def preempted(self, before: int | None, mode: Any, seq_group: Any, *_: Any) -> None:
        known = self._followed.get(seq_group.request_id)
        if known is None or before is None or mode.name == "SWAP":
            return
        known.running, known.preempted, known.looked_up_step = False, True, -1
        table = self.scheduler.block_manager.block_tables.get(known.seq_id)
        self._log.emit(
            ev.Preempted(
                at=self._log.now(),
                request=self._log.ids[known.request_id],
                step=self._step,
                cause="blocks",
                before_tokens=before,
                in_flight_tokens=-1,
                placeholder_tokens=-1,
                computed_tokens=known.data.get_num_computed_tokens(),
                held_blocks=len(table.physical_block_ids) if table is not None else 0,
                delivered=True,
            )
        )

    def cache_reset(self, _: None, result: bool, *__: Any, **___: Any) -> None:
        self._log.emit(ev.CacheReset(self._log.now(), bool(result), False))

    def end_begins(self, seq: Any) -> ev.Finished | None:
        """An end is told after the output that brought it, but before one still in flight."""
        known = self._by_sequence.get(seq.seq_id)
        if known is None or not seq.is_finished():
            return None
        return self._finished(known)

    def ended(self, finished: ev.Finished | None, _: None, seq: Any) -> None:
        if finished is None:
            return
        known = self._by_sequence[seq.seq_id]
        if known.request_id in self._out and known.moved:
            del self._by_sequence[seq.seq_id]
            self._ends.append((known, [finished]))
        else:
            self._end(known, [finished])

    def _finished(self, known: _Followed) -> ev.Finished:
        data = known.data
        return ev.Finished(
            at=self._log.now(),
            request=self._log.ids[known.request_id],
            reason=_reason(known.group.first_seq.status),
            computed_tokens=known.num_computed_tokens,
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            output_tokens=data.get_output_len(),
        )

    def _say_ends(self) -> None:
        ends, self._ends = self._ends, []
        for known, events in ends:
            self._end(known, events)

    def _end(self, known: _Followed, events: list[ev.Event]) -> None:
        """Tell an end; before it a look-up that the engine will never forget."""
        request_id, emit = known.request_id, self._log.emit
        failed = self._failed_attempts.pop(request_id, None)
        if failed is not None:
            emit(failed)
        remembered = self._remembered(known.seq_id)
        if remembered is not None:
            asked = known.looked_up_step
            emit(
                ev.LookupKept(
                    self._log.now(),
                    self._log.ids[request_id],
                    self._step,
                    asked,
                    remembered,
                    self._held_now(known.seq_id),
                    True,
                )
            )
        for event in events:
            emit(event)
        self._followed.pop(request_id, None)
        self._by_sequence.pop(known.seq_id, None)
        self._log.forget(request_id)


def _tracker(scheduler: Any) -> Any:
    """``ComputedBlocksTracker``, which remembers answers; None where no prefix is cached."""
    manager = scheduler.block_manager
    return manager._computed_blocks_tracker if getattr(manager, "enable_caching", False) else None


def _is_accounted(group: Any) -> bool:
    return len(group.seqs) == 1 and group.encoder_seq is None


_TRACKED = ("_seq_id_to_num_tokens_computed", "_seq_id_to_blocks_hashes", "_allocator", "_block_size")


def _refuse_what_is_not_accounted(scheduler: Any) -> None:
    config, tracker = scheduler.scheduler_config, _tracker(scheduler)
    missing = [name for name in _TRACKED if tracker is not None and not hasattr(tracker, name)]
    if missing:
        raise EngineMismatch(f"ComputedBlocksTracker has no {', '.join(missing)}")
    if config.num_scheduler_steps > 1 or config.num_lookahead_slots:
        raise EngineMismatch("several tokens a step of a v0 scheduler are not accounted")


@functools.cache
def _reason(status: Any) -> str:
    """``length`` for ``SequenceStatus.FINISHED_LENGTH_CAPPED``."""
    return str(status.name).removeprefix("FINISHED_").removesuffix("_CAPPED").lower()


def _configuration(scheduler: Any) -> dict[str, ev.Setting]:
    """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    return {
        "scheduler": type(scheduler).__name__,
        "asynchronous": bool(scheduler.use_async_output_proc),
        "policy": str(config.policy),
        "block_size": int(cache.block_size),
        "blocks": int(cache.num_gpu_blocks or 0),
        "groups": 1,
        "max_running": int(config.max_num_seqs),
        "max_batched_tokens": int(config.max_num_batched_tokens),
        "max_model_len": int(config.max_model_len),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(config.chunked_prefill_enabled),
        "preemption_mode": config.preemption_mode,
        "drafts": 0,
        "connector": None,
        "plan": "opaque",
        "load_failure_policy": None,
        "figures": "none",
        "census_steps": CENSUS_STEPS,
    }
