"""Asynchronous loads of vLLM v1 up to 0.17: the scheduler polls, and states no count meanwhile.

A request that waits for remote KV has no computed tokens; what it was promised stands nowhere. The
poll that finds the load finished sets the count, from the blocks that the request holds. So a load
that failed wholly changes no count: it is known by the set of failed requests alone.
"""

from __future__ import annotations

from typing import Any

from .. import events as ev
from .loads import LoadObserver


class Polling(LoadObserver):
    """Watches loads that are polled for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What the requests that wait, or ended while they did, were promised in all.
        self._promised: dict[str, int] = {}

    def computed(self, request: Any) -> int:
        waits = request.request_id in self._promised or self.waits_for_load(request)
        return -1 if waits else super().computed(request)

    def promised(self, _: None, __: None, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().promised(None, None, request, blocks, num_external_tokens)
        attempt = self._attempts.get(request.request_id)
        if attempt is not None and attempt.asynchronous:
            self._promised[request.request_id] = attempt.local + num_external_tokens

    def load_failure_begins(self, *_: Any, **__: Any) -> Any:
        return super().load_failure_begins(), set(self.scheduler.failed_recving_kv_req_ids)

    def load_failed(self, before: Any, result: set[str], *_: Any, **__: Any) -> None:
        self._load_failures |= result
        counts, known = before or ({}, set())
        failed = result | (self.scheduler.failed_recving_kv_req_ids - known)
        for request_id, tokens in counts.items():
            request = self.scheduler.requests[request_id]
            if request_id in failed or request.num_computed_tokens != tokens:
                self._tell_failed(request, -1 if self.waits_for_load(request) else tokens)

    def _loads_finished(self, request_ids: Any) -> None:
        """Nothing yet: the scheduler takes a load for finished when it polls."""

    def wait_ends(self, request: Any) -> bool:
        return request.request_id in getattr(self.scheduler, "failed_recving_kv_req_ids", ())

    def remote_wait_ended(self, before: Any, result: bool, request: Any) -> None:
        if before is None or not result:
            return
        request_id, computed = request.request_id, request.num_computed_tokens
        promised = self._promised.pop(request_id, -1)
        if before and not computed:
            self._tell_rolled_back(request, "released", 0, 0)
            return
        full = computed + 1 == promised == request.num_tokens
        loaded = promised if full else computed
        self.log.emit(ev.LoadFinished(self.log.now(), self.log.ids[request_id], loaded))
        if full:
            self._tell_rolled_back(request, "full_hit", promised, computed)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._promised.pop(request_id, None)
