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

from typing import Any, ClassVar

from ... import events as ev
from ...hooks import Hook
from .lookups import LookupObserver
from .sequence import (
    Followed,
    configuration_of,
    is_accounted,
    memory_of,
    reason_of,
    refuse_what_is_not_accounted,
)


class V0Observer(LookupObserver):
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The step whose output has not been told, and ends that wait for it.
        self._tokens: dict[str, int] = {}
        self._out: dict[str, Followed] = {}
        self._ends: list[tuple[Followed, ev.Finished]] = []
        self._census_due = False

    # --- beginning and end ------------------------------------------------------------------------

    def start(self, boundary: Any = None) -> None:
        """Wrap the scheduler. Raises :class:`~kvledger.audit.hooks.EngineMismatch` untouched."""
        refuse_what_is_not_accounted(self.scheduler)
        super().start(boundary)

    def stop(self, reason: str) -> None:
        """Say what is still to be said and give the scheduler back. Idempotent."""
        if not self._stopped:
            try:
                self._settle()
            except Exception as error:  # an observer must never stop the engine
                self._hook_failed("stop", error, removed=False)
        super().stop(reason)

    def snapshot_rows(self) -> list[ev.SnapshotRow]:
        self._census_due = False
        self._tokens, self._out, self._ends = {}, {}, []
        self._followed, self._by_sequence = {}, {}
        queues = self.scheduler.waiting, self.scheduler.running, self.scheduler.swapped
        groups = [group for queue in queues for group in queue if not group.is_finished()]
        rows = [self._snapshot_row(group) for group in groups if is_accounted(group)]
        for request_id in self.log.ids.keys() - self._followed.keys():
            self._failed_attempts.pop(request_id, None)
            self.log.forget(request_id)
        return rows

    def _snapshot_row(self, group: Any) -> ev.SnapshotRow:
        known = self._follow(group)
        data = known.data
        kept = memory_of(self.scheduler, known.seq_id)
        if not known.running and kept is not None:
            known.looked_up, known.looked_up_step = kept, self.step
        return ev.SnapshotRow(
            request=self.log.intern(group.request_id),
            request_id=group.request_id,
            prompt_tokens=data.get_prompt_len(),
            fresh=not (known.running or data.get_num_computed_tokens() or data.get_output_len()),
            computed_tokens=data.get_num_computed_tokens(),
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            preemptions=0,
        )

    def configuration(self) -> dict[str, ev.Setting]:
        """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
        return configuration_of(self.scheduler)

    # --- a step ---------------------------------------------------------------------------------------

    def schedule_begins(self) -> None:
        if self._out:
            self._deliver()
        self._say_ends()
        self.at_rest()
        self.step += 1
        self._attempts, self._admissions = {}, {}

    def scheduled(self, _: None, result: Any) -> None:
        metadata, outputs = result[0], result[1]
        tokens: dict[str, int] = {}
        hits: dict[str, int] = {}
        out: dict[str, Followed] = {}
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
            self.log.scheduled(self.step, tokens, {}, self._followed)
        for group in outputs.ignored_seq_groups:
            known = self._followed.get(group.request_id)
            if known is not None and group.is_finished():
                self._end(known, self._finished(known))

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
        self.log.delivered(self.log.now(), lengths, list(tokens), tokens, [])

    def census_wanted(self) -> bool:
        """Whether a count is not what its step promised, which is reported at once."""
        return self._census_due

    def census(self, now: int) -> None:
        self._census_due = False
        rows: list[int] = []
        for known in self._followed.values():
            if known.running:
                data = known.data
                number = self.log.ids[known.request_id]
                rows += (number, data.get_num_computed_tokens(), -1, -1, data.get_len())
        manager = self.scheduler.block_manager
        free = manager.get_num_free_gpu_blocks()
        blocks = getattr(manager, "num_total_gpu_blocks", 0)
        waiting = len(self.scheduler.waiting)
        self.log.emit(ev.Census(now, self.step, rows, waiting, free, blocks, *self.hook_time()))

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
        self.log.emit(
            ev.Preempted(
                at=self.log.now(),
                request=self.log.ids[known.request_id],
                step=self.step,
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
        self.log.emit(ev.CacheReset(self.log.now(), bool(result), False))

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
            self._ends.append((known, finished))
        else:
            self._end(known, finished)

    def _finished(self, known: Followed) -> ev.Finished:
        data = known.data
        return ev.Finished(
            at=self.log.now(),
            request=self.log.ids[known.request_id],
            reason=reason_of(known.group.first_seq.status),
            computed_tokens=known.num_computed_tokens,
            in_flight_tokens=-1,
            placeholder_tokens=-1,
            sequence_tokens=data.get_len(),
            output_tokens=data.get_output_len(),
        )

    def _say_ends(self) -> None:
        ends, self._ends = self._ends, []
        for known, finished in ends:
            self._end(known, finished)
