"""Patches that make a live vLLM 0.32 do what a release did before its fix, and no more.

Here: one function a defect; each patches the engine's own classes in this process, and must run
before the engine is built. Not here: what each is called and where it was reported (injections.py).
`refusals` takes what the engine's own counters said when they refused a figure.
"""

import functools
from collections.abc import Callable
from typing import Any

Refusals = list[str]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts `make(original)` where `owner.name` is, under the original's name and signature."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _external_asked_again(local: Callable[[int], int]) -> None:
    """At a re-admission in mid-prefill the external figure is taken anew, the sum stays frozen.

    Up to 0.19.1 `num_cached_tokens` was set once and `num_external_computed_tokens` at every
    look-up; the front end called the difference a local hit. `local` is what it made of that.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            figures, again = request.prefill_stats, request.num_preemptions > 0
            if again and figures and "num_external_computed_tokens" in kwargs:
                external_tokens = kwargs["num_external_computed_tokens"]
                figures.num_external_cached_tokens = external_tokens
                figures.num_local_cached_tokens = local(figures.num_cached_tokens - external_tokens)
            return original(self, request, *args, **kwargs)

        return allocate_slots

    _replace(KVCacheManager, "allocate_slots", make)


def negative_local_hit(refusals: Refusals) -> None:
    """The difference goes out as it is. The engine's counter refuses it; we let the engine live.

    Upstream the refusal ended the server's step. What the counter had not yet taken of that
    iteration is lost here as it was there.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def make(original: Any) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(self, *args, **kwargs)
            except ValueError as refusal:
                refusals.append(str(refusal))

        return record

    _external_asked_again(lambda tokens: tokens)
    _replace(PrometheusStatLogger, "record", make)


def clamped_local_hit(_: Refusals) -> None:
    """The difference is cut off at nought: no counter refuses it, and the sources do not add up."""
    _external_asked_again(lambda tokens: max(0, tokens))


def promise_not_loaded(_: Refusals) -> None:
    """The load plan leaves out requests that resume, whatever was promised for them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def make(original: Any) -> Any:
        def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
            for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
                self._requests_need_load.pop(request_id, None)
            return original(self, scheduler_output)

        return build_connector_meta

    _replace(ExampleConnector, "build_connector_meta", make)


def lookup_counted(_: Refusals) -> None:
    """The look-up counts itself, whether or not it leads to an admission."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    count = KVCacheManager.record_prefix_cache_stats

    def looked_up(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any) -> Any:
            found = original(self, request)
            count(self, request, found[1])
            return found

        return get_computed_blocks

    def admitted(_: Any) -> Any:
        return lambda *_: None

    _replace(KVCacheManager, "get_computed_blocks", looked_up)
    _replace(KVCacheManager, "record_prefix_cache_stats", admitted)


def stale_lookup(_: Refusals) -> None:
    """What a failed attempt found is used at the next one, without a look-up, though it has gone."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    found_before: dict[str, Any] = {}

    def looked_up(original: Any) -> Any:
        def _get_local_prefix_cache_hit(self: Any, request: Any) -> Any:
            if request.request_id not in found_before:
                found_before[request.request_id] = original(self, request)
            return found_before[request.request_id]

        return _get_local_prefix_cache_hit

    def allocated(original: Any) -> Any:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = original(self, request, *args, **kwargs)
            if blocks is not None:
                found_before.pop(request.request_id, None)
            return blocks

        return allocate_slots

    _replace(Scheduler, "_get_local_prefix_cache_hit", looked_up)
    _replace(KVCacheManager, "allocate_slots", allocated)


def double_allocation(_: Refusals) -> None:
    """Blocks for the external hit leave the free queue while the local hits still lie in it.

    Upstream this needed two cache groups, one taking what the other had found (up to 0.23). Here one
    group does both, and its order is turned round: the same block comes twice into a request's table.
    """
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    held_back: list[Callable[[], None]] = []

    def make(original: Any) -> Any:
        def allocate_new_computed_blocks(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            while held_back:
                held_back.pop()()

        return allocate_new_computed_blocks

    def found(original: Any) -> Any:
        def add_local_computed_blocks(
            self: Any, request_id: str, new_computed_blocks: Any, local_tokens: int, external_tokens: int
        ) -> None:
            hits, table = list(new_computed_blocks), self.req_to_blocks[request_id]
            table.extend(hits)
            self.num_cached_block[request_id] = len(hits)

            def touch(self: Any = self, request_id: str = request_id) -> None:
                self.block_pool.touch(hits)

            held_back.append(touch)

        return add_local_computed_blocks

    _replace(KVCacheCoordinator, "allocate_new_computed_blocks", make)
    _replace(SingleTypeKVCacheManager, "add_local_computed_blocks", found)


def double_free(_: Refusals) -> None:
    """A request that is preempted frees its first block, and then frees all of them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Any) -> Any:
        def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                _free_first(manager, request.request_id)
            original(self, request, *args, **kwargs)

        return _preempt_request

    def _free_first(self: Any, request_id: str) -> None:
        self.block_pool.free_blocks(self.req_to_blocks[request_id][:1])

    _replace(Scheduler, "_preempt_request", make)


def nothing(_: Refusals) -> None:
    """The released engine does it unaided."""
