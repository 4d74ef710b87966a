"""Requests of a v0 scheduler: their look-ups, what became of these, and their ends.

A waiting request is looked up by every attempt to admit it. Releases that keep the answer of one
that failed are told by :class:`~kvledger.audit.events.LookupKept`: at the admission that uses it,
or at the end of the request that leaves it behind. Like those of v1, look-ups are told when their
step is over.
"""

from __future__ import annotations

from typing import Any

from ... import events as ev
from ..observer import Observer
from .sequence import Followed, held_now, is_accounted, memory_of


class LookupObserver(Observer):
    """Watches arrivals, the tracker's answers and the allocations that follow them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._followed: dict[str, Followed] = {}
        self._by_sequence: dict[int, Followed] = {}
        self._attempts: dict[str, Followed] = {}
        self._admissions: dict[str, Followed] = {}
        self._failed_attempts: dict[str, ev.AdmissionFailed] = {}

    def emit_failed_attempts(self) -> None:
        for failed in self._failed_attempts.values():
            self.log.emit(failed)

    def _follow(self, group: Any) -> Followed:
        running = group.first_seq.status.name != "WAITING"
        known = Followed(group, running)
        self._followed[known.request_id] = self._by_sequence[known.seq_id] = known
        return known

    def request_added(self, _: None, __: None, seq_group: Any) -> None:
        request_id = seq_group.request_id
        if request_id in self._followed:
            return
        number, now = self.log.intern(request_id), self.log.now()
        if not is_accounted(seq_group):  # an end without a beginning: an account that is not known
            self.log.emit(ev.Finished(now, number, "not_followed", 0, -1, -1, -1, -1))
            self.log.forget(request_id)
            return
        self._follow(seq_group)
        self.log.emit(
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
        return memory_of(self.scheduler, seq.seq_id)

    def looked_up(self, kept: int | None, found: int, seq: Any) -> None:
        """The tracker answers a prefill from memory if it can: then nothing was looked up."""
        known = self._by_sequence.get(seq.seq_id)
        if known is None or known.running:
            return  # a later chunk: its hit was settled with the first
        if kept is None or known.looked_up_step < 0:
            known.looked_up, known.looked_up_step = found, self.step
        self._attempts[known.request_id] = known

    def allocated(self, seq_group: Any) -> None:
        """Just before: what the cache holds now decides which blocks the table will share."""
        known = self._followed.get(seq_group.request_id)
        if known is not None:
            known.cached = held_now(self.scheduler, known.seq_id)
            self._admissions[known.request_id] = known

    # --- what became of them ---------------------------------------------------------------------------

    def _executed(self, row: Any, known: Followed) -> tuple[int, int]:
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

    def _admitted(self, known: Followed, hit: int, executed: int) -> None:
        emit, now, number = self.log.emit, self.log.now(), self.log.ids[known.request_id]
        failed = self._failed_attempts.pop(known.request_id, None)
        if failed is not None:
            emit(failed)
        asked = known.looked_up_step
        if asked >= 0:
            emit(ev.LookedUp(now, number, asked, known.looked_up))
            if asked != self.step or known.cached not in (-1, known.looked_up):
                self._say_kept(known, known.looked_up, known.cached, ended=False)
        computed = known.then + known.chunk - executed
        given_back = int(hit == known.then + known.chunk)
        before = computed + given_back
        emit(ev.Admitted(now, number, self.step, known.preempted, hit, 0, False, before))
        if given_back:
            emit(ev.RolledBack(now, number, "full_hit", before, computed))
        known.running, known.looked_up_step = True, -1
        self.log.admitted(known.request_id, runs=True)

    def _not_admitted(self, known: Followed) -> None:
        """Equal failed attempts in a row are one event, told when they end."""
        request_id, found = known.request_id, known.looked_up
        last = self._failed_attempts.get(request_id)
        attempts = 1
        if last is not None:
            if last.local_tokens == found:
                attempts = last.attempts + 1
            else:
                self.log.emit(last)
        self._failed_attempts[request_id] = ev.AdmissionFailed(
            self.log.now(), self.log.ids[request_id], self.step, "not_allocated", found, 0, attempts
        )

    # --- the end ----------------------------------------------------------------------------------------

    def _end(self, known: Followed, finished: ev.Finished) -> None:
        """Tell an end; before it a look-up that the engine will never forget."""
        request_id, emit = known.request_id, self.log.emit
        failed = self._failed_attempts.pop(request_id, None)
        if failed is not None:
            emit(failed)
        kept = memory_of(self.scheduler, known.seq_id)
        if kept is not None:
            held = held_now(self.scheduler, known.seq_id)
            self._say_kept(known, kept, held, ended=True)
        emit(finished)
        self._followed.pop(request_id, None)
        self._by_sequence.pop(known.seq_id, None)
        self.log.forget(request_id)

    def _say_kept(self, known: Followed, answer: int, held: int, *, ended: bool) -> None:
        number, asked = self.log.ids[known.request_id], known.looked_up_step
        now = self.log.now()
        self.log.emit(ev.LookupKept(now, number, self.step, asked, answer, held, ended))
