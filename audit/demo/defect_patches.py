"""Patches that bring a fixed defect back into vLLM 0.32, and change nothing else.

Here: one function per defect. It patches vLLM's classes in this process and must run before the engine
is built. Not here: the names of the defects and where they were reported (injections.py).
`refusals` collects what the engine's own counters raised when they refused a figure.
"""

import functools
from collections.abc import Callable
from typing import Any

Refusals = list[str]


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, with the original's name and signature."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _external_updated_alone(local: Callable[[int], int]) -> None:
    """A readmission during prefill updates the external figure and keeps the old total.

    Up to 0.19.1 `num_cached_tokens` was set once and `num_external_computed_tokens` at every lookup; the
    front end reported the difference as the local hit. `local` is what it did to the difference.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            figures, readmitted = request.prefill_stats, request.num_preemptions > 0
            if readmitted and figures and "num_external_computed_tokens" in kwargs:
                external_tokens = kwargs["num_external_computed_tokens"]
                figures.num_external_cached_tokens = external_tokens
                figures.num_local_cached_tokens = local(figures.num_cached_tokens - external_tokens)
            return original(self, request, *args, **kwargs)

        return allocate_slots

    replace(KVCacheManager, "allocate_slots", make)


def negative_local_hit(refusals: Refusals) -> None:
    """The negative difference is reported as the local hit, and the engine's counter refuses it.

    Upstream, the counter's error ended the server's step; here the error is caught. Counters that come after
    it in the same iteration are not incremented, as upstream.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def make(original: Any) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except ValueError as refusal:
                refusals.append(str(refusal))

        return record

    _external_updated_alone(lambda tokens: tokens)
    replace(PrometheusStatLogger, "record", make)


def clamped_local_hit(_: Refusals) -> None:
    """The negative difference is clamped to zero: no counter refuses it, and the sources do not add up."""
    _external_updated_alone(lambda tokens: max(0, tokens))


def promise_not_loaded(_: Refusals) -> None:
    """The connector metadata omits the loads of resumed requests, although their tokens were promised."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def make(original: Any) -> Any:
        def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                self._requests_need_load.pop(request_id, None)
            return original(self, scheduler_output)

        return build_connector_meta

    replace(ExampleConnector, "build_connector_meta", make)


def lookup_counted(_: Refusals) -> None:
    """Every lookup is counted, whether or not the request is admitted."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    count = KVCacheManager.record_prefix_cache_stats

    def looked_up(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            hit = original(self, request)
            count(self, request, hit[1])
            return hit

        return get_computed_blocks

    def admitted(_: Any) -> Any:
        return lambda *_: None

    replace(KVCacheManager, "get_computed_blocks", looked_up)
    replace(KVCacheManager, "record_prefix_cache_stats", admitted)


def stale_lookup(_: Refusals) -> None:
    """An admission uses the hit of an earlier, failed attempt, although its blocks may be evicted."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    earlier_hits: dict[str, Any] = {}

    def looked_up(original: Any) -> Any:
        def _get_local_prefix_cache_hit(self: Any, request: Any) -> Any:
            if request.request_id not in earlier_hits:
                earlier_hits[request.request_id] = original(self, request)
            return earlier_hits[request.request_id]

        return _get_local_prefix_cache_hit

    def allocated(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = original(self, request, *args, **kwargs)
            if blocks is not None:
                earlier_hits.pop(request.request_id, None)
            return blocks

        return allocate_slots

    replace(Scheduler, "_get_local_prefix_cache_hit", looked_up)
    replace(KVCacheManager, "allocate_slots", allocated)


def double_allocation(_: Refusals) -> None:
    """Blocks for the external hit are allocated before the local hits leave the free queue.

    Upstream (up to 0.23) this needed two cache groups: one allocated the blocks that the other had hit.
    Here one group does both in the wrong order, and a block can stand twice in a request's table.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    deferred_touches: list[Callable[[], None]] = []

    def make(original: Any) -> Any:
        def allocate_new_computed_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            while deferred_touches:
                deferred_touches.pop()()

        return allocate_new_computed_blocks

    def deferring(original: Any) -> Any:
        def add_local_computed_blocks(
            self: Any, request_id: str, new_computed_blocks: Any, local_tokens: int, external_tokens: int
        ) -> None:
            hits, table = list(new_computed_blocks), self.req_to_blocks[request_id]
            table.extend(hits)
            self.num_cached_block[request_id] = len(hits)

            def touch(self: Any = self, request_id: str = request_id) -> None:
                self.block_pool.touch(hits)

            deferred_touches.append(touch)

        return add_local_computed_blocks

    replace(KVCacheCoordinator, "allocate_new_computed_blocks", make)
    replace(SingleTypeKVCacheManager, "add_local_computed_blocks", deferring)


def double_free(_: Refusals) -> None:
    """A preempted request frees its first block and then all of its blocks."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Any) -> Any:
        def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                _free_first(manager, request.request_id)
            original(self, request, *args, **kwargs)

        return _preempt_request

    def _free_first(self: Any, request_id: str) -> None:
        self.block_pool.free_blocks(self.req_to_blocks[request_id][:1])

    replace(Scheduler, "_preempt_request", make)


def nothing(_: Refusals) -> None:
    """No patch: vLLM 0.32 itself has this defect."""
