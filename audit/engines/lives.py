"""What ends a life or a turn: preemption, a reset of the cache, a session's chunk, the end.

An output may still be in flight when a life ends; ``_draining`` holds the requests that this may
concern, until it has been answered.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import events as ev
from .loads import LoadObserver

NO_STEP = -1


class LifeObserver(LoadObserver):
    """Watches lives end."""

    def __init__(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(scheduler, *args, **kwargs)
        self._draining: set[str] = set()
        self._gone: list[str] = []
        self._output: tuple[int, Any, list[int]] | None = None
        """The one that is being taken: when it came, what it is, and what each request sampled."""
        self._resetting_in = NO_STEP

    # --- preemption -----------------------------------------------------------------------------------

    def preemption_begins(self, request: Any, *_: Any, **__: Any) -> tuple[int, int, int]:
        if self.pools is not None:
            self.pools.leaves(request.request_id)
        return (request.num_computed_tokens, *self.counts(request)[1:])

    def preempted(
        self, before: tuple[int, int, int] | None, _: None, request: Any, *__: Any, **___: Any
    ) -> None:
        if before is None:
            return
        if before[1]:
            self._draining.add(request.request_id)
        self._tell_preempted(request, before, self.held_blocks(request), not request.drop_stale_output)

    def held_blocks(self, request: Any) -> int:
        """Blocks in the request's tables."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(len(manager.req_to_blocks.get(request.request_id, ())) for manager in managers)

    def _tell_preempted(
        self, request: Any, before: tuple[int, int, int], held_blocks: int, delivered: bool
    ) -> None:
        self.track(request, before[0])
        self.log.emit(
            ev.Preempted(
                at=self.log.now(),
                request=self.log.ids[request.request_id],
                step=self._step,
                cause="reset" if self._resetting_in == self._step else "blocks",
                before_tokens=before[0],
                in_flight_tokens=before[1],
                placeholder_tokens=before[2],
                computed_tokens=request.num_computed_tokens,
                held_blocks=held_blocks,
                delivered=delivered,
            )
        )

    def _stale(self, scheduled: dict[str, int]) -> Any:
        """Of the output that arrives for ``scheduled``, what may answer a life that is over."""
        ignored: list[str] = []
        for request_id in list(self._draining):
            request = self.scheduler.requests.get(request_id)
            if request is None or request.num_stale_output_tokens <= 0:
                self._draining.discard(request_id)
            elif request_id in scheduled and request.drop_stale_output:
                ignored.append(request_id)
        return ignored

    def _ignored(self, stale: Any) -> list[str]:
        """Requests whose output was thrown away, once it has been taken."""
        return list(stale)

    def reset_begins(self, *_: Any, **__: Any) -> None:
        self._resetting_in = self._step

    def cache_reset(
        self, _: None, result: bool, reset_running_requests: bool = False, *__: Any, **___: Any
    ) -> None:
        self._resetting_in = NO_STEP
        self.log.emit(ev.CacheReset(self.log.now(), bool(result), bool(reset_running_requests)))

    # --- sessions ---------------------------------------------------------------------------------------

    def stop_begins(self, request: Any) -> int:
        # A queued chunk is taken up inside; the rollback has to be told before it.
        if request.resumable and request.streaming_queue:
            self._turn_ends(request, request.num_computed_tokens)
        return int(request.num_computed_tokens)

    def turn_stopped(self, before: int | None, finished: bool, request: Any) -> None:
        if before is None or finished or request.status.name != "WAITING_FOR_STREAMING_REQ":
            return
        self._turn_ends(request, before)

    def _turn_ends(self, request: Any, before: int) -> None:
        before = self._past_stop(request, before)
        if self.in_flight(request):
            self._draining.add(request.request_id)
        self._tell_rolled_back(request, "session", before, self._frontier(request, before))

    def _frontier(self, request: Any, before: int) -> int:
        """The count that a turn which has ended leaves to the next: placeholders are given up."""
        if request.status.name == "WAITING_FOR_STREAMING_REQ":
            return int(request.num_computed_tokens)
        return before - int(request.num_output_placeholders)

    def session_extended(self, _: None, __: None, session: Any, *___: Any) -> None:
        number = self.log.ids[session.request_id]
        prompt, computed = session.num_prompt_tokens, session.num_computed_tokens
        self.log.emit(ev.Extended(self.log.now(), number, prompt, computed))

    # --- the end ----------------------------------------------------------------------------------------

    def finished(self, request: Any, *_: Any, **__: Any) -> None:
        log, request_id = self.log, request.request_id
        number = log.ids.get(request_id)
        if number is None or request_id in self._gone:
            return
        if self.pools is not None:
            self.pools.ends(request)
        if request_id in self._failed_attempts:
            log.emit(self._failed_attempts.pop(request_id))
        if self._since_033 and not getattr(request, "resumable", False):
            self._past_stop(request, request.num_computed_tokens)
        if self.connector is not None:
            self.track(request, self.computed(request))
            self.connector.ends(request_id)
        output = None if log.held is None else self._output
        tokens, outputs = request.num_tokens, request.num_output_tokens
        now, reason = log.now() if output is None else output[0], _reason(request.status._name_)
        computed, in_flight, placeholders = self.counts(request)
        log.emit(ev.Finished(now, number, reason, computed, in_flight, placeholders, tokens, outputs))
        if self._draining:
            self._draining.discard(request_id)
        if output is None:
            self._forget(request_id)
        else:  # its last output has not been told yet
            self._gone.append(request_id)

    def _past_stop(self, request: Any, computed: int) -> int:
        """The count before 0.33 took off the drafts accepted beyond a stop; told as a rollback."""
        if self._output is None or not self._since_033 or request.request_id in self._draining:
            return computed
        at, output, lengths = self._output
        index = output.req_id_to_index.get(request.request_id)
        if index is None or not lengths:
            return computed
        trimmed = lengths[index] - len(output.sampled_token_ids[index])
        if trimmed > 0:
            number = self.log.ids[request.request_id]
            self.log.emit(ev.RolledBack(at, number, "past_stop", computed + trimmed, computed))
        return computed


@functools.cache
def _reason(status: str) -> str:
    """``stopped`` for ``FINISHED_STOPPED``. Of the name, as an enum's hash and ``name`` are Python."""
    return status.removeprefix("FINISHED_").lower()
