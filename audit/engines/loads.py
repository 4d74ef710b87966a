"""External loads that have been promised: finished, failed, or rolled back.

Here: 0.18 and later, in which a request that waits for remote KV already counts the promised tokens as
computed. Up to 0.17 it counts nothing while it waits: see ``polled_loads``.
"""

from __future__ import annotations

from typing import Any

from .. import events as ev
from .admissions import Admissions
from .engine_counts import EngineCounts, EngineCounts020
from .observer import Observer


class Loads:
    """Handles the end of asynchronous loads, and load failures."""

    def __init__(self, observer: Observer, counts: EngineCounts, admissions: Admissions) -> None:
        self._scheduler = observer.scheduler
        self._log = observer.log
        self._counts = counts
        self._admissions = admissions
        self.failed: set[str] = set()
        """Ids of the requests whose load failed, as reported with the output being processed."""

    def failure_begins(self, *_: Any, **__: Any) -> Any:
        """``_handle_invalid_blocks`` or ``_handle_failed_recving`` is called: note every computed count."""
        return {
            request_id: request.num_computed_tokens
            for request_id, request in self._scheduler.requests.items()
        }

    def load_failed(self, before: Any, result: set[str], reported: Any, *_: Any) -> None:
        """The scheduler has lowered the computed counts. Emits ``LoadFailed`` for each that changed.

        ``reported``: block ids, or the ids of requests whose whole load failed. Each of these that waits for
        its load and goes on has failed, whatever its count.
        """
        self.failed |= result
        rows: list[tuple[Any, int]] = []
        for request_id, tokens in (before or {}).items():
            request = self._scheduler.requests[request_id]
            failed = request_id in reported and request_id not in result
            if request.num_computed_tokens != tokens or (failed and self._counts.waits_for_load(request)):
                rows.append((request, tokens))
        self.emit_failed(rows, reported)

    def emit_failed(self, rows: list[tuple[Any, int]], reported: Any) -> None:
        """Emit ``BlocksFailed``, and ``LoadFailed`` for each request, with its count before."""
        blocks = sorted(block for block in reported if isinstance(block, int))
        if blocks:
            self._log.emit(ev.BlocksFailed(self._log.now(), blocks))
        for request, before_tokens in rows:
            number = self._log.ids.get(request.request_id)
            if number is not None:
                computed, waiting = request.num_computed_tokens, self._counts.waits_for_load(request)
                self._log.emit(
                    ev.LoadFailed(self._log.now(), number, before_tokens, computed, waiting, blocks or None)
                )

    def received(self, model_output: Any) -> Any:
        """Ids of the requests whose load the workers report finished with this output."""
        transfers = model_output.kv_connector_output
        return None if transfers is None else transfers.finished_recving

    def finished(self, request_ids: Any) -> None:
        """The workers have loaded these requests' external tokens. Emits ``LoadFinished`` for each."""
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is not None and request_id in self._log.ids:
                number = self._log.ids[request_id]
                self._log.emit(ev.LoadFinished(self._log.now(), number, request.num_computed_tokens))

    def wait_ends(self, request: Any) -> Any:
        """``_update_waiting_for_remote_kv`` is called: note the count, and whether the load failed."""
        failed = request.request_id in self._scheduler.failed_recving_kv_req_ids
        return request.num_computed_tokens, failed

    def remote_wait_ended(self, before: Any, _: Any, request: Any) -> None:
        """The request waits no more. Emits ``RolledBack`` if its count changed or its load failed wholly."""
        if before is None:
            return
        tokens, failed = before
        computed = request.num_computed_tokens
        if failed and tokens == 0:
            cause = "released"
        elif computed != tokens:
            cause = "replay" if getattr(self._scheduler, "prefix_replay_tokens", 0) else "full_hit"
        else:
            return
        self.emit_rolled_back(request, cause, tokens, computed)

    def emit_rolled_back(self, request: Any, cause: str, before: int, computed: int) -> None:
        """Emit ``RolledBack``: the computed count went from ``before`` to ``computed``."""
        number = self._log.ids[request.request_id]
        self._log.emit(ev.RolledBack(self._log.now(), number, cause, before, computed))


# --- Asynchronous loads of vLLM v1 up to 0.17: the scheduler polls for them, and counts nothing
# meanwhile.
#
# A request that waits for remote KV has no computed tokens, and no field holds the promised count. The poll
# that finds the load finished sets the count from the blocks that the request holds. So a load that failed
# wholly changes no count; only the set of failed requests shows it.


class PolledCounts(EngineCounts020):
    """-1 computed tokens while a request waits for its load."""

    def __init__(self) -> None:
        self.promised: dict[str, int] = {}
        """Local and promised tokens of each request that waits, or ended while it waited, by request id."""

    def computed(self, request: Any) -> int:
        waits = request.request_id in self.promised or self.waits_for_load(request)
        return -1 if waits else super().computed(request)

    def forget(self, request_id: str) -> None:
        self.promised.pop(request_id, None)


class PolledLoads(Loads):
    """Handles loads that the scheduler polls for."""

    _counts: PolledCounts

    def promised(self, _: None, __: None, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """``update_state_after_alloc``: note how many tokens the request will have when its load is done."""
        self._admissions.promised(None, None, request, blocks, num_external_tokens)
        attempt = self._admissions.attempts.get(request.request_id)
        if attempt is not None and attempt.asynchronous:
            self._counts.promised[request.request_id] = attempt.local + num_external_tokens

    def failure_begins(self, *_: Any, **__: Any) -> Any:
        return super().failure_begins(), set(self._scheduler.failed_recving_kv_req_ids)

    def load_failed(self, before: Any, result: set[str], reported: Any, *_: Any) -> None:
        self.failed |= result
        counts, failed_before = before or ({}, set())
        failed = result | (self._scheduler.failed_recving_kv_req_ids - failed_before)
        rows: list[tuple[Any, int]] = []
        for request_id, tokens in counts.items():
            request = self._scheduler.requests[request_id]
            if request_id in failed or request.num_computed_tokens != tokens:
                rows.append((request, -1 if self._counts.waits_for_load(request) else tokens))
        self.emit_failed(rows, reported)

    def finished(self, request_ids: Any) -> None:
        """Emits nothing: the scheduler regards a load as finished when it polls."""

    def wait_ends(self, request: Any) -> bool:
        return request.request_id in getattr(self._scheduler, "failed_recving_kv_req_ids", ())

    def remote_wait_ended(self, before: Any, result: bool, request: Any) -> None:
        """The poll answered. Emits ``LoadFinished``, and ``RolledBack`` after a full hit or a failed load."""
        if before is None or not result:
            return
        request_id, computed = request.request_id, request.num_computed_tokens
        promised = self._counts.promised.pop(request_id, -1)
        if before and not computed:
            self.emit_rolled_back(request, "released", 0, 0)
            return
        full = computed + 1 == promised == request.num_tokens
        loaded = promised if full else computed
        self._log.emit(ev.LoadFinished(self._log.now(), self._log.ids[request_id], loaded))
        if full:
            self.emit_rolled_back(request, "full_hit", promised, computed)
