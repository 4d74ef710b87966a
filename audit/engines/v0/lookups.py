"""Requests of a v0 scheduler: their prefix-cache lookups, whether each led to an admission, and their ends.

Every attempt to admit a waiting request looks it up. If the release keeps the hit of a failed attempt,
:class:`~kvledger.audit.events.LookupKept` reports this: at the admission that uses the hit, or at the end of
a request whose hit is never released. As in v1, the events of a step's lookups are emitted when the step is
over.
"""

from __future__ import annotations

from typing import Any

from ... import events as ev
from ...text import cut_id, cut_priority
from ..observer import Observer
from .sequence import ObservedSequence, cached_now, is_accounted, remembered_hit


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
