"""External loads: promised at an admission, then finished, failed, or given up.

Here stands what every v1 release has: a request that waits for remote KV counts as computed what it
was promised. Up to 0.17 it counts nothing while it waits; see ``polling``.
"""

from __future__ import annotations

from typing import Any

from .. import events as ev
from .admissions import AdmissionObserver


class LoadObserver(AdmissionObserver):
    """Watches asynchronous loads end, and any load fail."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._load_failures: set[str] = set()

    def load_failure_begins(self, *_: Any, **__: Any) -> Any:
        return {
            request_id: request.num_computed_tokens for request_id, request in self.scheduler.requests.items()
        }

    def load_failed(self, before: Any, result: set[str], *_: Any, **__: Any) -> None:
        self._load_failures |= result
        for request_id, tokens in (before or {}).items():
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens != tokens:
                self._tell_failed(request, tokens)

    def _tell_failed(self, request: Any, before_tokens: int) -> None:
        number = self.log.ids.get(request.request_id)
        if number is None:
            return
        computed, waiting = request.num_computed_tokens, self.waits_for_load(request)
        self.log.emit(ev.LoadFailed(self.log.now(), number, before_tokens, computed, waiting))

    def received(self, model_runner_output: Any) -> Any:
        """Ids of the requests whose load the workers report finished with this output."""
        transfers = model_runner_output.kv_connector_output
        return None if transfers is None else transfers.finished_recving

    def _loads_finished(self, request_ids: Any) -> None:
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None and request_id in self.log.ids:
                self.log.emit(
                    ev.LoadFinished(self.log.now(), self.log.ids[request_id], request.num_computed_tokens)
                )

    def wait_ends(self, request: Any) -> Any:
        failed = request.request_id in self.scheduler.failed_recving_kv_req_ids
        return request.num_computed_tokens, failed

    def remote_wait_ended(self, before: Any, _: Any, request: Any) -> None:
        if before is None:
            return
        tokens, failed = before
        computed = request.num_computed_tokens
        if failed and tokens == 0:
            cause = "released"
        elif computed != tokens:
            cause = "replay" if getattr(self.scheduler, "prefix_replay_tokens", 0) else "full_hit"
        else:
            return
        self._tell_rolled_back(request, cause, tokens, computed)

    def _tell_rolled_back(self, request: Any, cause: str, before: int, computed: int) -> None:
        number = self.log.ids[request.request_id]
        self.log.emit(ev.RolledBack(self.log.now(), number, cause, before, computed))
