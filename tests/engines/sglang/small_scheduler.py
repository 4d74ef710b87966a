"""A scheduler with the methods and fields of SGLang's that an observer uses, for what no release shows well.

``module`` names SGLang, as the observer is chosen by it. The tests of released engines are in
``test_released_engines.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Request:
    """A request with this prompt length; ``max_new_tokens`` outputs end it."""

    def __init__(self, rid: str, prompt: int = 8, outputs: int = 2) -> None:
        self.rid = rid
        self.origin_input_ids = [1] * prompt
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(max_new_tokens=outputs)
        self.priority: int | None = None
        self.cached_tokens = 0
        self.cached_tokens_host = self.cached_tokens_storage = 0
        self.host_hit_length = self.storage_hit_length = 0
        self.inflight_middle_chunks = 0
        self.kv_committed_len = self.kv_allocated_len = self.cache_protected_len = 0
        self.kv_committed_freed = False
        self.req_pool_idx: int | None = 1
        self.is_retracted = False
        self.finished_reason: Any = None

    def finished(self) -> bool:
        """As in SGLang."""
        return self.finished_reason is not None


class Batch:
    """``rows``: a request, its tokens before the step, and the tokens of the step."""

    def __init__(self, *rows: tuple[Request, int, int], extends: bool = True) -> None:
        self.reqs = [row[0] for row in rows]
        self.prefix_lens = [row[1] for row in rows]
        self.extend_lens = [row[2] for row in rows]
        self.seq_lens_cpu = [row[1] + row[2] for row in rows]
        self.forward_mode = SimpleNamespace(is_extend=lambda: extends)


class Scheduler:
    """Does what a test says, through the methods that are hooked."""

    def __init__(self, **arguments: Any) -> None:
        self.server_args = SimpleNamespace(model_path="/models/tiny", **arguments)
        self.waiting_queue: list[Request] = []
        self.running_batch: Batch | None = None
        self.last_batch = self.chunked_req = None
        self.protected = self.lost = 0
        """Cached tokens that are protected, and slots that are in no count."""
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 10, protected_size=lambda: self.protected)
        self.token_to_kv_pool_allocator = SimpleNamespace(size=100, available_size=self.available)
        self.page_size, self.max_total_num_tokens = 1, 100
        self.sessions: dict[str, Any] = {}
        self.attn_tp_rank = self.pp_rank = 0
        self.refuses = False
        """Whether the queue takes no more requests."""
        self.retracts: list[tuple[Request, bool]] = []
        """What the next choice of a batch retracts, and whether for lack of room."""

    def available(self) -> int:
        """The free slots."""
        requests = self.running_batch.reqs if self.running_batch is not None else ()
        own = sum(each.kv_allocated_len for each in requests if not each.kv_committed_freed)
        return 90 - self.protected - self.lost - own

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        if not self.refuses:
            self.waiting_queue.append(req)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for message in recv_reqs:
            if type(message).__name__ == "AbortReq":
                self.waiting_queue = [each for each in self.waiting_queue if each.rid != message.rid]

    def get_next_batch_to_run(self) -> Any:
        while self.retracts:
            self.retract(*self.retracts.pop())

    def retract(self, request: Request, is_retracted: bool) -> None:
        """Let a request that runs wait again."""
        request.kv_committed_freed = True
        request.kv_committed_len = 0
        self._add_request_to_queue(request, is_retracted)

    def run_batch(self, batch: Batch) -> None:
        for request, before, tokens in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if request in self.waiting_queue:
                self.waiting_queue.remove(request)
            request.kv_committed_len = request.kv_allocated_len = before + tokens
            request.kv_committed_freed = False
        self.running_batch = batch

    def process_batch_result(self, batch: Batch, result: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(1)
            if len(request.output_ids) == request.sampling_params.max_new_tokens:
                request.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
                request.kv_committed_freed = True

    def flush_cache(self) -> bool:
        return True

    def step(self, batch: Batch) -> None:
        """One iteration of the event loop without overlap."""
        self.get_next_batch_to_run()
        self.run_batch(batch)
        self.process_batch_result(batch, None)


Scheduler.__module__ = "sglang.srt.managers.scheduler"
