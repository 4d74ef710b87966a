"""Asynchronous loads of vLLM v1 up to 0.17: the scheduler polls for them, and counts nothing meanwhile.

A request that waits for remote KV has no computed tokens, and no field holds the promised count. The poll
that finds the load finished sets the count from the blocks that the request holds. So a load that failed
wholly changes no count; only the set of failed requests shows it.
"""

from __future__ import annotations

from typing import Any

from .. import events as ev
from .engine_counts import EngineCounts020
from .loads import Loads


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
