"""vLLM v0, releases 0.9.1 and 0.9.2 without ``VLLM_USE_V1``: what each hook sees, and its events.

Facts about vLLM stand beside the code that relies on them. Names are those of ``vllm/core/scheduler.py``.

A v0 scheduler never receives an output: the engine writes into its sequences. An output has arrived when the
count of a scheduled sequence has risen. The output is emitted at the next rest: when ended requests are
freed, after an abort, or before the next ``schedule()``. With the asynchronous output processor the engine
finds the end of a request while the request's next step is in flight.

**The count.** ``num_computed_tokens`` rises when a step's output is processed, by the whole chunk that was
scheduled: hit and executed tokens together. kvledger counts a chunk when it is scheduled, as in v1. So it
adds the chunk to the engine's count until the engine has done so; at rest, at a preemption, and at an end
with no step in flight it takes the engine's count alone. If the count did not rise by the chunk, a census
reports that at once.

**Swapping** keeps the KV and the count: the life goes on, but its request is not in the steps meanwhile.

Not accounted: a group of several sequences or with an encoder (an unknown account), multi-step scheduling and
lookahead slots (refused). ``append_slots`` is not observed, because no count changes there.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from ... import events as ev
from ...hooks import EngineMismatch, Hook
from ...text import cut_id, cut_priority
from ..observer import CENSUS_STEPS, Observer

# --- One v0 sequence under observation, and what kvledger reads from a v0 scheduler without changing it.
#
# Private names of vLLM 0.9.1 and 0.9.2 stand in this file, and nowhere else.


class ObservedSequence:
    """A sequence group of one sequence, its last lookup and its current step."""

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
        """vLLM's sequence group."""
        self.request_id: str = group.request_id
        """The request's id."""
        self.seq_id: int = group.first_seq.seq_id
        """vLLM's number of the sequence."""
        self.data = group.first_seq.data
        """vLLM's token counts of the sequence."""
        self.running = running
        """Whether the sequence has been admitted."""
        self.preempted = False
        """Whether the sequence was preempted before."""
        self.looked_up = 0
        """The hit that the engine keeps for the waiting request."""
        self.looked_up_step = -1
        """The step of the lookup that returned it; -1: none."""
        self.cached = -1
        """The tokens that the cache held at the allocation; -1: unknown."""
        self.chunk = 0
        """The scheduled tokens whose output has not arrived."""
        self.then = 0
        """The computed count when the chunk was scheduled."""
        self.outputs = 0
        """The output tokens when the chunk was scheduled."""

    @property
    def moved(self) -> bool:
        """Whether the engine has processed the output of the scheduled chunk."""
        return bool(self.data.get_num_computed_tokens() != self.then)

    @property
    def num_computed_tokens(self) -> int:
        """The engine's computed count plus the scheduled chunk."""
        count = int(self.data.get_num_computed_tokens())
        return count + self.chunk if count == self.then else count


def tracker_of(scheduler: Any) -> Any:
    """``ComputedBlocksTracker``, which keeps the hits of lookups; None without prefix caching."""
    manager = scheduler.block_manager
    return manager._computed_blocks_tracker if getattr(manager, "enable_caching", False) else None


def remembered_hit(scheduler: Any, seq_id: int) -> int | None:
    """The hit that the tracker keeps for a sequence and would return without a lookup; None: none."""
    tracker = tracker_of(scheduler)
    return None if tracker is None else tracker._seq_id_to_num_tokens_computed.get(seq_id)


def cached_now(scheduler: Any, seq_id: int) -> int:
    """Tokens of a sequence that the cache holds now; -1 without a cache or before the first lookup."""
    tracker = tracker_of(scheduler)
    hashes = None if tracker is None else tracker._seq_id_to_blocks_hashes.get(seq_id)
    if tracker is None or hashes is None:
        return -1
    return len(tracker._allocator.find_cached_blocks_prefix(hashes)) * int(tracker._block_size)


def is_accounted(group: Any) -> bool:
    """Whether kvledger keeps an account of this group: one sequence, no encoder."""
    return len(group.seqs) == 1 and group.encoder_seq is None


_TRACKED = ("_seq_id_to_num_tokens_computed", "_seq_id_to_blocks_hashes", "_allocator", "_block_size")


def refuse_unsupported(scheduler: Any) -> None:
    """Raise EngineMismatch for a tracker without the expected attributes, and for several tokens a step."""
    config, tracker = scheduler.scheduler_config, tracker_of(scheduler)
    missing = [name for name in _TRACKED if tracker is not None and not hasattr(tracker, name)]
    if missing:
        raise EngineMismatch(f"ComputedBlocksTracker has no {', '.join(missing)}")
    if config.num_scheduler_steps > 1 or config.num_lookahead_slots:
        raise EngineMismatch("several tokens a step of a v0 scheduler are not accounted")


@functools.cache
def reason_of(status: Any) -> str:
    """``length`` for ``SequenceStatus.FINISHED_LENGTH_CAPPED``."""
    return str(status.name).removeprefix("FINISHED_").removesuffix("_CAPPED").lower()


def configuration_of(scheduler: Any) -> dict[str, ev.Setting]:
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


# --- Requests of a v0 scheduler: their prefix-cache lookups, whether each led to an admission, and their
# ends.
#
# Every attempt to admit a waiting request looks it up. If the release keeps the hit of a failed attempt,
# :class:`~kvledger.audit.events.LookupKept` reports this: at the admission that uses the hit, or at the end
# of a request whose hit is never released. As in v1, the events of a step's lookups are emitted when the
# step is over.


class LookupObserver(Observer):
    """Handles arrivals, the tracker's answers and the allocations that follow them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sequences: dict[str, ObservedSequence] = {}
        """The living requests, by request id."""
        self._by_sequence_id: dict[int, ObservedSequence] = {}
        """The same, by vLLM's sequence id."""
        self._attempts: dict[str, ObservedSequence] = {}
        """The requests looked up in this step, by request id."""
        self._admissions: dict[str, ObservedSequence] = {}
        """The requests for which blocks were allocated in this step, by request id."""
        self._failed_attempts: dict[str, ev.AdmissionFailed] = {}
        """The failed attempts of each waiting request that are being counted, by request id."""

    def emit_failed_attempts(self) -> None:
        for failed in self._failed_attempts.values():
            self.log.emit(failed)

    def _observe(self, group: Any) -> ObservedSequence:
        running = group.first_seq.status.name != "WAITING"
        sequence = ObservedSequence(group, running)
        self._sequences[sequence.request_id] = self._by_sequence_id[sequence.seq_id] = sequence
        return sequence

    def request_added(self, _: None, __: None, seq_group: Any) -> None:
        request_id = seq_group.request_id
        if request_id in self._sequences:
            return
        number, now = self.log.intern(request_id), self.log.now()
        if not is_accounted(seq_group):  # an end without a beginning gives an unknown account
            self.log.emit(ev.Finished(now, number, "not_followed", 0, -1, -1, -1, -1))
            self.log.forget(request_id)
            return
        self._observe(seq_group)
        self.log.emit(
            ev.RequestAdded(
                at=now,
                request=number,
                request_id=cut_id(request_id),
                prompt_tokens=seq_group.first_seq.get_prompt_len(),
                max_tokens=getattr(seq_group.sampling_params, "max_tokens", None),
                priority=cut_priority(seq_group.priority),
                pooling=seq_group.pooling_params is not None,
                labels=self.labels.of(seq_group),
            )
        )

    def look_up_begins(self, seq: Any) -> int | None:
        """``get_num_cached_tokens`` is called: note the hit that the tracker keeps."""
        return remembered_hit(self.scheduler, seq.seq_id)

    def looked_up(self, kept: int | None, tokens: int, seq: Any) -> None:
        """``get_num_cached_tokens`` returned; nothing was looked up if the tracker kept a hit."""
        sequence = self._by_sequence_id.get(seq.seq_id)
        if sequence is None or sequence.running:
            return  # a later chunk: its hit was settled with the first
        if kept is None or sequence.looked_up_step < 0:
            sequence.looked_up, sequence.looked_up_step = tokens, self.step
        self._attempts[sequence.request_id] = sequence

    def allocated(self, seq_group: Any) -> None:
        """``allocate`` is called: the tokens cached now decide which blocks the table will share."""
        sequence = self._sequences.get(seq_group.request_id)
        if sequence is not None:
            sequence.cached = cached_now(self.scheduler, sequence.seq_id)
            self._admissions[sequence.request_id] = sequence

    # --- what became of them ---------------------------------------------------------------------------

    def _executed(self, row: Any, sequence: ObservedSequence) -> tuple[int, int]:
        """The hit that a prompt's chunk uses, and the tokens that are executed.

        As in ``ModelRunner._compute_for_prefix_cache_hit``, the hit is the blocks that the step's metadata
        lists as computed, and the last token of a full hit is executed.
        """
        hit = len(row.computed_block_nums or ()) * self.scheduler.cache_config.block_size
        if self.scheduler.cache_config.sliding_window is not None:
            hit = 0
        end = min(sequence.data.get_len(), sequence.then + sequence.chunk)
        hit = min(hit, end)
        return hit, end - max(sequence.then, min(hit, end - 1))

    def _admit(self, tokens: dict[str, int], hits: dict[str, int]) -> None:
        """Emit what became of this step's lookups."""
        for request_id, sequence in self._attempts.items():
            if request_id not in self._admissions:
                self._not_admitted(sequence)
        for request_id, sequence in self._admissions.items():
            if request_id in tokens:
                self._admitted(sequence, hits.get(request_id, 0), tokens[request_id])

    def _admitted(self, sequence: ObservedSequence, hit: int, executed: int) -> None:
        emit, now, number = self.log.emit, self.log.now(), self.log.ids[sequence.request_id]
        failed = self._failed_attempts.pop(sequence.request_id, None)
        if failed is not None:
            emit(failed)
        asked = sequence.looked_up_step
        if asked >= 0:
            emit(ev.LookedUp(now, number, asked, sequence.looked_up))
            if asked != self.step or sequence.cached not in (-1, sequence.looked_up):
                self._emit_kept(sequence, sequence.looked_up, sequence.cached, ended=False)
        computed = sequence.then + sequence.chunk - executed
        given_back = int(hit == sequence.then + sequence.chunk)
        before = computed + given_back
        emit(ev.Admitted(now, number, self.step, sequence.preempted, hit, 0, False, before))
        if given_back:
            emit(ev.RolledBack(now, number, "full_hit", before, computed))
        sequence.running, sequence.looked_up_step = True, -1
        self.log.admitted(sequence.request_id, runs=True)

    def _not_admitted(self, sequence: ObservedSequence) -> None:
        """Count an equal failed attempt of an earlier step, or begin to count this one."""
        request_id, tokens = sequence.request_id, sequence.looked_up
        last = self._failed_attempts.get(request_id)
        attempts = 1
        if last is not None:
            if last.local_tokens == tokens:
                attempts = last.attempts + 1
            else:
                self.log.emit(last)
        self._failed_attempts[request_id] = ev.AdmissionFailed(
            self.log.now(), self.log.ids[request_id], self.step, "not_allocated", tokens, 0, attempts
        )

    # --- the end ----------------------------------------------------------------------------------------

    def _end(self, sequence: ObservedSequence, finished: ev.Finished) -> None:
        """Emit ``Finished``, and before it ``LookupKept`` if the engine never forgets the lookup."""
        request_id, emit = sequence.request_id, self.log.emit
        failed = self._failed_attempts.pop(request_id, None)
        if failed is not None:
            emit(failed)
        kept = remembered_hit(self.scheduler, sequence.seq_id)
        if kept is not None:
            held = cached_now(self.scheduler, sequence.seq_id)
            self._emit_kept(sequence, kept, held, ended=True)
        emit(finished)
        self._sequences.pop(request_id, None)
        self._by_sequence_id.pop(sequence.seq_id, None)
        self.log.forget(request_id)

    def _emit_kept(self, sequence: ObservedSequence, answer: int, held: int, *, ended: bool) -> None:
        number, asked = self.log.ids[sequence.request_id], sequence.looked_up_step
        now = self.log.now()
        self.log.emit(ev.LookupKept(now, number, self.step, asked, answer, held, ended))


class V0Observer(LookupObserver):
    """Observes one v0 scheduler. ``start`` wraps its methods, ``stop`` restores them."""

    NAME: ClassVar[str] = "v0-0.9"
    CENSUS_AT_END: ClassVar[tuple[str, ...]] = ("detached",)
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: dict[str, int] = {}
        """Scheduled tokens of the step whose output has not been emitted, by request id."""
        self._scheduled: dict[str, ObservedSequence] = {}
        """The requests of that step, by request id."""
        self._ends: list[tuple[ObservedSequence, ev.Finished]] = []
        self._census_due = False
        """A computed count did not move by its chunk."""

    # --- beginning and end ------------------------------------------------------------------------

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        refuse_unsupported(self.scheduler)
        super().start(boundary)

    def stop(self, reason: str) -> None:
        """Emit what is still buffered and restore the scheduler. Idempotent."""
        if not self._stopped:
            try:
                self._settle()
            except Exception as error:  # an observer must never stop the engine
                self._hook_failed("stop", error, removed=False)
        super().stop(reason)

    def snapshot_rows(self) -> list[ev.SnapshotRow]:
        self._census_due = False
        self._tokens, self._scheduled, self._ends = {}, {}, []
        self._sequences, self._by_sequence_id = {}, {}
        queues = self.scheduler.waiting, self.scheduler.running, self.scheduler.swapped
        groups = [group for queue in queues for group in queue if not group.is_finished()]
        rows = [self._snapshot_row(group) for group in groups if is_accounted(group)]
        for request_id in self.log.ids.keys() - self._sequences.keys():
            self._failed_attempts.pop(request_id, None)
            self.log.forget(request_id)
        return rows

    def _snapshot_row(self, group: Any) -> ev.SnapshotRow:
        sequence = self._observe(group)
        data = sequence.data
        kept = remembered_hit(self.scheduler, sequence.seq_id)
        if not sequence.running and kept is not None:
            sequence.looked_up, sequence.looked_up_step = kept, self.step
        return ev.SnapshotRow(
            request=self.log.intern(group.request_id),
            request_id=cut_id(group.request_id),
            prompt_tokens=data.get_prompt_len(),
            fresh=not (sequence.running or data.get_num_computed_tokens() or data.get_output_len()),
            computed_tokens=data.get_num_computed_tokens(),
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            preemptions=0,
            labels=self.labels.of(group),
        )

    def configuration(self) -> dict[str, ev.Setting]:
        """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
        return configuration_of(self.scheduler)

    # --- a step ---------------------------------------------------------------------------------------

    def schedule_begins(self) -> None:
        """``schedule`` is called: the last output has been processed, and a new step begins."""
        if self._scheduled:
            self._deliver()
        self._emit_ends()
        self.at_rest()
        self.step += 1
        self._attempts, self._admissions = {}, {}

    def scheduled(self, _: None, result: Any) -> None:
        """``schedule`` returned. Emits the step's admissions, ``Stepped``, and the ends of ignored groups."""
        metadata, outputs = result[0], result[1]
        tokens: dict[str, int] = {}
        hits: dict[str, int] = {}
        out: dict[str, ObservedSequence] = {}
        for row in metadata:
            request_id = row.request_id
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            data = sequence.data
            sequence.chunk, sequence.then = row.token_chunk_size, data.get_num_computed_tokens()
            sequence.outputs = data.get_output_len()
            out[request_id] = sequence
            if row.is_prompt:
                hits[request_id], tokens[request_id] = self._executed(row, sequence)
            else:
                tokens[request_id] = sequence.chunk
        if self._attempts or self._admissions:
            self._admit(tokens, hits)
        if tokens:
            self._tokens, self._scheduled = tokens, out
            self.log.scheduled(self.step, tokens, {}, self._sequences)
        for group in outputs.ignored_seq_groups:
            sequence = self._sequences.get(group.request_id)
            if sequence is not None and group.is_finished():
                self._end(sequence, self._finished(sequence))

    # --- its output -------------------------------------------------------------------------------------

    def rests(self, *_: Any, **__: Any) -> None:
        """Ended requests were freed, or requests aborted. Emits an output that has arrived, and ends."""
        self._settle()

    def _settle(self) -> None:
        if self._scheduled and any(sequence.moved for sequence in self._scheduled.values()):
            self._deliver()
        self._emit_ends()

    def _deliver(self) -> None:
        """Emit the output of the last step."""
        tokens, out = self._tokens, self._scheduled
        self._tokens, self._scheduled = {}, {}
        lengths = []
        for sequence in out.values():
            data = sequence.data
            lengths.append(data.get_output_len() - sequence.outputs)
            if data.get_num_computed_tokens() != sequence.then + sequence.chunk:
                self._census_due |= not sequence.group.is_finished()
            sequence.chunk, sequence.then = 0, -1
        self.log.delivered(self.log.now(), lengths, list(tokens), tokens, [])

    def census_wanted(self) -> bool:
        """Whether a computed count did not move by its chunk, which a census reports at once."""
        return self._census_due

    def census(self, now: int) -> None:
        self._census_due = False
        rows: list[int] = []
        waiting_rows: list[int] = []
        for sequence in self._sequences.values():
            if sequence.running or sequence.preempted:
                counts = rows if sequence.running else waiting_rows
                number = self.log.ids[sequence.request_id]
                counts += (number, sequence.num_computed_tokens, -1, -1, sequence.data.get_len())
        manager = self.scheduler.block_manager
        free = manager.get_num_free_gpu_blocks()
        blocks = getattr(manager, "num_total_gpu_blocks", 0)
        waiting = len(self.scheduler.waiting)
        timed = self.hook_time()
        self.log.emit(ev.Census(now, self.step, rows, waiting, free, blocks, *timed, waiting_rows))

    # --- preemption and the end ---------------------------------------------------------------------------

    def preemption_begins(self, seq_group: Any, *_: Any) -> int:
        """``_preempt`` is called: note the computed count."""
        sequence = self._sequences.get(seq_group.request_id)
        return sequence.num_computed_tokens if sequence is not None else -1

    def preempted(self, before: int | None, mode: Any, seq_group: Any, *_: Any) -> None:
        """The request waits again. Emits ``Preempted``, but not where its blocks were swapped out."""
        sequence = self._sequences.get(seq_group.request_id)
        if sequence is None or before is None or mode.name == "SWAP":
            return
        sequence.running, sequence.preempted, sequence.looked_up_step = False, True, -1
        table = self.scheduler.block_manager.block_tables.get(sequence.seq_id)
        self.log.emit(
            ev.Preempted(
                at=self.log.now(),
                request=self.log.ids[sequence.request_id],
                step=self.step,
                cause="blocks",
                before_tokens=before,
                in_flight_tokens=-1,
                placeholder_tokens=-1,
                computed_tokens=sequence.data.get_num_computed_tokens(),
                held_blocks=len(table.physical_block_ids) if table is not None else 0,
                delivered=True,
            )
        )

    def cache_reset(self, _: None, result: bool, *__: Any, **___: Any) -> None:
        """``reset_prefix_cache`` returned. Emits ``CacheReset``."""
        self.log.emit(ev.CacheReset(self.log.now(), bool(result), False))

    def end_begins(self, seq: Any) -> ev.Finished | None:
        """``free_seq`` is called. ``Finished`` comes after the output that ended the request."""
        sequence = self._by_sequence_id.get(seq.seq_id)
        if sequence is None or not seq.is_finished():
            return None
        return self._finished(sequence)

    def ended(self, finished: ev.Finished | None, _: None, seq: Any) -> None:
        """``free_seq`` returned. Emits ``Finished``, at once or after the output that has just arrived."""
        if finished is None:
            return
        sequence = self._by_sequence_id[seq.seq_id]
        if sequence.request_id in self._scheduled and sequence.moved:
            del self._by_sequence_id[seq.seq_id]
            self._ends.append((sequence, finished))
        else:
            self._end(sequence, finished)

    def _finished(self, sequence: ObservedSequence) -> ev.Finished:
        data = sequence.data
        return ev.Finished(
            at=self.log.now(),
            request=self.log.ids[sequence.request_id],
            reason=reason_of(sequence.group.first_seq.status),
            computed_tokens=sequence.num_computed_tokens,
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            output_tokens=data.get_output_len(),
        )

    def _emit_ends(self) -> None:
        ends, self._ends = self._ends, []
        for sequence, finished in ends:
            self._end(sequence, finished)
