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

from typing import Any, ClassVar

from ... import events as ev
from ...hooks import Hook
from ...text import cut_id
from .lookups import LookupObserver
from .sequence import (
    ObservedSequence,
    configuration_of,
    is_accounted,
    reason_of,
    refuse_unsupported,
    remembered_hit,
)


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
